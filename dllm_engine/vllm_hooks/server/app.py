"""Additions to vLLM's HTTP application for our models.

The playground, a check of request bodies, the API key for routes that vLLM leaves open, and refusals while the server
shuts down. vLLM's own hook for routes, ``vllm.endpoint_plugins``, loads only plugins that ``VLLM_PLUGINS`` names, and
users would have to list every other plugin there too. So ours are added together with vLLM's routes.
"""

from collections.abc import Awaitable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from dllm_engine import playground
from dllm_engine.families import family_of
from dllm_engine.options import EngineOptions
from dllm_engine.structured_output.tool_calls import serve_tool_calls
from dllm_engine.vllm_hooks.patch import Original
from dllm_engine.vllm_hooks.server.bodies import BodyCheck
from dllm_engine.vllm_hooks.server.shutdown import RefuseWhileShuttingDown

REMOVED_ROUTES = ("/scale_elastic_ep",)
"""Routes of vLLM that would stop an engine without experts."""
UNGUARDED_ROUTES = ("/invocations", "/generative_scoring")
"""Routes that answer prompts and that vLLM leaves open even when an API key is set."""


class KeyCheck(AuthenticationMiddleware):
    """vLLM's own check of the API key, for the routes that it leaves open."""

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path.startswith(UNGUARDED_ROUTES) and not self.verify_token(Headers(scope=scope)):
                return JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        return self.app(scope, receive, send)


def extend_app(
    register_api_routers: Original,
    args: Any,
    app: Any,
    supported_tasks: Any,
    model_config: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> None:
    register_api_routers(args, app, supported_tasks, model_config, *rest, **kwargs)
    if not getattr(model_config, "is_dllm_engine", False):
        return
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in REMOVED_ROUTES]
    serve_tool_calls(args)
    # vLLM adds its own middleware later, which then runs first: it checks the API key before we read the body.
    app.add_middleware(BodyCheck)
    if keys := [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]:
        app.add_middleware(KeyCheck, tokens=keys)
    app.add_middleware(RefuseWhileShuttingDown)
    from dllm_engine.evaluation import likelihood_route

    likelihood_route.add_route(app)
    options = EngineOptions.from_vllm_config(args)  # arguments have an ``additional_config`` too
    if options.playground:
        playground.add_route(app, options, family_of(model_config.hf_config))
