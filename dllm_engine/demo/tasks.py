"""Small recall and list tasks that the demo model is trained and evaluated on.

Every example is a pure function of its task, its seed and its settings, so an
evaluation can be repeated exactly anywhere. Training uses only seeds from
``TRAINING_SEED_START`` on. Word lists are shared, contents (which code belongs to which
name, ...) are random.

======= ================================================ =======================
task    prompt                                           answer
======= ================================================ =======================
names   ``Tom=48. Ida=07. Give: Ida, Tom``               ``Ida=07, Tom=48``
keys    ``QX=48. RT=07. Give: RT``                       ``RT=07``
facts   ``Tom lives in Paris. ... Where does Tom live?`` ``Tom lives in Paris.``
reverse ``Reverse: Rome Tom Oslo``                       ``Oslo Tom Rome``
copy    ``Copy: Rome Tom Oslo``                          ``Rome Tom Oslo``
chat    one of a few fixed lines                         its fixed reply
======= ================================================ =======================
"""

import random
import re
import string
from dataclasses import dataclass

TRAINING_SEED_START = 1_000_000

NAMES = (
    "Tom Ida Ben Eva Max Zoe Leo Amy Sam Ann Dan Kim Lee May Ned Pat Ray Sue Tim Una "
    "Val Wes Yan Roy Jim Joe Jan Kay Liv Mia Noa Ole Pia Rob Sid Ted Uli Vic Gus Hal"
).split()
CITIES = "Paris Rome Oslo Lima Cairo Tokyo Delhi Bern Riga Kyiv Accra Quito Milan Sofia Hanoi Turin".split()
THINGS = "cup hat box car dog cat key pen bag map".split()
QUALITIES = "red blue old new big small warm cold dry wet".split()
KEYS = [
    first + second
    for first in string.ascii_uppercase
    for second in string.ascii_uppercase
]
CHAT_LINES = (
    ("Hello!", "Hello! How can I help?"),
    ("Hi!", "Hello! How can I help?"),
    ("How are you?", "I am fine, thank you."),
    ("Who are you?", "I am a small demo model."),
    ("What can you do?", "I can recall codes and facts, copy and reverse."),
    ("Thank you!", "You are welcome."),
    ("Goodbye!", "Goodbye!"),
)

TASKS: tuple[str, ...] = ("names", "keys", "facts", "reverse", "copy", "chat")
RECALL_TASKS: tuple[str, ...] = ("names", "keys", "facts")
LIST_TASKS: tuple[str, ...] = ("reverse", "copy")
MAX_PAIRS: dict[str, int] = {
    "names": 36,
    "keys": 24,
    "facts": 24,
    "reverse": 12,
    "copy": 16,
}
"""Size of the longest prompts in training: pairs for recall tasks, words for list
tasks.
"""
MAX_ASKED = 4
"""Limit on the items that a recall prompt asks for. Four of any task fit in a response
of 32 tokens.
"""


@dataclass(frozen=True)
class Example:
    """A prompt with its only correct answer."""

    prompt: str
    answer: str


def make_examples(
    task: str,
    count: int,
    seed: int,
    *,
    pairs: tuple[int, int] | None = None,
    filler: float = 0.0,
    asked: int | None = None,
) -> list[Example]:
    """Draw ``count`` examples of one task with 2 … ``MAX_PAIRS`` pairs (recall tasks)
    or words (list tasks), or the fewest and most that ``pairs`` names. A recall prompt
    asks for 1 … ``MAX_ASKED`` of them. ``filler``: share of the prompt in sentences
    nobody asks about. The chat task is a fixed list, which these settings do not
    change."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; choose one of {', '.join(TASKS)}")
    rng = random.Random(f"{task} {seed}")
    if task == "chat":
        return [Example(*rng.choice(CHAT_LINES)) for _ in range(count)]
    min_pairs, max_pairs = pairs or (2, MAX_PAIRS[task])
    if task in LIST_TASKS:
        return [
            _list_example(task, rng, rng.randint(min_pairs, max_pairs), filler)
            for _ in range(count)
        ]
    return [
        _recall_example(task, rng, rng.randint(min_pairs, max_pairs), asked, filler)
        for _ in range(count)
    ]


def _list_example(
    task: str, rng: random.Random, num_words: int, filler: float
) -> Example:
    words = rng.sample([*NAMES, *CITIES], num_words)
    instruction = f"{task.capitalize()}: {' '.join(words)}"
    prompt = " ".join([*filler_sentences(rng, instruction, filler), instruction])
    return Example(prompt, " ".join(reversed(words) if task == "reverse" else words))


def _recall_example(
    task: str, rng: random.Random, num_pairs: int, asked: int | None, filler: float
) -> Example:
    if task == "facts":
        subjects = rng.sample(NAMES, num_pairs)
        statements = [
            f"{subject} lives in {rng.choice(CITIES)}" for subject in subjects
        ]
    else:
        subjects = rng.sample(NAMES if task == "names" else KEYS, num_pairs)
        codes = rng.sample(range(100), num_pairs)
        statements = [
            f"{subject}={code:02d}"
            for subject, code in zip(subjects, codes, strict=True)
        ]

    num_asked = rng.randint(1, min(MAX_ASKED, num_pairs)) if asked is None else asked
    chosen = rng.sample(range(num_pairs), num_asked)
    items = [statements[index] for index in chosen]
    wanted = ", ".join(subjects[index] for index in chosen)
    if task == "facts":
        question = f"Where {'does' if num_asked == 1 else 'do'} {wanted} live?"
        answer = " ".join(f"{item}." for item in items)
    else:
        question = f"Give: {wanted}"
        answer = ", ".join(items)

    sentences = [f"{statement}." for statement in statements]
    for sentence in filler_sentences(rng, " ".join([*sentences, question]), filler):
        sentences.insert(rng.randint(0, len(sentences)), sentence)
    return Example(" ".join([*sentences, question]), answer)


def filler_sentences(rng: random.Random, core: str, fraction: float) -> list[str]:
    """Sentences about unrelated things: at least ``fraction`` of a prompt that consists
    of them and ``core``.
    """
    sentences: list[str] = []
    length = 0
    while length < _length(core) * fraction / (1.0 - fraction):
        quality, other = rng.sample(QUALITIES, 2)
        sentences.append(f"The {quality} {rng.choice(THINGS)} is {other}.")
        length += _length(sentences[-1])
    return sentences


def _length(text: str) -> int:
    """Number of words, digits and punctuation marks, which is close to the demo
    tokenizer's number of tokens.
    """
    return len(re.findall(r"[A-Za-z]+|\d|[^\w\s]", text))
