"""Constrained responses as slow, plain PyTorch: every token in every state, no classes.

A text is closed by an end token, after which only end tokens may follow. Masks without
a prediction may be any token.
"""

from collections.abc import Iterable, Sequence

import torch

from dllm_engine.constraints.automaton import unpacked

NOWHERE = -1


class PlainConstraint:
    def __init__(self, packed: bytes, end_tokens: Iterable[int]) -> None:
        automaton = unpacked(packed)
        class_of = torch.tensor(automaton.class_of).long()
        next_state = torch.tensor(automaton.next_state).long()
        self.closed = len(next_state)
        self.accepted = {
            *(q for q in range(self.closed) if automaton.accepting[q]),
            self.closed,
        }
        self.following = torch.full((self.closed + 1, len(class_of)), NOWHERE)
        """The state after each token in each state."""
        spelling = class_of >= 0
        self.following[:-1, spelling] = next_state[:, class_of[spelling]]
        for token in end_tokens:
            self.following[:, token] = NOWHERE
            self.following[list(self.accepted), token] = self.closed

    def accepts(self, tokens: Sequence[int]) -> bool:
        state = 0
        for token in tokens:
            state = int(self.following[state, token]) if state != NOWHERE else NOWHERE
        return state in self.accepted

    def before(self, states: set[int], token: int | None) -> set[int]:
        """From which states ``token``, or any, leads to one of ``states``."""
        columns = (
            self.following if token is None else self.following[:, token : token + 1]
        )
        return {q for q, row in enumerate(columns.tolist()) if states.intersection(row)}

    def totals(self, rows: torch.Tensor, ends: set[int]) -> torch.Tensor:
        """The largest sum of scores of a text with each token at each place, float64
        ``[num_places, num_tokens]``.

        ``rows``: the scores, float64 ``[num_places, num_tokens]``; ``ends``: states
        that the text may lead to.
        """
        num_states = self.closed + 1
        spare = torch.where(self.following == NOWHERE, num_states, self.following)
        until = [torch.full((num_states + 1,), -torch.inf, dtype=torch.float64)]
        until[0][0] = 0.0
        for row in rows:
            arriving = until[-1][:-1, None] + row
            until.append(torch.full_like(until[0], -torch.inf))
            until[-1].scatter_reduce_(0, spare.flatten(), arriving.flatten(), "amax")
            until[-1][-1] = -torch.inf
        onward = torch.full_like(until[0], -torch.inf)
        onward[list(ends)] = 0.0
        found = torch.empty_like(rows)
        for place in range(len(rows) - 1, -1, -1):
            rest = rows[place] + onward[spare]
            found[place] = (until[place][:-1, None] + rest).amax(dim=0)
            onward[:-1] = rest.amax(dim=1)
        return found
