"""Requests that share the beginning of their prompts under full attention, against a
plain version.
"""

import random
from typing import Any

import numpy as np
import pytest
from vllm import envs

from dllm_engine import DiffusionParams, Questions
from dllm_engine.decisions.answering import as_messages
from dllm_engine.families import LLADA, SDAR
from dllm_engine.options import EngineOptions
from tests.support.engines import assert_nothing_left, generate, responses, scheduler_of
from tests.support.http_app import served
from tests.support.random_decisions import decision_params, random_decision
from tests.support.server import series_of
from tests.support.stepped_engines import Poison, run_in_steps

PAGE_SIZE = 8


@pytest.mark.parametrize(
    ("method", "num_read"), [("dual", 48), ("prefix", 48), ("sparse", 48), ("none", 16)]
)
def test_the_next_turn_of_a_chat_finds_the_response(
    engines, tiny_llada, method, num_read
):
    """As far as whole pages hold it, but for the window that ran last."""
    llm = engines(
        tiny_llada, cache_method=method, page_size=PAGE_SIZE, share_prompts=True
    )
    assert llm.reset_prefix_cache()
    params = DiffusionParams(gen_length=40, block_length=8, ignore_eos=True)
    prompt = [*range(20)]
    (response,) = responses(llm, [prompt], params)
    (output,) = generate(llm, [[*prompt, *response, 7]], params)
    assert output.num_cached_tokens == num_read
    assert_nothing_left(llm)


@pytest.mark.parametrize("length", [64, 66, 69])
def test_questions_about_one_text_compute_it_once(engines, tiny_llada, length):
    """All of it, also where it ends inside a page, and while others are answered. Later
    passes compute what is behind the prompt.
    """
    llm = engines(
        tiny_llada, cache_method="dual", page_size=PAGE_SIZE, share_prompts=True
    )
    assert llm.reset_prefix_cache()
    draw = random.Random(3)
    text = [draw.randrange(60, 140) for _ in range(length)]
    decisions = [random_decision(draw)[0] for _ in range(12)]
    prompts = [text + [draw.randrange(60, 140) for _ in range(5)] for _ in decisions]
    params = [
        DiffusionParams(**decision_params(decision, passes=1 + number % 3))
        for number, decision in enumerate(decisions)
    ]
    joins = [number // 5 for number in range(12)]
    run = run_in_steps(llm, prompts, params, joins=joins, after_step=Poison(llm))
    num_rows = [
        5 + figures.forward_passes * len(decision.template)
        for figures, decision in zip(run.figures, decisions, strict=True)
    ]
    assert max(figures.forward_passes for figures in run.figures) == 3
    assert [figures.tokens_computed for figures in run.figures] == [
        length + num_rows[0],
        *num_rows[1:],
    ]


@pytest.fixture
def sharing(engines, monkeypatch):
    """An engine that shares prompts, and a client of its server."""
    # For `/reset_prefix_cache`. An engine before may have made vLLM keep its variables.
    monkeypatch.setitem(vars(envs), "VLLM_SERVER_DEV_MODE", True)
    llm = engines(
        "demo",
        skip_tokenizer_init=False,
        cache_method="dual",
        page_size=PAGE_SIZE,
        share_prompts=True,
        disable_log_stats=False,
    )
    return llm, served(llm, "--enable-prompt-tokens-details")


def test_metrics_of_decisions_over_http(sharing):
    """They are shown with those of the next step."""
    llm, client = sharing
    question = {"type": "predicate", "instructions": "Ida lives in Rome."}
    text = "Tom lives in Paris. Ida lives in Rome. Ben lives in Oslo."
    asked: dict[str, Any] = {"input": text, "questions": [question] * 2}

    def figures() -> np.ndarray:
        body = {"prompt": [20, 21], "max_tokens": 8}
        for route in ("decisions", "completions"):
            fields = asked if route == "decisions" else body
            model = llm.model_config.model
            answer = client.post(f"/v1/{route}", json={"model": model, **fields})
            assert answer.status_code == 200, answer.text
        shown = series_of(client.get("/metrics").text)
        names = "questions", "rows", "prompt_tokens", "shared_tokens"
        return np.array([shown[f"vllm:dllm_decision_{name}_total"] for name in names])

    first, second = figures(), figures()
    questions, rows, tokens, shared = second - first
    row, _ = llm.asking.rows(as_messages(text), Questions(asked["questions"]).read)
    assert questions == 2
    (alone,) = llm.ask_rows([row])
    assert tokens == 2 * len(alone.prompt_token_ids)
    assert 0 < tokens - shared < 2 * (PAGE_SIZE + 1)
    assert rows == tokens - shared + 2 * row.params.max_tokens


def test_metrics_usage_and_reset_are_vllms_over_http(sharing):
    llm, client = sharing

    def figures() -> list[float]:
        shown = series_of(client.get("/metrics").text)
        names = "prefix_cache_queries_total", "prefix_cache_hits_total"
        return [shown[f"vllm:{name}"] for name in names]

    def ask(prompt: list[int]) -> int:
        """How many tokens of the prompt were read from pages, by the answer."""
        body = {"model": llm.model_config.model, "prompt": prompt, "max_tokens": 8}
        answer = client.post("/v1/completions", json=body | {"ignore_eos": True})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    text, (queries, hits) = [*range(20, 61)], figures()
    read = [ask([*text, number]) for number in (61, 62)]
    assert read == [0, 40]
    assert figures() == [queries + 84, hits + 40]
    assert client.post("/reset_prefix_cache").status_code == 200
    assert ask(text) == 0
    assert figures() == [queries + 84 + 41, hits + 40]
    assert_nothing_left(llm)


def test_room_for_rows_and_refreshes_is_counted_by_what_is_computed(
    engines, tiny_llada
):
    """One whole prompt fills a step; then the other requests all begin in one, and each
    owes only the rows that it computes.
    """
    llm = engines(
        tiny_llada,
        cache_method="dual",
        page_size=PAGE_SIZE,
        share_prompts=True,
        max_num_batched_tokens=256,
    )
    assert llm.reset_prefix_cache()
    prompts = [[1, 2], *([*range(100), *range(100), i] for i in range(8))]
    asked = DiffusionParams(
        gen_length=8, block_length=4, tokens_per_step=1, ignore_eos=True
    )
    owed: list[list[float]] = []

    def after_step() -> None:
        owed.append(sorted(scheduler_of(llm).refreshes._owed.values()))

    run = run_in_steps(llm, prompts, [asked] * 9, after_step=after_step)
    assert [len(plans) for plans in run.plans[:3]] == [2, 9, 9]
    # The short request owes its whole canvas until the next step. Each of the others
    # computes 9 rows (one token of its prompt, 8 of its response), and the short one's
    # 4 of that step pay for as many.
    first = 200 + 1 + 8
    assert owed[0] == [10, first - 10]
    assert owed[1] == [9 - 4] * 7 + [first - 10 - 4]
    rows = sorted(figures.tokens_computed for figures in run.figures)
    assert rows[:-1] == [42] * 7 + [44]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"cache_method": "maskkv"},
            "cache_method='maskkv'; choose dual, none, prefix",
        ),
        ({"batch_invariant": True}, "batch_invariant=True; leave"),
        (
            {"cache_method": "sparse", "cache_options": {"scorer": "all_voting"}},
            "scorer='all_voting'; leave",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(settings, named):
    options = EngineOptions(share_prompts=True, **settings)
    with pytest.raises(ValueError, match="^share_prompts=True is not .* " + named):
        options.with_paper_settings("model", LLADA)


def test_anchors_need_shared_prompts():
    options = EngineOptions(cache_method="dual", anchor_tokens=16)
    with pytest.raises(ValueError, match=r"^anchor_tokens=16 needs share_prompts=True"):
        options.with_paper_settings("model", LLADA)


def test_block_models_share_pages_without_it():
    options = EngineOptions(share_prompts=True, cache_method="block")
    with pytest.raises(ValueError, match="share_prompts=True: attention of SDAR"):
        options.with_paper_settings("model", SDAR)
