"""The lengths that a server takes."""

import pytest

from dllm_engine import plugin
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.vllm_hooks import input_processor


def test_lengths_above_a_servers_own_limit_are_refused_and_our_default_limits_nobody(monkeypatch):
    from vllm.entrypoints.serve.utils import api_utils

    plugin.register()
    monkeypatch.setattr(input_processor, "_response_limit", None)
    input_processor.limit_responses(None)
    for asked, given in ((400, 400), (None, 256), (10, 10)):
        assert api_utils.get_max_tokens(512, asked, 100, {"max_tokens": 256}, 256) == given
    input_processor.limit_responses(300)
    assert api_utils.get_max_tokens(512, 300, 100, {"max_tokens": 300}, 300) == 300
    with pytest.raises(InvalidRequestError, match="max_tokens=301 is above this server's limit of 300"):
        api_utils.get_max_tokens(512, 301, 100, {"max_tokens": 300}, 300)
