"""Lengths of holes that are chosen while a server still reads the request."""

import asyncio
from types import SimpleNamespace
from typing import Any

from dllm_engine.infill.http import Filling
from dllm_engine.infill.template import Template
from dllm_engine.vllm_hooks.server.open_requests import OpenRequests


def test_probes_of_a_refused_request_are_dropped(demo):
    calls = []

    async def collective_rpc(name: str, args: Any) -> None:
        calls.append((name, args[0]))
        if name == "masked_logprobs":
            await asyncio.Event().wait()

    engine = SimpleNamespace(
        vllm_config=demo.llm_engine.vllm_config,
        input_processor=demo.llm_engine.input_processor,
        collective_rpc=collective_rpc,
    )

    async def refuse() -> None:
        requests = OpenRequests()
        task: Any = asyncio.current_task()
        request = requests.begin("/v1/completions", task)
        request.filling = Filling(
            Template((None, [5, 6])), 0, 8, 1, False, [], in_chat=False
        )
        request.filling.begin(engine, [[7, 8], [9]])
        await asyncio.sleep(0)
        requests.finish(task)
        await asyncio.wait(request.filling.rankings.values())

    asyncio.run(refuse())
    asked, dropped = calls[:2], calls[2:]
    assert [name for name, _ in asked] == ["masked_logprobs"] * 2
    assert dropped == [("drop_probes", call) for _, call in asked]
