"""From hidden states of masked positions to a predicted token and its statistics, a vocabulary shard at a time.

Logits are made for the rows given and for a bounded number of them at once, so a step never holds
``[canvas, vocabulary]``. Under tensor parallelism each rank reduces its own shard and only per-row numbers travel;
top-p and top-k, which need the whole distribution, gather the logits of the rows that use them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from dllm_engine.model_executor.models.decoder import VocabularyShard
from dllm_engine.model_executor.noise import gumbel
from dllm_engine.model_executor.unmasking.policy import TokenStatistics, required

MAX_LOGITS_PER_CHUNK = 1 << 24
"""Logits held at once (64 MiB in float32)."""
_ENTROPY_EPS = 1e-10


@dataclass(frozen=True)
class SamplingSettings:
    """What rows that share a forward through the head have in common."""

    temperature: float
    top_p: float
    top_k: int
    tempered: bool
    """Whether the statistics are of the distribution after temperature, top-p and top-k."""

    @property
    def filters(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True)
class Counters:
    """The counters of each row's random numbers, int64 ``[num_rows]`` each."""

    seeds: torch.Tensor
    forwards: torch.Tensor
    positions: torch.Tensor

    def rows(self, rows: slice) -> "Counters":
        return Counters(*(getattr(self, f.name)[rows] for f in fields(self)))


class TokenPredictor:
    """Predicts tokens for rows of hidden states; the same on every rank."""

    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], VocabularyShard],
        vocab_size: int,
        mask_token_id: int,
        tp_group: GroupCoordinator,
    ) -> None:
        """``compute_logits`` maps ``[num_rows, hidden_size]`` to this rank's logits."""
        self.compute_logits = compute_logits
        self.mask_token_id = mask_token_id
        self.tp_group = tp_group
        self.max_rows = max(1, MAX_LOGITS_PER_CHUNK // vocab_size)

    def predict(
        self,
        hidden: torch.Tensor,
        settings: SamplingSettings,
        counters: Counters,
        with_entropy: bool,
        with_margin: bool,
    ) -> TokenStatistics:
        """Predict a token for each row of ``hidden`` ``[num_rows, hidden_size]`` (before the final norm).

        Greedy where ``temperature`` is 0, else Gumbel-max sampling: LLaDA's argmax of exp(logits) / (-log u)^T is the
        argmax of logits + T · Gumbel noise.
        """
        chunks = []
        for start in range(0, hidden.shape[0], self.max_rows):
            rows = slice(start, start + self.max_rows)
            shard = self.compute_logits(hidden[rows])
            chunks.append(self._reduce(shard, settings, counters.rows(rows), with_entropy, with_margin))
        return TokenStatistics(
            token=torch.cat([c.token for c in chunks]),
            probability=torch.cat([c.probability for c in chunks]),
            negative_entropy=torch.cat([required(c.negative_entropy) for c in chunks]) if with_entropy else None,
            margin=torch.cat([required(c.margin) for c in chunks]) if with_margin else None,
            noise=None,
        )

    def _reduce(
        self,
        shard: VocabularyShard,
        settings: SamplingSettings,
        counters: Counters,
        with_entropy: bool,
        with_margin: bool,
    ) -> TokenStatistics:
        logits, first_token = shard.logits.float(), shard.first_token
        gathered = settings.filters and self.tp_group.world_size > 1
        if gathered:
            logits, first_token = torch.cat(self._gather(logits), dim=-1), 0
        sharded = self.tp_group.world_size > 1 and not gathered

        drawn_from = _filtered(logits, settings) if settings.filters or settings.temperature > 0 else logits
        if settings.filters:
            # Where the mask token is all that passed the filters, the best other token passes too.
            column = (self._best_token(logits, first_token)[1] - first_token)[:, None]
            tempered = logits / settings.temperature if settings.temperature > 0 else logits
            drawn_from = drawn_from.scatter(-1, column, tempered.gather(-1, column))
        measured = drawn_from if settings.tempered else logits
        # `drawn_from` is divided by the temperature already, so plain Gumbel noise draws from its softmax.
        scores = drawn_from
        if settings.temperature > 0:
            token_ids = torch.arange(first_token, first_token + logits.shape[-1], device=logits.device)
            noise = gumbel(
                counters.seeds[:, None], counters.forwards[:, None], counters.positions[:, None], token_ids[None, :]
            )
            scores = drawn_from.double() + noise
        best, token = self._best_token(scores, first_token)
        measure = torch.stack(
            (torch.logsumexp(measured, dim=-1), measured.gather(-1, (token - first_token)[:, None])[:, 0])
        )
        top2 = measured.topk(2, dim=-1).values if with_margin else None
        if sharded:
            log_total, token, token_logit, top2 = self._combine(best, token, measure, top2)
        else:
            log_total, token_logit = measure
        negative_entropy = None
        if with_entropy:
            p = (measured - log_total[:, None]).exp()
            negative_entropy = (p * (p + _ENTROPY_EPS).log()).sum(dim=-1)
            if sharded:
                negative_entropy = self.tp_group.all_reduce(negative_entropy)
        margin = None
        if top2 is not None:
            p = (top2 - log_total[:, None]).exp()
            margin = p[:, 0] - p[:, 1]
        return TokenStatistics(token, (token_logit - log_total).exp(), negative_entropy, margin, None)

    def _best_token(self, scores: torch.Tensor, first_token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best token of this shard that is not the mask (a position filled with it would never count as filled)."""
        column = self.mask_token_id - first_token
        if 0 <= column < scores.shape[-1]:
            scores = scores.clone()
            scores[:, column] = -torch.inf
        best, index = scores.max(dim=-1)
        return best, index + first_token

    def _combine(
        self, best: torch.Tensor, token: torch.Tensor, measure: torch.Tensor, top2: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Reduce the shards' per-row numbers: (log of the total, token, its logit, two largest logits)."""
        all_best = torch.stack(self._gather(best))
        winner = all_best.argmax(dim=0, keepdim=True)  # the lowest rank, so the lowest token, on a tie
        token = torch.stack(self._gather(token)).gather(0, winner)[0]
        measures = torch.stack(self._gather(measure))  # [ranks, 2, num_rows]
        log_total = torch.logsumexp(measures[:, 0], dim=0)
        token_logit = measures[:, 1].gather(0, winner)[0]
        if top2 is not None:
            top2 = torch.cat(self._gather(top2), dim=-1).topk(2, dim=-1).values
        return log_total, token, token_logit, top2

    def _gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """``values`` of every rank, in rank order. Shards of a vocabulary may differ in their last dimension."""
        group = self.tp_group.device_group
        sizes = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(self.tp_group.world_size)]
        torch.distributed.all_gather(
            sizes, torch.tensor([values.shape[-1]], dtype=torch.int64, device=values.device), group=group
        )
        widest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(values, (0, widest - values.shape[-1])).contiguous()
        received = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(received, padded, group=group)
        return [r[..., : int(size)] for r, size in zip(received, sizes, strict=True)]


def _filtered(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Temperature, then top-p, then top-k, in Dream's order; what is filtered out has the lowest finite logit."""
    lowest = torch.finfo(logits.dtype).min
    if settings.temperature > 0:
        logits = logits / settings.temperature
    if settings.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1) > settings.top_p
        # The token that crosses the threshold is kept: shift the decision by one.
        remove = torch.nn.functional.pad(before[:, :-1], (1, 0), value=False)
        logits = logits.masked_fill(remove.scatter(-1, order, remove), lowest)
    if settings.top_k > 0:
        kept = logits.topk(min(settings.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kept, lowest)
    return logits
