"""A server under load."""

import asyncio
import random

import openai
import pytest

from tests.support.load_clients import LEFT, NUM_CLIENTS, SERVER, Load, draw_asks
from tests.support.server import scrape

pytestmark = pytest.mark.slow

SECONDS = 5
NUM_QUEUED, PER_CALL = 2_000, 1_000
"""vLLM takes at most 1,024 prompts in a call."""


@pytest.fixture(scope="module")
def server(servers):
    return servers("dllm", *SERVER)


def test_nothing_goes_wrong_under_load(server):
    load = Load(server.url, draw_asks(40, seed=1), seed=1)
    # How much is asked in that time is up to the machine.
    while not load.violations and min(load.outcomes[name] for name in ("answered", "hung up", "refused")) < 3:
        asyncio.run(load.run(NUM_CLIENTS, SECONDS))
    assert load.violations == []


def test_thousands_of_requests_over_http_are_all_answered(server):
    prompts = [[5 + i % 400, 5 + i // 400] for i in range(NUM_QUEUED)]

    async def texts(client, batch):
        arguments = {"model": "demo", "max_tokens": 2, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
        answer = await client.completions.create(prompt=batch, **arguments)
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    async def ask():
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", timeout=300, max_retries=0
        ) as client:
            batches = [prompts[start : start + PER_CALL] for start in range(0, NUM_QUEUED, PER_CALL)]
            answers = await asyncio.gather(*(texts(client, batch) for batch in batches))
            some = random.Random(5).sample(range(NUM_QUEUED), 20)
            alone = [await texts(client, [prompts[i]]) for i in some]
        together = [text for answer in answers for text in answer]
        assert len(together) == NUM_QUEUED
        assert [[together[i]] for i in some] == alone
        assert len(set(together)) > 50, "the answers differ, so that one in another's place is noticed"

    asyncio.run(ask())
    values = scrape(server.url)
    assert [values[name] for name in LEFT] == [0] * len(LEFT)
