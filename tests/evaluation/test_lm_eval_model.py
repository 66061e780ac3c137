"""lm_eval's model ``dllm``, driven by lm_eval on local tasks."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from dllm_engine.demo import model_path
from tests.evaluation.test_likelihood import plain_bound
from tests.support.checkout import CHECKOUT

TASKS = Path("examples") / "lm_eval"
PROMPT = "User: Tom=48. Ida=07. Give: Ida\nBot:"


@pytest.fixture(scope="module")
def make(demo):
    from dllm_engine.evaluation.lm_eval_model import DiffusionLM

    return lambda **settings: DiffusionLM(demo, **settings)


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def evaluate(model, *names, **settings):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    files = [str(TASKS / f"{name}.yaml") for name in names]
    return lm_eval.simple_evaluate(
        model, tasks=files, task_manager=manager, bootstrap_iters=0, **settings
    )


def test_generation_tasks_score_as_the_engine_answers(make, demo, monkeypatch):
    from dllm_engine.evaluation.own_tasks import OwnTasks, demo_tasks
    from dllm_engine.evaluation.runner import MeasuredEngine

    monkeypatch.chdir(CHECKOUT)
    # A few steps only, so that some answers are wrong.
    decoding = {"gen_length": 32, "block_length": 8, "steps": 4}
    results = evaluate(make(**decoding), "names", apply_chat_template=True)
    expected = OwnTasks("names", demo_tasks("names", 40, seed=0), "exact").score(
        MeasuredEngine(demo), decoding
    )
    assert results["results"]["names"]["exact_match,stripped"] == pytest.approx(
        expected.score
    )
    assert 0.1 < expected.score < 0.9


@pytest.mark.parametrize(("context", "mc_num"), [(PROMPT, 1023), ("", 63)])
def test_likelihood_and_greediness_of_text(make, demo, context, mc_num):
    pairs = requests("loglikelihood", (context, " Ida=07"), (context, " Ida=48"))
    (right, is_greedy), (wrong, is_not) = make(mc_num=mc_num).loglikelihood(
        pairs, disable_tqdm=True
    )
    tokenizer = demo.get_tokenizer()
    prompt = tokenizer.encode(context) or [tokenizer.bos_token_id]
    answer = tokenizer.encode(" Ida=07")
    assert right == pytest.approx(
        plain_bound(Path(model_path("demo")), prompt, answer), rel=1e-3, abs=1e-5
    )
    if context:
        assert right > wrong
        assert (is_greedy, is_not) == (True, False)


def test_stop_strings_end_a_response_and_are_no_part_of_it(make):
    model = make(block_length=8)
    asked = [
        (PROMPT, {"until": until, "max_gen_toks": 32})
        for until in ([], ["="], ["", "nowhere", "07"])
    ]
    texts = model.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert texts == [" Ida=07", " Ida", " Ida="]


def test_escape_until_keeps_what_follows_a_stop_string(make):
    asked = requests("generate_until", (PROMPT, {"until": ["="], "max_gen_toks": 32}))
    assert make(block_length=8, escape_until=True).generate_until(
        asked, disable_tqdm=True
    ) == [" Ida=07"]


def test_add_bos_token_begins_prompts_with_one(make, demo):
    tokenizer = demo.get_tokenizer()
    plain = tokenizer.encode(PROMPT, add_special_tokens=False)
    with_bos = [tokenizer.bos_token_id, *plain]
    assert make(add_bos_token=True).tok_encode(PROMPT) == with_bos
    assert make(add_bos_token=True).tok_encode(tokenizer.bos_token + PROMPT) == with_bos
    assert make(add_bos_token=False).tok_encode(PROMPT) == plain
    assert (
        make(add_bos_token=True).tok_encode(PROMPT, add_special_tokens=False) == plain
    )
    prompt, continuation = make(add_bos_token=True)._encode_pair(PROMPT, " Ida=07")
    assert (prompt, tokenizer.decode(continuation)) == (with_bos, " Ida=07")


@pytest.mark.parametrize(
    ("decoding", "task", "expected"),
    [
        ({}, {"max_gen_toks": 24}, {"gen_length": 24}),
        (
            {"gen_length": 16, "steps": 8},
            {"gen_length": 12, "steps": 6},
            {"gen_length": 12, "steps": 6},
        ),
        ({}, {"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        (
            {},
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
            {"temperature": 0.7, "top_p": 0.9},
        ),
        ({"threshold": 0.9}, {"until": "x"}, {"threshold": 0.9, "stop": ["x"]}),
    ],
)
def test_the_model_arguments_go_before_the_task_and_gen_kwargs_before_both(
    make, decoding, task, expected
):
    params = make(**decoding)._params(task)
    assert {name: getattr(params, name) for name in expected} == expected


def test_repeated_requests_get_different_seeds(make, monkeypatch):
    model = make(seed=5)

    def answer(requests):
        return [SimpleNamespace(text=str(params.seed)) for _, params in requests], None

    monkeypatch.setattr(model, "answer", answer)
    first, second = requests(
        "generate_until", (PROMPT, {"max_gen_toks": 8}), (PROMPT, {"max_gen_toks": 8})
    )
    assert model.generate_until([first, first, second, first]) == ["5", "6", "5", "7"]


def test_long_prompts_are_refused_or_lose_their_middle(make, demo):
    prompt = " ".join(f"Tom={n % 90 + 10}." for n in range(60)) + " " + PROMPT
    asked = requests("generate_until", (prompt, {"max_gen_toks": 32}))
    with pytest.raises(
        ValueError, match=r"exceed max_model_len 256; .* max_prompt_tokens"
    ):
        make().generate_until(asked)
    model = make(block_length=8, max_prompt_tokens=101)
    tokens = demo.get_tokenizer().encode(prompt)
    assert model._fit(tokens, 32) == tokens[:50] + tokens[-51:]
    assert model.generate_until(asked, disable_tqdm=True) == [" Ida=07"]
    assert math.isfinite(
        model.loglikelihood(requests("loglikelihood", (prompt, " Ida=07")))[0][0]
    )


@pytest.mark.parametrize(
    ("settings", "asked", "named"),
    [
        ({"num_steps": 3}, {}, "num_steps"),
        ({"max_prompt_tokens": 1}, {}, "max_prompt_tokens=1"),
        ({}, {"num_beams": 4}, "num_beams=4 is not supported"),
    ],
)
def test_what_is_not_supported_is_named(make, settings, asked, named):
    with pytest.raises(ValueError, match=named):
        make(**settings).generate_until(requests("generate_until", (PROMPT, asked)))


def test_model_args_are_sorted_into_engine_decoding_and_estimate(demo, monkeypatch):
    from lm_eval.api.registry import get_model, model_registry

    from dllm_engine.evaluation import lm_eval_model

    assert "hf" in model_registry, "lm_eval's own models stay known"
    started = {}
    monkeypatch.setattr(
        lm_eval_model,
        "LLM",
        lambda model, **kwargs: started.update(kwargs, model=model) or demo,
    )
    model = get_model("dllm").create_from_arg_string(
        "pretrained=demo,cache_method=sparse,block_length=8,mc_num=4",
        {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"},
    )
    assert started == {"model": "demo", "cache_method": "sparse"}
    assert model.decoding == {"block_length": 8}
    assert model.settings.mc_num == 4
    with pytest.raises(ValueError, match="pretrained"):
        type(model).create_from_arg_string("cache_method=sparse")
