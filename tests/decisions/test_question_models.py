"""Probabilities of questions against the enumeration of all answers with a plain
forward pass.
"""

import random
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dllm_engine import DiffusionParams, Questions
from dllm_engine.constraints.decision import unpacked_decision
from dllm_engine.decisions.answering import as_messages
from dllm_engine.decisions.asking import Asking
from dllm_engine.decisions.build import choice_decision
from dllm_engine.demo import model_path
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.sampling_params import DECISION
from tests.oracles.decisions import decide, logprobs_of
from tests.oracles.models import PlainModel
from tests.support import tiny_checkpoints
from tests.support.engines import (
    EACH_METHOD_WITH_A_MODEL,
    assert_nothing_left,
    generate,
)
from tests.support.random_decisions import decision_params, listed
from tests.support.tiny_checkpoints import EOS

TEXT = "Tom lives in Paris. Ida lives in Rome. Tom=48. Ida=07."
QUESTIONS: list[dict[str, Any]] = [
    {
        "type": "choice",
        "instructions": "Where does Tom live?",
        "choices": [{"value": city} for city in ("Paris", "Rome", "Rome Oslo", "Lima")],
    },
    {"type": "predicate", "instructions": "Tom lives in Rome."},
    {
        "type": "score",
        "instructions": "Give: Ida",
        "levels": [{"label": "07"}, {"label": "48", "description": "high"}],
    },
]


def spelled_in_two_ways(rng):
    """Options with two spellings each, none of which two options share."""
    numbers = rng.sample(range(20, 60), 24)
    options = []
    for _ in range(4):
        lengths = rng.randint(1, 2), rng.randint(1, 3)
        options.append([[numbers.pop() for _ in range(length)] for length in lengths])
    return options


@pytest.mark.parametrize(
    ("checkpoint", "method"),
    [
        ("tiny_llada", "none"),
        ("tiny_dream", "none"),
        *((checkpoint, method) for method, checkpoint in EACH_METHOD_WITH_A_MODEL),
        *product(("tiny_sdar", "tiny_dream_reasoner"), ("none", "block", "focus")),
    ],
)
def test_options_with_several_spellings(engines, request, checkpoint, method):
    """Alone, and beside requests for which the cache method keeps what it computes."""
    path = request.getfixturevalue(checkpoint)
    model = PlainModel(path)
    llm = engines(path, cache_method=method)
    rng = random.Random(checkpoint)
    fields = [[spelled_in_two_ways(rng) for _ in range(n)] for n in (1, 1, 2)]
    literals = [[[], [EOS]], [[61], [EOS]], [[61], [62, 63], [EOS]]]
    decisions = [
        unpacked_decision(choice_decision(before, options, 1 << 20).packed)
        for before, options in zip(literals, fields, strict=True)
    ]
    prompts = [[rng.randrange(60, 140) for _ in range(9)] for _ in decisions]
    params = [DiffusionParams(**decision_params(each)) for each in decisions]
    others = [
        DiffusionParams(gen_length=24, steps=12, block_length=8, ignore_eos=True)
    ] * 2
    alone = [
        generate(llm, [prompt], [each])[0]
        for prompt, each in zip(prompts, params, strict=True)
    ]
    beside = generate(llm, [[70], *prompts, [80, 90]], [others[0], *params, others[1]])
    assert_nothing_left(llm)
    for i, (decision, options, before) in enumerate(
        zip(decisions, fields, literals, strict=True)
    ):
        plain = plain_decision(model, prompts[i], decision, options, before, EOS)
        for output in (alone[i], beside[i + 1]):
            answers = output.outputs[0].diffusion.decision
            for name, own in answers.items():
                assert listed(own) == pytest.approx(plain.probabilities[name], abs=1e-4)
            if len(answers) == 1:
                assert own["label_mass"] == pytest.approx(plain.mass, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "settings", "most_rest"),
    [
        # A block may begin in the text, and another one ends behind the answer.
        ("demo-blocks", {}, 2 * 7),
        ("demo", {"share_prompts": True, "cache_method": "dual"}, 0),
    ],
)
def test_the_text_is_read_once_for_all_questions(engines, model, settings, most_rest):
    """Also what the text fills of its last page, with pages of the default size."""
    llm = engines(model, skip_tokenizer_init=False, max_model_len=2048, **settings)
    questions = [
        {"type": "predicate", "instructions": f"{number} is known of someone else"}
        for number in range(100)
    ]
    text = " ".join(f"Tom={number}." for number in range(97))
    rows = llm.asking.rows(as_messages(text), Questions(questions).read)
    length = len(llm.get_tokenizer().encode(text))
    assert length % 32 > 16
    llm.reset_prefix_cache()
    outputs = llm.ask_rows(rows)
    asked = sum(
        len(output.prompt_token_ids) - length + row.params.max_tokens
        for output, row in zip(outputs, rows, strict=True)
    )
    computed = sum(each.outputs[0].diffusion.tokens_computed for each in outputs)
    assert computed <= length + asked + 100 * most_rest
    assert computed <= 1.2 * (length + asked)
    assert_nothing_left(llm)


def plain_decision(model, prompt, decision, options, literals, end):
    fields: dict[str, Any] = {
        str(number): [(i, tokens) for i, each in enumerate(own) for tokens in each]
        for number, own in enumerate(options)
    }
    logprobs = logprobs_of(model, prompt, decision.template)
    return decide(fields, literals, logprobs, [end])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Folders of models: the demos', and of random weights with the demo's words."""

    def folder(model):
        if model.startswith("demo"):
            return Path(model_path(model))
        path = tmp_path_factory.getbasetemp() / f"words-{model}"
        if not path.exists():
            tiny_checkpoints.write(
                *(model, path),
                vocab_size=512,
                max_position_embeddings=512,
                mask_token_id=2,
                eos_token_id=1,
            )
            for name in ("tokenizer*", "decision*"):
                for file in Path(model_path("demo")).glob(name):
                    shutil.copy(file, path)
        return path

    return folder


@pytest.mark.parametrize("model", ["demo", "demo-blocks", "dream", "dream_reasoner"])
@pytest.mark.parametrize("way", ["marks", "labels"])
@pytest.mark.parametrize("joint", [False, True])
def test_both_ways_of_asking(engines, folder_of, model, way, joint):
    """Each row is the prompt of the template, and its answers are spelled as the
    tokenizer does, with a space before them and without.
    """
    folder = folder_of(model)
    llm = engines(folder, skip_tokenizer_init=False, decision_way=way)
    (answers,) = llm.decide(TEXT, Questions(QUESTIONS, joint))
    plain = PlainModel(folder)
    tokenizer = llm.get_tokenizer()
    config = llm.llm_engine.vllm_config
    asking = Asking(
        EngineOptions.from_vllm_config(config), llm.model_config.model, tokenizer
    )
    questions = Questions(QUESTIONS).read
    rows = asking.rows([{"role": "user", "content": TEXT}], questions, joint)
    numbers = [[*row.readings] for row in rows]
    assert numbers == ([[0, 1, 2]] if joint else [[0], [1], [2]])
    for row in rows:
        decision = unpacked_decision(row.params.extra_args[DECISION])
        prompt = tokenizer.apply_chat_template(
            row.messages, add_generation_prompt=True, tokenize=False
        )
        tokens = tokenizer.encode(prompt, add_special_tokens=False)
        shares = shares_by_graph(plain, tokens, decision, tokenizer.eos_token_id)
        for place, number in enumerate(row.readings):
            assert answers[number].probabilities == pytest.approx(
                shares[place], abs=1e-4
            )
    assert_nothing_left(llm)


def shares_by_graph(model, prompt, decision, end):
    """The probability of each option of each field, by following all paths of the
    decision's graph.
    """
    logprobs = logprobs_of(model, prompt, decision.template)
    edges = decision.graph.edges
    sums = [dict.fromkeys(range(len(each)), 0.0) for each in decision.values]
    pending = [(0, 0, 0.0, {})]
    while pending:
        state, position, score, chosen = pending.pop()
        if state in decision.graph.ends:
            total = np.exp(score + logprobs[position:, end].sum())
            for field, choice in chosen.items():
                sums[field][choice] += total
        for edge in edges[edges["source"] == state]:
            begun = (
                {int(edge["field"]): int(edge["choice"])} if edge["choice"] >= 0 else {}
            )
            following = score + logprobs[position, edge["token"]]
            pending.append((edge["target"], position + 1, following, chosen | begun))
    return [np.array([*each.values()]) / sum(each.values()) for each in sums]
