"""``dllm serve`` decodes by its arguments, and says neither prompts nor keys in its log."""

import openai
import pytest

from tests.support.model_servers import KEY, keyed_server

pytestmark = pytest.mark.slow


def test_the_cache_is_the_one_asked_for_and_the_log_has_neither_prompts_nor_keys(servers):
    server = keyed_server(servers)
    messages = [{"role": "user", "content": "Reverse: Rome Tom Oslo"}]  # 10 tokens with the template
    body = {"ignore_eos": True, "vllm_xargs": {"block_length": 8}}
    chats = server.client(KEY).chat.completions
    answer = chats.create(model="demo", messages=messages, max_tokens=32, extra_body=body)
    figures = answer.choices[0].model_extra["diffusion"]
    assert figures["tokens_retained"] == (10 + 24) // 2
    assert figures["pages_held"] % 3 == 0, "17 tokens are three pages in each layer"
    with pytest.raises(openai.AuthenticationError):
        server.client("swordfish").models.list()
    log = server.log.read_text()
    assert "POST /v1/chat/completions" in log
    assert not [word for word in ("Reverse", "Oslo", "sesame", "swordfish") if word in log]
