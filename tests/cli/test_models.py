"""``dllm models`` lists what the registries hold."""

import json

from dllm_engine.cli.main import main
from dllm_engine.cli.models import describe
from dllm_engine.families import FAMILIES
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.options.request_fields import PARALLEL_OPTIONS
from dllm_engine.scheduler.unmasking_policies import UNMASKING_POLICIES


def test_tables_name_everything_and_json_holds_the_same(capsys):
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "number > 0, ≤ 1" in printed
    words = printed.split()
    assert "FULL steps of a window before the UPDATE step" in " ".join(words), "what an option means"
    checkpoints = [checkpoint for family in FAMILIES.values() for checkpoint in family.checkpoints]
    options = [option for method in CACHE_METHODS.values() for option in method.options.model_fields]
    assert {*checkpoints, *CACHE_METHODS, *options, *UNMASKING_POLICIES, *PARALLEL_OPTIONS} <= set(words)
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(describe()))
