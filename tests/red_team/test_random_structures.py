"""Random regexes and JSON schemas, decoded in every way: each answer matches.

``--red-team N`` draws N times as many, for every cache method.
"""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from vllm.sampling_params import StructuredOutputsParams

from dllm_engine import DiffusionParams
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.structured_output import automata
from tests.structured_output.test_json import schemas
from tests.structured_output.test_regexes import patterns
from tests.support.engines import assert_nothing_left, generate
from tests.support.plans import FULL_METHODS

pytestmark = pytest.mark.slow

PROMPT = "User: Tom=48. Ida=07. Give: Ida, Tom\nBot:"
BATCH = 8
WAYS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.7, "top_k": 5},
    {"threshold": 0.6},
    {"factor": 2.0, "block_add_threshold": 0.25},
    {"entropy_bound": 0.5, "unmasking": "entropy"},
    {"steps": 24, "unmasking": "random"},
    {"threshold": 0.5, "early_stop": True},
    {"delay_eos": True},
    {"slow_fast": {"span_steps": 2, "fast_threshold": 0.4}},
    {"tokens_per_step": 3},
]
GRAMMARS = st.one_of(
    patterns().map(lambda pattern: ("regex", pattern)),
    schemas().map(lambda drawn: ("json", json.dumps(drawn[0]))),
    st.lists(st.text("abé {", max_size=6), min_size=1, max_size=4).map(
        lambda texts: ("choice", texts)
    ),
)


def matches(kind: str, grammar, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(grammar, text) is not None
    if kind == "choice":
        return text in grammar
    return Draft202012Validator(json.loads(grammar)).is_valid(json.loads(text))


@pytest.fixture
def admitted(monkeypatch):
    """``admitted(llm, params)``: whether the engine takes such a request. Builds
    without a process.
    """

    def build_here(cache, asked):
        try:
            return asked.wanted.run()
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None

    def is_admitted(llm, params) -> bool:
        prompt = {"prompt_token_ids": [1], "type": "token"}
        try:
            llm.llm_engine.input_processor.process_inputs(
                "x", prompt, params, ("generate",)
            )
        except InvalidRequestError as error:
            return not re.search(
                "too short|more states|max_automaton_search|spell no "
                "text|unmasking|suit",
                str(error),
            )
        return True

    monkeypatch.setattr(automata, "_build_apart", build_here)
    return is_admitted


def test_every_answer_matches(engines, request, admitted):
    times = request.config.getoption("--red-team")
    for method in FULL_METHODS if times > 1 else ("none", "dual", "sparse", "es_dllm"):
        llm = engines.shared("demo", cache_method=method, skip_tokenizer_init=False)
        assert answers_that_match(llm, admitted, 2 * times) > BATCH, method
        assert_nothing_left(llm)


def test_every_answer_behind_reasoning_matches(engines, request, admitted):
    for method in ("none", "dual"):
        settings = {"reasoning_parser": "qwen3"}
        llm = engines(
            "demo",
            cache_method=method,
            skip_tokenizer_init=False,
            structured_outputs_config=settings,
        )
        assert (
            answers_that_match(
                llm, admitted, request.config.getoption("--red-team"), "</think>"
            )
            > BATCH / 2
        )
        assert_nothing_left(llm)


def answers_that_match(llm, admitted, max_examples: int, marker: str = "") -> int:
    """How many there were; all others fail. ``marker``: what ends the reasoning before
    an answer.
    """
    tokenizer, found = llm.get_tokenizer(), []

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(
            st.tuples(GRAMMARS, st.sampled_from(WAYS)), min_size=BATCH, max_size=BATCH
        ),
        st.integers(0, 1 << 30),
    )
    def ask(drawn, seed):
        cases = []
        for (kind, grammar), way in drawn:
            asked = StructuredOutputsParams(**{kind: grammar})
            params = DiffusionParams(
                structured_outputs=asked,
                **way,
                gen_length=96,
                block_length=32,
                seed=seed,
            )
            cases += [(kind, grammar, params)] if admitted(llm, params) else []
        prompts = [tokenizer.encode(PROMPT)] * len(cases)
        for (kind, grammar, params), output in zip(
            cases, generate(llm, prompts, [c[2] for c in cases]), strict=True
        ):
            (completion,) = output.outputs
            text = completion.text.partition(marker)[2] if marker else completion.text
            assert matches(kind, grammar, text), (
                kind,
                grammar,
                params,
                completion.text,
            )
            assert completion.finish_reason == "stop"
            found.append(completion.text)

    ask()
    return len(found)
