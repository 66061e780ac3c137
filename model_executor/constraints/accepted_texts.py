"""Accepted texts of a decision, and the probabilities that a forward pass gives them.

docs/decisions.md defines the probabilities. A token that all accepted texts have at the
same position is given; other positions are masks.
"""

import json
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dllm_engine.constraints.decision import Decision, unpacked_decision
from dllm_engine.constraints.graph import END, LITERAL
from dllm_engine.model_executor.constraints.field_texts import (
    FieldChances,
    FieldLattice,
)
from dllm_engine.model_executor.constraints.lattice import Lattice


class Posterior:
    """Log-probabilities of all accepted texts in one pass."""

    def __init__(self, lattice: Lattice, scores: np.ndarray) -> None:
        """``scores``: score of each edge, float64 ``[num_lattice_edges]``; −∞ if its
        token must not be written.
        """
        before, after = lattice.log_sums(scores)
        self.lattice = lattice
        self.weights = scores + after[lattice.targets]
        """Score of each edge, plus the log of the sum over all paths behind it."""
        # Nodes that no allowed path passes through give −∞ − −∞.
        with np.errstate(invalid="ignore"):
            self.steps = np.where(
                np.isfinite(self.weights),
                self.weights - after[lattice.sources],
                -np.inf,
            )
        """Log-probability of each edge, given that its source is passed through."""
        self.visits = before + after
        """Log-probability that a text passes through each node, ``[num_nodes]``."""
        self.visits[lattice.sources] -= before[lattice.closes][lattice.segments]
        self.segment_totals = before[lattice.closes]
        """Log of the sum over all accepted texts of each segment."""
        self.path = lattice.best_path(scores)
        """The edges of the most probable text, one per position."""

    def label_mass(self, edges: np.ndarray) -> float:
        """Share of the model's probability that accepted texts have, in the segments of
        these edges.
        """
        segments = np.unique(self.lattice.segments[edges])
        return float(np.exp(self.segment_totals[segments].sum()))

    def leaves(self, field: int, node: int) -> float:
        """Log-probability that a field ends at a node."""
        leaving = self.lattice.edges_from(node)
        if not leaving.size:
            return 0.0
        return float(
            np.logaddexp.reduce(
                self.steps[leaving[self.lattice.fields[leaving] != field]],
                initial=-np.inf,
            )
        )


class FieldChoices:
    """Choices of a field, and their probabilities."""

    def __init__(self, texts: "AcceptedTexts", field: int) -> None:
        lattice = texts.lattice
        self.values = texts.decision.values[field] or []
        edges = texts.edges_of_fields[field]
        self.begins = edges[lattice.choices[edges] != LITERAL]
        """Edges that begin a choice."""

    def answer(self, posterior: Posterior, edges: np.ndarray) -> dict[str, Any]:
        """Value, probability and distribution. ``edges``: edges of the field's most
        probable text.
        """
        lattice = posterior.lattice
        values = self.values
        chances = np.exp(
            posterior.visits[lattice.sources[self.begins]]
            + posterior.steps[self.begins]
        )
        sums = np.bincount(lattice.choices[self.begins], chances, minlength=len(values))
        shares = (sums / sums.sum()).tolist()
        choice = int(lattice.choices[edges].max())
        ranked = sorted(zip(values, shares, strict=True), key=lambda each: -each[1])
        return _answer(values[choice], shares[choice], ranked)


class FieldTexts:
    """Texts of a field with a pattern, and their probabilities."""

    def __init__(self, texts: "AcceptedTexts", field: int) -> None:
        self.accepted = texts
        edges = texts.edges_of_fields[field]
        self.lattice = FieldLattice(
            texts.lattice,
            edges,
            texts.pieces_of_tokens[texts.edge_columns[edges]],
            texts.piece_lengths,
        )
        self.read = json.loads if texts.decision.is_json[field] else bytes.decode
        """Converts a text into its value."""

    def answer(self, posterior: Posterior, edges: np.ndarray) -> dict[str, Any]:
        """Value, probability and distribution, as in ``FieldChoices``. The
        probabilities are exact.
        """
        accepted = self.accepted
        decision = self.accepted.decision
        text = b"".join(
            decision.spellings[column] for column in accepted.edge_columns[edges]
        )
        chances = FieldChances(self.lattice, posterior.visits, posterior.steps)
        likeliest = chances.most_probable_texts(accepted.pieces, decision.beginnings)
        texts = {text, *likeliest}
        probabilities = chances.probabilities(
            [*texts], accepted.pieces, accepted.piece_numbers
        )
        ranked = sorted(
            texts, key=lambda other: (-probabilities[other], other != text, other)
        )[: decision.top_k]
        if text not in ranked:
            ranked[-1] = text
        distribution = [(self.read(other), probabilities[other]) for other in ranked]
        return _answer(self.read(text), probabilities[text], distribution)


def _answer(
    value: Any, probability: float, ranked: list[tuple[Any, float]]
) -> dict[str, Any]:
    listed = [{"value": other, "probability": share} for other, share in ranked]
    return {"value": value, "probability": probability, "distribution": listed}


class AcceptedTexts:
    """All texts of a decision in one lattice, and the part of each field."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.lattice = Lattice(decision.graph)

    @cached_property
    def edge_columns(self) -> np.ndarray:
        """Index of each edge's token in the decision's tokens; an end token has the
        index behind the last.
        """
        return np.where(
            self.lattice.tokens == END,
            len(self.decision.tokens),
            np.searchsorted(self.decision.tokens, self.lattice.tokens),
        )

    @cached_property
    def edges_of_fields(self) -> list[np.ndarray]:
        """Edges of the lattice that belong to each field, ascending."""
        fields = self.lattice.fields
        order = np.argsort(fields, kind="stable")
        bounds = np.searchsorted(fields[order], np.arange(len(self.decision.names) + 1))
        return [
            order[slice(*bounds[field : field + 2])]
            for field in range(len(self.decision.names))
        ]

    @cached_property
    def pieces(self) -> list[bytes]:
        """Distinct texts of tokens."""
        return [*dict.fromkeys(self.decision.spellings)]

    @cached_property
    def piece_numbers(self) -> dict[bytes, int]:
        """Index in ``pieces`` of each piece."""
        return {piece: number for number, piece in enumerate(self.pieces)}

    @cached_property
    def piece_lengths(self) -> np.ndarray:
        """Length in bytes of each of ``pieces``."""
        return np.array([len(piece) for piece in self.pieces])

    @cached_property
    def pieces_of_tokens(self) -> np.ndarray:
        """Index in ``pieces`` of each of the decision's tokens."""
        return np.array([self.piece_numbers[text] for text in self.decision.spellings])

    @cached_property
    def fields(self) -> list[FieldChoices | FieldTexts]:
        return [
            FieldTexts(self, field) if values is None else FieldChoices(self, field)
            for field, values in enumerate(self.decision.values)
        ]


@lru_cache(maxsize=16)
def accepted_texts(packed: bytes) -> AcceptedTexts:
    """Accepted texts of ``Decision.packed``, cached for requests with the same fields."""
    return AcceptedTexts(unpacked_decision(packed))
