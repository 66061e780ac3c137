"""How a server ends: every client gets an answer, and the exit status says whether the engine died.

vLLM's own server leaves two gaps. When its engine process dies it answers its clients with errors and stops, but with
status 0, as if somebody had asked for it. And when it is asked to stop (SIGTERM) while requests are running that do
not finish in ``--shutdown-timeout`` seconds, it takes their engine away and then waits for their clients.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

logger = init_logger("vllm.dllm_engine.shutdown")

ENGINE_DIED = 1
"""Exit status of a server whose engine died."""


def ending_well(serve_http: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """vLLM's ``serve_http`` without the gaps. It returns an awaitable that is awaited last of all."""

    async def serve(app: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        engine = app.state.engine_client
        if engine is None:  # a server that only renders prompts
            return await serve_http(app, *args, **kwargs)
        loop = asyncio.get_running_loop()
        stop, asked = engine.shutdown, False

        def shutdown(*args: Any, **kwargs: Any) -> None:
            """Called in a thread when the server is asked to stop, and by nobody while it is to go on."""
            nonlocal asked
            asked = True
            stop(*args, **kwargs)
            if not loop.is_closed():
                loop.call_soon_threadsafe(engine.output_processor.propagate_error, EngineDeadError())

        engine.shutdown = shutdown
        closing = await serve_http(app, *args, **kwargs)
        return closing if asked or not engine.errored else _fail_after(closing)

    return serve


async def _fail_after(closing: Awaitable[Any]) -> None:
    await closing
    logger.error("the engine died; the server ends with exit status %d", ENGINE_DIED)
    raise SystemExit(ENGINE_DIED)
