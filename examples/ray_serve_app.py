"""Replicas of a model behind OpenAI's API, on one machine or a cluster, with Ray Serve.

python examples/ray_serve_app.py --model demo --min-replicas 2 --max-replicas 2
python examples/ray_serve_app.py --model GSAI-ML/LLaDA-8B-Instruct --cache-method sparse --max-model-len 2048

or, as a step of a deployment:

serve run --app-dir examples ray_serve_app:app model=demo max_replicas=4 options="--cache-method sparse"

Every option of `dllm serve`, and of `vllm serve`, that is not one of this program goes to each replica. A replica is
an actor with vLLM's own server application around its `AsyncLLM`: /v1/completions, /v1/chat/completions with streaming,
/v1/models, /health, and /metrics of that replica. Ray Serve listens, spreads the requests, adds replicas while more
than `--target-requests` run per replica, and replaces replicas that died or whose engine did.

Install it with `pip install "dllm-engine[ray]"` beside vLLM. A running cluster is used where RAY_ADDRESS names one.
"""

import argparse
import os
import shlex
import signal
import sys
import threading
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

HEALTH_CHECK_S = 5


@serve.deployment(health_check_period_s=HEALTH_CHECK_S, health_check_timeout_s=30, graceful_shutdown_timeout_s=120)
@serve.ingress()
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
        # vLLM's error handler stops its HTTP server here when the engine died; Ray does that by `check_health`.
        self.application.state.server = SimpleNamespace()

    def __serve_build_asgi_app__(self) -> Any:
        return self.application

    async def check_health(self) -> None:
        """Called by Ray; a replica that raises is replaced."""
        await self.engine.check_health()

    async def __del__(self) -> None:
        await self.running.aclose()


def app(settings: dict[str, str]) -> Application:
    """The application for ``serve run``; ``settings`` are the options of this program, ``options`` those of vLLM."""
    options = shlex.split(settings.pop("options", ""))
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return build(*parse([*arguments, *options]))


def build(args: argparse.Namespace, options: list[str]) -> Application:
    """The application with replicas of ``args.model``, which get ``options``."""
    # Here, so that wrong options are refused before any replica starts.
    from dllm_engine.cli.main import build_parser
    from dllm_engine.cli.serve import vllm_arguments

    served, served.unknown = build_parser().parse_known_args(["serve", args.model, *options])
    _, *command = vllm_arguments(served)
    gpus = args.gpus_per_replica
    if gpus is None:
        gpus = 1 if ray.is_initialized() and ray.cluster_resources().get("GPU") else 0
    return DiffusionServer.options(
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            initial_replicas=args.min_replicas,
            max_replicas=max(args.min_replicas, args.max_replicas),
            target_ongoing_requests=args.target_requests,
        ),
        # Requests beyond it wait in Ray's proxy, where the next free replica takes them.
        max_ongoing_requests=2 * args.target_requests,
        ray_actor_options={"num_cpus": args.cpus_per_replica, "num_gpus": gpus},
    ).bind(command, args.cpus_per_replica)


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
    if not ray.is_initialized():
        # A CPU beyond the replicas' for Ray Serve's controller and proxy.
        cpus = max(args.min_replicas, args.max_replicas) * args.cpus_per_replica + 1
        ray.init(logging_level="ERROR", **({} if "RAY_ADDRESS" in os.environ else {"num_cpus": cpus}))
    # After Ray's own, which ends the process without a word to the replicas.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve.start(http_options={"host": args.host, "port": args.port})
        serve.run(build(args, options), name="dllm", route_prefix="/")
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
