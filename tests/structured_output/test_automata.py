import asyncio
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.sampling_params import StructuredOutputsParams

from dllm_engine.constraints.automaton import unpacked
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.structured_output import automata
from dllm_engine.structured_output.automata import (
    MOST_WAITING,
    built,
    take_counts,
    when_built,
)
from dllm_engine.structured_output.build import REFUSED, BuildInput, Grammar, build
from dllm_engine.structured_output.compiler import Vocabulary
from dllm_engine.structured_output.requests import (
    LONGEST_GRAMMAR,
    grammar_of,
    vocabulary_of,
)
from tests.support.automaton_walks import accepts
from tests.support.byte_level_tokenizers import NOTE, TALE, spelled, train_tokenizer
from tests.support.preloaded import Program, wait_until
from tests.support.processes import BUILDER, children_of

END = "<|end|>"
LIMITS: dict[str, Any] = {"max_states": 4096, "build_seconds": 30.0}


@pytest.fixture
def tokenizer():
    return train_tokenizer(TALE, 400, END)


def wanted_of(grammar: Grammar, tokenizer, vocab_size: int = 410, **limits):
    return BuildInput(grammar, vocabulary_of(tokenizer, vocab_size), **LIMITS | limits)


def automaton_of(*args, **limits):
    return unpacked(built(wanted_of(*args, **limits)))


@pytest.fixture
def asked():
    """``asked(grammar, tokenizer)``: the future of its automaton, for which a thread
    waits.
    """
    with ThreadPoolExecutor(64) as executor:
        yield lambda *args, **limits: executor.submit(automaton_of, *args, **limits)


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch):
    monkeypatch.setattr(automata, "_cache", automata._Cache())


@pytest.fixture
def in_process(monkeypatch):
    """Builds without a process, and what was built."""
    grammars = []

    def run(cache, asked) -> CompletedProcess[bytes]:
        wanted = pickle.loads(pickle.dumps(asked.wanted))
        grammars.append(wanted.grammar)
        try:
            return CompletedProcess([], 0, wanted.run())
        except ValueError as error:
            return CompletedProcess([], REFUSED, str(error).encode())

    monkeypatch.setattr(automata, "_run_apart", run)
    return grammars


@pytest.mark.parametrize(
    ("told", "grammar"),
    [
        ({"regex": "a*"}, Grammar("regex", "a*")),
        ({"choice": ["b", "a", "b"]}, Grammar("choice", '["b", "a"]')),
        ({"json": {"type": "null"}}, Grammar("json", '{"type": "null"}')),
        ({"json": ' {"type":"null"}'}, Grammar("json", '{"type": "null"}')),
        (
            {"json": {}, "disable_any_whitespace": True},
            Grammar("json", "{}", spaces=False),
        ),
        ({"json_object": True}, Grammar("json_object", "")),
    ],
)
def test_grammars(told, grammar):
    assert grammar_of(StructuredOutputsParams(**told)) == grammar


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"grammar": "root ::= 'a'"}, "structured_outputs.grammar: context-free"),
        (
            {"structural_tag": "{}"},
            "structured_outputs.structural_tag: structural tags",
        ),
        (
            {"regex": "a", "whitespace_pattern": " *"},
            "structured_outputs.whitespace_pattern: not",
        ),
        (
            {"json": {}, "disable_additional_properties": True},
            "set additionalProperties to false",
        ),
        ({"choice": []}, "structured_outputs.choice: the list is empty"),
        ({"json": "{"}, "structured_outputs.json: the schema is not JSON"),
        ({"json": {"a": {1}}}, "structured_outputs.json: the schema is not JSON"),
        ({"json": '{"items":' * 3000 + "{}" + "}" * 3000}, "structured_outputs.json: "),
        ({"json_object": False}, "structured_outputs.json_object: only true"),
    ],
)
def test_refused(told, named):
    with pytest.raises(InvalidRequestError, match=re.escape(named)):
        grammar_of(StructuredOutputsParams(**told))


@pytest.mark.parametrize(
    ("kind", "of_length"),
    [
        ("regex", lambda length: "a" * length),
        ("choice", lambda length: ["b" * (length - 4)]),
        ("choice", lambda length: ["", *(f"{i:04}" for i in range((length - 4) // 8))]),
        ("json", lambda length: {"enum": ["c" * (length - 14)]}),
        ("json", lambda length: '{"enum": ["' + "c" * (length - 14) + '"]}'),
    ],
)
def test_grammars_are_limited_by_their_length_and_not_read(
    kind, of_length, monkeypatch
):
    monkeypatch.setattr(
        Grammar, "expression", property(lambda grammar: pytest.fail("it was read"))
    )
    assert (
        grammar_of(StructuredOutputsParams(**{kind: of_length(LONGEST_GRAMMAR)})).kind
        == kind
    )
    with pytest.raises(
        InvalidRequestError,
        match=f"structured_outputs.{kind}: .* more than the {LONGEST_GRAMMAR} ",
    ):
        grammar_of(StructuredOutputsParams(**{kind: of_length(LONGEST_GRAMMAR + 16)}))


@pytest.mark.parametrize(
    ("told", "named"),
    [
        (
            {"regex": "(a"},
            "structured_outputs.regex: '(a' is not a regex that Python can read: "
            "missing )",
        ),
        (
            {"regex": "(?=a)" + "b" * 9000},
            "structured_outputs.regex: look-around in the regex '(?=a)bbb",
        ),
        (
            {"regex": "c" * 9000 + "(a"},
            "is not a regex that Python can read: missing )",
        ),
        ({"json": {"not": {}}}, "structured_outputs.json: #: the keyword 'not'"),
        (
            {"json": {"type": "integer", "maximum": 10**3000}},
            "structured_outputs.json: the schema is nested too deeply",
        ),
        (
            {"json": {"enum": []}},
            "structured_outputs.json: the tokens of this model spell no text that "
            "matches",
        ),
    ],
)
def test_constructs_that_are_not_supported_are_named_where_the_automaton_is_built(
    tokenizer, in_process, told, named
):
    with pytest.raises(InvalidRequestError, match=re.escape(named)) as refused:
        automaton_of(grammar_of(StructuredOutputsParams(**told)), tokenizer)
    assert len(str(refused.value)) < 700


def test_bytes_of_a_byte_level_tokenizer(tokenizer):
    vocabulary = vocabulary_of(
        tokenizer, 410
    )  # a model may predict more than its tokenizer has
    expected = spelled(tokenizer)
    assert [*map(vocabulary.spelling, range(410))] == [
        expected.get(number, b"") for number in range(410)
    ]
    assert tokenizer.eos_token_id not in expected


def metaspace(strip: bool) -> PreTrainedTokenizerFast:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "é"]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        [],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*parts, *([decoders.Strip(" ", 1, 0)] if strip else [])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_bytes_of_a_tokenizer_that_falls_back_to_bytes_and_tokenizers_that_are_refused():
    vocabulary = vocabulary_of(metaspace(strip=False), 261)
    assert vocabulary.token_bytes.tobytes() == bytes(range(256)) + "  abé".encode()
    with pytest.raises(InvalidRequestError, match="decodes tokens to other text"):
        vocabulary_of(metaspace(strip=True), 261)
    with pytest.raises(InvalidRequestError, match="without skip_tokenizer_init"):
        vocabulary_of(None, 10)
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}))
    words.decoder = decoders.WordPiece()
    with pytest.raises(InvalidRequestError, match="byte-level BPE is supported"):
        vocabulary_of(PreTrainedTokenizerFast(tokenizer_object=words), 3)


def test_automata_are_kept(tokenizer, in_process):
    grammar = Grammar("regex", "seven|herons")
    automaton = automaton_of(grammar, tokenizer)
    assert accepts(automaton, tokenizer.encode("herons"))
    assert automaton_of(grammar, tokenizer) is automaton
    assert automaton_of(grammar, train_tokenizer(TALE, 400, END)) is automaton
    counts = take_counts()
    assert len(in_process) == counts["automaton_builds"] == 1
    assert counts["automaton_build_seconds"] > 0
    automaton_of(Grammar("regex", "a"), tokenizer)
    automaton_of(grammar, train_tokenizer(NOTE, 400))
    automaton_of(grammar, tokenizer, 420)
    automaton_of(grammar, tokenizer, max_states=100)
    assert take_counts()["automaton_builds"] == 4


def test_the_least_used_are_let_go(tokenizer, in_process, monkeypatch):
    grammars = [Grammar("choice", f'["{letter}"]') for letter in "abc"]
    automaton_of(grammars[0], tokenizer)
    size = automata._cache.kept.currsize
    monkeypatch.setattr(automata, "_cache", automata._Cache(int(2.5 * size)))
    for i in (0, 1, 0, 2, 0, 1):  # a, b, a (kept), c (b goes), a, b again
        automaton_of(grammars[i], tokenizer)
    assert in_process[1:] == [grammars[0], grammars[1], grammars[2], grammars[1]]


def test_failures_are_told_and_not_kept(tokenizer, in_process):
    grammar = Grammar("regex", "a{200}")
    for _ in range(2):
        with pytest.raises(ValueError, match="max_automaton_states=100"):
            automaton_of(grammar, tokenizer, max_states=100)
    assert take_counts()["automaton_builds"] == 2
    automaton_of(grammar, tokenizer, max_states=400)


@pytest.fixture
def held(monkeypatch):
    """An event that lets builds go on, and the texts of the grammars that are built."""
    go_on, begun = threading.Event(), []

    def wait(cache, asked):
        begun.append(asked.wanted.grammar.text)
        assert go_on.wait(60)
        return asked.wanted.run()

    monkeypatch.setattr(automata, "_build_apart", wait)
    return go_on, begun


def test_requests_at_the_same_time_build_once_and_two_are_built_at_once(
    tokenizer, held, asked
):
    go_on, begun = held
    futures = [asked(Grammar("regex", text), tokenizer) for text in "aaabbc"]
    wait_until(
        lambda: len(begun) == automata._AT_ONCE and len(automata._cache.builds) == 3, 60
    )
    go_on.set()
    assert [
        accepts(future.result(60), tokenizer.encode("a")) for future in futures
    ] == [True] * 3 + [False] * 3
    assert sorted(begun) == ["a", "b", "c"]


def test_the_queue_of_builds_is_bounded(tokenizer, held, asked):
    most = automata._AT_ONCE + MOST_WAITING
    grammars = [Grammar("regex", f"a{number}") for number in range(most)]
    futures = [asked(grammar, tokenizer) for grammar in grammars]
    wait_until(lambda: len(automata._cache.builds) == most, 60)
    with pytest.raises(RetryableRequestError, match="32 requests wait"):
        automaton_of(Grammar("regex", "b"), tokenizer)
    futures.append(asked(grammars[7], tokenizer))
    held[0].set()
    assert all(future.result(60) for future in futures)
    assert take_counts()["automaton_builds"] == most


def test_a_build_that_nobody_waits_for_any_more_does_not_begin(tokenizer, held):
    """Of three that wait for their turn, one is left by its only client, another by one
    of two.
    """
    go_on, begun = held
    wanted = {text: wanted_of(Grammar("regex", text), tokenizer) for text in "abcde"}

    async def ask():
        clients = {
            name: asyncio.create_task(when_built(wanted[name[0]]))
            for name in ("a", "b", "c", "d", "e", "e2")
        }
        while (
            len(begun) < automata._AT_ONCE or clients["e2"] not in asyncio.all_tasks()
        ):
            await asyncio.sleep(0.01)
        clients["c"].cancel()
        clients["e"].cancel()
        await asyncio.wait([clients["c"], clients["e"]])
        assert wanted["c"] not in automata._cache.builds
        assert wanted["e"] in automata._cache.builds
        go_on.set()
        return await asyncio.gather(*(clients[name] for name in ("a", "b", "d", "e2")))

    assert all(asyncio.run(ask()))
    assert sorted(begun) == ["a", "b", "d", "e"]
    assert not automata._cache.builds


@pytest.mark.slow
def test_a_build_that_nobody_waits_for_any_more_ends_and_others_have_its_turn(
    tokenizer,
):
    endless = [
        Grammar("regex", f"(a|b)*a(a|b){{{number}}}") for number in range(25, 29)
    ]
    limits = {"max_states": 1 << 24, "build_seconds": 600}

    async def ask():
        clients = [
            asyncio.create_task(when_built(wanted_of(each, tokenizer, **limits)))
            for each in endless
        ]
        while len(builders()) < automata._AT_ONCE:
            await asyncio.sleep(0.01)
        for client in clients:
            client.cancel()
        async with asyncio.timeout(60):
            return await when_built(wanted_of(Grammar("regex", "a"), tokenizer))

    assert accepts(unpacked(asyncio.run(ask())), tokenizer.encode("a"))
    wait_until(lambda: not builders(), 60)


def builders():
    return children_of(psutil.Process(), BUILDER)


@pytest.mark.slow
def test_built_in_a_process_of_its_own(tokenizer):
    grammar = Grammar(
        "json",
        '{"properties": {"é": {"type": "integer"}}, "required": ["é"]}',
        spaces=False,
    )
    expected = build(BuildInput(grammar, vocabulary_of(tokenizer, 410), **LIMITS))
    assert automaton_of(grammar, tokenizer).packed == expected.packed
    with pytest.raises(
        InvalidRequestError,
        match=re.escape("structured_outputs.regex: its automaton has more states"),
    ):
        automaton_of(Grammar("regex", "(a|b)*a(a|b){25}"), tokenizer, max_states=64)
    with pytest.raises(InvalidRequestError, match="max_automaton_seconds=1 "):
        automaton_of(
            Grammar("regex", "(a|b)*a(a|b){25}"),
            tokenizer,
            max_states=1 << 24,
            build_seconds=1,
        )
    with pytest.raises(
        InvalidRequestError, match="the tokens of this model spell no text"
    ):
        automaton_of(Grammar("regex", "a"), metaspace(strip=False), 3)


@pytest.mark.slow
def test_a_build_that_fails_by_our_fault_is_no_bad_request():
    broken = Vocabulary([b"a"])
    broken.starts = np.array([0, 5])
    with pytest.raises(
        GenerationError, match="its automaton: building it failed"
    ) as error:
        built(BuildInput(Grammar("regex", "a"), broken, **LIMITS))
    assert error.type is GenerationError


@pytest.mark.slow
def test_a_building_process_that_is_killed_from_outside(tokenizer, asked):
    future = asked(
        Grammar("regex", "(a|b)*a(a|b){25}"),
        tokenizer,
        max_states=1 << 24,
        build_seconds=600,
    )
    wait_until(builders, 60)
    builders()[0].kill()
    assert type(future.exception(60)) is RetryableRequestError
    assert "ended from outside" in str(future.exception())


ENDS_DURING_A_BUILD = """
import asyncio
from types import SimpleNamespace
import psutil
from transformers import AutoTokenizer
from vllm.sampling_params import StructuredOutputsParams
from dllm_engine.demo import DEMO_MODEL_DIR
from dllm_engine.structured_output.requests import Constraints, ReasoningArguments

def builders():
    return [child.pid for child in psutil.Process().children() if any("output.build" in a for a in child.cmdline())]

async def main():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    hostile = StructuredOutputsParams(regex="(a|b)*a(a|b){25}")
    model_config = SimpleNamespace(hf_config=SimpleNamespace(vocab_size=len(tokenizer)))
    limits = {"max_automaton_states": 1 << 20, "max_automaton_seconds": 600}
    config = SimpleNamespace(additional_config=limits, model_config=model_config)
    build = asyncio.create_task(Constraints(hostile, ReasoningArguments(), tokenizer, config).prepare([]))
    while not builders():
        await asyncio.sleep(0.1)
    print(*builders(), flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow  # a program ends
def test_a_build_does_not_hold_up_the_end_of_the_program(tmp_path):
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(ENDS_DURING_A_BUILD)
    with log.open("wb") as output:
        assert Program([program], stdout=output).wait(120) == 0
    (builder,) = map(int, log.read_text().splitlines()[-1].split())
    wait_until(lambda: not psutil.pid_exists(builder), 60)
