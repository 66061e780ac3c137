"""vLLM's HTTP application without an engine, or with one in this process."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Sequence
from contextvars import Context
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dllm_engine.families import LLADA, ModelFamily

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from dllm_engine import LLM


def app_client(
    *arguments: str,
    ours: bool = True,
    family: ModelFamily = LLADA,
    tasks: tuple[str, ...] = (),
) -> "TestClient":
    """A client of the application that ``vllm serve`` with these arguments builds for a
    model of ours or another.
    """
    model_config = SimpleNamespace(
        get_pooling_task=lambda tasks: None,
        is_encoder_decoder=False,
        skip_tokenizer_init=True,
    )
    if ours:
        model_config.is_dllm_engine, model_config.hf_config = (
            True,
            SimpleNamespace(family=family),
        )
    return _client(arguments, tasks, model_config)


def _client(
    arguments: Sequence[str],
    tasks: tuple[str, ...],
    model_config: Any,
    engine: Any = None,
) -> "TestClient":
    from starlette.testclient import TestClient
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.entrypoints.launchers import app as launcher
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dllm_engine.plugin import register

    register()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    app = launcher.build_app(args, tasks, model_config)
    if engine is not None:
        asyncio.run(init_app_state(engine, app.state, args, tasks))
    return TestClient(app, raise_server_exceptions=False)


class EngineInProcess:
    """What vLLM's server asks of ``AsyncLLM``, answered by an engine in this process;
    one request at a time.
    """

    def __init__(self, llm: "LLM") -> None:
        from dllm_engine.vllm_hooks.input_processor import generate_if_valid

        self.llm_engine = llm.llm_engine
        self.errored, self.is_running, self.dead_error = False, True, None
        self._checked_generate = partial(generate_if_valid, type(self)._generate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm_engine, name)

    def check_admission(self, *args: Any, **kwargs: Any) -> None:
        """There is no queue."""

    async def check_health(self) -> None:
        """It is well."""

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        return self.llm_engine.reset_prefix_cache(*args, **kwargs)

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        return self.llm_engine.collective_rpc(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        return self._checked_generate(self, *args, **kwargs)

    async def _generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> Any:
        for name in (
            "data_parallel_rank",
            "reasoning_ended",
            "reasoning_parser_kwargs",
        ):
            kwargs.pop(name, None)
        # vLLM reads raw prompts in a thread, where nothing of this context is known.
        add = partial(self.llm_engine.add_request, request_id, prompt, **kwargs)
        Context().run(add, sampling_params)
        while self.llm_engine.has_unfinished_requests():
            for output in self.llm_engine.step():
                yield output


def served(llm: "LLM", *arguments: str) -> "TestClient":
    """A client of the application that ``vllm serve`` with these arguments builds, with
    this engine behind it.
    """
    arguments = ("--model", llm.model_config.model, *arguments)
    return _client(arguments, ("generate",), llm.model_config, EngineInProcess(llm))


def openai_client(client: "TestClient") -> Any:
    """OpenAI's own client of the application."""
    from openai import OpenAI

    return OpenAI(
        api_key="none",
        base_url="http://testserver/v1",
        http_client=client,
        max_retries=0,
    )


def length_of(answer: Any) -> int:
    """The tokens of the response in an answer of any route."""
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage.get("completion_tokens", usage.get("output_tokens"))


def refusal(answer: Any) -> str:
    """The message of an answer with status 400."""
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def chunks_of(answer: Any) -> list[dict[str, Any]]:
    """Of a stream that ends as OpenAI's do."""
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def choices_of(answer: Any) -> list[dict[str, str]]:
    """Content, reasoning and reason of the end of each choice in the answer to a chat or
    a completion, whole or in a stream.
    """
    assert answer.status_code == 200, answer.text
    is_streamed = answer.text.startswith("data: ")
    choices: dict[int, dict[str, str]] = {}
    for chunk in chunks_of(answer) if is_streamed else [answer.json()]:
        for part in chunk["choices"]:
            empty = {"content": "", "reasoning": "", "finish_reason": ""}
            choice = choices.setdefault(part["index"], empty)
            message = part.get("message") or part.get("delta") or {}
            choice["content"] += message.get("content") or part.get("text") or ""
            choice["reasoning"] += message.get("reasoning") or ""
            choice["finish_reason"] += part["finish_reason"] or ""
    return [choices[index] for index in sorted(choices)]


def answered_meanwhile(
    client: "TestClient",
    slow: dict[str, Any],
    other: dict[str, Any],
    function: str,
    monkeypatch: Any,
) -> tuple[Any, Any]:
    """The answers to two completions, of which the slow one calls this function, given
    by its full name, and stays in it until the other is answered.
    """
    import httpx

    called = threading.Event()
    answered = threading.Event()
    original = resolve_name(function)

    def call_when_another_is_answered(*args: Any) -> Any:
        called.set()
        assert answered.wait(60), "the server serves nobody meanwhile"
        return original(*args)

    monkeypatch.setattr(function, call_when_another_is_answered)

    async def ask() -> tuple[Any, Any]:
        url: Any = {
            "transport": httpx.ASGITransport(client.app),
            "base_url": "http://testserver",
        }
        async with httpx.AsyncClient(**url, timeout=120) as http:
            first = asyncio.create_task(
                http.post("/v1/completions", json={"model": "demo"} | slow)
            )
            while not called.is_set():
                await asyncio.sleep(0.01)
            second = await http.post("/v1/completions", json={"model": "demo"} | other)
            answered.set()
            return await first, second

    return asyncio.run(ask())
