import itertools
import re
import threading
from dataclasses import replace

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import StructuredOutputsParams

from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.structured_output import automata
from dllm_engine.structured_output.automata import automaton_of, take_counts
from dllm_engine.structured_output.build import Grammar, Limits, build
from dllm_engine.structured_output.grammar import grammar_of
from dllm_engine.structured_output.vocabulary import Vocabulary, vocabulary_of
from tests.support.automaton_walks import accepts, laid_out
from tests.support.byte_level_tokenizers import NOTE, TALE, spelled, train_tokenizer
from tests.support.preloaded import Program, wait_until

END = "<|end|>"
LIMITS = Limits(4096, 30.0)


@pytest.fixture
def tokenizer():
    return train_tokenizer(TALE, 400, END)


@pytest.fixture
def in_process(monkeypatch):
    """Builds without a process, and what was built."""
    built = []

    def record(_: object, grammar: Grammar, vocabulary: Vocabulary, limits: Limits):
        built.append(grammar)
        return build(grammar, limits, vocabulary.token_bytes, vocabulary.starts)

    monkeypatch.setattr(automata, "_build_apart", record)
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
        assert automaton_of(*other) is not automaton
    counts = take_counts()
    assert (counts["automaton_builds"], counts["automaton_cache_hits"]) == (4, 0)


def test_the_least_used_are_let_go(tokenizer, in_process, monkeypatch):
    grammars = [Grammar("choice", f'["{letter}"]') for letter in "abc"]
    size = automata._size(automaton_of(grammars[0], tokenizer, 410, LIMITS))
    monkeypatch.setattr(automata, "_KEPT_BYTES", int(2.5 * size))
    for i in (1, 0, 2, 0, 1):  # b, a (kept), c (b goes), a, b again
        automaton_of(grammars[i], tokenizer, 410, LIMITS)
    assert in_process == [grammars[0], grammars[1], grammars[2], grammars[1]]


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


@pytest.mark.slow
def test_built_in_a_process_of_its_own(tokenizer, monkeypatch):
    monkeypatch.setattr(automata, "_cache", automata._Cache())
    grammar = Grammar("json", '{"properties": {"é": {"type": "integer"}}, "required": ["é"]}', spaces=False)
    automaton = automaton_of(grammar, tokenizer, 410, LIMITS)
    vocabulary = vocabulary_of(tokenizer, 410)
    expected = build(grammar, LIMITS, vocabulary.token_bytes, vocabulary.starts)
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
    broken = Vocabulary(*laid_out([b"a"])[:1], np.array([0, 5]))
    with pytest.raises(RuntimeError, match="building an automaton failed"):
        automata._cache.automaton(Grammar("regex", "a"), broken, LIMITS)


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
