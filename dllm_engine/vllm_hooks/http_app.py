"""What vLLM's HTTP application gets where it serves one of our models: the playground, a check of request bodies, and
refusals when the server ends.

vLLM's own hook for routes, ``vllm.endpoint_plugins``, loads only what the variable ``VLLM_PLUGINS`` names, and that
would then have to name every other plugin as well; so what is ours is added with vLLM's routes.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from vllm import envs

from dllm_engine import playground
from dllm_engine.options import OPTIONS_KEY, EngineOptions
from dllm_engine.vllm_hooks.key_check import KeyCheck
from dllm_engine.vllm_hooks.request_bodies import BodyCheck
from dllm_engine.vllm_hooks.shutdown import RefuseAtTheEnd

LEFT_OUT = ("/scale_elastic_ep",)
"""Routes of vLLM that an engine without experts cannot serve: they would stop it."""


def engine_options(args: Namespace) -> EngineOptions:
    """The options in ``additional_config``, whose values were checked when the engine started."""
    additional = getattr(args, "additional_config", None)
    options = additional.get(OPTIONS_KEY) if isinstance(additional, dict) else None
    return EngineOptions.parse(options or {})


def extended_app(register_api_routers: Callable[..., None]) -> Callable[..., None]:
    def register(
        args: Namespace, app: Any, supported_tasks: Any, model_config: Any = None, *rest: Any, **kwargs: Any
    ) -> None:
        register_api_routers(args, app, supported_tasks, model_config, *rest, **kwargs)
        if not getattr(model_config, "is_dllm_engine", False):
            return
        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in LEFT_OUT]
        # Added before vLLM's own, which makes it the innermost: what needs the key is refused without it first.
        app.add_middleware(BodyCheck)
        if keys := [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]:
            app.add_middleware(KeyCheck, tokens=keys)
        app.add_middleware(RefuseAtTheEnd)
        options = engine_options(args)
        if options.playground:
            playground.add_route(app, options)

    return register
