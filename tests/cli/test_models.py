"""``dllm models`` lists what the registries hold."""

import json

from pydantic import BaseModel, Field

from dllm_engine.cli.main import main
from dllm_engine.cli.models import as_tables, describe
from dllm_engine.families import FAMILIES
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.options.request_fields import PARALLEL_OPTIONS
from dllm_engine.scheduler.unmasking_policies import UNMASKING_POLICIES


class Options(BaseModel):
    ratio: float = Field(default=0.5, gt=0, le=1, description="Share of the\nprompt that is kept. More is better.")
    every: int | None = Field(default=None, ge=1)


def test_tables_name_everything_and_json_holds_the_same(capsys):
    assert main(["models"]) == 0
    words = capsys.readouterr().out.split()
    assert "FULL steps of a window before the UPDATE step" in " ".join(words), "what an option means"
    checkpoints = [checkpoint for family in FAMILIES.values() for checkpoint in family.checkpoints]
    options = [option for method in CACHE_METHODS.values() for option in method.options.model_fields]
    assert {*checkpoints, *CACHE_METHODS, *options, *UNMASKING_POLICIES, *PARALLEL_OPTIONS} <= set(words)
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(describe()))


def test_options_are_shown_with_range_default_and_meaning():
    properties = Options.model_json_schema()["properties"]
    table = as_tables(
        {
            "families": [],
            "cache_methods": {"evict": properties, "none": {}},
            "unmasking": [],
            "parallel_unmasking": {"limit": {"value": {"type": "number", "minimum": 0}, "policies": ["best", "next"]}},
        }
    )
    assert "evict         ratio         number > 0, ≤ 1; default 0.5" in table
    assert "Share of the prompt that is kept\n" in table
    assert "every         integer ≥ 1 or null; default null" in table
    assert "none          (no options)" in table
    assert "limit               number ≥ 0  best, next" in table
