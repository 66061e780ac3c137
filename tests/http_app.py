"""vLLM's HTTP application without an engine."""

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.testclient import TestClient


def app_client(*arguments: str, ours: bool = True, tasks: tuple[str, ...] = ()) -> "TestClient":
    """A client of the application that ``vllm serve`` with these arguments builds for a model of ours or another."""
    from starlette.testclient import TestClient
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.entrypoints.launchers import app as launcher
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dllm_engine.plugin import register

    register()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    model_config = SimpleNamespace(get_pooling_task=lambda tasks: None, is_encoder_decoder=False)
    if ours:
        model_config.is_dllm_engine = True
    return TestClient(launcher.build_app(args, tasks, model_config), raise_server_exceptions=False)
