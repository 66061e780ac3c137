"""Forward passes that measure a model instead of decoding: memory, importance of layers, likelihood of tokens."""

import itertools

import numpy as np
import torch

from dllm_engine.model_executor.guide.model import Guide
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.passes.base import DensePass
from dllm_engine.model_executor.step_batch import RowBounds
from dllm_engine.model_executor.token_prediction import Counters, SamplingSettings, TokenPredictor, head_chunks
from dllm_engine.model_executor.unmasking.constrained import ConstrainedRows


def run_largest_batch(
    model: DiffusionDecoder,
    predictor: TokenPredictor,
    guide: Guide | None,
    num_rows: int,
    max_model_len: int,
    block_length: int | None,
    device: torch.device,
) -> None:
    """One forward pass of ``num_rows`` masks in canvases of ``max_model_len``, and the largest chunks of logits that
    predictions take, for vLLM to measure its memory."""
    ids = torch.full((num_rows,), predictor.mask_token_id, device=device)
    positions = torch.arange(num_rows, device=device) % max_model_len
    sizes = [min(max_model_len, num_rows - start) for start in range(0, num_rows, max_model_len)]
    hidden = model(ids, positions, DensePass(RowBounds(sizes, device, _limits(positions, block_length))))
    chunk = head_chunks(num_rows, predictor.vocab_size, device)[0]
    counters = Counters(*(positions[chunk],) * 3)
    one_class = torch.zeros(predictor.vocab_size, dtype=torch.int64, device=device)
    constrained = [ConstrainedRows(chunk, one_class, 1, lambda scores: np.zeros(len(scores), np.int64))]
    for settings in (SamplingSettings(0.0, 1.0, 0, False), SamplingSettings(1.0, 0.9, 50, True)):
        for rows in ((), constrained):
            predictor.predict(hidden[chunk], settings, counters, True, True, num_logprobs=1, constrained=rows)
    if guide is not None:
        guide.profile_run(num_rows)


def masked_logprobs(
    model: DiffusionDecoder,
    predictor: TokenPredictor,
    sequences: list[list[int]],
    masked: list[list[int]],
    shift: int,
    block_length: int | None,
    device: torch.device,
) -> list[list[float]]:
    """Log-probability of each token that is masked, given the rest of its sequence; one forward pass for all.

    Args:
        sequences: token ids.
        masked: per sequence the positions that are masked.
        shift: 1 where position p is predicted by row p - 1, else 0.
        block_length: of the blocks that attention goes by; None: all rows of a sequence attend to each other.
    """
    positions = torch.cat([torch.arange(len(sequence), device=device) for sequence in sequences])
    row_bounds = RowBounds([len(sequence) for sequence in sequences], device, _limits(positions, block_length))
    starts = torch.tensor(row_bounds.bounds[:-1], device=device)
    sizes = torch.tensor([len(positions) for positions in masked], device=device)
    tokens = torch.tensor(list(itertools.chain.from_iterable(sequences)), device=device)
    places = torch.tensor(list(itertools.chain.from_iterable(masked)), dtype=torch.int64, device=device)
    rows = starts.repeat_interleave(sizes) + places
    ids = tokens.index_fill(0, rows, predictor.mask_token_id)
    hidden = model(ids, positions, DensePass(row_bounds))
    # As in a response, the first position of a sequence has no row before it.
    predicting = rows - (places > 0).long() * shift
    logprobs = predictor.logprobs_of(hidden[predicting], tokens[rows])
    return [part.tolist() for part in logprobs.split(sizes.tolist())]


def _limits(positions: torch.Tensor, block_length: int | None) -> torch.Tensor | None:
    """End of each position's block, as ``RowBounds`` takes it."""
    return None if block_length is None else ((positions // block_length + 1) * block_length).int()
