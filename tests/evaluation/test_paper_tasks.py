"""The papers' benchmark settings: servable as they are, with tasks that lm_eval has."""

from pathlib import Path

import pytest

from dllm_engine.evaluation.paper_tasks import PAPER_TASKS, PAPERS, paper_task
from dllm_engine.families import DREAM, FAMILIES, LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.resolve import resolve_decoding

ROWS = [(row, family) for row in PAPER_TASKS for family in FAMILIES.values() if row.is_for(family)]
FOLDERS = ("arc", "bbh", "benchmarks", "gpqa", "gsm8k", "humaneval", "longbench", "mbpp", "minerva_math", "mmlu")
FOLDERS += ("mmlu_pro",)


@pytest.fixture(scope="module")
def harness():
    """lm_eval's tasks of the benchmarks above; all of them would take ten seconds."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=[str(root / name) for name in FOLDERS])


@pytest.mark.parametrize(("row", "family"), ROWS, ids=lambda value: getattr(value, "benchmark", None))
def test_settings_are_servable_with_every_cache_method(row, family):
    params = DiffusionParams(**row.decoding)
    for method in CACHE_METHODS:
        options = row.cache_options(f"GSAI-ML/{next(iter(row.checkpoint_options or {''}))}").get(method, {})
        engine = EngineOptions.parse({"cache_method": method, "cache_options": options})
        spec = resolve_decoding(params, 100, family, engine)
        wanted = (row.gen_length, row.gen_length, row.block_length or row.gen_length)
        assert (spec.gen_length, spec.steps, spec.block_length) == wanted


@pytest.mark.parametrize("name", sorted({n for row in PAPER_TASKS for n in (row.task, row.base_task) if n}))
def test_lm_eval_has_the_task_and_asks_for_a_response(harness, name):
    from lm_eval.tasks._yaml_loader import load_yaml

    assert name in harness.all_tasks
    path = harness.task_index[name].yaml_path
    if name in harness.all_subtasks:
        assert load_yaml(path, resolve_func=False).get("output_type", "generate_until") == "generate_until"


def test_each_row_is_of_a_known_paper_and_found_by_its_name():
    assert {row.paper for row in PAPER_TASKS} == set(PAPERS)
    for row, family in ROWS:
        assert paper_task(row.benchmark, family, row.paper) is row


def test_the_first_paper_that_has_a_benchmark_is_taken():
    assert paper_task("gsm8k", LLADA).paper == "sparse-dllm"
    assert paper_task("mbpp", DREAM).paper == "dllm-cache"
    assert paper_task("gsm8k", DREAM, "freecache").block_length is None
    assert paper_task("gsm8k", LLADA, "freecache").block_length == 64


def test_refresh_intervals_are_those_of_the_checkpoint():
    row = paper_task("gsm8k", LLADA, "dllm-cache")
    llada = {"prompt_refresh_interval": 50, "response_refresh_interval": 7}
    assert row.cache_options("GSAI-ML/LLaDA-8B-Instruct") == {"dllm_cache": llada}
    assert row.cache_options("GSAI-ML/LLaDA-1.5") == {}
    base = {"prompt_refresh_interval": 25, "response_refresh_interval": 5}
    assert row.cache_options("GSAI-ML/LLaDA-8B-Base") == {"dllm_cache": base}
    assert row.cache_options("/models/Dream-v0-Instruct-7B")["dllm_cache"]["prompt_refresh_interval"] == 25


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"benchmark 'gsm9k' is unknown; the papers have mmlu, .*gsm8k"):
        paper_task("gsm9k", LLADA)
    with pytest.raises(ValueError, match=r"'mbpp' is unknown; paper sparse-dllm has mmlu"):
        paper_task("mbpp", LLADA, "sparse-dllm")
    with pytest.raises(ValueError, match=r"paper 'nobody' is unknown; choose one of sparse-dllm"):
        paper_task("gsm8k", LLADA, "nobody")
