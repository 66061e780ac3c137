"""``/v1/likelihoods``: what ``log_likelihoods`` and ``masked_logprobs`` compute, over
HTTP.
"""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from vllm.exceptions import RetryableRequestError

from dllm_engine.decoding.probe import Probe
from dllm_engine.evaluation.likelihood import log_likelihoods
from dllm_engine.lengths.forward_passes import served_answers
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


def test_none_is_computed_while_weights_are_incomplete(ask, client, demo, monkeypatch):
    scheduler = demo.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler.weights, "incomplete_since", "update_weights")
    hole = {"prompt": "Bot: Ida=", "suffix": ", Tom=48"}
    for reply in (
        ask(prompt=PROMPT, answers=["a"]),
        client.post("/v1/completions", json=hole),
        client.post("/v1/fim/completions", json=hole),
    ):
        assert reply.status_code == 503
        assert "its weights changed; ask again" in reply.json()["error"]["message"]
    with pytest.raises(ValueError, match="weights are incomplete"):
        list(demo.masked_logprobs([([5, 6], [1])]))


# Calls of the engine


class Engine:
    """Calls with probes of at most ten rows, of which it notes the first tokens of the
    canvases; these are the answers too.
    """

    def __init__(self):
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=10)
        )
        self.calls, self.dropped = {}, []
        self.num_weight_changes = self.changes_per_call = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def collective_rpc(self, method, args):
        name, *fields = args
        if method == "drop_probes":
            return self.dropped.append(name)
        canvases, *_ = fields
        self.calls[name] = [canvas[0] for canvas in canvases]
        await self.goes_on.wait()
        self.num_weight_changes += self.changes_per_call
        answers = [[[float(canvas[0])], [0.0]] for canvas in canvases]
        return [answers, self.num_weight_changes]


async def computed(engine, *sizes):
    probes = [Probe([mark] * size, [0], [0]) for mark, size in sizes]
    return [answer.tokens[0] async for answer in served_answers(engine, probes)]


def test_a_call_has_as_many_canvases_as_fit_into_a_step():
    engine = Engine()
    sizes = [(1, 4)] * 3 + [(2, 12)] + [(3, 3)] * 3
    assert asyncio.run(computed(engine, *sizes)) == [1.0] * 3 + [2.0] + [3.0] * 3
    assert [*engine.calls.values()] == [[1, 1], [1], [2], [3, 3, 3]]


def test_a_client_that_leaves_takes_its_canvases_along():
    async def run():
        engine = Engine()
        engine.goes_on.clear()
        task = asyncio.create_task(computed(engine, *[(1, 10)] * 9))
        while not engine.calls:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert [*engine.calls] == engine.dropped

    asyncio.run(run())


@pytest.mark.parametrize(("num_canvases", "is_refused"), [(1, False), (2, True)])
def test_a_likelihood_never_comes_from_two_sets_of_weights(num_canvases, is_refused):
    engine = Engine()
    engine.changes_per_call = 1
    refused = (
        pytest.raises(RetryableRequestError) if is_refused else contextlib.nullcontext()
    )
    with refused:
        asyncio.run(computed(engine, *[(1, 10)] * num_canvases))
