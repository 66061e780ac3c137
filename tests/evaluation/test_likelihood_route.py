"""``/v1/likelihoods``: what ``log_likelihoods`` and ``masked_logprobs`` compute, over
HTTP.
"""

import asyncio
import time
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from dllm_engine.evaluation.likelihood import log_likelihoods
from dllm_engine.lengths.forward_passes import ForwardPasses, Probe
from tests.support.engines import assert_nothing_left

CHAT = [{"role": "user", "content": "Tom=48. Ida=07. Give: Ida"}]
PROMPT = "User: Tom=48. Ida=07. Give: Ida\nBot:"
ANSWERS = [" Ida=07", " Ida=48", " Ida=07, Tom=48, and the rest of a longer answer"]


@pytest.fixture
def ask(client):
    return lambda **fields: client.post("/v1/likelihoods", json=fields)


def test_they_are_the_bounds_that_python_computes(ask, demo):
    ids = demo.get_tokenizer().encode
    prompt = ids(PROMPT)
    answers = [ids(answer) for answer in ANSWERS]
    settings = {"num_samples": 20, "seed": 3}
    expected = log_likelihoods(
        demo, [(prompt, answer) for answer in answers], **settings
    )
    assert expected[0] > expected[1]
    for fields in (
        {"prompt": PROMPT, "answers": ANSWERS},
        {"messages": CHAT, "answers": ANSWERS},
        {"prompt": prompt, "answers": answers, "model": "demo"},
    ):
        reply = ask(**fields, **settings)
        assert reply.status_code == 200, reply.text
        assert [
            each["log_likelihood"] for each in reply.json()["data"]
        ] == pytest.approx(expected, rel=1e-5)
        assert [each["num_tokens"] for each in reply.json()["data"]] == [
            len(answer) for answer in answers
        ]
    assert reply.json()["usage"]["prompt_tokens"] == len(prompt) + sum(
        map(len, answers)
    )
    # Masks of the client's own choice.
    answers = [answers[0], [*answers[0]]]
    masks = [[0, 1, 2, 3], [2], []]
    canvases = [
        (prompt + answer, [len(prompt) + i for i in mask])
        for answer in answers
        for mask in masks
    ]
    data = ask(prompt=prompt, answers=answers, masks=masks).json()["data"]
    for logprobs, own in zip(
        [*data[0]["logprobs"], *data[1]["logprobs"]],
        demo.masked_logprobs(canvases),
        strict=True,
    ):
        assert logprobs == pytest.approx(own, rel=1e-5)
    assert "log_likelihood" not in data[0]
    assert_nothing_left(demo)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"answers": [""]}, "answers[0] is empty"),
        ({"answers": ["a", "<|mdm_mask|>"]}, "answers[1] contains the mask token"),
        ({"answers": [[5, 6000]]}, "answers[0] contains token id 6000"),
        ({"answers": [[5]] * 257}, "answers"),
        ({"prompt": "<|mdm_mask|>"}, "the prompt contains the mask token"),
        ({"prompt": None}, "either prompt or messages"),
        ({"num_samples": 0}, "num_samples"),
        (
            {"num_samples": 1024, "answers": [[5] * 100] * 10},
            "num_samples=1024: forward passes over",
        ),
        (
            {"masks": [[0], [1]], "answers": [[5, 5], [5]]},
            "masks[1] must hold different positions",
        ),
        ({"masks": [[0]] * 10**5}, "100000 masks: forward passes over"),
        ({"stream": True}, "stream"),
        ({"model": "other"}, "other"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused_by_name(ask, fields, named):
    reply = ask(**{"prompt": PROMPT, "answers": ["a"]} | fields)
    assert reply.status_code in (400, 404)
    assert named in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/completions",
            {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1},
        ),
        ("/v1/completions", {"prompt": [5, 6], "prompt_logprobs": 0}),
        ("/v1/chat/completions", {"messages": CHAT, "prompt_logprobs": 1}),
    ],
)
def test_log_probabilities_of_a_prompt_are_refused_with_a_word_about_it(
    client, path, fields
):
    reply = client.post(path, json={"model": "demo"} | fields)
    assert reply.status_code == 400
    assert "/v1/likelihoods" in reply.json()["error"]["message"]


def test_none_is_computed_while_weights_are_incomplete(ask, demo, monkeypatch):
    scheduler = demo.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler.weights, "incomplete_since", "update_weights")
    reply = ask(prompt=PROMPT, answers=["a"])
    assert reply.status_code == 503
    assert "its weights changed; ask again" in reply.json()["error"]["message"]
    with pytest.raises(ValueError, match="weights are incomplete"):
        list(demo.masked_logprobs([([5, 6], [1])]))


# Passes


class Engine:
    """Passes of at most ten rows, of which it notes the sizes; a log-probability is the
    first token of a canvas.
    """

    def __init__(self, *failures):
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=10)
        )
        self.passes, self.failures = [], list(failures)
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: False)
        self.num_weight_changes = self.changes_per_pass = 0

    async def collective_rpc(self, method, args):
        sequences, *_ = args
        self.passes.append([sequence[0] for sequence in sequences])
        await asyncio.sleep(0)
        self.num_weight_changes += self.changes_per_pass
        if self.failures:
            raise self.failures.pop()
        return [
            [[[float(sequence[0])], [0.0]] for sequence in sequences],
            self.num_weight_changes,
        ]


def computed(engine, *requests, during=lambda tasks: None):
    async def one(passes, request):
        probes = [Probe([mark] * size, [0], [0]) for mark, size in request]
        return [answer.asked[0] async for answer in passes.answers(probes)]

    async def run():
        passes = ForwardPasses(engine)
        tasks = [asyncio.create_task(one(passes, request)) for request in requests]
        for _ in range(2):  # the second begins the first pass
            await asyncio.sleep(0)
        during(tasks)
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


def test_requests_take_turns_with_passes_of_as_many_canvases_as_fit():
    engine = Engine()
    first = [(1, 4)] * 3 + [(2, 12)] + [(3, 3)] * 3
    assert computed(engine, first, [(4, 10)] * 2, []) == [
        [1.0] * 3 + [2.0] + [3.0] * 3,
        [4.0] * 2,
        [],
    ]
    assert engine.passes == [[1, 1], [4], [1], [4], [2], [3, 3, 3]]


def test_the_engine_has_one_pass_at_a_time_also_where_clients_leave():
    """Of ten clients that leave, it computes the pass that it has, and
    none that waits.
    """
    engine, ends = Engine(), asyncio.Event()

    async def wait(method, args):
        engine.passes.append(args[0][0][0])
        await ends.wait()
        return [[[[0.0], [0.0]]] * len(args[0]), 0]

    engine.collective_rpc = wait

    async def run():
        passes = ForwardPasses(engine)

        async def one(mark):
            return [x async for x in passes.answers([Probe([mark] * 9, [0], [0])])]

        leaving = [asyncio.create_task(one(mark)) for mark in range(10)]
        staying = asyncio.create_task(one(10))
        while not engine.passes:
            await asyncio.sleep(0)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        assert engine.passes == [0]
        ends.set()
        await staying
        assert engine.passes == [0, 10]

    asyncio.run(run())


def test_the_engines_steps_have_as_much_time_as_passes():
    engine, begun, ended = Engine(), [], []
    engine.output_processor.has_unfinished_requests = lambda: True

    async def take_a_while(method, args):
        begun.append(time.monotonic())
        await asyncio.sleep(0.05)
        ended.append(time.monotonic())
        return [[[[0.0], [0.0]]] * len(args[0]), 0]

    engine.collective_rpc = take_a_while
    assert computed(engine, [(1, 10)] * 3, [(2, 10)] * 3) == [[0.0] * 3] * 2
    assert all(
        later - sooner >= 0.04 for sooner, later in zip(ended, begun[1:], strict=False)
    )


def test_a_client_that_leaves_takes_its_canvases_along():
    engine = Engine()
    left, stayed = computed(
        engine, [(1, 10)] * 9, [(2, 10)] * 2, during=lambda tasks: tasks[0].cancel()
    )
    assert isinstance(left, asyncio.CancelledError)
    assert stayed == [2.0, 2.0]
    assert engine.passes == [[1], [2], [2]]


@pytest.mark.parametrize(("num_canvases", "is_refused"), [(1, False), (2, True)])
def test_a_likelihood_never_comes_from_two_sets_of_weights(num_canvases, is_refused):
    engine = Engine()
    engine.changes_per_pass = 1
    (result,) = computed(engine, [(1, 10)] * num_canvases)
    assert isinstance(result, HTTPException) == is_refused
