"""Decisions: fields with accepted texts, and the probabilities that forward passes give
these texts.

docs/decisions.md defines the probabilities. The tokens that all accepted texts have at
the same position are given; the rest are masks.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dllm_engine.model_executor.constraints.field_texts import (
    FieldChances,
    FieldLattice,
)
from dllm_engine.model_executor.constraints.lattice import (
    EDGE,
    END,
    LITERAL,
    OPEN,
    Graph,
    Lattice,
    edges_between,
)


class Posterior:
    """Log-probabilities of all accepted texts in one pass."""

    def __init__(self, lattice: Lattice, scores: np.ndarray) -> None:
        """``scores``: of each edge, float64 ``[num_lattice_edges]``; −∞ where none may
        write its token.
        """
        before, after = lattice.log_sums(scores)
        self.lattice = lattice
        self.weights = scores + after[lattice.targets]
        """Score of each edge, plus the log of the sum over all paths behind it."""
        with np.errstate(
            invalid="ignore"
        ):  # of nodes that no allowed path passes through
            self.steps = np.where(
                np.isfinite(self.weights),
                self.weights - after[lattice.sources],
                -np.inf,
            )
        """Log-probability of each edge, given that its source is passed through."""
        self.visits = before + after
        """Log-probability that a text passes through each node, ``[num_nodes]``."""
        self.visits[lattice.sources] -= before[lattice.closes][lattice.segments]
        self.path = lattice.best_path(scores)
        """The edges of the most probable text, one per position."""

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

    def __init__(self, decision: "Decision", field: int) -> None:
        lattice, self.values = decision.lattice, decision.values[field] or []
        own = decision.edges_of_fields[field]
        self.begins = own[lattice.choices[own] != LITERAL]
        """Edges that begin a choice."""

    def answer(self, posterior: Posterior, own: np.ndarray) -> dict[str, Any]:
        """Value, probability and distribution, where the edges of the field's most
        probable text are ``own``.
        """
        lattice, values = posterior.lattice, self.values
        chances = np.exp(
            posterior.visits[lattice.sources[self.begins]]
            + posterior.steps[self.begins]
        )
        sums = np.bincount(lattice.choices[self.begins], chances, minlength=len(values))
        shares, choice = (sums / sums.sum()).tolist(), int(lattice.choices[own].max())
        ranked = sorted(zip(values, shares, strict=True), key=lambda each: -each[1])
        return _answer(values[choice], shares[choice], ranked)


class FieldTexts:
    """Texts of a field with a pattern, and their probabilities."""

    def __init__(self, decision: "Decision", field: int) -> None:
        self.decision = decision
        edges = decision.edges_of_fields[field]
        self.lattice = FieldLattice(
            decision.lattice,
            edges,
            decision.pieces_of_tokens[decision.edge_columns[edges]],
            decision.piece_lengths,
        )
        self.read = json.loads if decision.is_json[field] else bytes.decode
        """Value of a text."""

    def answer(self, posterior: Posterior, own: np.ndarray) -> dict[str, Any]:
        """As of ``FieldChoices``. The probabilities are exact."""
        decision = self.decision
        text = b"".join(
            decision.spellings[column] for column in decision.edge_columns[own]
        )
        chances = FieldChances(self.lattice, posterior.visits, posterior.steps)
        texts = {
            text,
            *chances.most_probable_texts(decision.pieces, decision.beginnings),
        }
        probabilities = chances.probabilities(
            [*texts], decision.pieces, decision.piece_numbers
        )
        ranked = sorted(
            texts, key=lambda each: (-probabilities[each], each != text, each)
        )[: decision.top_k]
        if text not in ranked:
            ranked[-1] = text
        distribution = [(self.read(each), probabilities[each]) for each in ranked]
        return _answer(self.read(text), probabilities[text], distribution)


def _answer(
    value: Any, probability: float, ranked: list[tuple[Any, float]]
) -> dict[str, Any]:
    listed = [{"value": each, "probability": share} for each, share in ranked]
    return {"value": value, "probability": probability, "distribution": listed}


@dataclass(frozen=True, eq=False)
class Decision:
    """Fields of a decision, and the texts that it may write."""

    graph: Graph
    names: Sequence[str]
    values: Sequence[Sequence[Any] | None]
    """Choices of each field; None for a field of a pattern."""
    spellings: Sequence[bytes]
    """Text of each of ``tokens``; needed where a field has a pattern."""
    top_k: int
    """Values that are reported of a field with a pattern."""
    is_json: Sequence[bool]
    """True for each field with a pattern whose texts are JSON; its values are what JSON
    says.
    """
    beginnings: int
    """Beginnings of texts that the search for these values goes on with, from each
    state of a pattern.
    """

    @cached_property
    def tokens(self) -> np.ndarray:
        """Different tokens of the graph, ascending."""
        return np.unique(self.graph.edges["token"])

    @cached_property
    def lattice(self) -> Lattice:
        return Lattice(self.graph)

    @cached_property
    def template(self) -> tuple[int | None, ...]:
        """The response before the first pass, with None for each mask."""
        left = self.lattice.tokens_left(np.ones(len(self.lattice.tokens), bool))
        return tuple(token if token >= 0 else None for token in left.tolist())

    @cached_property
    def edge_columns(self) -> np.ndarray:
        """Index into ``tokens`` of each edge of the lattice; the number of tokens for
        an end token.
        """
        return np.where(
            self.lattice.tokens == END,
            len(self.tokens),
            np.searchsorted(self.tokens, self.lattice.tokens),
        )

    @cached_property
    def edges_of_fields(self) -> list[np.ndarray]:
        """Edges of the lattice that belong to each field, ascending."""
        fields = self.lattice.fields
        order = np.argsort(fields, kind="stable")
        bounds = np.searchsorted(fields[order], np.arange(len(self.names) + 1))
        return [
            order[slice(*bounds[field : field + 2])] for field in range(len(self.names))
        ]

    @cached_property
    def pieces(self) -> list[bytes]:
        """Different texts of tokens."""
        return [*dict.fromkeys(self.spellings)]

    @cached_property
    def piece_numbers(self) -> dict[bytes, int]:
        """Index into ``pieces`` of each of them."""
        return {piece: number for number, piece in enumerate(self.pieces)}

    @cached_property
    def piece_lengths(self) -> np.ndarray:
        """Bytes of each of ``pieces``."""
        return np.array([len(piece) for piece in self.pieces])

    @cached_property
    def pieces_of_tokens(self) -> np.ndarray:
        """Index into ``pieces`` of each of ``tokens``."""
        return np.array([self.piece_numbers[text] for text in self.spellings])

    @cached_property
    def fields(self) -> list[FieldChoices | FieldTexts]:
        kinds = (
            FieldTexts if values is None else FieldChoices for values in self.values
        )
        return [kind(self, field) for field, kind in enumerate(kinds)]

    @cached_property
    def packed(self) -> bytes:
        """To be sent; ``unpacked_decision`` makes it a decision again."""
        buffer, graph = io.BytesIO(), self.graph
        spellings = [text.hex() for text in self.spellings]
        values = [None if each is None else [*each] for each in self.values]
        settings = [self.top_k, self.is_json, self.beginnings]
        header = json.dumps([self.names, values, spellings, *settings, self.template])
        columns = np.stack(
            [graph.edges[name] for name in EDGE.names or ()]
        )  # each compresses well alone
        np.savez_compressed(
            buffer, ends=graph.ends, columns=columns, header=np.array(header)
        )
        return buffer.getvalue()


@lru_cache(maxsize=16)
def unpacked_decision(packed: bytes) -> Decision:
    """The decision of ``Decision.packed``. Requests with the same fields share it."""
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        graph = Graph(arrays["ends"], edges_between(*arrays["columns"]))
        names, values, spellings, *settings, template = json.loads(
            arrays["header"].item()
        )
    texts = [bytes.fromhex(text) for text in spellings]
    decision = Decision(graph, names, values, texts, *settings)
    vars(decision)["template"] = tuple(
        template
    )  # what only asks for that need not make the lattice
    return decision


TokenOptions = dict[int, tuple[np.ndarray, np.ndarray]]
"""By positions, tokens that may follow those before, and their log-probabilities among
accepted texts.
"""


class RunningDecision:
    """A decision of one request, pass by pass."""

    def __init__(
        self, decision: Decision, end_tokens: frozenset[int], passes: int
    ) -> None:
        """``passes``: the most forward passes."""
        self.decision, self.lattice = decision, decision.lattice
        self._ends = sorted(end_tokens)
        self.columns = np.array([*decision.tokens.tolist(), *self._ends])
        """Tokens whose logits ``commit`` reads."""
        self._answers: dict[int, dict[str, Any]] = {}
        self._left = list(range(len(decision.names)))
        self._passes_left = passes
        self._allowed = np.ones(len(self.lattice.tokens), bool)

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        """Value, probability and distribution of each committed field, in the order of
        the fields.
        """
        return {
            self.decision.names[field]: self._answers[field]
            for field in sorted(self._answers)
        }

    @property
    def is_complete(self) -> bool:
        """True if all fields are committed."""
        return not self._left

    def commit(
        self,
        positions: Sequence[int],
        logits: np.ndarray,
        *,
        with_logprobs: bool = False,
    ) -> tuple[dict[int, int], TokenOptions]:
        """Commit the surest fields, or in the last pass all that are left. Returns the
        tokens that this decides, by their positions, and with ``with_logprobs`` the
        options of these positions.

        Args:
            positions: all masks of the response, counted from its start.
            logits: float64 ``[num_masks, num_columns]`` of ``columns``; finite.
        """
        decision, lattice, num_tokens = (
            self.decision,
            self.lattice,
            len(self.decision.tokens),
        )
        table = np.zeros((lattice.length, num_tokens + 1))
        table[positions, :num_tokens] = logits[:, :num_tokens]
        table[positions, num_tokens] = np.logaddexp.reduce(
            logits[:, num_tokens:], axis=1, initial=-np.inf
        )
        scores = np.where(
            self._allowed, table[lattice.positions, decision.edge_columns], -np.inf
        )
        posterior = Posterior(lattice, scores)
        path, path_fields = posterior.path, lattice.fields[posterior.path]
        committed = (
            self._left if self._passes_left == 1 else self._surest(positions, posterior)
        )
        self._left = [field for field in self._left if field not in committed]
        self._passes_left -= 1
        for field in committed:
            self._answers[field] = decision.fields[field].answer(
                posterior, path[path_fields == field]
            )
        left = (
            self._tokens_left(path, committed) if self._left else lattice.tokens[path]
        )
        # The best end token of a position stands for all of them.
        best = np.full(lattice.length, END)
        if self._ends:
            best[positions] = np.array(self._ends)[
                logits[:, num_tokens:].argmax(axis=1)
            ]
        is_written = (left != OPEN) & ((left != END) | self.is_complete)
        left = np.where(left == END, best, left)
        tokens = {
            position: int(left[position])
            for position in positions
            if is_written[position]
        }
        options = (
            lattice.conditionals(path, posterior.weights, tokens)
            if with_logprobs
            else {}
        )
        return tokens, {
            p: (np.where(ids == END, best[p], ids), values)
            for p, (ids, values) in options.items()
        }

    def _surest(self, positions: Sequence[int], posterior: Posterior) -> list[int]:
        """The fields to commit in a pass that is not the last: those whose tokens are
        all decided, and an equal part of the others. ``positions`` as of ``commit``."""
        lattice, path, steps = self.lattice, posterior.path, posterior.steps
        path_fields, as_on_path = lattice.fields[path], self._as_on_path(path)

        def sureness(field: int) -> float:
            """Log-probability that the field has its text at these positions: only what
            is somewhere is committed.
            """
            own = path[path_fields == field]
            place = lattice.positions[own[0]]
            start, stop = np.searchsorted(lattice.positions, (place, place + 1))
            first = start + np.flatnonzero(as_on_path[start:stop])
            begins = np.logaddexp.reduce(
                posterior.visits[lattice.sources[first]] + steps[first]
            )
            ends = posterior.leaves(field, int(lattice.nodes_behind[own[-1]]))
            return float(begins + steps[own[1:]].sum() + ends)

        undecided = {*path_fields[positions].tolist()}.intersection(self._left)
        count = max(len(undecided) // self._passes_left, 1)
        decided = [field for field in self._left if field not in undecided]
        return decided + sorted(undecided, key=sureness, reverse=True)[:count]

    def _as_on_path(self, path: np.ndarray) -> np.ndarray:
        """The edges that write what a path writes at their position, bool
        ``[num_lattice_edges]``.

        A text that may follow several others begins with an edge from each of them.
        """
        same = path[self.lattice.positions]
        columns = (self.lattice.tokens, self.lattice.fields, self.lattice.targets)
        return np.logical_and.reduce([column == column[same] for column in columns])

    def _tokens_left(self, path: np.ndarray, committed: list[int]) -> np.ndarray:
        """Allow only texts that have the committed fields where the path has them; as
        ``Lattice.tokens_left``.
        """
        fields = self.lattice.fields
        fixed = np.isin(fields[path], committed)[self.lattice.positions]
        self._allowed &= np.where(
            fixed, self._as_on_path(path), ~np.isin(fields, committed)
        )
        return self.lattice.tokens_left(self._allowed)
