"""Forward passes that measure a model instead of decoding: its memory, and the
likelihood of tokens.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from dllm_engine.decoding.probe import Logprobs, Probe
from dllm_engine.kernels.sampling import Counters
from dllm_engine.model_executor.graphs.recording import padded
from dllm_engine.model_executor.head_chunks import head_chunks
from dllm_engine.model_executor.passes.base import DensePass, PassInput
from dllm_engine.model_executor.rank import Rank
from dllm_engine.model_executor.step_batch import RowBounds
from dllm_engine.model_executor.token_prediction import (
    GREEDY,
    Demands,
    SamplingSettings,
    Wanted,
)
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking.logits import ConstrainedRows


@torch.inference_mode()
def run_largest_batch(rank: Rank) -> None:
    """Run the largest possible batch, with the rows that fill up its graph, and the
    largest chunks of logits that predictions take. vLLM measures their memory."""
    num_rows = padded(rank.max_num_batched_tokens) or rank.max_num_batched_tokens
    longest, device, predictor = rank.max_model_len, rank.device, rank.predictor
    pass_memory = torch.empty(
        rank.options.method.cost.num_bytes(num_rows, longest),
        dtype=torch.uint8,
        device=device,
    )
    ids = torch.full((num_rows,), predictor.mask_token_id, device=device)
    positions = torch.arange(num_rows, device=device) % longest
    sizes = [min(longest, num_rows - start) for start in range(0, num_rows, longest)]
    limits = _limits(positions, rank.model.config.family.attention_block)
    hidden, _ = rank.model(ids, positions, DensePass(RowBounds(sizes, device, limits)))
    chunk = head_chunks(num_rows, predictor.vocab_size, on_gpu=device.type != "cpu")[0]
    counters = Counters(*(positions[chunk],) * 3)
    one_class = torch.zeros(predictor.vocab_size, dtype=torch.int64, device=device)
    constrained = [
        ConstrainedRows(
            chunk, one_class, 1, lambda scores: np.zeros(len(scores), np.int64)
        )
    ]
    wanted = Wanted({"entropy", "margin"}, num_logprobs=1)
    for settings in (GREEDY, SamplingSettings(1.0, 0.9, 50, True)):
        for rows in ((), constrained):
            demands = Demands(constrained=rows)
            predictor.predict(hidden[chunk], settings, counters, wanted, demands)
    if rank.guide is not None:
        rank.guide.profile_run(num_rows)
    del pass_memory


class ProbeBatch:
    """Probes of one forward pass, whose rows lie end to end."""

    def __init__(self, rank: Rank, probes: Sequence[Probe]) -> None:
        device = rank.device
        family = rank.model.config.family
        self.predictor = rank.predictor
        canvases = [probe.canvas for probe in probes]
        positions = torch.cat(
            [torch.arange(len(canvas), device=device) for canvas in canvases]
        )
        limits = _limits(positions, family.attention_block)
        rows = RowBounds(list(map(len, canvases)), device, limits)
        # As in a response, the first position of a sequence has no row before it.
        places = [
            (first + p, first + max(p - family.shifts_logits, 0))
            for first, probe in zip(rows.bounds, probes, strict=False)
            for p in probe.masked
        ]
        masked, predicting = np.array(places, np.int64).reshape(-1, 2).T
        input_tokens = on_device(list(chain.from_iterable(canvases)), device)
        input_tokens = input_tokens.index_fill(
            0, on_device(masked, device), self.predictor.mask_token_id
        )
        self.input = PassInput(input_tokens, positions, DensePass(rows))
        # A row with several tokens goes through the head once.
        predicting, row_of = np.unique(predicting, return_inverse=True)
        self.predicting = on_device(predicting, device)
        self.row_of = on_device(row_of, device)
        tokens = [token for probe in probes for token in probe.tokens]
        self.tokens = on_device(tokens, device, torch.int64)
        self.num_tokens = [len(probe.tokens) for probe in probes]

    def answers(self, hidden: Tensor) -> list[Logprobs]:
        """Answers to the probes, from hidden states ``[num_rows, hidden_size]``."""
        logprobs = self.predictor.logprobs_of(
            hidden[self.predicting], self.row_of, self.tokens
        )
        parts = logprobs.split(self.num_tokens, dim=1)
        return [Logprobs(*part.tolist()) for part in parts]


@torch.inference_mode()
def masked_logprobs(rank: Rank, probes: Sequence[Probe]) -> list[Logprobs]:
    """Answers to probes, from one forward pass for all."""
    batch = ProbeBatch(rank, probes)
    hidden, _ = rank.model(*batch.input)
    return batch.answers(hidden)


def _limits(positions: Tensor, block_length: int | None) -> Tensor | None:
    """End of each position's block, for ``RowBounds.limits``; None without blocks."""
    return (
        None
        if block_length is None
        else ((positions // block_length + 1) * block_length).int()
    )
