"""A server of a block diffusion model in little memory: pages that requests share, and that the newest give back."""

import json
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from dllm_engine.demo import demo_model_path
from tests.support import tiny_checkpoints
from tests.support.server import scrape

pytestmark = pytest.mark.slow

SHARED = [*range(10, 26)]
NUM_REQUESTS, MAX_TOKENS = 4, 100


@pytest.fixture(scope="module")
def server(servers, tmp_path_factory):
    """Pages of 8 tokens of 2 layers, 3,072 bytes each: room for one request and a half."""
    folder = tmp_path_factory.mktemp("sdar")
    tiny_checkpoints.write_sdar(folder, vocab_size=512, mask_token_id=2, eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{demo_model_path()}/{name}", folder)
    memory = ("--max-model-len", "128", "--page-size", "8", "--kv-cache-memory-bytes", str(48 * 3072))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        return servers("dllm", "serve", str(folder), "--served-model-name", "sdar", "--dtype", "float32", *memory)


def ask(server, number):
    fields = {"seed": number, "temperature": number % 2, "ignore_eos": True, "return_token_ids": True}
    body = {"model": "sdar", "prompt": [*SHARED, *range(30, 35 + number)], "max_tokens": MAX_TOKENS} | fields
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["token_ids"]


def test_preemptions_and_hits_are_in_vllms_metrics(server):
    def grown():
        after = scrape(server.url)
        names = ("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
        return [after[f"vllm:{name}"] - before[f"vllm:{name}"] for name in names]

    before = scrape(server.url)
    alone = [ask(server, number) for number in range(NUM_REQUESTS)]
    assert [len(tokens) for tokens in alone] == [MAX_TOKENS] * NUM_REQUESTS
    # Each but the first finds what all begin with.
    assert grown() == [0, sum(len(SHARED) + 5 + number for number in range(NUM_REQUESTS)), 16 * (NUM_REQUESTS - 1)]
    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        assert [*clients.map(lambda number: ask(server, number), range(NUM_REQUESTS))] == alone
    assert grown()[0] > 0
    urllib.request.urlopen(urllib.request.Request(server.url + "/reset_prefix_cache", b""), timeout=30)
    before = scrape(server.url)
    assert ask(server, 0) == alone[0]
    assert grown() == [0, len(SHARED) + 5, 0]
    assert scrape(server.url)["vllm:dllm_pages_reserved"] == 0
