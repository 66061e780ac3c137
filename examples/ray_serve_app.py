"""Replicas of a model behind OpenAI's API, on one machine or a cluster, with Ray Serve.

python examples/ray_serve_app.py demo --min-replicas 2 --max-replicas 2
python examples/ray_serve_app.py GSAI-ML/LLaDA-8B-Instruct --cache-method sparse
--max-model-len 2048

The other options are those of `dllm serve`. Ray Serve listens, spreads the requests,
adds replicas while more than 32 requests run per replica, and replaces those that died
or whose engine did; requests that ran there end with an error. It needs `pip install
".[ray]"` in a checkout, beside vLLM. A cluster is used where RAY_ADDRESS names one.
"""

import argparse
import os
import signal
import sys
from typing import Any

import ray
from ray import serve
from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dllm_engine.cli.commands import build_parser
from dllm_engine.cli.serve import vllm_arguments


class DiffusionServer:
    """An ASGI application: an engine, and vLLM's application around it. ``args`` are
    those of ``vllm serve``.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (
            scope["type"] == "lifespan"
        ):  # begins before the first request and ends with the replica
            return await self.run(scope, receive, send)
        try:
            await self.application(scope, receive, send)
        finally:
            if self.engine.errored:
                os._exit(1)  # Ray starts another replica

    async def run(self, scope: Any, receive: Any, send: Any) -> None:
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind"
        )  # replicas would all bind to the same cores
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import (
            build_async_engine_client,
        )
        from vllm.entrypoints.launchers.app import build_app

        async with build_async_engine_client(self.args) as self.engine:
            tasks = await self.engine.get_supported_tasks()
            self.application = build_app(self.args, tasks, self.engine.model_config)
            await init_app_state(self.engine, self.application.state, self.args, tasks)
            self.application.state.server = (
                argparse.Namespace()
            )  # which vLLM's handler of errors would stop
            await self.application(scope, receive, send)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--min-replicas", type=int, default=1, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--max-replicas", type=int, default=1, metavar="N", help="default: %(default)s"
    )
    replicas, options = parser.parse_known_args()
    served, unknown = build_parser().parse_known_args(["serve", *options])
    served.unknown = unknown
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        vllm_arguments(served)[1:]
    )
    args.model = args.model_tag
    validate_parsed_serve_args(args)
    ray.init(
        logging_level="ERROR",
        **({} if "RAY_ADDRESS" in os.environ else {"include_dashboard": False}),
    )
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(0)
    )  # Ray's handler would not let replicas finish what runs
    application = serve.deployment(
        serve.ingress(lambda: DiffusionServer(args))()
    ).options(
        name="DiffusionServer",
        autoscaling_config={**vars(replicas), "target_ongoing_requests": 32},
        max_ongoing_requests=64,
        graceful_shutdown_timeout_s=120,
        ray_actor_options={
            "num_gpus": args.tensor_parallel_size
            if "GPU" in ray.cluster_resources()
            else 0
        },
    )
    try:
        serve.start(http_options={"host": args.host or "127.0.0.1", "port": args.port})
        serve.run(application.bind(), name="dllm", blocking=True)
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
