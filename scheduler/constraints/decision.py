"""Decisions: fields with accepted texts, and the probabilities that forward passes give these texts.

docs/decisions.md defines the probabilities. The tokens that all accepted texts have at the same position are given; the
rest are masks.
"""

import heapq
import io
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dllm_engine.scheduler.constraints.lattice import END, LITERAL, OPEN, Graph, Lattice

_PATHS_PER_TEXT = 40
"""Beginnings of sequences that a search looks at for each of the most probable texts of a field."""


class FieldTexts:
    """Texts of a field with a pattern, and their probabilities. Several sequences of tokens may spell one."""

    def __init__(self, decision: "Decision", field: int) -> None:
        lattice, self.spellings = decision.lattice, decision.spellings
        self.lattice, self.columns, self.is_own = lattice, decision.edge_columns, lattice.fields == field
        self.longest = max(map(len, self.spellings))
        self.starts = np.setdiff1d(lattice.sources[self.is_own], lattice.following[lattice.targets[self.is_own]])
        """Nodes before the field."""
        self._edges_of: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        """Edges of the field by their source and their text, which several tokens may have."""
        own = np.flatnonzero(self.is_own)
        columns = (column.tolist() for column in (own, lattice.sources[own], self.columns[own]))
        for edge, source, column in zip(*columns, strict=True):
            self._edges_of[source, self.spellings[column]].append(edge)

    def text_of(self, edges: np.ndarray) -> bytes:
        """The text that edges spell."""
        return b"".join(self.spellings[column] for column in self.columns[edges].tolist())

    def top(self, visits: np.ndarray, steps: np.ndarray, top_k: int, wanted: bytes) -> list[tuple[bytes, float]]:
        """The most probable texts, most probable first, with ``wanted`` among them, and their probabilities.

        The probabilities are exact. The search is bounded, so that a text of many improbable spellings may be missing.

        Args:
            visits: log-probability that a text passes through each node, ``[num_nodes]``.
            steps: log-probability of each edge, given that its source is passed through, ``[num_lattice_edges]``.
        """
        probabilities = {wanted: self._probability(visits, steps, wanted)}
        numbers = itertools.count()
        queue = [(-visits[node], next(numbers), int(node), b"") for node in self.starts]
        heapq.heapify(queue)
        for _ in range(_PATHS_PER_TEXT * top_k):
            best = heapq.nlargest(top_k, probabilities.values())
            # No other text is more probable than all others together.
            if not queue or (len(best) == top_k and best[-1] >= 1 - sum(probabilities.values())):
                break
            cost, _, node, text = heapq.heappop(queue)
            if node < 0:
                if text not in probabilities:
                    probabilities[text] = self._probability(visits, steps, text)
                continue
            leaving = self.lattice.edges_from(node)
            own = leaving[self.is_own[leaving]]
            if text and (leaves := self.leaves(node, steps)) > -np.inf:
                heapq.heappush(queue, (cost - leaves, next(numbers), -1, text))
            # Through fewer than the best of a node's edges no more texts can be among the best.
            for edge in own[np.argsort(-steps[own])][: top_k + len(probabilities)].tolist():
                target = int(self.lattice.following[self.lattice.targets[edge]])
                spelled = text + self.spellings[self.columns[edge]]
                heapq.heappush(queue, (cost - steps[edge], next(numbers), target, spelled))
        ranked = sorted(probabilities.items(), key=lambda each: (-each[1], each[0] != wanted))[:top_k]
        if wanted not in dict(ranked):
            ranked[-1] = wanted, probabilities[wanted]
        return ranked

    def _probability(self, visits: np.ndarray, steps: np.ndarray, text: bytes) -> float:
        """Sum over all spellings of a text."""
        masses: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(len(text) + 1)]
        for node in self.starts.tolist():
            masses[0][node] = float(np.exp(visits[node]))
        for start in range(len(text)):
            for node, mass in masses[start].items():
                for stop in range(start + 1, min(start + self.longest, len(text)) + 1):
                    for edge in self._edges_of.get((node, text[start:stop]), ()):
                        target = int(self.lattice.following[self.lattice.targets[edge]])
                        masses[stop][target] += mass * float(np.exp(steps[edge]))
        return min(sum(mass * float(np.exp(self.leaves(node, steps))) for node, mass in masses[-1].items()), 1.0)

    def leaves(self, node: int, steps: np.ndarray) -> float:
        """Log-probability that the field ends at a node."""
        leaving = self.lattice.edges_from(node)
        if node == self.lattice.closes[-1]:
            return 0.0
        return float(np.logaddexp.reduce(steps[leaving[~self.is_own[leaving]]], initial=-np.inf))


@dataclass(frozen=True, eq=False)
class Decision:
    """Fields of a decision, and the texts that it may write."""

    graph: Graph
    names: Sequence[str]
    values: Sequence[list[Any] | None]
    """Choices of each field; None for a field of a pattern."""
    spellings: Sequence[bytes]
    """Text of each of ``tokens``; needed where a field has a pattern."""
    top_k: int
    """Values that are reported of a field with a pattern."""
    is_json: Sequence[bool]
    """True for each field with a pattern whose texts are JSON; its values are what JSON says."""

    @cached_property
    def tokens(self) -> np.ndarray:
        """Different tokens of the graph, ascending."""
        return np.unique(self.graph.tokens)

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
        """Index into ``tokens`` of each edge of the lattice; the number of tokens for an end token."""
        return np.where(self.lattice.tokens == END, len(self.tokens), np.searchsorted(self.tokens, self.lattice.tokens))

    @cached_property
    def first_edges(self) -> list[np.ndarray]:
        """Of each field, the edges of the lattice that begin a choice."""
        fields, begins = self.lattice.fields, np.flatnonzero(self.lattice.choices != LITERAL)
        order = begins[np.argsort(fields[begins], kind="stable")]
        return np.split(order, np.searchsorted(fields[order], range(1, len(self.names))))

    @cached_property
    def texts(self) -> list[FieldTexts | None]:
        """Texts of each field with a pattern; None for a field of choices."""
        return [FieldTexts(self, field) if values is None else None for field, values in enumerate(self.values)]

    @cached_property
    def packed(self) -> bytes:
        """To be sent; ``unpacked_decision`` makes it a decision again."""
        buffer, graph = io.BytesIO(), self.graph
        header = json.dumps(
            [self.names, self.values, self.top_k, self.is_json, [text.hex() for text in self.spellings]]
        )
        edges = np.stack((graph.sources, graph.tokens, graph.targets, graph.fields, graph.choices))
        np.savez_compressed(buffer, edges=edges, ends=graph.ends, header=np.frombuffer(header.encode(), np.uint8))
        return buffer.getvalue()


@lru_cache(maxsize=16)
def unpacked_decision(packed: bytes) -> Decision:
    """The decision of ``Decision.packed``. Requests with the same fields share it."""
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        graph = Graph(arrays["ends"], *arrays["edges"])
        names, values, top_k, is_json, spellings = json.loads(arrays["header"].tobytes())
    texts = [bytes.fromhex(text) for text in spellings]
    return Decision(graph, names, values, texts, top_k, is_json)


@dataclass(frozen=True)
class Committed:
    """Tokens that a pass writes, by their position in the response."""

    tokens: dict[int, int]
    logprobs: dict[int, tuple[np.ndarray, np.ndarray]]
    """The tokens that each of them may hold after the tokens before it, and their log-probabilities among accepted
    texts; empty if nobody asks."""


class RunningDecision:
    """A decision of one request, pass by pass."""

    def __init__(self, decision: Decision, end_tokens: frozenset[int], passes: int) -> None:
        """``passes``: the most forward passes."""
        self.decision = decision
        self._ends = sorted(end_tokens)
        self.columns = np.array([*decision.tokens.tolist(), *self._ends])
        """Tokens whose logits ``commit`` reads."""
        self._answers: dict[int, dict[str, Any]] = {}
        self._left = list(range(len(decision.names)))
        self._passes_left = passes
        self._allowed = np.ones(len(decision.lattice.tokens), bool)

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        """Value, probability and distribution of each committed field, in the order of the fields."""
        return {self.decision.names[field]: self._answers[field] for field in sorted(self._answers)}

    @property
    def is_complete(self) -> bool:
        """True if all fields are committed."""
        return not self._left

    def commit(self, positions: Sequence[int], logits: np.ndarray, *, with_logprobs: bool = False) -> Committed:
        """Commit the surest fields, or in the last pass all that are left.

        Args:
            positions: all masks of the response, counted from its start.
            logits: float64 ``[num_masks, num_columns]`` of ``columns``; finite.
        """
        decision, lattice = self.decision, self.decision.lattice
        num_tokens = len(decision.tokens)
        table = np.zeros((lattice.length, num_tokens + 1))
        table[positions, :num_tokens] = logits[:, :num_tokens]
        table[positions, num_tokens] = np.logaddexp.reduce(logits[:, num_tokens:], axis=1, initial=-np.inf)
        scores = np.where(self._allowed, table[lattice.positions, decision.edge_columns], -np.inf)
        before, after = lattice.log_sums(scores)
        weights = scores + after[lattice.targets]
        with np.errstate(invalid="ignore"):  # of nodes that no allowed path passes through
            steps = np.where(np.isfinite(weights), weights - after[lattice.sources], -np.inf)
        visits = before + after
        visits[lattice.sources] -= before[lattice.closes][lattice.segments]
        path = lattice.best_path(scores)
        answers = {field: self._answer(field, path, visits, steps) for field in self._left}
        committed = self._left if self._passes_left == 1 else self._surest(positions, path, visits, steps)
        self._left = [field for field in self._left if field not in committed]
        self._passes_left -= 1
        self._answers |= {field: answers[field] for field in committed}
        left = self._tokens_left(path, committed) if self._left else lattice.tokens[path]
        # The best end token of a position stands for all of them.
        ends = dict(zip(positions, logits[:, num_tokens:].argmax(axis=1).tolist(), strict=True)) if self._ends else {}
        decided = {position: int(left[position]) for position in positions}
        tokens = {
            position: self._ends[ends[position]] if token == END else token
            for position, token in decided.items()
            if token != OPEN and (token != END or not self._left)
        }
        logprobs = {}
        for position, (names, values) in enumerate(lattice.conditionals(path, weights) if with_logprobs else ()):
            if position in tokens:
                named = [self._ends[ends[position]] if token == END else token for token in names.tolist()]
                logprobs[position] = np.array(named), values
        return Committed(tokens, logprobs)

    def _surest(self, positions: Sequence[int], path: np.ndarray, visits: np.ndarray, steps: np.ndarray) -> list[int]:
        """The fields to commit in a pass that is not the last: those whose tokens are all decided, and an equal part of
        the others. Arguments as of ``commit`` and ``FieldTexts.top``."""
        decision, lattice = self.decision, self.decision.lattice
        path_fields, as_on_path = lattice.fields[path], self._as_on_path(path)

        def sureness(field: int) -> float:
            """Log-probability that the field has its text at these positions: only what is somewhere is committed."""
            own, texts = path[path_fields == field], decision.texts[field]
            first = np.flatnonzero(as_on_path & (lattice.positions == lattice.positions[own[0]]))
            begins = np.logaddexp.reduce(visits[lattice.sources[first]] + steps[first])
            ends = 0.0 if texts is None else texts.leaves(int(lattice.following[lattice.targets[own[-1]]]), steps)
            return float(begins + steps[own[1:]].sum() + ends)

        undecided = {*path_fields[positions].tolist()}.intersection(self._left)
        count = max(len(undecided) // self._passes_left, 1)
        decided = [field for field in self._left if field not in undecided]
        return decided + sorted(undecided, key=sureness, reverse=True)[:count]

    def _as_on_path(self, path: np.ndarray) -> np.ndarray:
        """The edges that write what a path writes at their position, bool ``[num_lattice_edges]``.

        A text that may follow several others begins with an edge from each of them.
        """
        fields, lattice = self.decision.lattice.fields, self.decision.lattice
        same = path[lattice.positions]
        writes_same = (lattice.tokens == lattice.tokens[same]) & (fields == fields[same])
        return writes_same & (lattice.targets == lattice.targets[same])

    def _tokens_left(self, path: np.ndarray, committed: list[int]) -> np.ndarray:
        """Allow only texts that have the committed fields where the path has them; as ``Lattice.tokens_left``."""
        fields, lattice = self.decision.lattice.fields, self.decision.lattice
        fixed = np.isin(fields[path], committed)[lattice.positions]
        self._allowed &= np.where(fixed, self._as_on_path(path), ~np.isin(fields, committed))
        return lattice.tokens_left(self._allowed)

    def _answer(self, field: int, path: np.ndarray, visits: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
        """Arguments as of ``FieldTexts.top``."""
        decision, texts, values = self.decision, self.decision.texts[field], self.decision.values[field]
        lattice = decision.lattice
        own = path[lattice.fields[path] == field]
        if texts is not None:
            text = texts.text_of(own)
            ranked = texts.top(visits, steps, decision.top_k, text)
            probability = dict(ranked)[text]
            read = json.loads if decision.is_json[field] else bytes.decode
            value, *listed = (read(each) for each in (text, *dict(ranked)))
            distribution = list(zip(listed, dict(ranked).values(), strict=True))
        else:
            assert values is not None
            begins = decision.first_edges[field]
            posterior = np.exp(visits[lattice.sources[begins]] + steps[begins])
            sums = np.bincount(lattice.choices[begins], posterior, minlength=len(values))
            shares, choice = (sums / sums.sum()).tolist(), int(lattice.choices[own].max())
            value, probability = values[choice], shares[choice]
            distribution = sorted(zip(values, shares, strict=True), key=lambda each: -each[1])
        listed = [{"value": each, "probability": share} for each, share in distribution]
        return {"value": value, "probability": probability, "distribution": listed}
