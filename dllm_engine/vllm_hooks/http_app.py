"""What vLLM's HTTP application gets where it serves one of our models: the playground, a check of request bodies, and
refusals when the server ends.

vLLM's own hook for routes, ``vllm.endpoint_plugins``, loads only what the variable ``VLLM_PLUGINS`` names, and that
would then have to name every other plugin as well; so what is ours is added with vLLM's routes.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from dllm_engine import playground
from dllm_engine.vllm_hooks.request_bodies import BodyCheck
from dllm_engine.vllm_hooks.shutdown import RefuseAtTheEnd


def wants_playground(args: Namespace) -> bool:
    """Whether ``additional_config`` leaves the playground on; its values were checked with the engine's options."""
    from dllm_engine.options import OPTIONS_KEY

    additional = getattr(args, "additional_config", None)
    options = additional.get(OPTIONS_KEY) if isinstance(additional, dict) else None
    return not isinstance(options, dict) or options.get("playground", True) is not False


def extended_app(register_api_routers: Callable[..., None]) -> Callable[..., None]:
    def register(
        args: Namespace, app: Any, supported_tasks: Any, model_config: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        register_api_routers(args, app, supported_tasks, model_config, *rest, **kwargs)
        if not getattr(model_config, "is_dllm_engine", False):
            return
        # Added before vLLM's own, which makes it the innermost: what needs the key is refused without it first.
        app.add_middleware(BodyCheck)
        app.add_middleware(RefuseAtTheEnd)
        if wants_playground(args):
            playground.add_route(app)

    return register
