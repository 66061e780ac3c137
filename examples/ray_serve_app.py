"""Replicas of a model behind OpenAI's API, on one machine or a cluster, with Ray Serve.

python examples/ray_serve_app.py --model demo --min-replicas 2 --max-replicas 2
python examples/ray_serve_app.py --model GSAI-ML/LLaDA-8B-Instruct --cache-method sparse --max-model-len 2048

or, as a step of a deployment:

serve run --app-dir examples ray_serve_app:app model=demo max_replicas=4 options="--cache-method sparse"

Every option of `dllm serve`, and of `vllm serve`, that is not one of this program goes to each replica. A replica is
an actor with vLLM's own server application around its `AsyncLLM`: /v1/completions, /v1/chat/completions with streaming,
/v1/models, /health, and /metrics of that replica. Ray Serve listens, spreads the requests, adds replicas while more
than `--target-requests` run per replica, and replaces replicas that died or whose engine did. A request whose replica
dies before anything was sent is answered by another one; a stream that has begun ends with an error event.

Install it with `pip install "dllm-engine[ray]"` beside vLLM. A running cluster is used where RAY_ADDRESS names one.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dllm_engine.text import one_line

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
    from starlette.requests import Request
    from starlette.responses import Response

HEALTH_CHECK_S = 5
ATTEMPTS = 3  # replicas that one request may see die: it may be what kills them
OPEN_REQUESTS = 10_000
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
DIED = {"message": "the engine died; try again", "type": "ServiceUnavailableError", "param": None, "code": 503}


class Ingress:
    """Hands each request to a replica."""

    def __init__(self, replicas: "DeploymentHandle") -> None:
        self.replicas = replicas.options(stream=True)

    async def __call__(self, request: "Request") -> "Response":
        from ray.exceptions import RayActorError
        from starlette.responses import JSONResponse, StreamingResponse

        scope = {key: request.scope[key] for key in SCOPE if key in request.scope}
        body = await request.body()
        for _ in range(ATTEMPTS):
            chunks = self.replicas.answer.remote(scope, body)
            try:
                status, headers, first = await anext(chunks)
            except RayActorError:
                continue
            is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
            response = StreamingResponse(whole(first, chunks, is_stream), status)
            response.raw_headers = headers
            return response
        return JSONResponse({"error": DIED}, 503)


async def whole(first: bytes, chunks: "DeploymentResponseGenerator[bytes]", is_stream: bool) -> AsyncIterator[bytes]:
    """The bytes of a response; of a stream whose replica dies an error event is the last."""
    from ray.exceptions import RayActorError

    yield first
    try:
        async for chunk in chunks:
            yield chunk
    except RayActorError:
        if not is_stream:
            raise
        yield f"data: {json.dumps({'error': DIED})}\n\n".encode()


class DiffusionServer:
    """One engine and vLLM's application around it."""

    async def __init__(self, command: list[str], threads: int) -> None:
        """``command`` is that of ``vllm serve``."""
        # Read when vLLM is imported; only a CPU cares: replicas would all bind to the same cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["OMP_NUM_THREADS"] = str(threads)
        from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
        args.model = args.model_tag
        validate_parsed_serve_args(args)
        self.running = AsyncExitStack()
        self.engine = await self.running.enter_async_context(build_async_engine_client(args))
        tasks = await self.engine.get_supported_tasks()
        self.application = build_app(args, tasks, self.engine.model_config)
        await init_app_state(self.engine, self.application.state, args, tasks)
        # vLLM's error handler stops its HTTP server here when the engine died; here the process ends.
        self.application.state.server = SimpleNamespace()
        await self.running.enter_async_context(self.application.router.lifespan_context(self.application))

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """The application's response: status, headers and the first bytes together, then the other bytes."""
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        request = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            # A client that hangs up cancels `answer`.
            return request.pop() if request else await asyncio.Future()

        call = asyncio.create_task(self.application(scope, receive, messages.put))
        # In case that it fails, which `await call` raises.
        call.add_done_callback(lambda _: messages.put_nowait({"type": "http.response.body"}))
        try:
            start, more = None, True
            while more:
                message = await messages.get()
                self.end_without_engine()
                if message["type"] == "http.response.start":
                    start = message
                    continue
                chunk, more = message.get("body", b""), message.get("more_body", False)
                yield chunk if start is None else (start["status"], start["headers"], chunk)
                start = None
            await call
        finally:
            call.cancel()

    async def check_health(self) -> None:
        """Called by Ray, every ``HEALTH_CHECK_S`` seconds."""
        self.end_without_engine()

    def end_without_engine(self) -> None:
        """End this process if its engine has died.

        The ingress then sends the requests that ran here, and all others, to other replicas, and Ray starts a new one.
        A replica that went on would be chosen most often: nobody answers an error as fast as an engine that is dead.
        """
        if self.engine.errored:
            os._exit(1)

    async def __del__(self) -> None:
        await self.running.aclose()


def app(settings: dict[str, str]) -> "Application":
    """The application for ``serve run``; ``settings`` are the options of this program, ``options`` those of vLLM."""
    options = shlex.split(settings.pop("options", ""))
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    args, options = parse([*arguments, *options])
    return build(args, engine_command(args.model, options))


def build(args: argparse.Namespace, command: list[str]) -> "Application":
    """The application with replicas that run ``command``, which is that of ``vllm serve``."""
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig

    gpus = args.gpus_per_replica
    if gpus is None:
        gpus = 1 if ray.is_initialized() and ray.cluster_resources().get("GPU") else 0
    replicas = serve.deployment(DiffusionServer).options(
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            initial_replicas=args.min_replicas,
            max_replicas=max(args.min_replicas, args.max_replicas),
            target_ongoing_requests=args.target_requests,
        ),
        # Requests beyond it wait in the ingress, where the next free replica takes them.
        max_ongoing_requests=2 * args.target_requests,
        health_check_period_s=HEALTH_CHECK_S,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=120,
        ray_actor_options={"num_cpus": args.cpus_per_replica, "num_gpus": gpus},
    )
    ingress = serve.deployment(Ingress).options(
        max_ongoing_requests=OPEN_REQUESTS, graceful_shutdown_timeout_s=120, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(replicas.bind(command, args.cpus_per_replica))


def engine_command(model: str, options: list[str]) -> list[str]:
    """The arguments of ``vllm serve``; wrong options are refused here, before any replica starts."""
    from dllm_engine.cli.main import build_parser
    from dllm_engine.cli.serve import vllm_arguments

    served, served.unknown = build_parser().parse_known_args(["serve", model, *options])
    _, *command = vllm_arguments(served)
    return command


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default="demo", help="folder or Hugging Face name (default: the demo model)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--min-replicas", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-replicas", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--target-requests", type=int, default=32, metavar="N", help="per replica, above it more start (%(default)s)"
    )
    parser.add_argument("--cpus-per-replica", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--gpus-per-replica", type=int, metavar="N", help="its --tensor-parallel-size; default: 1 or 0")
    return parser.parse_known_args(arguments)


def main() -> int:
    args, options = parse(sys.argv[1:])
    try:
        import ray
        from ray import serve
    except ImportError as error:
        print(f"ray_serve_app: error: {error}; pip install 'dllm-engine[ray]'", file=sys.stderr)
        return 2
    try:
        command = engine_command(args.model, options)
    except ValueError as error:
        print(f"ray_serve_app: error: {one_line(error)}", file=sys.stderr)
        return 2
    if not ray.is_initialized():
        # A CPU beyond the replicas' for Ray Serve's controller, proxy and ingress.
        cpus = max(args.min_replicas, args.max_replicas) * args.cpus_per_replica + 1
        local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": cpus, "include_dashboard": False}
        ray.init(logging_level="ERROR", **local)
    # After Ray's own, which ends the process without a word to the replicas.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve.start(http_options={"host": args.host, "port": args.port})
        serve.run(build(args, command), name="dllm", route_prefix="/")
        print(f"serving {args.model} on http://{args.host}:{args.port}/v1", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        return 130
    finally:
        # Replicas finish what runs, for up to `graceful_shutdown_timeout_s`.
        serve.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
