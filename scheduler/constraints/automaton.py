"""Automata over tokens: which sequences of tokens spell a text that a request may write."""

import hashlib
import io
import zlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np


@dataclass(frozen=True, eq=False)
class Automaton:
    """Reads a text token by token, from state 0. Tokens that lead to the same state from every state are one class, so
    a few hundred classes stand for a vocabulary of 126,464."""

    class_of: np.ndarray
    """int32 ``[vocab_size]``: the class of each token; −1 for a token that is in no accepted text."""
    next_state: np.ndarray
    """int32 ``[num_states, num_classes]``: where a class leads; −1 where no accepted text begins that way."""
    accepting: np.ndarray
    """bool ``[num_states]``: whether the text may end here."""

    @cached_property
    def digest(self) -> str:
        """Equal for equal automata."""
        return hashlib.blake2b(self._raw, digest_size=16).hexdigest()

    @cached_property
    def _raw(self) -> bytes:
        buffer = io.BytesIO()
        for table in (self.class_of, self.next_state, self.accepting):
            np.save(buffer, table, allow_pickle=False)
        return buffer.getvalue()

    @cached_property
    def packed(self) -> bytes:
        """To be sent; ``unpacked`` makes it an automaton again."""
        return bytes.fromhex(self.digest) + zlib.compress(self._raw, level=1)


@lru_cache(maxsize=16)
def unpacked(packed: bytes) -> Automaton:
    """The automaton of ``Automaton.packed``. Requests of the same constraint share it."""
    buffer = io.BytesIO(zlib.decompress(packed[16:]))
    automaton = Automaton(*(np.load(buffer, allow_pickle=False) for _ in range(3)))
    vars(automaton)["packed"] = packed  # not to be made again
    return automaton
