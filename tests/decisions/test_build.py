"""Building decisions: in which order limits are compared, and that the server answers
others meanwhile.
"""

import json
import re

import pytest
from tokenizers import Tokenizer

from dllm_engine.decisions import build
from dllm_engine.decisions.build import DecisionInput, build_decision
from dllm_engine.decisions.requests import schema_of
from dllm_engine.structured_output.build import build as build_automaton
from dllm_engine.structured_output.compiler import Vocabulary
from dllm_engine.structured_output.requests import serialized_tokenizer
from tests.support.byte_level_tokenizers import TALE, spelled, train_tokenizer
from tests.support.http_app import answered_meanwhile

PROMPT = "User: Tom=48. Ida=07. Give: Ida, Tom\nBot:"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TALE, 400)


@pytest.fixture
def tokenized(monkeypatch):
    """The number of texts in each call of the tokenizer."""
    calls = []

    class Counting:
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        @classmethod
        def from_str(cls, text):
            return cls(real.from_str(text))

        def __getattr__(self, name):
            return getattr(self.tokenizer, name)

        def encode_batch(self, texts, **options):
            calls.append(len(texts))
            return self.tokenizer.encode_batch(texts, **options)

    real = Tokenizer
    monkeypatch.setattr(build, "Tokenizer", Counting)
    return calls


def wanted_of(fields, tokenizer, **limits):
    vocabulary = Vocabulary(
        [spelled(tokenizer).get(number, b"") for number in range(400)]
    )
    limits = {
        "max_model_len": 4096,
        "max_states": 4096,
        "build_seconds": 10.0,
        "max_search": 1 << 24,
    } | limits
    return DecisionInput(
        json.dumps(schema_of(fields)),
        None,
        limits.pop("top_k", 5),
        vocabulary=vocabulary,
        tokenizer=serialized_tokenizer(tokenizer),
        **limits,
    )


def test_choices_are_tokenized_together(tokenizer, tokenized):
    decision = build_decision(wanted_of({"n": range(500), "is_old": bool}, tokenizer))
    assert decision.values == [range(500), [True, False]]
    assert sorted(tokenized) == [1, 1, 1, 2, 500]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (
            {"max_model_len": 256},
            r"text needs \d+ tokens or more, max_model_len is 256",
        ),
        ({"max_search": 1 << 21}, "too many of their .* max_automaton_search=2097152"),
    ],
)
def test_building_stops_at_the_first_field_that_is_too_much(
    tokenizer, tokenized, limit, message
):
    fields = {f"f{number}": range(number, number + 1024) for number in range(40)}
    with pytest.raises(ValueError, match=f"^fields: .*{message}"):
        build_decision(wanted_of(fields, tokenizer, **limit))
    assert 0 < sum(tokenized) < 38 * 1024


def test_fields_of_one_pattern_share_its_automaton(tokenizer, monkeypatch):
    built = []
    monkeypatch.setattr(
        build,
        "build",
        lambda wanted: built.append(wanted.grammar.text) or build_automaton(wanted),
    )
    decision = build_decision(
        wanted_of({name: re.compile("[a-c]{1,2}") for name in "abc"}, tokenizer)
    )
    assert decision.values == [None] * 3
    assert len(built) == 1


def test_a_search_for_many_values_is_within_the_limit(tokenizer):
    """More beginnings than are needed, as far as there is time for them."""
    fields = {f"f{number}": re.compile("[a-c]{1,3}") for number in range(60)}
    kept = [
        build_decision(wanted_of(fields, tokenizer, top_k=top_k)).beginnings
        for top_k in (5, 100)
    ]
    assert kept[0] == 4 * (5 + 16)
    assert 100 < kept[1] < 4 * (100 + 16)
    with pytest.raises(
        ValueError,
        match=r"^top_k=100: .* max_automaton_search=4194304; lower top_k to \d+,",
    ) as refusal:
        build_decision(wanted_of(fields, tokenizer, top_k=100, max_search=1 << 22))
    allowed = int(re.search(r"lower top_k to (\d+)", str(refusal.value))[1])
    build_decision(wanted_of(fields, tokenizer, top_k=allowed, max_search=1 << 22))
    with pytest.raises(ValueError, match="top_k=0: ask for 1"):
        build_decision(wanted_of(fields, tokenizer, top_k=0))
    assert (
        build_decision(wanted_of({"n": range(9)}, tokenizer, top_k=100)).beginnings == 0
    )


def test_others_are_served_while_a_decision_is_built(client, monkeypatch):
    """One that ``response_format`` and ``logprobs`` ask for, by the way that
    ``/v1/decisions`` takes.
    """
    schema = schema_of({"Ida": ["07", "48", "99"]})
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": schema},
    }
    slow = {"prompt": PROMPT, "logprobs": 1, "response_format": wanted}
    decided, plain = answered_meanwhile(
        client,
        slow,
        {"prompt": PROMPT, "max_tokens": 16},
        "dllm_engine.structured_output.automata._build_apart",
        monkeypatch,
    )
    assert plain.json()["choices"][0]["text"] == " Ida=07, Tom=48"
    assert decided.json()["choices"][0]["diffusion"]["decision"]["Ida"]["value"] in (
        "07",
        "48",
        "99",
    )
