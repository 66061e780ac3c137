"""Tokens that spell a text which a constraint accepts, chosen by classes of tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from dllm_engine.model_executor.transfer import on_device
from dllm_engine.scheduler.constraints.constraint import Constraint


@dataclass(frozen=True)
class ConstrainedRows:
    """Rows that predict positions of one constrained response."""

    rows: slice
    class_of: torch.Tensor
    """int64 ``[vocab_size]``: the class of each token; ``num_classes`` for a token that must not be written."""
    num_classes: int
    choose: Callable[[np.ndarray], np.ndarray]
    """From the score of each row's best token of each class, ``[num_rows, num_classes]``, to the class that each row
    writes, int64 ``[num_rows]``; −1 for a row that the constraint leaves open."""

    def within(self, chunk: slice) -> slice:
        """Rows within ``chunk``, counted from its first row."""
        return slice(max(self.rows.start - chunk.start, 0), max(self.rows.stop - chunk.start, 0))


@lru_cache(maxsize=16)
def class_on_device(constraint: Constraint, device: torch.device) -> torch.Tensor:
    """``ConstrainedRows.class_of`` of a constraint."""
    class_of = constraint.class_of.astype(np.int64)
    return on_device(np.where(class_of < 0, constraint.num_classes, class_of), device)


def class_maxima(scores: torch.Tensor, class_of: torch.Tensor, num_classes: int) -> torch.Tensor:
    """The best score of each class, ``[num_rows, num_classes]``; −∞ for a class without a token.

    ``scores``: ``[num_rows, num_tokens]``; ``class_of``: of the same tokens.
    """
    found = scores.new_full((scores.shape[0], num_classes + 1), -torch.inf)
    return found.scatter_reduce_(1, class_of.expand_as(scores), scores, "amax")[:, :-1]


def best_of_class(
    scores: torch.Tensor, class_of: torch.Tensor, classes: torch.Tensor, forbidden_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row's class; of all but ``forbidden_token`` where the class is −1.

    Args:
        scores: ``[num_rows, num_tokens]``.
        class_of: of the same tokens.
        classes: int64 ``[num_rows]``.
        forbidden_token: a column; −1 for none.

    Returns:
        score: ``[num_rows]``; −∞ where no token is of the class.
        column: int64 ``[num_rows]``.
    """
    allowed, is_open = class_of == classes[:, None], classes < 0
    if is_open.any():
        allowed |= is_open[:, None]
        if forbidden_token >= 0:
            allowed[:, forbidden_token] = False
    score, column = torch.where(allowed, scores, -torch.inf).max(dim=-1)
    ruled_out = score == -torch.inf
    if ruled_out.any():
        # A token that has no probability is better than one that must not be written.
        column = torch.where(ruled_out, allowed.byte().argmax(dim=-1), column)
        score = torch.where(ruled_out & allowed.any(dim=-1), torch.finfo(score.dtype).min, score)
    return score, column
