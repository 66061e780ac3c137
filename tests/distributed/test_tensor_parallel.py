"""Two tensor-parallel ranks give the tokens of one, in real worker processes under
vLLM's executors.
"""

import random
from itertools import cycle, islice
from typing import Any

import pytest
from transformers import AutoTokenizer

from dllm_engine import DiffusionParams
from dllm_engine.demo import DEMO_GUIDE_DIR, DEMO_MODEL_DIR
from dllm_engine.demo.tasks import TASKS, make_examples
from examples.quantize import quantize
from tests.support.byte_level_tokenizers import copy_renumbered
from tests.support.engines import generate, scheduler_of
from tests.support.quantized_checkpoints import needs_kernels
from tests.support.random_decisions import (
    assert_same_decisions,
    decision_params,
    random_decision,
)
from tests.support.random_requests import random_automaton
from tests.support.reference_cases import reference_cases
from tests.support.sharded import assert_alike, run_and_abort, two_ranks, watch_pages
from tests.support.tiny_checkpoints import write, write_adapter

pytestmark = pytest.mark.slow

CONSTRAINT = random_automaton(random.Random(0), 512, {*range(505, 512)})
"""Of the tokens below the special ones."""
PROMPTS = {
    "llada-tiny-a": "vanilla_llada",
    "dream-tiny-a": "vanilla_dream",
    "llada-moe-tiny-a": "vanilla_llada_moe",
    "sdar-tiny-a": "block_sdar",
    "llada2-moe-tiny-a": "block_llada2",
}
"""By model, the reference cases whose prompts are asked."""
SHORT_PROMPTS = [[3, 17, 99, 4, 61], [8] * 21, [5, 6, 7]]
"""For other models."""
# One request per policy and way of sampling; their noise must not depend on the number
# of ranks.
SAMPLED = [
    {"temperature": 1.0, "seed": 7, "unmasking": policy, **filters}
    for policy in (
        "low_confidence",
        "random",
        "maskgit_plus",
        "entropy",
        "topk_margin",
        "origin",
    )
    for filters in (
        {},
        {"top_p": 0.9, "top_k": 20},
        {"top_p": 0.9, "extra_args": {"constraint": CONSTRAINT.packed}},
        {"extra_args": {"constraint": CONSTRAINT.packed}, "logprobs": 2},
    )
]


RULES: list[dict[str, Any]] = [
    {},
    {"threshold": 0.5},
    {"factor": 2.0, "block_add_threshold": 0.3},
    {"entropy_bound": 1.0},
    {"margin": 0.4},
    {"entropy_threshold": 1.5, "block_add_threshold": 0.2},
    {"slow_fast": {"span_steps": 1, "span_threshold": 0.5, "fast_threshold": 0.3}},
    {"threshold": 0.2, "extra_args": {"constraint": CONSTRAINT.packed}},
]
BIASED: list[dict[str, Any]] = [
    {"logit_bias": {7: 3.0, 300: -9.0, 496: -2.0}, "min_tokens": 9},
    {"confidence_eos_eot_inf": True, "logits_eos_inf": True},
    {"alg_temp": 0.3, "seed": 5, "steps": 9, "logit_bias": {316: -4.0}},
]
SPARSE = {"cache_method": "sparse", "cache_options": {"retention_ratio": 0.4}}
REFRESHED = {
    "cache_method": "sparse",
    "cache_options": {"retention_ratio": 0.4, "refresh": "response"},
}
D2_CACHE = {
    "cache_method": "d2_cache",
    "cache_options": {"masked_rows": 6, "rollout_p": 0.2},
}
ORDER = ("unmasked_per_step", "forward_passes")
CHOSEN = ("unmasked_per_step", "computed_positions")
RETAINED = ("unmasked_per_step", "retained_positions")
SKIPPED = ("selected_positions", "retained_positions")
INTERVALS = {
    "prompt_refresh_interval": 5,
    "response_refresh_interval": 3,
    "update_ratio": 0.25,
}
MASKKV = INTERVALS | {"kv_budget": 12, "alpha": 0.0, "refresh_first_layer": True}
DRAWN = MASKKV | {"scorer": "random"}
ALL = ("trace", "tokens_computed")


def es_dllm(**options):
    return {
        "cache_method": "es_dllm",
        "cache_options": {"block_refresh_interval": 4} | options,
    }


BLOCK_RULES: list[dict[str, Any]] = [
    {},
    {"threshold": 0.5},
    {"threshold": 0.6, "edit_threshold": 0.3, "max_post_steps": 3},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"threshold": 0.2, "extra_args": {"constraint": CONSTRAINT.packed}},
]
SHORT = {"max_model_len": 256}
DRAFTS = SHORT | {
    "cache_method": "block",
    "cache_options": {"draft_lora": "linear_spec_lora"},
}
MODES: list[dict[str, Any]] = [
    {},
    {"decoding": "autoregressive", "block_length": None},
    {"decoding": "self_speculation"},
    {"decoding": "self_speculation", "temperature": 1.0, "seed": 7},
]
SEEDED = ("fast-dllm v2", "nemotron")
"""Cases of models that decide nothing."""
CASES: dict[str, Any] = {
    **{
        f"none {model}": (model, {}, [{}, {"steps": 9}, *SAMPLED, *BIASED], ORDER)
        for model in [*PROMPTS][:3]
    },
    "sdar": ("sdar-tiny-a", {}, BLOCK_RULES, CHOSEN),
    "llada2": ("llada2-moe-tiny-a", {}, BLOCK_RULES, CHOSEN),
    "sparse llada": ("llada-tiny-a", SPARSE, RULES, RETAINED),
    "sparse dream": ("dream-tiny-a", REFRESHED, RULES, RETAINED),
    "freecache": ("llada-tiny-a", {"cache_method": "freecache"}, RULES, RETAINED),
    "delayed": ("dream-tiny-a", {"cache_method": "delayed"}, RULES, RETAINED),
    "d2_cache llada": (
        "llada-tiny-a",
        D2_CACHE,
        [{"certainty_sigma": 10.0, "tokens_per_step": 2}, *RULES],
        CHOSEN,
    ),
    "d2_cache dream": ("dream-tiny-a", D2_CACHE, RULES, CHOSEN),
    "es_dllm query": ("llada-tiny-a", es_dllm(indicator="query"), [{}], SKIPPED),
    "es_dllm key": ("dream-tiny-a", es_dllm(indicator="key"), [{}], SKIPPED),
    "es_dllm hidden_state": (
        "dream-tiny-a",
        es_dllm(indicator="hidden_state", retention_ratio=0.4),
        [{}],
        SKIPPED,
    ),
    **{
        f"{method} {family}": (
            f"{family}-tiny-a",
            {"cache_method": method, "cache_options": options},
            [{}],
            ALL,
        )
        for method, options, families in (
            ("dual", {"refresh": "near", "near_tokens": 4}, ["dream"]),
            ("dkv", {"refresh_interval": 4}, ["llada"]),
            ("dllm_cache", INTERVALS, ["llada", "dream"]),
            ("maskkv", MASKKV, ["llada", "dream"]),
        )
        for family in families
    },
    "random heads": (
        "llada-tiny-a",
        {"cache_method": "maskkv", "cache_options": DRAWN},
        [{"seed": 5}],
        ALL,
    ),
    # Experts and dense layers; those of LLaDA-MoE have a shared one beside them.
    "experts llada": (
        "tiny_llada_moe",
        {"cache_method": "dual", "max_model_len": 256},
        RULES[:3],
        ORDER,
    ),
    "experts sdar": ("tiny_sdar_moe", {"max_model_len": 256}, BLOCK_RULES[:3], ORDER),
    "a2d": ("tiny_a2d", {"cache_method": "dual"} | SHORT, RULES[:3], ORDER),
    "a2d bd3lm": ("tiny_a2d_bd3lm", {"page_size": 4} | SHORT, BLOCK_RULES[:2], ORDER),
    "open-dcoder": ("tiny_open_dcoder", SHORT, [{}, {"unmasking": "p2"}], ORDER),
    "fast-dllm v2": (
        "tiny_fast_dllm_v2",
        {"cache_method": "block", "cache_options": {"sub_block_cache": True}} | SHORT,
        [{"sub_block_length": 4, "threshold": 0.2}, {"sub_block_length": 2}],
        CHOSEN,
    ),
    "nemotron": ("nemotron-labs-diffusion-spec-tiny-a", DRAFTS, MODES, CHOSEN),
    # Every rank plans the steps after the first by itself.
    "steps per dispatch": (
        "llada-tiny-a",
        {"cache_method": "dllm_cache", "steps_per_dispatch": 6},
        RULES,
        ORDER,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_retain_and_unmask_what_one_does(
    engines, checkpoint_of, case
):
    check_two_ranks(engines, checkpoint_of, case)


def check_two_ranks(engines, checkpoint_of, case, backend="mp"):
    model, engine, rules, figures = CASES[case]
    engine = {"page_size": 16, "max_model_len": 512} | engine
    checkpoint = checkpoint_of(model)
    prompts = SHORT_PROMPTS
    if model in PROMPTS:
        prompts = [
            case["prompt_ids"][0]
            for case in reference_cases(PROMPTS[model])
            if case["model"] == model
        ][::3]
    prompts = [*islice(cycle(prompts), max(len(prompts), len(rules), 4))]
    asked: dict[str, Any] = {"gen_length": 20, "block_length": 8, "ignore_eos": True}
    params = [
        DiffusionParams(**asked | rules[i % len(rules)]) for i in range(len(prompts))
    ]
    rng = random.Random(case)
    decisions = [
        DiffusionParams(**decision_params(random_decision(rng)[0], passes=passes))
        for passes in ((1, 1, 2, 2) if case not in SEEDED else ())
    ]
    deciding = prompts[: len(decisions)]
    with two_ranks(checkpoint, backend=backend, **engine) as sharded:
        decided = [
            output.outputs[0] for output in generate(sharded, deciding, decisions)
        ]
        pages = watch_pages(sharded)
        answers = generate(sharded, prompts, params)
        by_blocks = scheduler_of(sharded).tables.pages.shares
        again = generate(sharded, prompts, params) if by_blocks else answers
    alone = engines(checkpoint, **engine)
    assert_alike(answers, generate(alone, prompts, params), *figures)
    assert_same_decisions(
        decided,
        [output.outputs[0] for output in generate(alone, deciding, decisions)],
    )
    assert_alike(again, answers)
    if case.startswith("maskkv"):
        planned, allocated, reserved = pages[0]
        assert allocated == reserved < planned, "what voting left free is given back"
    assert by_blocks == any(output.num_cached_tokens for output in again)


def test_two_ranks_share_prompts(engines, checkpoint_of):
    checkpoint = checkpoint_of("llada-tiny-a")
    engine: dict[str, Any] = {
        **SPARSE,
        "share_prompts": True,
        "page_size": 16,
        "max_model_len": 128,
    }
    prompts = [[*range(50), number] for number in range(5)]
    params = DiffusionParams(gen_length=20, block_length=8, ignore_eos=True)
    with two_ranks(checkpoint, **engine) as sharded:
        answers = generate(sharded, prompts, params)
    others = generate(engines(checkpoint, **engine), prompts, params)
    assert_alike(answers, others, *RETAINED)
    for outputs in (answers, others):
        assert [each.num_cached_tokens for each in outputs] == [0, 48, 48, 48, 48]


def test_two_ranks_split_quantized_weights(engines, tmp_path):
    """In bfloat16 a sum over ranks is rounded, so that tokens may differ where two are
    as probable.
    """
    needs_kernels("int4")
    # CPU kernels for four bits take multiples of 32, on each rank.
    model = quantize(
        str(write("llada", tmp_path / "plain", mlp_hidden_size=128)),
        tmp_path / "quantized",
        "int4",
    )
    params = DiffusionParams(
        gen_length=8, block_length=8, steps=1, ignore_eos=True, logprobs=2
    )
    with two_ranks(model, max_model_len=256, dtype="bfloat16") as sharded:
        answers = generate(sharded, SHORT_PROMPTS, params)
    for answer, other in zip(
        answers,
        generate(engines(model, dtype="bfloat16"), SHORT_PROMPTS, params),
        strict=True,
    ):
        (output,), (expected,) = answer.outputs, other.outputs
        for token, ours, theirs in zip(
            output.token_ids, output.logprobs, expected.logprobs, strict=True
        ):
            assert theirs[token].logprob == pytest.approx(ours[token].logprob, abs=0.25)
            assert (
                theirs[token].logprob
                > max(each.logprob for each in theirs.values()) - 0.25
            )


def test_two_ranks_share_an_adapter(engines, tiny_llada, tmp_path):
    modules = [
        f"model.transformer.blocks.{part}"
        for part in ("0.k_proj", "1.attn_out", "0.up_proj", "1.ff_out")
    ]
    adapter = str(write_adapter(tmp_path, tiny_llada, modules))
    params = DiffusionParams(gen_length=16, block_length=8, ignore_eos=True)
    llm = engines(tiny_llada, lora_path=adapter)
    canvas = [([5, 6, 7, 90, 149], [3, 4])]
    rule: dict[str, Any] = {"auto_length_start": 8, "auto_length_tail": 1}
    chosen = DiffusionParams(gen_length="auto", max_tokens=60, block_length=8, **rule)
    asked = ([[5, 6, 7]] * 2, [params, chosen])
    alone, (likelihood,) = generate(llm, *asked), llm.masked_logprobs(canvas)
    with two_ranks(tiny_llada, max_model_len=256, lora_path=adapter) as sharded:
        answers = generate(sharded, *asked)
        assert [*sharded.masked_logprobs(canvas)] == [
            pytest.approx(likelihood, abs=1e-4)
        ]
    for theirs, ours in zip(answers, alone, strict=True):
        assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids
        passes = ours.outputs[0].diffusion.length_passes
        assert theirs.outputs[0].diffusion.length_passes == passes


# Where a guide decides


ASKED: list[dict[str, Any]] = [
    {},
    {"guided": False, "threshold": 0.9},
    {"guide_threshold": 0.8, "speculation_length": 5},
    {"guide_top_k": 3, "guide_correction": True},
    {"guide_fallback": "draft"},
    {"guided": False},
]


@pytest.mark.parametrize(
    ("cache_method", "other_tokenizer"), [("freecache", False), ("dllm_cache", True)]
)
def test_two_ranks_follow_the_guide_as_one_does(
    engines, tmp_path, cache_method, other_tokenizer
):
    guide = (
        copy_renumbered(DEMO_GUIDE_DIR, tmp_path / "guide")
        if other_tokenizer
        else DEMO_GUIDE_DIR
    )
    engine: dict[str, Any] = {
        "cache_method": cache_method,
        "guide_model": str(guide),
        "page_size": 16,
    }
    engine["skip_tokenizer_init"] = not other_tokenizer
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    texts = [
        f"User: {example.prompt}\nBot:"
        for task in TASKS
        for example in make_examples(task, 2, seed=5)
    ]
    prompts = [tokenizer.encode(text) for text in texts]
    asked: list[dict[str, Any]] = [
        {"gen_length": 32, "block_length": 8} | ASKED[i % len(ASKED)]
        for i in range(len(prompts))
    ]
    params = [DiffusionParams(**of_one) for of_one in asked]
    with two_ranks(DEMO_MODEL_DIR, **engine) as sharded:
        run_and_abort(sharded, prompts[:4], params[:4])
        answers = generate(sharded, prompts, params)

    alone = generate(
        engines(DEMO_MODEL_DIR, max_model_len=512, **engine), prompts, params
    )
    # A trained model is equally sure of many end tokens: without a guide, which comes
    # first is a matter of rounding.
    for guided, figure in ((True, "unmasked_per_step"), (False, "forward_passes")):
        chosen = [
            i for i, of_one in enumerate(asked) if of_one.get("guided", True) == guided
        ]
        assert_alike([answers[i] for i in chosen], [alone[i] for i in chosen], figure)
