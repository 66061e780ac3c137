"""``dllm serve`` decodes by its arguments, and says neither prompts nor keys in its log."""

import openai
import pytest

from tests.support.model_servers import KEY, keyed_server

pytestmark = pytest.mark.slow


@pytest.fixture
def server(servers):
    return keyed_server(servers)


@pytest.fixture
def figures(server):
    def ask(**options):
        messages = [{"role": "user", "content": "Reverse: Rome Tom Oslo"}]  # 10 tokens with the template
        body = {"ignore_eos": True, "vllm_xargs": {"block_length": 8} | options}
        chats = server.client(KEY).chat.completions
        answer = chats.create(model="demo", messages=messages, max_tokens=32, extra_body=body)
        return answer.choices[0].model_extra["diffusion"]

    return ask


def test_the_cache_is_the_one_asked_for(figures):
    by_default = figures()
    assert "trace" not in by_default
    assert figures(trace=True)["trace"]
    assert by_default["tokens_retained"] == (10 + 24) // 2
    assert by_default["pages_held"] % 3 == 0, "17 tokens are three pages in each layer"
    assert figures(retention_ratio=0.25)["tokens_retained"] == (10 + 24) // 4
    with pytest.raises(openai.BadRequestError, match=r"retention_ratio=0\.75 is out of range"):
        figures(retention_ratio=0.75)


def test_the_log_has_requests_but_neither_prompts_nor_keys(server, figures):
    figures()
    with pytest.raises(openai.AuthenticationError):
        server.client("swordfish").models.list()
    log = server.log.read_text()
    assert "POST /v1/chat/completions" in log
    assert not [word for word in ("Reverse", "Oslo", "sesame", "swordfish") if word in log]
