"""Servers of models that are written for them, asked by the real OpenAI client."""

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from dllm_engine import DiffusionParams
from tests.support.model_servers import KEY, PAGE_SIZE, blocks_server, keyed_server
from tests.support.server import scrape

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(servers):
    return blocks_server(servers)


def test_the_second_request_finds_the_pages_of_the_first(server, servers, engines):
    llm = engines(
        servers.folder / "blocks", skip_tokenizer_init=False, page_size=PAGE_SIZE
    )
    messages = [
        {
            "role": "user",
            "content": "Tom lives in Paris. Ida lives in Oslo. Where does Ida live?",
        }
    ]
    (offline,) = llm.chat(
        messages, DiffusionParams(gen_length=14, ignore_eos=True), use_tqdm=False
    )
    asked = {
        "model": "blocks",
        "messages": messages,
        "max_tokens": 14,
        "extra_body": {"ignore_eos": True},
    }
    first, second = (server.client().chat.completions.create(**asked) for _ in range(2))
    whole = len(offline.prompt_token_ids) // PAGE_SIZE * PAGE_SIZE
    for answer in (first, second):
        assert answer.choices[0].message.content == offline.outputs[0].text
        assert answer.usage.completion_tokens == 14
        assert answer.usage.prompt_tokens == len(offline.prompt_token_ids)
    assert second.usage.prompt_tokens_details.cached_tokens == whole
    assert (
        second.choices[0].model_extra["diffusion"]["denoising_steps"]
        == offline.outputs[0].diffusion.denoising_steps
    )


def test_preemptions_and_hits_are_in_vllms_metrics(server):
    """Requests side by side get the tokens that they get alone."""
    shared, numbers = [*range(10, 26)], range(4)

    def ask(number):
        body = {
            "seed": number,
            "temperature": number % 2,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        prompt = [*shared, *range(30, 35 + number)]
        answer = server.client().completions.create(
            model="blocks", prompt=prompt, max_tokens=200, extra_body=body
        )
        return answer.choices[0].model_extra["token_ids"]

    def grown():
        after = scrape(server.url)
        names = (
            "num_preemptions_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
        )
        return [after[f"vllm:{name}"] - before[f"vllm:{name}"] for name in names]

    def reset():
        urllib.request.urlopen(server.url + "/reset_prefix_cache", b"", timeout=30)
        return scrape(server.url)

    before = reset()
    alone = [ask(number) for number in numbers]
    assert [len(tokens) for tokens in alone] == [200] * 4
    # Each but the first finds what all begin with, in whole blocks of 4.
    common = (len(shared) + 5) // 4 * 4
    num_asked = sum(len(shared) + 5 + number for number in numbers)
    assert grown() == [0, num_asked, 3 * common]
    with ThreadPoolExecutor(4) as clients:
        assert [*clients.map(ask, numbers)] == alone
    assert grown()[0] > 0
    before = reset()
    assert ask(0) == alone[0]
    assert grown() == [0, len(shared) + 5, 0]
    assert scrape(server.url)["vllm:dllm_pages_reserved"] == 0


def test_the_cache_is_the_one_asked_for_and_the_log_has_neither_prompts_nor_keys(
    servers,
):
    server = keyed_server(servers)
    messages: Any = [
        {"role": "user", "content": "Reverse: Rome Tom Oslo"}
    ]  # 10 tokens with the template
    body = {"ignore_eos": True, "vllm_xargs": {"block_length": 8}}
    chats = server.client(KEY).chat.completions
    answer = chats.create(
        model="demo", messages=messages, max_tokens=32, extra_body=body
    )
    figures = answer.choices[0].model_extra["diffusion"]
    assert figures["tokens_retained"] == (10 + 24) // 2
    assert figures["pages_held"] % 3 == 0, "17 tokens are three pages in each layer"
    with pytest.raises(openai.AuthenticationError):
        server.client("swordfish").models.list()
    log = server.log.read_text()
    assert "POST /v1/chat/completions" in log
    assert not [
        word for word in ("Reverse", "Oslo", "sesame", "swordfish") if word in log
    ]
