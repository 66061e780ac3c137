"""Log-probabilities: of each token, when it was committed, under the model's own softmax."""

from types import SimpleNamespace

import pytest
import torch
from vllm.logprobs import FlatLogprobs

from dllm_engine import DiffusionParams
from dllm_engine.model_executor.models.decoder import VocabularyShard
from dllm_engine.model_executor.token_prediction import Counters, SamplingSettings, TokenPredictor
from tests.oracles.models import PlainModel
from tests.support import tiny_checkpoints
from tests.support.engines import generate

PROMPT = [3, 1, 4, 1, 5, 9]
SETTINGS = {"gen_length": 16, "block_length": 8, "steps": 6, "ignore_eos": True}
SAMPLED = {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "seed": 3}


def complete(llm, prompt=PROMPT, **settings):
    return generate(llm, [prompt], DiffusionParams(**(SETTINGS | settings)))[0].outputs[0]


def replayed(folder, completion) -> dict[int, torch.Tensor]:
    """Log-softmax of a plain implementation's logits at each response position, at the step that filled it."""
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
def test_each_token_and_the_likeliest_have_those_of_the_step_that_committed_it(engines, request, family, sampled):
    folder = request.getfixturevalue(f"tiny_{family}")
    # Where attention goes by blocks, the response ends with one.
    asked = {"gen_length": 18, "block_length": PlainModel(folder).block_length} if family in ("sdar", "llada2") else {}
    completion = complete(engines(folder), logprobs=3, **asked, **(SAMPLED if sampled else {}))
    rows = replayed(folder, completion)
    assert len(completion.logprobs) == len(completion.token_ids) == len(rows)
    for position, (token, of_token) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        best = rows[position].topk(3)
        assert set(of_token) == {token, *best.indices.tolist()}
        for value, index, rank in zip(best.values.tolist(), best.indices.tolist(), (1, 2, 3), strict=True):
            assert of_token[index].logprob == pytest.approx(value, abs=1e-3)
            assert of_token[index].rank == rank
        assert of_token[token].logprob == pytest.approx(rows[position][token].item(), abs=1e-3)
        assert of_token[token].rank == 1 + (rows[position] > rows[position][token]).sum()
    total = sum(
        of_token[token].logprob for token, of_token in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)


def test_requests_of_a_batch_get_what_each_asks_for(engines, tiny_llada):
    llm = engines(tiny_llada)
    wanted = [None, 0, 4]
    params = [DiffusionParams(**SETTINGS, logprobs=n) for n in wanted]
    outputs = generate(llm, [PROMPT, PROMPT, [8, 9]], params)
    alone = complete(llm, logprobs=0)
    assert outputs[0].outputs[0].logprobs is None
    assert [len(of_token) for of_token in outputs[1].outputs[0].logprobs] == [1] * 16
    assert all(len(of_token) in (4, 5) for of_token in outputs[2].outputs[0].logprobs)
    for together, single in zip(outputs[1].outputs[0].logprobs, alone.logprobs, strict=True):
        assert {t: v.logprob for t, v in together.items()} == pytest.approx({t: v.logprob for t, v in single.items()})


def test_they_end_where_the_response_ends(engines, tmp_path, tiny_llada):
    full = list(complete(engines(tiny_llada)).token_ids)
    cut = next(i for i in range(9, 15) if full[i] not in full[:i])
    completion = complete(
        engines(tiny_checkpoints.write_llada(tmp_path, eos_token_id=full[cut])), logprobs=1, ignore_eos=False
    )
    assert list(completion.token_ids) == full[: cut + 1]
    assert len(completion.logprobs) == cut + 1


def test_vllms_flat_form(engines, tiny_llada):
    nested, flat = (complete(engines(tiny_llada), logprobs=2, flat_logprobs=form) for form in (False, True))
    assert isinstance(flat.logprobs, FlatLogprobs)
    assert list(flat.logprobs) == list(nested.logprobs)


def test_a_token_that_is_unlikely_beyond_float32_has_a_finite_one():
    predictor = TokenPredictor(lambda rows: VocabularyShard(rows, 0), 3, 1, SimpleNamespace(world_size=1))
    logits = torch.tensor([[0.0, 300.0, -5.0]])  # the mask token, which is never predicted, has nearly all
    count = Counters(*(torch.zeros(1, dtype=torch.int64) for _ in range(3)))
    got = predictor.predict(logits, SamplingSettings(0.0, 1.0, 0, False), count, False, False, num_logprobs=1)
    assert got.probability.item() == 0.0
    assert got.logprobs.token.item() == -300.0
    assert got.logprobs.rank.item() == 2
    assert got.logprobs.top_tokens.tolist() == [[1]]
