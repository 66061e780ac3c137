"""Log-probabilities of tokens when they were committed, under the model's own softmax;
and ``return_order``, which says by which forward pass each was."""

from functools import partial
from typing import Any

import pytest
import torch
from vllm.logprobs import FlatLogprobs

from dllm_engine import DiffusionParams
from dllm_engine.families import LLADA
from dllm_engine.model_executor import head_chunks
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.errors import InvalidRequestError
from tests.oracles.models import PlainModel
from tests.support import tiny_checkpoints
from tests.support.engines import completion_of
from tests.support.plans import resolved
from tests.support.tiny_checkpoints import EOS, VOCAB_SIZE

PROMPT = [3, 1, 4, 1, 5, 9]
SAMPLED: dict[str, Any] = {
    "temperature": 1.3,
    "top_p": 0.9,
    "top_k": 20,
    "seed": 3,
    "logit_bias": {20: 4.0, 77: -9.0, 100: 4.0},
}


complete = partial(
    completion_of,
    prompt=PROMPT,
    gen_length=16,
    block_length=8,
    steps=6,
    ignore_eos=True,
)


def replayed(folder, completion) -> dict[int, torch.Tensor]:
    """Log-softmax of a plain implementation's logits at each response position, at the
    step that filled it.
    """
    model = PlainModel(folder)
    tokens = PROMPT + list(completion.token_ids)
    canvas = PROMPT + [tiny_checkpoints.MASK] * (len(tokens) - len(PROMPT))
    rows = {}
    for positions in completion.diffusion.unmasked_per_step:
        predictions = model.predictions(canvas).log_softmax(-1)
        for position in positions:
            rows[position - len(PROMPT)] = predictions[position]
            canvas[position] = tokens[position]
    return rows


@pytest.mark.parametrize("family", ["llada", "dream", "sdar", "llada2"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_each_token_and_the_likeliest_have_those_of_the_step_that_committed_it(
    engines, request, monkeypatch, family, sampled
):
    """Computed for few rows at once."""
    monkeypatch.setattr(head_chunks, "MAX_LOGITS_PER_CHUNK", 3 * VOCAB_SIZE)
    folder = request.getfixturevalue(f"tiny_{family}")
    # Where attention goes by blocks, the response ends with one.
    asked: dict[str, Any] = (
        {"gen_length": 18, "block_length": PlainModel(folder).block_length}
        if family in ("sdar", "llada2")
        else {}
    )
    completion = complete(
        engines(folder), logprobs=3, **asked, **(SAMPLED if sampled else {})
    )
    rows = replayed(folder, completion)
    assert len(completion.logprobs) == len(completion.token_ids) == len(rows)
    for position, (token, of_token) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        best = rows[position].topk(3)
        assert set(of_token) == {token, *best.indices.tolist()}
        for value, index, rank in zip(
            best.values.tolist(), best.indices.tolist(), (1, 2, 3), strict=True
        ):
            assert of_token[index].logprob == pytest.approx(value, abs=1e-3)
            assert of_token[index].rank == rank
        assert of_token[token].logprob == pytest.approx(
            rows[position][token].item(), abs=1e-3
        )
        assert (
            of_token[token].rank == 1 + (rows[position] > rows[position][token]).sum()
        )
    total = sum(
        of_token[token].logprob
        for token, of_token in zip(
            completion.token_ids, completion.logprobs, strict=True
        )
    )
    assert completion.cumulative_logprob == pytest.approx(total)


def test_vllms_flat_form(engines, tiny_llada):
    nested, flat = (
        complete(engines(tiny_llada), logprobs=2, flat_logprobs=form)
        for form in (False, True)
    )
    assert isinstance(flat.logprobs, FlatLogprobs)
    assert list(flat.logprobs) == list(nested.logprobs)


ordered = partial(complete, return_order=True)


@pytest.mark.parametrize(
    ("cache_method", "settings"),
    [
        ("dkv", SAMPLED),
        ("es_dllm", {"block_length": 16}),
        ("delayed", {"entropy_threshold": 4.0, "block_add_threshold": 0.2}),
    ],
)
def test_it_is_what_trace_and_logprobs_say_and_changes_no_token(
    engines, tiny_llada, cache_method, settings
):
    llm = engines(tiny_llada, cache_method=cache_method)
    completion = ordered(llm, logprobs=0, **settings)
    assert ordered(llm, return_order=None, **settings).token_ids == completion.token_ids
    figures = completion.diffusion
    traced = [
        [position - len(PROMPT) for position in passed]
        for passed in figures.unmasked_per_step
    ]
    assert figures.order == traced
    of_tokens = zip(completion.token_ids, completion.logprobs, strict=True)
    assert figures.committed_logprobs == [
        logprobs[token].logprob for token, logprobs in of_tokens
    ]
    alone = ordered(llm, **settings)
    assert alone.logprobs is None
    assert alone.diffusion.committed_logprobs == pytest.approx(
        figures.committed_logprobs, abs=1e-5
    )


def test_it_ends_with_the_tokens(engines, tiny_llada):
    llm = engines(tiny_llada)
    whole = ordered(llm, logprobs=0)
    cut = ordered(llm, logprobs=0, stop_token_ids=[whole.token_ids[5]])
    assert len(cut.token_ids) <= 6
    assert cut.logprobs == whole.logprobs[: len(cut.token_ids)]
    assert (
        cut.diffusion.committed_at == whole.diffusion.committed_at[: len(cut.token_ids)]
    )


def test_it_ends_at_a_stop_string_too(demo):
    chat = [{"role": "user", "content": "Tom=48. Ida=07. Max=31. Give: Tom, Ida, Max"}]
    whole, cut = (
        demo.chat(
            chat,
            DiffusionParams(gen_length=32, stop=stop, return_order=True),
            use_tqdm=False,
        )[0].outputs[0]
        for stop in ([], ["Ida"])
    )
    assert (
        cut.diffusion.committed_at == whole.diffusion.committed_at[: len(cut.token_ids)]
    )
    assert (
        len(cut.diffusion.committed_logprobs)
        == len(cut.token_ids)
        < len(whole.token_ids)
    )


def test_given_tokens_are_certain_and_committed_by_no_pass_and_may_be_left_out(
    engines, tiny_llada
):
    template = [7, None, None, 8, None, EOS, None, 9]
    given = [index for index, token in enumerate(template) if token is not None]
    holes = [index for index, token in enumerate(template) if token is None]
    asked: dict[str, Any] = {
        "gen_length": None,
        "steps": None,
        "block_length": 4,
        "response_template": template,
        "logprobs": 2,
    }
    whole, filled = (
        ordered(engines(tiny_llada), return_given=given, **asked)
        for given in (True, False)
    )
    assert [whole.token_ids[i] for i in given] == [template[i] for i in given]
    assert [whole.diffusion.committed_at[i] for i in given] == [0] * 4
    assert [whole.diffusion.committed_logprobs[i] for i in given] == [0.0] * 4
    assert [whole.logprobs[i][template[i]].logprob for i in given] == [0.0] * 4
    assert (
        sorted(index for committed in whole.diffusion.order for index in committed)
        == holes
    )
    assert list(filled.token_ids) == [whole.token_ids[i] for i in holes]
    assert list(filled.logprobs) == [whole.logprobs[i] for i in holes]
    assert filled.diffusion.committed_at == [
        whole.diffusion.committed_at[i] for i in holes
    ]
    assert filled.diffusion.tokens_unmasked == whole.diffusion.tokens_unmasked == 4


def test_tokens_of_a_guide_have_no_logprob():
    guided = EngineOptions(guide_model="demo")
    with pytest.raises(
        InvalidRequestError,
        match=r"return_order=True: tokens of the guide .* guide_fallback='draft'",
    ):
        resolved(LLADA, guided, gen_length=8, return_order=True)
    assert resolved(
        LLADA, guided, gen_length=8, return_order=True, guide_fallback="draft"
    ).reports.return_order
