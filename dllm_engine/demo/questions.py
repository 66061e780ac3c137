"""Questions about a text of a few facts, that the demo model is trained and evaluated
on.

====== ========= ========================== ======================================
kind   type      question                   answer, if the text is
                                            "Tom lives in Rome. Tom=48."
====== ========= ========================== ======================================
where  choice    ``Where does Tom live?``   ``Rome``
who    choice    ``Who lives in Rome?``     ``Tom``; if several live there, one of
                                            them
code   choice    ``Give: Tom``              ``48``
anyone predicate ``Does anyone live in      false
                 Oslo?``
count  score     ``How many live in Oslo?`` 0, of 0 to 5
====== ========= ========================== ======================================
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dllm_engine.demo.tasks import CITIES, NAMES, filler_sentences

QUESTION_KINDS = ("where", "who", "code", "anyone", "count")
MOST_COUNTED = 5
MOST_PEOPLE = 10
MOST_CHOICES = 6


@dataclass(frozen=True)
class Asked:
    """A question in OpenAI's form with its answer: a label, true or false, or the index
    of a level.
    """

    question: dict[str, Any]
    answer: str | bool | int

    @property
    def option(self) -> int:
        """Index of the answer among the options. Of yes and no, yes comes first."""
        if isinstance(self.answer, bool):
            return 0 if self.answer else 1
        if isinstance(self.answer, int):
            return self.answer
        values = [choice["value"] for choice in self.question["choices"]]
        return values.index(self.answer)


@dataclass(frozen=True)
class AskedText:
    """A text, and questions about it."""

    text: str
    asked: tuple[Asked, ...]


def ask(
    seed: int,
    count: int,
    kinds: Sequence[str] = QUESTION_KINDS,
    together: int = 1,
    filler: float = 0.0,
) -> list[AskedText]:
    """Draw ``count`` texts with ``together`` questions each. ``filler``: as for
    ``make_examples``.
    """
    rng = random.Random(f"questions {seed}")
    return [_asked_text(rng, kinds, together, filler) for _ in range(count)]


def _asked_text(
    rng: random.Random, kinds: Sequence[str], together: int, filler: float
) -> AskedText:
    facts = _Facts(rng)
    asked = tuple(_ASK[kind](facts) for kind in rng.choices(kinds, k=together))
    sentences = facts.sentences()
    core = " ".join([*sentences, *(item.question["instructions"] for item in asked)])
    for sentence in filler_sentences(rng, core, filler):
        sentences.insert(rng.randint(0, len(sentences)), sentence)
    return AskedText(" ".join(sentences), asked)


class _Facts:
    """The towns of some people, and the codes of some of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        people = rng.sample(NAMES, rng.randint(1, rng.randint(2, MOST_PEOPLE)))
        self.crowded, *cities = rng.sample(CITIES, rng.randint(2, 6))
        num_crowded = rng.randint(0, min(MOST_COUNTED, len(people)))
        self.home = {name: rng.choice(cities) for name in people}
        self.home |= dict.fromkeys(people[:num_crowded], self.crowded)
        owners = rng.sample(people, rng.randint(1, len(people)))
        codes = rng.sample(range(100), len(owners))
        self.codes = {
            name: f"{code:02d}" for name, code in zip(owners, codes, strict=True)
        }
        self.has_codes = rng.random() < 0.2

    def sentences(self) -> list[str]:
        homes = [f"{name} lives in {city}." for name, city in self.home.items()]
        codes = [f"{name}={code}." for name, code in self.codes.items()]
        sentences = homes + codes * self.has_codes
        self.rng.shuffle(sentences)
        return sentences

    def where(self) -> Asked:
        name, city = self.rng.choice([*self.home.items()])
        others = [other for other in CITIES if other != city]
        return self._choice(f"Where does {name} live?", city, others)

    def who(self) -> Asked:
        name, city = self.rng.choice([*self.home.items()])
        others = [other for other in NAMES if self.home.get(other) != city]
        return self._choice(f"Who lives in {city}?", name, others)

    def code(self) -> Asked:
        self.has_codes = True
        name, code = self.rng.choice([*self.codes.items()])
        others = [f"{number:02d}" for number in range(100) if number != int(code)]
        return self._choice(f"Give: {name}", code, others)

    def _choice(self, instructions: str, right: str, others: list[str]) -> Asked:
        num_others = self.rng.randint(1, MOST_CHOICES - 1)
        values = [right, *self.rng.sample(others, num_others)]
        self.rng.shuffle(values)
        choices = [{"value": value} for value in values]
        question = {"instructions": instructions, "choices": choices}
        return Asked({"type": "choice", **question}, right)

    def anyone(self) -> Asked:
        cities = [*self.home.values()]
        is_so = self.rng.random() < 0.5
        others = [city for city in CITIES if city not in cities]
        city = self.rng.choice(cities if is_so else others)
        question = f"Does anyone live in {city}?"
        return Asked({"type": "predicate", "instructions": question}, is_so)

    def count(self) -> Asked:
        homes = [*self.home.values()]
        city = self.crowded if self.rng.random() < 0.8 else self.rng.choice(CITIES)
        number = homes.count(city)
        if number > MOST_COUNTED:
            city, number = self.crowded, homes.count(self.crowded)
        levels = [{"label": str(number)} for number in range(MOST_COUNTED + 1)]
        question = {"instructions": f"How many live in {city}?", "levels": levels}
        return Asked({"type": "score", **question}, number)


_ASK = {
    "where": _Facts.where,
    "who": _Facts.who,
    "code": _Facts.code,
    "anyone": _Facts.anyone,
    "count": _Facts.count,
}
