"""Questions for a model: the words of the prompt, and the texts that stand for the
answers.

A question becomes a row: a prompt, and a decision between the texts of its answers,
read from one forward pass. Each question has a row of its own, or all share one.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from vllm.sampling_params import SamplingParams

from dllm_engine.decisions.build import choice_decision
from dllm_engine.decisions.calibration import Calibration, Reading, Readings
from dllm_engine.decisions.questions import (
    MOST_OPTIONS,
    Answer,
    Message,
    Option,
    Question,
    QuestionError,
    answered,
)
from dllm_engine.decisions.requests import params_of
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.structured_output.requests import serialized_tokenizer

Decisions = Sequence[Mapping[str, Any]]
"""The fields that were decided in each row, in the order of its questions."""

TEMPLATE_FILE = "decision_template.jinja"
"""File in the folder of a checkpoint with its own words."""
_DEFAULT_TEMPLATE = Path(__file__).with_name("prompt.jinja")
MOST_LABEL_CHARACTERS = 1 << 20
"""Limit on the characters of all labels of a request. To tokenize so many takes a
second or two.
"""
_PLACE = "\0"
"""Stands for an answer while a template renders the response."""


@dataclass(frozen=True)
class Spelling:
    """Tokens of the texts that a model may answer with."""

    tokenizer: Tokenizer
    end_of_turn: int | None
    """The token behind an answer."""

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text. Markers in it are read as text."""
        # ``encode_batch`` wakes threads, which takes longer than a few texts.
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        return [encode(text).ids for text in texts]

    def spells(self, tokens: list[int], text: str) -> bool:
        """Return True if tokens spell the text, apart from spaces around it."""
        written = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return _normal(written) == _normal(text)

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        added = self.tokenizer.get_added_tokens_decoder().values()
        markers = [re.escape(each.content) for each in added if each.special]
        return re.compile("|".join(markers) or "(?!)")

    def escaped(self, text: str) -> str:
        """The text with a space in each marker, which makes it text."""
        return self._markers.sub(lambda each: f"{each[0][0]} {each[0][1:]}", text)

    def escaped_question(self, question: Question) -> Question:
        """The question with escaped texts."""
        options = [
            Option(
                each.label
                if isinstance(each.label, bool)
                else self.escaped(each.label),
                self.escaped(each.description),
            )
            for each in question.options
        ]
        instructions = self.escaped(question.instructions)
        return Question(question.kind, instructions, tuple(options))

    @cached_property
    def marks(self) -> list[str]:
        """``A``, …, ``Z``, ``AA``, …; first those that are one token, with a space
        before them or without.
        """
        letters = string.ascii_uppercase
        names = [*letters, *map("".join, product(letters, repeat=2))]
        bare, spaced = self.tokens(names), self.tokens([f" {name}" for name in names])
        fewest = [min(map(len, pair)) for pair in zip(bare, spaced, strict=True)]
        order = sorted(range(len(names)), key=lambda index: fewest[index] > 1)
        return [names[index] for index in order[:MOST_OPTIONS]]


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


@lru_cache(maxsize=4)
def spelling_of(tokenizer: Any) -> Spelling:
    """Spelling with a model's tokenizer."""
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise InvalidRequestError(
            "questions need one of Hugging Face's fast tokenizers, which this engine "
            "does not have"
        )
    backend = Tokenizer.from_str(serialized_tokenizer(tokenizer).decode())
    backend.no_truncation()
    backend.no_padding()
    end = _end_of_turn(tokenizer, backend)
    backend.encode_special_tokens = True
    return Spelling(backend, end)


def _end_of_turn(tokenizer: Any, backend: Tokenizer) -> int | None:
    """The marker that the chat template writes right behind an answer, or the end of
    the text if there is none.
    """
    end: int | None = tokenizer.eos_token_id
    if not tokenizer.chat_template:
        return end
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\0"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    behind = backend.encode(rendered.rpartition("\0")[2], add_special_tokens=False).ids
    markers = backend.get_added_tokens_decoder()
    return behind[0] if behind and behind[0] in markers else end


def answers_by_marks(question: Question, spelling: Spelling) -> list[str]:
    """Yes and No, or a letter for each option, beyond 26 pairs of letters. For models
    that follow instructions: answers are one token, whatever the labels are.
    """
    if question.kind == "yes_no":
        return question.labels
    return spelling.marks[: len(question.options)]


def answers_by_labels(question: Question, spelling: Spelling) -> list[str]:
    """The labels as they are. For models that know no letters of options. A label of
    several tokens has the product of their probabilities.
    """
    return question.labels


WAYS: dict[str, Callable[[Question, Spelling], list[str]]] = {
    "marks": answers_by_marks,
    "labels": answers_by_labels,
}
"""Ways to ask: the text that a model answers with for each option."""


@dataclass(frozen=True)
class Row:
    """A prompt whose questions the engine answers in one canvas."""

    messages: list[Message]
    params: SamplingParams
    readings: Mapping[int, Reading]
    """A reading of each question that the row answers, by its number in the request."""


class Asking:
    """The questions' form for the model of an engine."""

    def __init__(self, options: EngineOptions, model: str, tokenizer: Any) -> None:
        """``model``: folder or name of the model.

        Raises ``InvalidRequestError`` for a template that cannot be read.
        """
        self.options, self.spelling = options, spelling_of(tokenizer)
        self.template = read_template(_template_file(options, model))
        way = options.decision_way
        self.way = self.template["way"] if way == "auto" else way
        self.calibration = Calibration.read(options.decision_calibration)

    def rows(
        self,
        messages: Sequence[Message],
        questions: Sequence[Question],
        joint: bool | None = None,
    ) -> list[Row]:
        """The rows that answer questions about some messages. ``joint``: all questions
        in one row; None: as the engine was started.

        Raises ``QuestionError`` for labels that this model cannot write.
        """
        length = sum(len(label) for each in questions for label in each.labels)
        if length > MOST_LABEL_CHARACTERS:
            raise QuestionError(
                ["questions"],
                f"their labels have {length} characters, at most "
                f"{MOST_LABEL_CHARACTERS} are supported; send several requests",
            )
        is_joint = self.options.decision_joint if joint is None else joint
        text = self._escaped(messages)
        return [
            self._row(text, questions, readings)
            for readings in self._groups(questions, is_joint=is_joint)
        ]

    def _groups(
        self, questions: Sequence[Question], *, is_joint: bool
    ) -> list[dict[int, Reading]]:
        """For each row, the readings of its questions by their numbers. A question with
        one option has no row.
        """
        groups: dict[tuple[int, int], dict[int, Reading]] = {}
        for number, question in enumerate(questions):
            if len(question.options) > 1:
                readings = self.calibration.of(question.kind).readings(question)
                for turn, reading in enumerate(readings):
                    row = (reading.is_blank, turn) if is_joint else (number, turn)
                    groups.setdefault(row, {})[number] = reading
        return [groups[row] for row in sorted(groups)]

    def _escaped(self, messages: Sequence[Message]) -> list[Message]:
        escaped = []
        for each in messages:
            content = each.get("content")
            if isinstance(content, str):
                each = {**each, "content": self.spelling.escaped(content)}
            escaped.append(each)
        return escaped

    def _row(
        self,
        messages: Sequence[Message],
        questions: Sequence[Question],
        readings: Mapping[int, Reading],
    ) -> Row:
        shown, answers = [], []
        for i, reading in readings.items():
            question = self.spelling.escaped_question(questions[i])
            listed = tuple(question.options[number] for number in reading.order)
            question = replace(question, options=listed)
            answers.append(WAYS[self.way](question, self.spelling))
            shown.append(as_shown(question, answers[-1]))
        literals = self._literals(shown)
        try:
            packed = _packed_decision(
                self.spelling,
                tuple(literals),
                tuple(map(tuple, answers)),
                self.options.max_automaton_search,
            )
        except ValueError as error:
            raise QuestionError(["questions", min(readings)], str(error)) from None
        is_blank = any(each.is_blank for each in readings.values())
        asking = self._with_question([] if is_blank else messages, shown)
        return Row(asking, params_of(packed, passes=1), readings)

    def _with_question(
        self, messages: Sequence[Message], shown: list[dict[str, Any]]
    ) -> list[Message]:
        """The messages, with the question in the last one."""
        before, text = list(messages), ""
        if before and before[-1]["role"] == "user":
            text = before.pop()["content"]
        prompt = self._rendered("prompt", text, shown, self.way)
        return [*before, {"role": "user", "content": prompt}]

    def _literals(self, shown: list[dict[str, Any]]) -> list[str]:
        """The text before each answer, and behind the last."""
        response = ""
        for i, question in enumerate(shown):
            number = i + 1 if len(shown) > 1 else 0
            response += self._rendered("response", question, number, _PLACE)
        literals = response.split(_PLACE)
        if len(literals) != len(shown) + 1:
            raise InvalidRequestError(
                "decision_template: its macro `response` must hold `answer` once"
            )
        return literals

    def _rendered(self, macro: str, *arguments: Any) -> str:
        try:
            return str(self.template[macro](*arguments))
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"decision_template: {macro}: {error}") from None

    def answers(
        self, questions: Sequence[Question], rows: Sequence[Row], decisions: Decisions
    ) -> list[Answer]:
        """The answers to all questions. ``rows`` have those with several options."""
        readings, masses = readings_of(rows, decisions)
        answers = []
        for number, question in enumerate(questions):
            shares = np.ones(1)
            if number in readings:
                correction = self.calibration.of(question.kind)
                shares = correction.applied(readings[number])
            answers.append(answered(question, shares, masses.get(number, 1.0)))
        return answers


def readings_of(
    rows: Sequence[Row], decisions: Decisions
) -> tuple[dict[int, Readings], dict[int, float]]:
    """By the number of each question in ``rows``: the probabilities of its options in
    the order of the question, and the label mass of its first reading.
    """
    readings: dict[int, Readings] = {}
    masses: dict[int, float] = {}
    for row, decision in zip(rows, decisions, strict=True):
        fields = zip(row.readings.items(), decision.values(), strict=True)
        for (number, reading), field in fields:
            shares = [0.0] * len(reading.order)
            for each in field["distribution"]:
                shares[reading.order[each["value"]]] = each["probability"]
            by_kind = readings.setdefault(number, Readings([], []))
            (by_kind.blank if reading.is_blank else by_kind.with_input).append(shares)
            masses.setdefault(number, field["label_mass"])
    return readings, masses


def check_files(options: EngineOptions, model: str) -> None:
    """Raise ``ValueError`` for a template or a calibration that cannot be read."""
    read_template(_template_file(options, model))
    Calibration.read(options.decision_calibration)


def _template_file(options: EngineOptions, model: str) -> Path:
    if options.decision_template is not None:
        return Path(options.decision_template)
    file = Path(model) / TEMPLATE_FILE
    return file if file.is_file() else _DEFAULT_TEMPLATE


@lru_cache(maxsize=4)
def read_template(path: Path) -> dict[str, Any]:
    """Names that a template sets. Raises ``InvalidRequestError`` if one is missing."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        template = environment.from_string(path.read_text(encoding="utf-8"))
        names = vars(template.module)
    except (OSError, ValueError, TemplateError) as error:
        raise InvalidRequestError(f"decision_template={str(path)!r}: {error}") from None
    missing = {"way", "prompt", "response"} - names.keys()
    if missing or names["way"] not in WAYS:
        raise InvalidRequestError(
            f"decision_template={str(path)!r} must have the macros `prompt` and "
            f"`response`, and set `way` to one of {', '.join(WAYS)}"
        )
    return names


def as_shown(question: Question, answers: Sequence[str]) -> dict[str, Any]:
    """A question as templates see it."""
    options = [
        {"answer": answer, "label": label, "description": option.description}
        for answer, label, option in zip(
            answers, question.labels, question.options, strict=True
        )
    ]
    return {
        "kind": question.kind,
        "instructions": question.instructions,
        "options": options,
    }


@lru_cache(maxsize=512)
def _packed_decision(
    spelling: Spelling,
    literals: tuple[str, ...],
    answers: tuple[tuple[str, ...], ...],
    max_search: int,
) -> bytes:
    """The decision between the texts of answers, with literal text around them."""
    texts = [literal.removesuffix(" ") for literal in literals]
    spelled = spelling.tokens(texts)
    for literal, tokens in zip(texts, spelled, strict=True):
        if not spelling.spells(tokens, literal):
            raise ValueError(f"the tokens of this model do not spell {literal!r}")
    options = []
    for literal, texts_of_options in zip(literals, answers, strict=False):
        options.append(_spellings(spelling, literal, texts_of_options))
    if spelling.end_of_turn is not None:
        spelled[-1].append(spelling.end_of_turn)
    return choice_decision(spelled, options, max_search).packed


def _spellings(
    spelling: Spelling, before: str, answers: Sequence[str]
) -> list[list[list[int]]]:
    """The ways to spell each answer behind the text ``before``. At the start of a
    response, some models write a space and some do not; both count.
    """
    spaces = ["", " "] if not before else [" " if before.endswith(" ") else ""]
    by_space = [spelling.tokens([space + each for each in answers]) for space in spaces]
    ways = []
    owners: dict[tuple[int, ...], int] = {}
    for i, (answer, *each) in enumerate(zip(answers, *by_space, strict=True)):
        different = [list(tokens) for tokens in dict.fromkeys(map(tuple, each))]
        for tokens in different:
            if not tokens or not spelling.spells(tokens, answer):
                raise ValueError(
                    f"the tokens of this model do not spell the label {answer!r}; "
                    f"start the engine with decision_way=marks"
                )
            if owners.setdefault(tuple(tokens), i) != i:
                raise ValueError(
                    f"the labels {answers[owners[tuple(tokens)]]!r} and {answer!r} have "
                    f"the same tokens; start the engine with decision_way=marks"
                )
        ways.append(different)
    return ways
