"""Decisions: fields, and the texts that may be written."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dllm_engine.constraints.graph import EDGE, END, Graph, edges_between


@dataclass(frozen=True, eq=False)
class Decision:
    """A decision: its fields, and the graph of the texts that it may write."""

    graph: Graph
    names: Sequence[str]
    values: Sequence[Sequence[Any] | None]
    """Choices of each field; None for a field of a pattern."""
    spellings: Sequence[bytes]
    """Text of each of ``tokens``; needed where a field has a pattern."""
    top_k: int
    """Number of values that are reported for a field with a pattern."""
    is_json: Sequence[bool]
    """True for each field with a pattern whose texts are JSON. Its values are parsed.
    """
    beginnings: int
    """Number of beginnings of texts with which the search for these values goes on from
    each state of a pattern.
    """

    @cached_property
    def tokens(self) -> np.ndarray:
        """Distinct tokens of the graph, ascending."""
        return np.unique(self.graph.edges["token"])

    @cached_property
    def template(self) -> tuple[int | None, ...]:
        """The response before the first pass, with None for each mask."""
        positions, edges = self.graph.placed_edges()
        firsts = np.flatnonzero(np.diff(positions, prepend=-1))
        lowest, highest = (
            of.reduceat(edges["token"], firsts).tolist()
            for of in (np.minimum, np.maximum)
        )
        return tuple(
            token if token == other else None
            for token, other in zip(lowest, highest, strict=True)
        )

    @property
    def has_shorter_texts(self) -> bool:
        """True if some texts are shorter than others, so that end tokens follow them."""
        _, edges = self.graph.placed_edges()
        return bool((edges["token"] == END).any())

    @cached_property
    def packed(self) -> bytes:
        """The decision as bytes. ``unpacked_decision`` restores it."""
        edges = self.graph.edges
        ends = self.graph.ends.tolist()
        spellings = [text.hex() for text in self.spellings]
        values = [None if options is None else [*options] for options in self.values]
        settings = [self.top_k, self.is_json, self.beginnings]
        header = json.dumps(
            [self.names, values, spellings, *settings, ends, self.template]
        )
        # Each column compresses well alone.
        columns = [edges[name].tobytes() for name in EDGE.names or ()]
        return zlib.compress(b"\n".join([header.encode(), b"".join(columns)]))


@lru_cache(maxsize=16)
def unpacked_decision(packed: bytes) -> Decision:
    """The decision of ``Decision.packed``, cached for requests with the same fields."""
    header, _, edges = zlib.decompress(packed).partition(b"\n")
    names, values, spellings, *settings, ends, template = json.loads(header)
    columns = np.frombuffer(edges, np.int32).reshape(len(EDGE.names or ()), -1)
    graph = Graph(np.array(ends), edges_between(*columns))
    texts = [bytes.fromhex(text) for text in spellings]
    decision = Decision(graph, names, values, texts, *settings)
    vars(decision)["template"] = tuple(template)  # set the cached property
    return decision
