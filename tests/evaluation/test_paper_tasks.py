"""The papers' benchmark settings and tables: servable as they are, with tasks that
lm_eval has.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dllm_engine.cli.arguments import parse_method, parse_rule, split_names
from dllm_engine.evaluation import paper_tasks
from dllm_engine.evaluation.paper_tasks import (
    PAPER_TABLES,
    PAPER_TASKS,
    harness_task,
    paper_table,
    paper_task,
)
from dllm_engine.families import DREAM, FAMILIES, LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from tests.support.plans import FULL_METHODS, resolved

INSTRUCT = {LLADA.name: "LLaDA-8B-Instruct", DREAM.name: "Dream-v0-Instruct-7B"}
ROWS = [
    (row, family)
    for row in PAPER_TASKS
    for family in FAMILIES.values()
    if any(paper_tasks.is_for(row, family, is_base) for is_base in (False, True))
]
NAMES = {row[key] for row in PAPER_TASKS for key in ("task", "base_task") if key in row}
TASK_FILES = sorted(name for name in NAMES if name.endswith(".yaml"))
FOLDERS = (
    "arc",
    "bbh",
    "benchmarks",
    "gpqa",
    "gsm8k",
    "humaneval",
    "ifeval",
    "longbench",
    "mbpp",
    "minerva_math",
    "mmlu",
    "mmlu_pro",
)


@pytest.fixture(scope="module")
def harness():
    """lm_eval's tasks of the benchmarks above; all of them would take ten seconds."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(
        include_defaults=False, include_path=[str(root / name) for name in FOLDERS]
    )


def spec_of(decoding, family, cache_method="none", **cache_options):
    engine = EngineOptions.parse(
        {"cache_method": cache_method, "cache_options": cache_options}
    )
    return engine.method, resolved(family, engine, **decoding)


@pytest.mark.parametrize(
    ("row", "family"),
    ROWS,
    ids=lambda value: value.get("benchmark") if isinstance(value, dict) else None,
)
def test_a_row_is_found_by_its_name_and_servable_with_every_cache_method(row, family):
    assert (
        paper_task(
            row["benchmark"], family, row["paper"], is_base=bool(row.get("base"))
        )
        is row
    )
    task = harness_task(
        row, f"GSAI-ML/{next(iter(row['cache_options'] or {''}))}", is_base=False
    )
    for method in FULL_METHODS:
        _, spec = spec_of(
            task.decoding, family, method, **task.cache_options.get(method, {})
        )
        length = row["gen_length"]
        assert (
            spec.layout.gen_length,
            spec.schedule.steps,
            spec.layout.block_length,
        ) == (
            length,
            length,
            task.decoding.get("sub_block_length", row.get("block_length", length)),
        )


@pytest.mark.parametrize("name", sorted(NAMES - {*TASK_FILES}))
def test_lm_eval_has_the_task_and_asks_for_a_response(harness, name):
    from lm_eval.tasks._yaml_loader import load_yaml

    assert name in harness.all_tasks
    path = harness.task_index[name].yaml_path
    if name in harness.all_subtasks:
        assert (
            load_yaml(path, resolve_func=False).get("output_type", "generate_until")
            == "generate_until"
        )


def test_base_models_have_rows_and_checkpoints_intervals_of_their_own():
    assert paper_task("mmlu", LLADA, "dllm-cache")["gen_length"] == 3
    base = harness_task(
        paper_task("mmlu", LLADA, "dllm-cache", is_base=True),
        "LLaDA-8B-Base",
        is_base=True,
    )
    assert (base.decoding["gen_length"], base.with_chat_template) == (256, False)
    assert base.cache_options["dllm_cache"]["response_refresh_interval"] == 6
    row = paper_task("gsm8k", LLADA, "dllm-cache")
    expected = {
        "LLaDA-8B-Instruct": (50, 7),
        "LLaDA-1.5": (),
        "LLaDA-8B-Base": (25, 5),
        INSTRUCT[DREAM.name]: (25, 2),
    }
    for checkpoint, intervals in expected.items():
        options = harness_task(row, f"models/{checkpoint}", is_base=False).cache_options
        assert tuple(options.get("dllm_cache", {}).values()) == intervals


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        (DREAM, "Dream-v0-Base-7B", True),
        (DREAM, "Dream-v0-Instruct-7B", None),
        (LLADA, "LLaDA-8B-Base", None),
    ],
)
def test_prompts_of_dreams_base_models_begin_with_the_bos_token(
    monkeypatch, family, name, expected
):
    monkeypatch.setattr(
        paper_tasks, "load_config", lambda model: SimpleNamespace(family=family)
    )
    (task,) = paper_tasks.tasks_of_papers(name, ["gsm8k"], "dllm-cache")
    assert task.add_bos_token is expected


@pytest.mark.parametrize("family", [LLADA, DREAM], ids=lambda family: family.name)
def test_freecache_keeps_blocks_of_256_with_and_without_a_guide(family):
    task = harness_task(
        paper_task("gsm8k", family, "freecache"), INSTRUCT[family.name], is_base=False
    )
    assert task.cache_options == {"freecache": {"cache_block_length": 256}}
    for decoding in (
        task.decoding,
        {k: task.guided[k] for k in ("gen_length", "block_length")},
    ):
        _, spec = spec_of(
            decoding, family, "freecache", **task.cache_options["freecache"]
        )
        assert spec.cache.refusal(spec) is None


@pytest.mark.parametrize(
    ("name", "paper", "message"),
    [
        ("gsm9k", None, r"benchmark 'gsm9k' is unknown; the papers have mmlu, .*gsm8k"),
        ("mbpp", "sparse-dllm", r"'mbpp' is unknown; paper sparse-dllm has mmlu"),
        ("gsm8k", "nobody", r"paper 'nobody' is unknown; choose one of sparse-dllm"),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones(name, paper, message):
    with pytest.raises(ValueError, match=message):
        paper_task(name, LLADA, paper)


@pytest.mark.parametrize(
    "key", [key for key, table in PAPER_TABLES.items() if table["benchmarks"]]
)
def test_the_rows_of_a_table_can_be_asked_for(key):
    table = paper_table(key)
    first = table["models"].partition(",")[0]
    family = next(
        family
        for family in FAMILIES.values()
        if any(name.endswith(f"/{first}") for name in family.checkpoints)
    )
    rows = [
        paper_task(name, family, table["paper"])
        for name in table["benchmarks"].split(",")
    ]
    methods = [
        chosen
        for text in split_names(table["methods"])
        for chosen in parse_method(text)
    ]
    assert len({str(chosen) for chosen in methods}) == len(methods)
    for method, options in methods:
        for guide, decoding in map(parse_rule, split_names(table["rules"])):
            for task in (harness_task(row, "", is_base=False) for row in rows):
                if guide is None:
                    spec_of(task.decoding | decoding, family, method, **options)
                else:
                    DiffusionParams(**task.guided | decoding)


DOCUMENTS = {
    "piqa_chat": {
        "goal": "Boil an egg.",
        "sol1": "Use water.",
        "sol2": "Use sand.",
        "label": 0,
    },
    "arc_easy_chat": {
        "question": "What is wet? ",
        "choices": {"text": ["Water", "Sand"], "label": ["1", "2"]},
        "answerKey": "1",
    },
    "hellaswag_chat": {
        "activity_label": "Cooking",
        "ctx": "He",
        "endings": ["eats.", "sinks.", "is."],
        "label": "0",
    },
}


@pytest.mark.parametrize("name", TASK_FILES)
def test_our_own_tasks_ask_for_a_letter_and_find_it(name, tmp_path, monkeypatch):
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    (tmp_path / "docs.jsonl").write_text(
        json.dumps(DOCUMENTS[name.removesuffix(".yaml")]) + "\n"
    )
    text = (paper_tasks._TASK_FILES / name).read_text(encoding="utf-8")
    lines = [
        line
        for line in text.splitlines()
        if not line.startswith(("dataset_name", "training", "fewshot_split"))
    ]
    local = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{validation: "
        f"{tmp_path}/docs.jsonl}}}}"
    )
    lines = [local if line.startswith("dataset_path") else line for line in lines]
    (tmp_path / name).write_text(
        "\n".join(lines).replace("test_split: test", "validation_split: validation")
    )
    asked = []

    class Answering(lm_eval.api.model.LM):
        def generate_until(self, requests, disable_tqdm=False):
            asked.extend(request.args[0] for request in requests)
            return ["The answer is B at first. No: the answer is (A)."] * len(requests)

        loglikelihood = loglikelihood_rolling = None

    manager = TaskManager(include_defaults=False)
    scored = lm_eval.simple_evaluate(
        Answering(),
        tasks=[str(tmp_path / name)],
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert scored["results"][name.removesuffix(".yaml")]["exact_match,letter"] == 1.0
    assert "\nA. " in asked[0]
    assert "\nB. " in asked[0]
