"""Prediction of a token and its statistics from the hidden state of each masked
position, on shards of the vocabulary.

Logits are made only for the given rows, and for a limited number of rows at once, so a
step never holds ``[canvas, vocabulary]``. With tensor parallelism each rank reduces its
own shard, and ranks exchange only numbers per row. Top-p and top-k need the whole
distribution: they gather the logits of the rows that use them.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import GroupCoordinator

from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.unmasking_policies import Measure
from dllm_engine.kernels.sampling import (
    Counters,
    filtered_logits,
    gumbel_max,
    noisy_logits,
)
from dllm_engine.kernels.token_statistics import token_statistics
from dllm_engine.model_executor.head_chunks import LEAST_ROWS, TILE_ROWS, head_chunks
from dllm_engine.model_executor.models.decoder import VocabularyShard
from dllm_engine.model_executor.transfer import (
    gather_from_ranks,
    gather_shards,
    on_device,
)
from dllm_engine.model_executor.unmasking.logits import (
    BiasedRows,
    ConstrainedRows,
    best_of_class,
    class_maxima,
    log_totals,
    logits_at,
    token_logprobs,
    with_biases,
)
from dllm_engine.model_executor.unmasking.statistics import TokenStatistics

FILTERED_OUT = 1e6
"""Difference by which the score of a token is lowered if top-p or top-k leaves it out.
It is not −∞, because a constrained response may need the token.
"""


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings that all rows of one pass through the head share."""

    temperature: float
    top_p: float
    top_k: int
    tempered: bool
    """True if the statistics describe the distribution after temperature, top-p and
    top-k.
    """
    least_confident: frozenset[int] = frozenset()
    """Tokens that may be predicted, but do not count in the statistics."""

    @classmethod
    def of(cls, spec: DecodingSpec) -> "SamplingSettings":
        """Settings of a request. Settings without effect are equal, so that such
        requests share the head.
        """
        greedy_unfiltered = (
            spec.sampling.temperature == 0
            and spec.sampling.top_p >= 1.0
            and spec.sampling.top_k == 0
        )
        tempered = spec.unmasking.policy.tempered and not greedy_unfiltered
        # The most likely token survives every filter.
        filters = (
            (1.0, 0)
            if spec.sampling.temperature == 0 and not tempered
            else (spec.sampling.top_p, spec.sampling.top_k)
        )
        return cls(
            spec.sampling.temperature, *filters, tempered, spec.ends.least_confident
        )

    @property
    def filters(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0


GREEDY = SamplingSettings(0.0, 1.0, 0, False)


class Wanted(NamedTuple):
    """Statistics to compute beside a token and its probability."""

    measures: Set[Measure] = frozenset()
    """Measures of confidence."""
    num_logprobs: int | None = None
    """Number of the likeliest tokens whose log-probabilities are computed, beside that
    of the predicted token; None: no log-probabilities.
    """


class Demands(NamedTuple):
    """Demands of requests on the tokens of their rows."""

    biased: Sequence[BiasedRows] = ()
    """Rows whose logits are changed before everything else. Reported log-probabilities
    are those of the unchanged logits.
    """
    constrained: Sequence[ConstrainedRows] = ()
    """Rows of constrained responses, request by request: all rows or no rows."""
    options: Tensor | None = None
    """``[num_rows, 2]``: the only tokens that a constrained row may get; −1: any token.
    """


NO_DEMANDS = Demands()


class TokenPredictor:
    """Predictor of tokens from rows of hidden states. Results are the same on every
    rank.
    """

    def __init__(
        self,
        compute_logits: Callable[[Tensor], VocabularyShard],
        vocab_size: int,
        mask_token_id: int,
        tp_group: GroupCoordinator,
    ) -> None:
        """``compute_logits`` maps ``[num_rows, hidden_size]`` (before the final norm)
        to this rank's logits.
        """
        self.compute_logits = compute_logits
        self.vocab_size = vocab_size
        self.mask_token_id = mask_token_id
        self.tp_group = tp_group

    def predict(
        self,
        hidden: Tensor,
        settings: SamplingSettings,
        counters: Counters | None,
        wanted: Wanted,
        demands: Demands = NO_DEMANDS,
    ) -> TokenStatistics:
        """Predict a token for each row of ``hidden`` ``[num_rows, hidden_size]``.

        Greedy where ``temperature`` is 0, else Gumbel-max sampling: the argmax of
        exp(logits) / (-log u)^T is the argmax of logits + T · Gumbel noise.

        ``counters``: needed only for sampling.
        """
        constrained = demands.constrained
        changes_logits = constrained or demands.biased or settings.least_confident
        least_rows = TILE_ROWS if changes_logits else LEAST_ROWS
        chunks = self._chunks(hidden, least_rows)

        def compute(number: int) -> _Chunk:
            rows = chunks[number]
            return _Chunk(self, hidden, rows, settings, counters, demands)

        # Constraints read each chunk twice: cache the last one, so that a single chunk
        # is computed once. Without constraints, a chunk must not outlive the logits of
        # the next.
        computed: Callable[[int], _Chunk] = (
            lru_cache(maxsize=1)(compute) if constrained else compute
        )
        numbers = range(len(chunks))
        classes = None
        if constrained:
            by_request = zip(
                *(computed(number).class_maxima() for number in numbers), strict=True
            )
            # With filters, every rank has the whole vocabulary, and equal maxima. This
            # waits for the device.
            maxima = [
                gather_from_ranks(torch.cat(parts), self.tp_group).amax(dim=0)
                for parts in by_request
            ]
            scores = [best.double().cpu().numpy() for best in maxima]
            chosen = [
                response.choose(best)
                for response, best in zip(constrained, scores, strict=True)
            ]
            classes = on_device(np.concatenate(chosen), hidden.device)
        parts = [computed(number).statistics(wanted, classes) for number in numbers]
        return parts[0] if len(parts) == 1 else TokenStatistics.concatenated(parts)

    def logprobs_at(
        self, hidden: Tensor, pairs: Sequence[tuple[slice, Tensor]]
    ) -> list[Tensor]:
        """Log-probabilities of tokens at rows under the plain softmax of the rows'
        logits, for each pair of rows and tokens (int64 ``[num_tokens]``): float32
        ``[num_rows, num_tokens]``.
        """
        parts: list[list[Tensor]] = [[] for _ in pairs]
        for chunk in self._chunks(hidden):
            shard = self.compute_logits(hidden[chunk])
            totals = log_totals(shard[0], self.tp_group)
            numbers = torch.arange(len(totals), device=totals.device)
            for part, (rows, tokens) in zip(parts, pairs, strict=True):
                chunk_rows = numbers[
                    max(rows.start - chunk.start, 0) : max(rows.stop - chunk.start, 0)
                ]
                values = logits_at(shard, chunk_rows[:, None], tokens, self.tp_group)
                part.append(values - totals[chunk_rows, None])
        return [torch.cat(part) for part in parts]

    def logprobs_of(self, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities, float32 ``[2, num_tokens]``, of ``tokens[i]`` at row
        ``rows[i]``, and of the likeliest token of this row, under the plain softmax of
        the row's logits. ``rows`` and ``tokens`` are int64 ``[num_tokens]``.
        """
        logprobs = torch.empty(2, len(tokens), device=hidden.device)
        for chunk in self._chunks(hidden):
            shard = self.compute_logits(hidden[chunk])
            totals = log_totals(shard[0], self.tp_group)
            largest = gather_from_ranks(shard[0].amax(dim=-1).float(), self.tp_group)
            likeliest = largest.amax(dim=0) - totals
            (in_chunk,) = ((rows >= chunk.start) & (rows < chunk.stop)).nonzero(
                as_tuple=True
            )
            chunk_rows = rows[in_chunk] - chunk.start
            token_logprobs = (
                logits_at(shard, chunk_rows, tokens[in_chunk], self.tp_group)
                - totals[chunk_rows]
            )
            logprobs[:, in_chunk] = torch.stack([token_logprobs, likeliest[chunk_rows]])
        return logprobs

    def _chunks(self, hidden: Tensor, least_rows: int = LEAST_ROWS) -> list[slice]:
        """Chunks of the rows of ``hidden`` that go through the head together."""
        on_gpu = hidden.device.type != "cpu"
        return head_chunks(
            hidden.shape[0], self.vocab_size, on_gpu=on_gpu, least_rows=least_rows
        )


class _Chunk:
    """Rows that go through the head at once, and their logits: for the tokens of this
    rank, or with filters for all tokens.
    """

    def __init__(
        self,
        predictor: TokenPredictor,
        hidden: Tensor,
        rows: slice,
        settings: SamplingSettings,
        counters: Counters | None,
        demands: Demands,
    ) -> None:
        """``rows``: rows of the chunk. Other arguments as for ``predict``."""
        self.rows, self.settings, self.tp_group = rows, settings, predictor.tp_group
        self.counters = None
        if counters is not None:
            self.counters = Counters(*(column[rows] for column in counters))
        self.responses = [
            (response.within(rows), response) for response in demands.constrained
        ]
        """The rows of each constrained response in the chunk, counted from the chunk's
        first row.
        """
        self.options = None if demands.options is None else demands.options[rows]
        self.plain = predictor.compute_logits(hidden[rows])
        changed = with_biases(self.plain, demands.biased, rows)
        self.is_biased = changed is not self.plain
        self.logits, self.first_token = changed
        self.sharded = self.tp_group.world_size > 1 and not settings.filters
        if self.tp_group.world_size > 1 and settings.filters:
            self.logits = gather_shards(self.logits, self.tp_group)
            self.first_token = 0
        self.tokens = slice(self.first_token, self.first_token + self.logits.shape[1])
        # The mask is never predicted: a position with it would stay masked.
        mask = predictor.mask_token_id
        self.mask_column = (
            mask - self.first_token
            if self.tokens.start <= mask < self.tokens.stop
            else -1
        )

    @cached_property
    def drawn_from(self) -> tuple[Tensor, float]:
        """Logits that tokens are drawn from, after filters, and the temperature that is
        still to be applied.
        """
        settings = self.settings
        if not (settings.filters or settings.tempered):
            return self.logits, settings.temperature
        filters = settings.temperature or 1.0, settings.top_p, settings.top_k
        return filtered_logits(self.logits, *filters, self.mask_column), 1.0

    @cached_property
    def scores(self) -> Tensor:
        """Scores of the tokens of constrained rows, ``[num_rows, num_tokens]``: logits,
        or logits with noise; −∞ for all tokens but the ``options``. The best score
        wins."""
        if self.settings.temperature == 0:
            scores = self.logits.float()
        else:
            assert self.counters is not None
            kept, temperature = self.drawn_from
            if self.settings.filters:
                left_out = (
                    self.logits.float() / self.settings.temperature - FILTERED_OUT
                )
                kept = torch.where(kept > torch.finfo(kept.dtype).min, kept, left_out)
            scores = torch.empty_like(self.logits, dtype=torch.float32)
            for rows, noisy in noisy_logits(
                kept, self.counters, self.first_token, temperature
            ):
                scores[rows] = noisy
        if self.options is None:
            return scores
        first, second = self.options[:, :, None].unbind(dim=1)
        tokens = torch.arange(self.tokens.start, self.tokens.stop, device=scores.device)
        return torch.where(
            (tokens == first) | (tokens == second) | (first < 0), scores, -torch.inf
        )

    def class_maxima(self) -> list[Tensor]:
        """Best score of each class in each row of each constrained response."""
        return [
            class_maxima(
                self.scores[rows], response.class_of[self.tokens], response.num_classes
            )
            for rows, response in self.responses
        ]

    def _choose(self, logits: Tensor, classes: Tensor | None) -> tuple[Tensor, Tensor]:
        """Score and column of each row's token: the best one of the row's class, a
        drawn one, or the likeliest one.
        """
        if classes is not None:
            parts = [
                best_of_class(
                    self.scores[rows],
                    response.class_of[self.tokens],
                    classes[self.rows][rows],
                    self.mask_column,
                )
                for rows, response in self.responses
            ]
            best, column = (torch.cat(part) for part in zip(*parts, strict=True))
            return best, column
        if self.settings.temperature > 0:
            assert self.counters is not None
            drawn_from, temperature = self.drawn_from
            return gumbel_max(
                drawn_from,
                self.counters,
                self.first_token,
                temperature,
                self.mask_column,
            )
        column, best, *_ = token_statistics(
            logits, self.mask_column, with_entropy=False, with_margin=False
        )
        return best, column

    def statistics(
        self,
        wanted: Wanted,
        classes: Tensor | None,
    ) -> TokenStatistics:
        """Predictions of the rows: the best token, or with ``classes`` (of all
        predicted rows) the best token of each row's class."""
        with_entropy = "entropy" in wanted.measures
        with_margin = "margin" in wanted.measures
        logits = self.drawn_from[0] if self.settings.tempered else self.logits
        measured = logits
        if least_confident := self.settings.least_confident:
            columns = _columns(
                least_confident, self.first_token, logits.shape[1], logits.device
            )
            measured = logits.index_fill(-1, columns, -torch.inf)
        column, token_logit, log_total, negative_entropy, top2 = token_statistics(
            measured,
            self.mask_column,
            with_entropy=with_entropy,
            with_margin=with_margin,
        )
        best = token_logit
        if classes is not None or self.settings.temperature > 0 or least_confident:
            best, column = self._choose(logits, classes)
            token_logit = measured.gather(-1, column[:, None])[:, 0].float()
        token = column + self.first_token
        if self.sharded:
            # The lowest rank wins a tie.
            winner = self._gather(best).argmax(dim=0, keepdim=True)
            token, token_logit = (
                self._gather(values).gather(0, winner)[0]
                for values in (token, token_logit)
            )
            log_totals = self._gather(log_total)
            log_total = torch.logsumexp(log_totals, dim=0)
            if with_entropy:
                weights = (log_totals - log_total).exp()
                entropies = self._gather(negative_entropy)
                negative_entropy = (
                    weights * entropies - torch.special.entr(weights)
                ).sum(dim=0)
            if with_margin:
                top2 = (
                    self._gather(top2).transpose(0, 1).flatten(1).topk(2, dim=-1).values
                )
        probability = (token_logit - log_total).exp()
        margin = None
        if with_margin:
            p1, p2 = (top2 - log_total[:, None]).exp().unbind(dim=-1)
            margin = (
                p1 - p2
                if classes is None
                else torch.where(probability < p1, probability - p1, p1 - p2)
            )
        result = TokenStatistics(
            token,
            probability,
            negative_entropy if with_entropy else None,
            margin,
            noise=None,
        )
        if least_confident:
            result.put_last(
                torch.stack([token == last for last in sorted(least_confident)]).any(
                    dim=0
                )
            )
        if wanted.num_logprobs is not None:
            is_plain = measured is self.logits and not self.is_biased
            result.logprobs = token_logprobs(
                self.plain,
                token,
                wanted.num_logprobs,
                self.tp_group,
                log_total if is_plain else None,
            )
        return result

    def _gather(self, values: Tensor) -> Tensor:
        return gather_from_ranks(values, self.tp_group)


@cache  # cached, because recorded steps keep reading the tensor
def _columns(
    tokens: frozenset[int], first_token: int, num_tokens: int, device: torch.device
) -> Tensor:
    """Columns of those tokens that are in a shard, int64."""
    columns = [token - first_token for token in sorted(tokens)]
    return on_device([column for column in columns if 0 <= column < num_tokens], device)
