"""From hidden states of masked positions to a predicted token and its statistics, a vocabulary shard at a time.

Logits are made for the rows given and for a bounded number of them at once, so a step never holds
``[canvas, vocabulary]``. Under tensor parallelism each rank reduces its own shard and only per-row numbers travel;
top-p and top-k, which need the whole distribution, gather the logits of the rows that use them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from dllm_engine.kernels.noise import filtered_logits, gumbel_max, noisy_logits
from dllm_engine.kernels.token_statistics import token_statistics
from dllm_engine.model_executor.models.decoder import VocabularyShard
from dllm_engine.model_executor.transfer import gather_from_ranks, gather_shards, on_device
from dllm_engine.model_executor.unmasking.logits import (
    BiasedRows,
    ConstrainedRows,
    best_of_class,
    class_maxima,
    token_logprobs,
    with_biases,
)
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.unmasking_policies import UNMASKING_POLICIES

MAX_LOGITS_PER_CHUNK = 1 << 24
"""Logits held at once (64 MiB in float32), where a GPU's tiles do not ask for more."""
FILTERED_OUT = 1e6
"""By so much lower is the score of a token that top-p and top-k leave out: a constrained response may need it."""
TILE_ROWS, LEAST_ROWS = 128, 512
"""A GPU multiplies tiles of so many rows; fewer than so many wait for the head's weights, which each chunk reads.
A chunk of constrained or biased rows is one tile: it holds up to four times as much for each logit."""


@dataclass(frozen=True)
class SamplingSettings:
    """Settings that rows share in one forward through the head."""

    temperature: float
    top_p: float
    top_k: int
    tempered: bool
    """True if the statistics describe the distribution after temperature, top-p and top-k."""
    least_confident: frozenset[int] = frozenset()
    """Tokens that may be predicted, and that the statistics leave out."""

    @classmethod
    def of(cls, spec: DecodingSpec) -> "SamplingSettings":
        """Settings of a request. Settings without effect are equal, so that such requests share the head."""
        greedy_unfiltered = spec.temperature == 0 and spec.top_p >= 1.0 and spec.top_k == 0
        tempered = UNMASKING_POLICIES[spec.unmasking].tempered and not greedy_unfiltered
        # The most likely token survives every filter.
        filters = (1.0, 0) if spec.temperature == 0 and not tempered else (spec.top_p, spec.top_k)
        return cls(spec.temperature, *filters, tempered, spec.least_confident)

    @property
    def filters(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0


GREEDY = SamplingSettings(0.0, 1.0, 0, False)


class Counters(NamedTuple):
    """Counters of each row's random numbers, int64 ``[num_rows]`` each."""

    seeds: torch.Tensor
    forwards: torch.Tensor
    positions: torch.Tensor


def head_chunks(num_rows: int, vocab_size: int, device: torch.device, least_rows: int = LEAST_ROWS) -> list[slice]:
    """Rows that go through a head of ``vocab_size`` tokens at once, so that their logits fit in memory."""
    size = max(1, MAX_LOGITS_PER_CHUNK // vocab_size)
    if device.type != "cpu":
        size = max(size // TILE_ROWS * TILE_ROWS, least_rows)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


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
        self.vocab_size = vocab_size
        self.mask_token_id = mask_token_id
        self.tp_group = tp_group

    def predict(
        self,
        hidden: torch.Tensor,
        settings: SamplingSettings,
        counters: Counters | None,
        with_entropy: bool,
        with_margin: bool,
        num_logprobs: int | None = None,
        biased: Sequence[BiasedRows] = (),
        constrained: Sequence[ConstrainedRows] = (),
        options: torch.Tensor | None = None,
    ) -> TokenStatistics:
        """Predict a token for each row of ``hidden`` ``[num_rows, hidden_size]`` (before the final norm).

        Greedy where ``temperature`` is 0, else Gumbel-max sampling: LLaDA's argmax of exp(logits) / (-log u)^T is the
        argmax of logits + T · Gumbel noise. ``num_logprobs`` asks for log-probabilities of the predicted token and of
        so many of the likeliest; None: for none. ``counters`` are needed for sampling only. ``biased``: of which
        rows the logits are changed before all else but log-probabilities, which stay the model's. ``constrained``: none
        of the rows, or all, request by request. ``options`` ``[num_rows, 2]``: the only tokens that a constrained row
        may get; −1 in rows that may get any.
        """

        def counters_of(rows: slice) -> Counters | None:
            return None if counters is None else Counters(*(column[rows] for column in counters))

        least_rows = TILE_ROWS if constrained or biased or settings.least_confident else LEAST_ROWS
        chunks = head_chunks(hidden.shape[0], self.vocab_size, hidden.device, least_rows)

        @lru_cache(maxsize=1)  # a single chunk is computed once, although constraints read it twice
        def scored(number: int) -> tuple[VocabularyShard, VocabularyShard, VocabularyShard | None]:
            """Logits of a chunk; with what requests add to them, or the same object; and scores of constrained rows."""
            rows = chunks[number]
            plain = self.compute_logits(hidden[rows])
            shard = with_biases(plain, biased, rows)
            scores = self._scores(shard, settings, counters_of(rows)) if constrained else None
            if scores is not None and options is not None:
                scores = _only(scores, options[rows])
            return plain, shard, scores

        classes = None
        if constrained:
            scores_of_chunks = ((rows, scored(number)[2]) for number, rows in enumerate(chunks))
            classes = self._classes(scores_of_chunks, constrained)
        parts = []
        for number, rows in enumerate(chunks):
            plain, shard, scores = scored(number)
            given = None
            if classes is not None and scores is not None:
                given = self._tokens_of(classes[rows], scores, constrained, rows)
            part, log_total = self._reduce(shard, settings, counters_of(rows), with_entropy, with_margin, given)
            if num_logprobs is not None:
                known = log_total if shard is plain else None
                part.logprobs = token_logprobs(plain, part.token, num_logprobs, self.tp_group, known)
            parts.append(part)
        return parts[0] if len(parts) == 1 else TokenStatistics.concatenated(parts)

    def _scores(self, shard: VocabularyShard, settings: SamplingSettings, counters: Counters | None) -> VocabularyShard:
        """Scores by which tokens win, ``[num_rows, num_tokens]``: logits, or logits with noise; and the first token."""
        logits, first_token, _ = self._as_filters_need(shard, settings)
        if settings.temperature == 0:
            return VocabularyShard(logits.float(), first_token)
        drawn_from, temperature = logits, settings.temperature
        if settings.filters:
            filters = temperature, settings.top_p, settings.top_k
            kept = filtered_logits(logits, *filters, self._mask_column(logits, first_token))
            left_out = logits.float() / temperature - FILTERED_OUT
            drawn_from, temperature = torch.where(kept > torch.finfo(kept.dtype).min, kept, left_out), 1.0
        assert counters is not None
        scores = torch.empty_like(logits, dtype=torch.float32)
        for rows, noisy in noisy_logits(drawn_from, *counters, first_token, temperature):
            scores[rows] = noisy
        return VocabularyShard(scores, first_token)

    def _classes(
        self, chunks: Iterable[tuple[slice, VocabularyShard | None]], constrained: Sequence[ConstrainedRows]
    ) -> torch.Tensor:
        """The class of token that each constrained row writes, int64 ``[num_rows]``. Waits for the device."""
        best: list[list[torch.Tensor]] = [[] for _ in constrained]
        for chunk, scored in chunks:
            assert scored is not None
            scores, first_token = scored
            tokens = slice(first_token, first_token + scores.shape[1])
            for request_maxima, held in zip(best, constrained, strict=True):
                request_maxima.append(class_maxima(scores[held.within(chunk)], held.class_of[tokens], held.num_classes))
        found = []
        for request_maxima, held in zip(best, constrained, strict=True):
            # Where filters are used, every rank has the whole vocabulary, and the same maxima.
            maxima = self._gather(torch.cat(request_maxima)).amax(dim=0)
            found.append(on_device(held.choose(maxima.double().cpu().numpy()), maxima.device))
        return torch.cat(found)

    def _tokens_of(
        self, classes: torch.Tensor, scored: VocabularyShard, constrained: Sequence[ConstrainedRows], chunk: slice
    ) -> torch.Tensor:
        """The best token of each row's class; ``[num_rows]`` each."""
        scores, first_token = scored
        tokens = slice(first_token, first_token + scores.shape[1])
        mask_column = self._mask_column(scores, first_token)
        parts = [
            best_of_class(scores[rows], held.class_of[tokens], classes[rows], mask_column)
            for held in constrained
            for rows in [held.within(chunk)]
        ]
        score, column = (torch.cat(part) for part in zip(*parts, strict=True))
        winner = self._gather(score).argmax(dim=0, keepdim=True)
        return self._gather(column + first_token).gather(0, winner)[0]

    def logits_at(self, hidden: torch.Tensor, asked: Sequence[tuple[slice, torch.Tensor]]) -> list[torch.Tensor]:
        """Logits of some rows at some tokens, float32 ``[num_rows, num_tokens]`` for each pair that is ``asked``.

        ``hidden`` as for ``predict``; tokens are int64 ``[num_tokens]``.
        """
        parts: list[list[torch.Tensor]] = [[] for _ in asked]
        for chunk in head_chunks(hidden.shape[0], self.vocab_size, hidden.device):
            logits, first_token = self.compute_logits(hidden[chunk])
            for part, (rows, tokens) in zip(parts, asked, strict=True):
                own = logits[max(rows.start - chunk.start, 0) : max(rows.stop - chunk.start, 0)]
                columns = tokens - first_token
                elsewhere = (columns < 0) | (columns >= logits.shape[1])
                values = own[:, columns.clamp(0, logits.shape[1] - 1)].float()
                part.append(self._gather(values.masked_fill(elsewhere, -torch.inf)).amax(dim=0))
        return [torch.cat(part) for part in parts]

    def logprobs_of(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probability of a given token per row, ``[num_rows]`` float32, under the plain softmax of its logits.

        ``hidden`` as for ``predict``; ``tokens`` ``[num_rows]`` int64.
        """
        chunks = head_chunks(hidden.shape[0], self.vocab_size, hidden.device)
        shards = ((rows, self.compute_logits(hidden[rows])) for rows in chunks)
        return torch.cat([token_logprobs(shard, tokens[rows], 0, self.tp_group).token for rows, shard in shards])

    def _reduce(
        self,
        shard: VocabularyShard,
        settings: SamplingSettings,
        counters: Counters | None,
        with_entropy: bool,
        with_margin: bool,
        given: torch.Tensor | None,
    ) -> tuple[TokenStatistics, torch.Tensor | None]:
        """``given``: the token of each row, ``[num_rows]``; None: predict it. Also returns the log of the sum of
        exponentials of each row's logits, ``[num_rows]``, where the statistics come from these."""
        logits, first_token, sharded = self._as_filters_need(shard, settings)
        mask_column = self._mask_column(logits, first_token)

        drawn_from, temperature = logits, settings.temperature
        if settings.filters or settings.tempered:
            filters = settings.temperature or 1.0, settings.top_p, settings.top_k
            drawn_from, temperature = filtered_logits(logits, *filters, mask_column), 1.0
        unchanged = measured = drawn_from if settings.tempered else logits
        if settings.least_confident:
            columns = _columns(settings.least_confident, first_token, logits.shape[1], logits.device)
            measured = measured.index_fill(-1, columns, -torch.inf)
        token, token_logit, log_total, negative_entropy, top2 = token_statistics(
            measured, mask_column, with_entropy, with_margin
        )
        best = token_logit
        if given is not None:
            token = given - first_token
            held = (token >= 0) & (token < logits.shape[-1])
            token = token.clamp(0, logits.shape[-1] - 1)
            # The rank that holds the token is the winner.
            best, token_logit = held.float(), measured.gather(-1, token[:, None])[:, 0].float()
        elif settings.temperature > 0:
            assert counters is not None
            best, token = gumbel_max(drawn_from, *counters, first_token, temperature, mask_column)
            token_logit = measured.gather(-1, token[:, None])[:, 0].float()
        elif measured is not unchanged:
            token, best = token_statistics(unchanged, mask_column, False, False)[:2]
            token_logit = measured.gather(-1, token[:, None])[:, 0].float()
        token = token + first_token
        if sharded:
            winner = self._gather(best).argmax(dim=0, keepdim=True)  # the lowest rank on a tie
            token = self._gather(token).gather(0, winner)[0]
            token_logit = self._gather(token_logit).gather(0, winner)[0]
            log_totals = self._gather(log_total)
            log_total = torch.logsumexp(log_totals, dim=0)
            if with_entropy:
                weights = (log_totals - log_total).exp()
                entropies = self._gather(negative_entropy)
                negative_entropy = (weights * entropies - torch.special.entr(weights)).sum(dim=0)
            if with_margin:
                top2 = self._gather(top2).transpose(0, 1).flatten(1).topk(2, dim=-1).values
        probability = (token_logit - log_total).exp()
        margin = None
        if with_margin:
            p1, p2 = (top2 - log_total[:, None]).exp().unbind(dim=-1)
            margin = p1 - p2 if given is None else torch.where(probability < p1, probability - p1, p1 - p2)
        statistics = TokenStatistics(token, probability, negative_entropy if with_entropy else None, margin, noise=None)
        if settings.least_confident:
            statistics.put_last(torch.stack([token == each for each in sorted(settings.least_confident)]).any(dim=0))
        return statistics, log_total if measured is logits else None

    def _as_filters_need(self, shard: VocabularyShard, settings: SamplingSettings) -> tuple[torch.Tensor, int, bool]:
        """Logits, the token of their first column, and whether they are those of a part of the vocabulary."""
        if self.tp_group.world_size > 1 and settings.filters:
            return gather_shards(shard[0], self.tp_group), 0, False
        return *shard, self.tp_group.world_size > 1

    def _mask_column(self, logits: torch.Tensor, first_token: int) -> int:
        """Column of the mask, which is never predicted: a position filled with it would never count as filled."""
        column = self.mask_token_id - first_token
        return column if 0 <= column < logits.shape[-1] else -1

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        return gather_from_ranks(values, self.tp_group)


def _only(scored: VocabularyShard, options: torch.Tensor) -> VocabularyShard:
    """Scores with −∞ for all but the ``options`` of each row."""
    scores, first_token = scored
    tokens = torch.arange(first_token, first_token + scores.shape[1], device=scores.device)
    allowed = (tokens == options[:, :1]) | (tokens == options[:, 1:]) | (options[:, :1] < 0)
    return VocabularyShard(torch.where(allowed, scores, -torch.inf), first_token)


@cache  # recorded steps go on to read them
def _columns(tokens: frozenset[int], first_token: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Columns of the tokens that a shard has, int64."""
    columns = [token - first_token for token in sorted(tokens)]
    return on_device([column for column in columns if 0 <= column < num_tokens], device)
