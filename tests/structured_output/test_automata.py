import asyncio
import itertools
import pickle
import re
import threading
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output import automata, requests
from dllm_engine.structured_output.automata import MOST_WAITING, awaited_automaton, take_counts
from dllm_engine.structured_output.build import REFUSED, BuildInput, Grammar, Limits, build
from dllm_engine.structured_output.lifting import Vocabulary
from dllm_engine.structured_output.requests import LONGEST_GRAMMAR, grammar_of
from dllm_engine.structured_output.vocabulary import vocabulary_of
from tests.support.automaton_walks import accepts
from tests.support.byte_level_tokenizers import NOTE, TALE, spelled, train_tokenizer
from tests.support.preloaded import Program, wait_until

END = "<|end|>"
LIMITS = Limits(4096, 30.0)


@pytest.fixture
def tokenizer():
    return train_tokenizer(TALE, 400, END)


def automaton_of(grammar: Grammar, tokenizer, vocab_size: int = 410, limits: Limits = LIMITS):
    with awaited_automaton(BuildInput(grammar, vocabulary_of(tokenizer, vocab_size), limits)) as future:
        return future.result()


@pytest.fixture
def in_process(monkeypatch):
    """Builds without a process, and what was built."""
    built = []

    def run(_: object, sent: bytes) -> tuple[int, bytes, bytes]:
        wanted = pickle.loads(sent)
        built.append(wanted.grammar)
        try:
            return 0, build(wanted).packed, b""
        except ValueError as error:
            return REFUSED, str(error).encode(), b""

    monkeypatch.setattr(automata, "_run_apart", run)
    monkeypatch.setattr(automata, "_cache", automata._Cache())
    return built


@pytest.mark.parametrize(
    ("told", "grammar"),
    [
        ({"regex": "a*"}, Grammar("regex", "a*")),
        ({"choice": ["b", "a", "b"]}, Grammar("choice", '["b", "a"]')),
        ({"json": {"type": "null"}}, Grammar("json", '{"type": "null"}')),
        ({"json": ' {"type":"null"}'}, Grammar("json", '{"type": "null"}')),
        ({"json": {}, "disable_any_whitespace": True}, Grammar("json", "{}", spaces=False)),
        ({"json_object": True}, Grammar("json_object", "")),
    ],
)
def test_grammars(told, grammar):
    assert grammar_of(StructuredOutputsParams(**told)) == grammar


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"grammar": "root ::= 'a'"}, "structured_outputs.grammar: context-free"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag: structural tags"),
        ({"regex": "a", "whitespace_pattern": " *"}, "structured_outputs.whitespace_pattern: not"),
        ({"json": {}, "disable_additional_properties": True}, "set additionalProperties to false"),
        ({"choice": []}, "structured_outputs.choice: the list is empty"),
        ({"regex": "\ud800"}, "a lone surrogate"),
        ({"json": "{"}, "structured_outputs.json: the schema is no JSON"),
        ({"json": {"a": {1}}}, "structured_outputs.json: the schema is no JSON"),
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
def test_grammars_are_limited_by_their_length_and_not_read(kind, of_length, monkeypatch):
    monkeypatch.setattr(Grammar, "expression", property(lambda grammar: pytest.fail("it was read")))
    assert grammar_of(StructuredOutputsParams(**{kind: of_length(LONGEST_GRAMMAR)})).kind == kind
    with pytest.raises(InvalidRequestError, match=f"structured_outputs.{kind}: .* more than the {LONGEST_GRAMMAR} "):
        grammar_of(StructuredOutputsParams(**{kind: of_length(LONGEST_GRAMMAR + 16)}))


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"regex": "(a"}, "structured_outputs.regex: '(a' is not a regex that Python can read: missing )"),
        ({"regex": "(?=a)" + "b" * 9000}, "structured_outputs.regex: look-around in the regex '(?=a)bbb"),
        ({"regex": "c" * 9000 + "(a"}, "is not a regex that Python can read: missing )"),
        ({"json": {"not": {}}}, "structured_outputs.json: #: the keyword 'not'"),
        (
            {"json": {"type": "integer", "maximum": 10**3000}},
            "json: #: a bound of an integer may have",
        ),
        ({"json": {"enum": []}}, "structured_outputs.json: #/enum: [] is no list with an entry"),
    ],
)
def test_constructs_that_are_not_supported_are_named_where_the_automaton_is_built(tokenizer, in_process, told, named):
    with pytest.raises(InvalidRequestError, match=re.escape(named)) as refused:
        automaton_of(grammar_of(StructuredOutputsParams(**told)), tokenizer, 410, LIMITS)
    assert len(str(refused.value)) < 700


def test_bytes_of_a_byte_level_tokenizer(tokenizer):
    vocabulary = vocabulary_of(tokenizer, 410)  # a model may predict more than its tokenizer has
    expected = spelled(tokenizer)
    starts = vocabulary.starts.tolist()
    found = [vocabulary.token_bytes[a:b].tobytes() for a, b in itertools.pairwise(starts)]
    assert found == [expected.get(number, b"") for number in range(410)]
    assert found[tokenizer.eos_token_id] == b""


def metaspace(strip: bool) -> PreTrainedTokenizerFast:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "é"]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strip else [])])
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
    grammar, limits = Grammar("regex", "seven|herons"), LIMITS
    automaton = automaton_of(grammar, tokenizer, 410, limits)
    assert accepts(automaton, tokenizer.encode("herons"))
    assert automaton_of(grammar, tokenizer, 410, limits) is automaton
    assert automaton_of(grammar, train_tokenizer(TALE, 400, END), 410, limits) is automaton
    counts = take_counts()
    assert len(in_process) == counts["automaton_builds"] == 1
    assert counts["automaton_cache_hits"] == 2
    assert counts["automaton_build_seconds"] > 0
    others = [(Grammar("regex", "a"), tokenizer, 410, limits), (grammar, train_tokenizer(NOTE, 400), 410, limits)]
    others += [(grammar, tokenizer, 420, limits), (grammar, tokenizer, 410, replace(LIMITS, max_states=100))]
    for other in others:
        automaton_of(*other)
    counts = take_counts()
    assert (counts["automaton_builds"], counts["automaton_cache_hits"]) == (4, 0)


def test_the_least_used_are_let_go(tokenizer, in_process, monkeypatch):
    grammars = [Grammar("choice", f'["{letter}"]') for letter in "abc"]
    automaton_of(grammars[0], tokenizer)
    size = automata._cache.kept.currsize
    monkeypatch.setattr(automata, "_cache", automata._Cache(int(2.5 * size)))
    for i in (0, 1, 0, 2, 0, 1):  # a, b, a (kept), c (b goes), a, b again
        automaton_of(grammars[i], tokenizer, 410, LIMITS)
    assert in_process[1:] == [grammars[0], grammars[1], grammars[2], grammars[1]]


def test_failures_are_told_and_not_kept(tokenizer, in_process):
    grammar = Grammar("regex", "a{200}")
    for _ in range(2):
        with pytest.raises(ValueError, match="max_automaton_states=100"):
            automaton_of(grammar, tokenizer, 410, replace(LIMITS, max_states=100))
    assert take_counts()["automaton_builds"] == 2
    automaton_of(grammar, tokenizer, 410, replace(LIMITS, max_states=400))


def test_requests_at_the_same_time_build_once(tokenizer, monkeypatch, in_process):
    go_on, started, found = threading.Event(), threading.Event(), []
    build_now = automata._build_apart

    def wait(*arguments):
        started.set()
        assert go_on.wait(60)
        return build_now(*arguments)

    monkeypatch.setattr(automata, "_build_apart", wait)
    ask = lambda: found.append(automaton_of(Grammar("regex", "a"), tokenizer, 410, LIMITS))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(4)]
    threads[0].start()
    assert started.wait(60)
    for thread in threads[1:]:
        thread.start()
    while automata._cache.counts["automaton_cache_hits"] < 3:
        go_on.wait(0.01)
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == len(in_process) == 1


class Held:
    """Builds that go on when a test says so, or end when they are stopped."""

    def __init__(self, monkeypatch):
        self.begun, self.ended, self.go_on = [], [], threading.Event()
        monkeypatch.setattr(automata, "_cache", automata._Cache())
        monkeypatch.setattr(automata, "_build_apart", self.build)

    def build(self, build_: object, wanted: BuildInput):
        self.begun.append(wanted.grammar.text)
        while not self.go_on.wait(0.01) and not build_.future.done():
            pass
        self.ended.append(wanted.grammar.text)
        return build(wanted)


def test_builds_that_nobody_waits_for_end_and_hold_up_no_other(tokenizer, monkeypatch):
    held, vocabulary = Held(monkeypatch), vocabulary_of(tokenizer, 410)
    with ExitStack() as calls:
        for number in range(24):
            calls.enter_context(awaited_automaton(BuildInput(Grammar("regex", f"a{number}"), vocabulary, LIMITS)))
        again = calls.enter_context(awaited_automaton(BuildInput(Grammar("regex", "a0"), vocabulary, LIMITS)))
        wait_until(lambda: len(held.begun) == automata._AT_ONCE, 60)
    with awaited_automaton(BuildInput(Grammar("regex", "b"), vocabulary, LIMITS)) as future:
        wait_until(lambda: "b" in held.begun, 60)
        held.go_on.set()
        assert future.result(60)
    assert sorted(held.begun) == ["a0", "a1", "b"]
    assert sorted(held.ended) == ["a0", "a1", "b"]
    assert list(automata._cache.kept) == [BuildInput(Grammar("regex", "b"), vocabulary, LIMITS)]
    assert not automata._cache.builds
    assert isinstance(again.exception(60), RuntimeError)


def test_a_build_goes_on_while_somebody_waits_for_it(tokenizer, monkeypatch):
    held, vocabulary, grammar = Held(monkeypatch), vocabulary_of(tokenizer, 410), Grammar("regex", "a")
    with awaited_automaton(BuildInput(grammar, vocabulary, LIMITS)) as future:
        with awaited_automaton(BuildInput(grammar, vocabulary, LIMITS)) as other:
            assert other is future
        held.go_on.set()
        assert accepts(future.result(60), tokenizer.encode("a"))


def test_the_queue_of_builds_is_bounded(tokenizer, monkeypatch):
    held, vocabulary = Held(monkeypatch), vocabulary_of(tokenizer, 410)
    with ExitStack() as calls:
        for number in range(automata._AT_ONCE + MOST_WAITING):
            calls.enter_context(awaited_automaton(BuildInput(Grammar("regex", f"a{number}"), vocabulary, LIMITS)))
        for grammar, is_refused in ((Grammar("regex", "b"), True), (Grammar("regex", "a7"), False)):
            with pytest.raises(RetryableRequestError, match="32 requests wait") if is_refused else nullcontext():
                calls.enter_context(awaited_automaton(BuildInput(grammar, vocabulary, LIMITS)))
        assert len(automata._cache.builds) == automata._AT_ONCE + MOST_WAITING
        held.go_on.set()


def test_an_engine_that_dies_ends_the_waiting(demo, monkeypatch):
    held, config = Held(monkeypatch), demo.llm_engine.vllm_config
    structured = StructuredOutputsParams(regex="waiting")

    async def ask():
        asked = [asyncio.create_task(requests.prepare(structured, demo.get_tokenizer(), config)) for _ in range(2)]
        while not held.begun:
            await asyncio.sleep(0.01)
        automata.stop_builds(EngineDeadError())
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [type(error) for error in asyncio.run(ask())] == [EngineDeadError] * 2
    wait_until(lambda: held.ended == ["waiting"], 60)


@pytest.mark.slow
def test_built_in_a_process_of_its_own(tokenizer, monkeypatch):
    monkeypatch.setattr(automata, "_cache", automata._Cache())
    grammar = Grammar("json", '{"properties": {"é": {"type": "integer"}}, "required": ["é"]}', spaces=False)
    automaton = automaton_of(grammar, tokenizer, 410, LIMITS)
    expected = build(BuildInput(grammar, vocabulary_of(tokenizer, 410), LIMITS))
    assert automaton.digest == expected.digest
    with pytest.raises(InvalidRequestError, match=re.escape("structured_outputs.regex: its automaton has more states")):
        automaton_of(Grammar("regex", "(a|b)*a(a|b){25}"), tokenizer, 410, replace(LIMITS, max_states=64))
    with pytest.raises(InvalidRequestError, match="max_automaton_seconds=1 "):
        automaton_of(Grammar("regex", "(a|b)*a(a|b){25}"), tokenizer, 410, Limits(1 << 24, build_seconds=1))
    with pytest.raises(InvalidRequestError, match="the tokens of this model spell no text"):
        automaton_of(Grammar("regex", "a"), metaspace(strip=False), 3, LIMITS)


@pytest.mark.slow
def test_a_build_that_fails_by_our_fault_is_no_bad_request(monkeypatch):
    monkeypatch.setattr(automata, "_cache", automata._Cache())
    broken = Vocabulary(np.frombuffer(b"a", np.uint8), np.array([0, 5]))
    with awaited_automaton(BuildInput(Grammar("regex", "a"), broken, LIMITS)) as future:
        assert type(future.exception(60)) is GenerationError
        assert "building its automaton failed" in str(future.exception())


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed from outside", "no longer waited for"])
def test_a_building_process_ends(tokenizer, monkeypatch, is_killed):
    monkeypatch.setattr(automata, "_cache", automata._Cache())
    hostile, vocabulary = Grammar("regex", "(a|b)*a(a|b){25}"), vocabulary_of(tokenizer, 410)

    def builders():
        return [child for child in psutil.Process().children() if any("output.build" in a for a in child.cmdline())]

    with awaited_automaton(BuildInput(hostile, vocabulary, Limits(1 << 24, 600))) as future:
        wait_until(builders, 60)
        if is_killed:
            builders()[0].kill()
            assert type(future.exception(60)) is RetryableRequestError
            assert "ended from outside" in str(future.exception())
    wait_until(lambda: not builders(), 60)


ENDS_DURING_A_BUILD = """
import asyncio
from types import SimpleNamespace
import psutil
from transformers import AutoTokenizer
from vllm.sampling_params import StructuredOutputsParams
from dllm_engine.demo import DEMO_MODEL_DIR
from dllm_engine.structured_output.requests import prepare

def builders():
    return [child.pid for child in psutil.Process().children() if any("output.build" in a for a in child.cmdline())]

async def main():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    hostile = StructuredOutputsParams(regex="(a|b)*a(a|b){25}")
    model_config = SimpleNamespace(hf_config=SimpleNamespace(vocab_size=len(tokenizer)))
    limits = {"max_automaton_states": 1 << 20, "max_automaton_seconds": 600}
    config = SimpleNamespace(additional_config=limits, model_config=model_config)
    build = asyncio.create_task(prepare(hostile, tokenizer, config))
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
