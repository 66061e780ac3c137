"""Random engines, random requests that come and are aborted at random: each answer is
the one given alone.

``--red-team N`` draws N times as many. The number in a test's name draws the same
engine again. Two decisions closer than 1e-4 may go the other way in a batch: a rare
failure in a long run may be such a tie, which the trace shows.
"""

import random
from typing import TYPE_CHECKING, Any

import pytest

from dllm_engine import DiffusionParams
from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.families import Attention
from dllm_engine.request_options.fields import FACTS
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS
from tests.support.engines import assert_nothing_left, generate, scheduler_of
from tests.support.plans import draw_cache_options
from tests.support.random_decisions import decision_params, random_decision
from tests.support.random_requests import (
    between_blocks,
    by_blocks,
    in_certain_order,
    in_spans,
    random_requests,
)
from tests.support.sharded import assert_alike, run_and_abort, two_ranks
from tests.support.tiny_checkpoints import VOCAB_SIZE, write_guide

if TYPE_CHECKING:
    from dllm_engine import LLM

pytestmark = pytest.mark.slow

NUM_ENGINES, NUM_REQUESTS = 24, 14
"""Two engines of each cache method."""
END_OPTIONS = ("confidence_eos_eot_inf", "logits_eos_inf")
GUIDE_DECIDES = (
    "steps",
    "steps_per_block",
    "tokens_per_step",
    "unmasking",
    "certainty_sigma",
    *PARALLEL_OPTIONS,
    "block_add_threshold",
    "delay_eos",
    "logprobs",
    "alg_temp",
    "min_tokens",
    "logit_bias",
    *END_OPTIONS,
)
"""Options that a guided request cannot have."""
MODELS: dict[Attention, list[str]] = {
    "full": [
        "tiny_dream",
        "tiny_dream",
        "tiny_llada",
        "tiny_llada_moe",
        "tiny_a2d",
        "tiny_open_dcoder",
    ],
    "block_causal": [
        "tiny_sdar",
        "tiny_llada2",
        "tiny_a2d_bd3lm",
        "tiny_fast_dllm_v2",
    ],
    "causal": ["tiny_nemotron_labs"],
}
"""Fixtures of checkpoints."""
SEEDS_BLOCKS = ("tiny_fast_dllm_v2", "tiny_nemotron_labs")
"""Models whose row before a position predicts its token: they decide nothing."""


@pytest.fixture(scope="session")
def tiny_guide(tmp_path_factory) -> str:
    """The folder of a random guide for the tiny checkpoints."""
    return str(write_guide(tmp_path_factory.mktemp("guide")))


def draw_model(draw: random.Random, method: str) -> str:
    """One that the method suits."""
    models = MODELS[draw.choice(CACHE_METHODS[method].attention)]
    if method == "focus":  # it keeps rows by the position that they predict
        models = [model for model in models if model not in SEEDS_BLOCKS]
    return draw.choice(models)


def draw_engine(
    draw: random.Random, method: str, guide: str | None = None
) -> dict[str, Any]:
    """Settings of an engine with scarce pages, rows or sequences, or plenty of them;
    with a ``guide`` or without.
    """
    guided = (
        guide is not None
        and method not in ("es_dllm", "d2_cache")
        and draw.random() < 0.4
    )
    keeps_for_good = CACHE_METHODS[method].keeps_for_good
    options = draw_cache_options(draw, method)
    if options.get("cache_block_length"):
        options["cache_block_length"] = 480  # every block divides it
    return {
        **({"enable_prefix_caching": draw.random() < 0.7} if keeps_for_good else {}),
        "guide_model": guide if guided else None,
        "cache_method": method,
        "cache_options": options,
        "page_size": draw.choice([8, 16, 32]),
        "refresh_ratio": draw.choice([None, 0.1, 1.0]),
        "steps_per_dispatch": draw.choice([1, 1, 4]),
        "trace": draw.random() < 0.5,  # without it, more steps run ahead
        "max_num_seqs": draw.choice([1, 3, 8, 64]),
        "max_num_batched_tokens": draw.choice(
            [64 if keeps_for_good else 256, 400, 2048]
        ),
        "kv_cache_memory_bytes": draw.choice([1 if keeps_for_good else 3, 4, 8]) << 20,
    }


def draw_requests(
    draw: random.Random,
    model: str,
    *,
    has_guide: bool = False,
    trims_suffix: bool = False,
    takes_back: bool = False,
) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and fields of ``DiffusionParams``; some requests sample, report
    log-probabilities or hold end tokens back, or begin alike. ``takes_back``: the cache
    method lets tokens be taken back."""
    requests, number = [], draw.randrange(1 << 30)
    drawn = random_requests(number, NUM_REQUESTS, model == "tiny_dream")
    if model not in MODELS["full"]:
        drawn = between_blocks(
            [
                ([*range(draw.choice([0, 20, 70])), *prompt], asked)
                for prompt, asked in drawn
            ]
        )
    else:
        drawn = in_spans(drawn, number)
    for prompt, asked in by_blocks(in_certain_order(drawn, number), number):
        # The scorer `random` draws too, so greedy requests need a seed as well.
        asked = asked | {
            "ignore_eos": draw.random() < 0.7,
            "seed": draw.randrange(1 << 40),
        }
        if draw.random() < 0.3:
            asked["temperature"] = draw.choice([0.2, 1.0])
        if draw.random() < 0.2:
            asked["logprobs"] = draw.choice([0, 3])
        if draw.random() < 0.2:
            asked["delay_eos"] = True
        if draw.random() < 0.2:
            asked["logit_bias"] = {
                draw.randrange(VOCAB_SIZE): draw.uniform(-9, 9)
                for _ in range(draw.choice([1, 40]))
            }
        if draw.random() < 0.2:
            asked["min_tokens"] = draw.randrange(asked["gen_length"] + 1)
        measures = asked["unmasking"] != "sequential"
        if measures and draw.random() < 0.2:
            asked[draw.choice(END_OPTIONS)] = True
        if measures and not asked.keys() & {*PARALLEL_OPTIONS} and draw.random() < 0.2:
            asked["alg_temp"] = draw.choice([0.1, 1.0])
        if trims_suffix and draw.random() < 0.3:
            asked["suffix_blocks"] = draw.randrange(3)
        if has_guide and draw.random() < 0.3:
            asked["guided"] = False
        elif has_guide:
            asked = {
                name: value
                for name, value in asked.items()
                if name not in GUIDE_DECIDES
            }
            asked |= {
                "speculation_length": draw.choice([1, 3, 32]),
                "guide_top_k": draw.choice([1, 40]),
                "guide_fallback": draw.choice(["guide", "draft"]),
                "guide_correction": draw.random() < 0.3,
            }
        if model not in SEEDS_BLOCKS and draw.random() < 0.15:
            decision, _, _ = random_decision(draw)
            asked = decision_params(decision, passes=draw.randint(1, 3))
        elif draw.random() < 0.5:
            asked = own_options(draw, model, asked, takes_back=takes_back)
        requests.append(([token % 140 for token in prompt], asked))
    return requests


def own_options(
    draw: random.Random, model: str, asked: dict[str, Any], *, takes_back: bool
) -> dict[str, Any]:
    """Options that only models of its kind have."""
    if model == "tiny_open_dcoder" and takes_back:
        kept = {
            name: value
            for name, value in asked.items()
            if name not in FACTS or not FACTS[name].needs_decided
        }
        return kept | {"unmasking": "p2"}
    if model == "tiny_fast_dllm_v2":
        length = asked["block_length"]
        parts = [n for n in range(1, length + 1) if length % n == 0]
        # `steps` were drawn for blocks; parts need one each.
        kept = {name: value for name, value in asked.items() if name != "steps"}
        return kept | {"sub_block_length": draw.choice(parts)}
    if model != "tiny_nemotron_labs":
        return asked
    decoding = draw.choice(["autoregressive", "self_speculation"])
    left_out = {"steps", "steps_per_block", "tokens_per_step"}
    if decoding == "autoregressive":
        left_out.add("block_length")
    kept = {name: value for name, value in asked.items() if name not in left_out}
    return kept | {"decoding": decoding}


def answer_with_aborts(
    llm: "LLM", requests: list, draw: random.Random
) -> dict[int, Any]:
    """What the requests got that were not aborted; they join a few at a time, and one
    in five is aborted.
    """
    waiting = list(enumerate(requests))
    alive: set[int] = set()
    answers: dict[int, Any] = {}
    scheduler = scheduler_of(llm)
    while waiting or llm.llm_engine.has_unfinished_requests():
        for _ in range(draw.randrange(4)):
            if waiting:
                number, (prompt, asked) = waiting.pop()
                llm.llm_engine.add_request(
                    str(number), {"prompt_token_ids": prompt}, DiffusionParams(**asked)
                )
                alive.add(number)
        if alive and draw.random() < 0.06:
            victim = draw.choice(sorted(alive))
            llm.llm_engine.abort_request([str(victim)])
            alive.remove(victim)
        for output in llm.llm_engine.step():
            if output.finished and int(output.request_id) in alive:
                alive.remove(int(output.request_id))
                answers[int(output.request_id)] = output.outputs[0]
        assert (
            scheduler.pages.num_allocated
            <= scheduler.pages.num_reserved
            <= scheduler.pages.num_pages
        )
    assert_nothing_left(llm)
    return answers


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, count in (("number", NUM_ENGINES), ("sharded_number", 1)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(
                name, range(count * metafunc.config.getoption("red_team"))
            )


def test_answers_beside_others_are_those_given_alone(
    engines, request, tiny_guide, number
):
    draw = random.Random(number)
    method = list(CACHE_METHODS)[number % len(CACHE_METHODS)]
    model = draw_model(draw, method)
    sees_all = model in MODELS["full"]
    settings = draw_engine(draw, method, tiny_guide if sees_all else None)
    if model == "tiny_nemotron_labs":
        settings["cache_options"].pop("sub_block_cache", None)
    trims_suffix = CACHE_METHODS[method].trims_suffix and sees_all
    requests = draw_requests(
        draw,
        model,
        has_guide=settings["guide_model"] is not None,
        trims_suffix=trims_suffix,
        takes_back=method == "none" and settings["guide_model"] is None,
    )
    llm = engines(request.getfixturevalue(model), **settings)

    answers = answer_with_aborts(llm, requests, draw)

    assert answers, "all were aborted"
    for index, answer in answers.items():
        prompt, asked = requests[index]
        (alone,) = generate(llm, [prompt], DiffusionParams(**asked))
        assert list(answer.token_ids) == list(alone.outputs[0].token_ids), (
            settings,
            prompt,
            asked,
        )
        assert answer.finish_reason == alone.outputs[0].finish_reason
        assert (
            answer.diffusion.denoising_steps
            == alone.outputs[0].diffusion.denoising_steps
        )
    assert_nothing_left(llm)


def test_two_ranks_answer_as_one_beside_aborted_requests(
    engines, request, sharded_number
):
    draw = random.Random(1000 + sharded_number)
    method = draw.choice(["sparse", "es_dllm", "maskkv", "block"])
    fixture = draw_model(draw, method)
    model, settings = request.getfixturevalue(fixture), draw_engine(draw, method)
    requests = draw_requests(draw, fixture)
    prompts, params = (
        [prompt for prompt, _ in requests],
        [DiffusionParams(**asked) for _, asked in requests],
    )
    with two_ranks(model, max_model_len=256, **settings) as sharded:
        run_and_abort(sharded, prompts[::3], params[::3])
        answers = generate(sharded, prompts, params)

    alone = engines(model, **settings)
    assert_alike(
        answers,
        [generate(alone, [prompts[i]], params[i])[0] for i in range(len(prompts))],
    )
