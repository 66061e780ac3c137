"""Guided Diffusion in the engine against the plain one, and what it promises beyond
that.
"""

import random
import shutil
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dllm_engine import DiffusionParams
from dllm_engine.constraints.constraint import Constraint
from dllm_engine.model_executor import head_chunks
from tests.oracles.constrained import PlainConstraint
from tests.oracles.guided import Texts, plain_guided
from tests.oracles.models import PlainModel
from tests.support.answers import answer_of
from tests.support.byte_level_tokenizers import NOTE, TALE, spelled, train_tokenizer
from tests.support.engines import assert_nothing_left, generate, runner_of, start_engine
from tests.support.random_requests import random_automaton
from tests.support.tiny_checkpoints import write_guide

VOCABULARY = 512
LENGTHS = [(24, 16, 8), (7, 20, 20), (40, 24, 8), (15, 10, 4)]
"""Prompt, response, block."""
TEMPLATES: dict[int, Any] = {
    24: [5, None, None, 7] * 4 + [None] * 4 + [9] * 4,
    10: [None] * 3 + [8] * 4 + [None] * 3,
}
"""Of responses of so many tokens."""
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "short window": {"speculation_length": 3},
    "lenient": {"guide_top_k": 40},
    "threshold": {"guide_threshold": 0.2},
    "draft": {"guide_fallback": "draft", "guide_top_k": 3},
    "correction": {"guide_correction": True, "guide_top_k": 30, "guide_threshold": 0.3},
}


@pytest.fixture(scope="module")
def guides(tmp_path_factory):
    """Folders of small random guides."""
    return {
        name: write_guide(
            tmp_path_factory.mktemp("guides") / name,
            name,
            vocab_size=VOCABULARY,
            **config,
        )
        for name, config in dict[str, dict[str, Any]](
            {
                "llama": {"num_key_value_heads": 4},
                "qwen2": {"tie_word_embeddings": True},
            }
        ).items()
    }


GUIDED_BY = {"llada-tiny-a": "llama", "dream-tiny-a": "qwen2"}
SPELLING = (TALE, 480), (NOTE, 400, "<stop>")
"""Tokenizers of the models and of their guides, where they differ."""


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(480) for _ in range(length)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, reference_checkpoints, guides):
    """Folders of a model and a guide that spell differently, by the model's name."""
    folders = {}
    for model, guide in GUIDED_BY.items():
        folders[model] = (
            tmp_path_factory.mktemp("pairs") / model,
            tmp_path_factory.mktemp("pairs") / guide,
        )
        shutil.copytree(
            reference_checkpoints / model,
            folders[model][0],
            copy_function=shutil.copyfile,
        )
        shutil.copytree(guides[guide], folders[model][1])
        for folder, tokenizer in zip(folders[model], SPELLING, strict=True):
            train_tokenizer(*tokenizer).save_pretrained(folder)
    return folders


@pytest.fixture
def engine(engines, reference_checkpoints, guides, pairs):
    def make(model="llada-tiny-a", cache_method="none", *, has_texts=False, **settings):
        """``has_texts``: with a guide of another tokenizer."""
        folder, guide = (
            pairs[model]
            if has_texts
            else (reference_checkpoints / model, guides[GUIDED_BY[model]])
        )
        settings = {
            "max_model_len": 128,
            "page_size": 8,
            "skip_tokenizer_init": not has_texts,
        } | settings
        return engines(
            folder, guide_model=str(guide), cache_method=cache_method, **settings
        )

    return make


def ask(llm, lengths=LENGTHS, **options):
    params = [
        DiffusionParams(gen_length=g, block_length=b, ignore_eos=True, **options)
        for _, g, b in lengths
    ]
    return generate(llm, [prompt(length) for length, _, _ in lengths], params)


def tokens(llm, lengths=LENGTHS, **options) -> list[list[int]]:
    return [
        list(output.outputs[0].token_ids) for output in ask(llm, lengths, **options)
    ]


@pytest.mark.parametrize(("settings", "model"), list(zip(SETTINGS, cycle(GUIDED_BY))))
@pytest.mark.parametrize(
    "has_texts", [False, True], ids=["same tokenizer", "another tokenizer"]
)
def test_engine_decodes_as_the_plain_one_does(
    engine, reference_checkpoints, guides, pairs, settings, model, has_texts
):
    texts = None
    folders = (reference_checkpoints / model, guides[GUIDED_BY[model]])
    llm = engine(
        model,
        has_texts=has_texts,
        **({"guide_tokens_per_token": 8.0} if has_texts else {}),
    )
    if has_texts:
        folders, (own, other) = (
            pairs[model],
            (train_tokenizer(*tokenizer) for tokenizer in SPELLING),
        )
        special = {llm.model_config.hf_config.eos_token_id: other.eos_token_id}
        texts = Texts(
            spelled(own),
            lambda text: other.encode(text, add_special_tokens=False),
            spelled(other),
            special,
        )
    plain_model = PlainModel(folders[0])
    judge = AutoModelForCausalLM.from_pretrained(folders[1]).eval()

    def judged(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return judge(torch.tensor([ids])).logits[0]

    compared = 0
    for length, gen_length, block_length in LENGTHS:
        template = TEMPLATES.get(gen_length)
        options = SETTINGS[settings] | {"response_template": template}
        (output,) = ask(llm, [(length, gen_length, block_length)], **options)
        lengths: dict[str, Any] = {
            "gen_length": gen_length,
            "block_length": block_length,
        }
        plain = plain_guided(
            plain_model, judged, prompt(length), texts=texts, **lengths, **options
        )
        # A decision between numbers this close is rounding's, not the method's.
        if plain.closest < 1e-4:
            continue
        answer = answer_of(
            output, num_given=sum(token is not None for token in template or ())
        )
        assert answer.tokens == plain.tokens
        assert answer.order == plain.order
        compared += 1
    assert compared >= 2, "the cases decide by rounding; choose others"


@pytest.mark.parametrize("overflows", [True, False])
def test_a_request_that_the_guide_cannot_judge_ends_alone(
    engine, monkeypatch, overflows
):
    llm = engine(cache_method="dual")
    alone, guide = tokens(llm), runner_of(llm).rank.guide
    judge, read = guide._judge, type(guide.reader).read

    def overflow(hidden, drafted):
        hidden[0] = torch.nan  # a row of the request asked first
        return judge(hidden, drafted)

    def unreadable(self, tokens, drafted):
        if tokens[: LENGTHS[0][0]] == prompt(LENGTHS[0][0]):
            raise UnicodeError("no text")
        return read(self, tokens, drafted)

    if overflows:
        monkeypatch.setattr(guide, "_judge", overflow)
        said = "the guide model produced logits that are NaN or infinite"
        failed, *others = ask(llm, LENGTHS[:1])
    else:
        monkeypatch.setattr(type(guide.reader), "read", unreadable)
        said = "UnicodeError: no text"
        failed, *others = ask(llm, LENGTHS)
    monkeypatch.undo()
    assert failed.outputs[0].finish_reason == "error"
    assert said in failed.outputs[0].diffusion.error
    assert [list(other.outputs[0].token_ids) for other in others] == alone[
        1 : 1 + len(others)
    ]
    assert tokens(llm) == alone
    assert_nothing_left(llm)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"unmasking": "random"}, "unmasking=random: the guide decides"),
        ({"threshold": 0.9}, "threshold=0.9: the guide decides"),
        ({"alg_temp": 0.1}, "alg_temp=0.1: the guide decides"),
        ({"logits_eos_inf": True}, "logits_eos_inf=True: the guide decides"),
        ({"min_tokens": 3}, "min_tokens=3: it is for the model's tokens"),
        (
            {"logit_bias": {5: -1.0}},
            r"logit_bias=\{5: -1.0\}: it is for the model's tokens",
        ),
        ({"guided": False, "guide_top_k": 2}, "guided=False and guide_top_k"),
    ],
)
def test_what_a_guided_request_cannot_have_is_named(engine, options, named):
    with pytest.raises(ValueError, match=named):
        ask(engine(), LENGTHS[:1], **options)


@pytest.mark.parametrize("cache_method", ["es_dllm", "d2_cache"])
def test_rows_that_are_skipped_cannot_be_drafted(
    reference_checkpoints, guides, cache_method
):
    guide = str(guides["llama"])
    with pytest.raises(
        ValueError,
        match=f"guide_model is not supported with cache_method='{cache_method}'",
    ):
        start_engine(
            reference_checkpoints / "llada-tiny-a",
            guide_model=guide,
            cache_method=cache_method,
        )


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("gpt2", "GPT2LMHeadModel"), ("llama", "StableDiffcoderForCausalLM")],
)
def test_other_architectures_are_refused_by_name(
    reference_checkpoints, tmp_path, model_type, architecture
):
    (tmp_path / "config.json").write_text(
        f'{{"model_type": "{model_type}", "architectures": ["{architecture}"]}}'
    )
    named = rf"\['{architecture}'\], model_type='{model_type}' cannot guide; guides are Qwen2ForCausalLM, LlamaFor"
    with pytest.raises(ValueError, match=named):
        start_engine(reference_checkpoints / "llada-tiny-a", guide_model=str(tmp_path))


def test_a_guide_keeps_to_a_constraint(engine):
    """Its own tokens do not: in their place the draft is taken."""
    draw = random.Random(4)
    automaton = random_automaton(draw, VOCABULARY, {*range(500, VOCABULARY)})
    while not Constraint(automaton, frozenset()).completable([None] * 24)[0][0]:
        automaton = random_automaton(draw, VOCABULARY, {*range(500, VOCABULARY)})
    plain = PlainConstraint(automaton.packed, ())
    for options in (
        {},
        {"guide_correction": True},
        {"guide_threshold": 0.05, "speculation_length": 3},
    ):
        outputs = ask(
            engine(),
            [(10, 24, 8), (7, 24, 24)],
            extra_args={"constraint": automaton.packed},
            **options,
        )
        for output in outputs:
            assert plain.accepts(output.outputs[0].token_ids)


def test_what_the_guide_has_no_room_for_is_unmasked_unchecked(engine):
    llm = engine(has_texts=True, guide_tokens_per_token=1.25)
    settings: dict[str, Any] = {
        "gen_length": 24,
        "block_length": 24,
        "ignore_eos": True,
        "guide_top_k": VOCABULARY,
    }
    (output,) = generate(llm, [prompt(6)], DiffusionParams(**settings))
    first, *others = output.outputs[0].diffusion.unmasked_per_step
    assert first == [*range(6, 6 + len(first))]
    assert 1 < len(first) < 24, "what there is room for is checked, and passes"
    assert others == [[position] for position in range(6 + len(first), 30)]
    assert_nothing_left(llm)


def test_the_memory_profile_includes_the_largest_chunk_of_the_guides_logits(
    engine, monkeypatch
):
    llm = engine(cache_method="dual")
    runner, judged = runner_of(llm), []
    judge = runner.rank.guide._judge
    monkeypatch.setattr(
        runner.rank.guide,
        "_judge",
        lambda *rows: judged.append(len(rows[0])) or judge(*rows),
    )
    monkeypatch.setattr(
        head_chunks,
        "MAX_LOGITS_PER_CHUNK",
        7 * runner.rank.guide.model.config.vocab_size,
    )
    runner.profile_run()
    assert judged == [7]
