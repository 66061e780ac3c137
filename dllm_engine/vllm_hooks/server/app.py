"""Additions to vLLM's HTTP application for our models: routes, a check of bodies, and
the API key on routes for which vLLM does not ask for one.

vLLM's own hook for routes, ``vllm.endpoint_plugins``, loads only plugins that
``VLLM_PLUGINS`` names, and users would have to list every other plugin there too.
"""

import logging
from functools import partial
from typing import Any

from starlette.types import Scope
from vllm.entrypoints.anthropic import api_router as anthropic
from vllm.entrypoints.serve.middleware import authenticate

from dllm_engine import playground
from dllm_engine.options import EngineOptions
from dllm_engine.structured_output.tool_calls import serve_tool_calls
from dllm_engine.vllm_hooks.patch import Original
from dllm_engine.vllm_hooks.server.bodies import BodyCheck
from dllm_engine.vllm_hooks.server.error_forms import (
    as_anthropic,
    is_anthropic,
    is_failure,
    route_of,
)
from dllm_engine.vllm_hooks.server.open_requests import (
    Answers,
    OpenRequests,
    Rewrite,
    open_request,
)
from dllm_engine.vllm_hooks.server.responses import WITH_FIGURES, with_figures


def rewriter(scope: Scope, status: int) -> Rewrite | None:
    """The function that changes a JSON response: errors get Anthropic's form,
    completions get figures.
    """
    route = route_of(scope)
    if status >= 400 and is_anthropic(route):
        return partial(as_anthropic, status)
    if status == 200 and route in WITH_FIGURES:
        current_request = open_request.get()
        assert current_request is not None, "Answers is in front"
        serving = scope["app"].state.openai_serving_completion
        return partial(with_figures, current_request, serving.renderer.tokenizer)
    return None


def extend_app(
    register: Original,
    args: Any,
    app: Any,
    supported_tasks: Any,
    model_config: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> None:
    """Add our routes and middleware together with vLLM's routes."""
    register(args, app, supported_tasks, model_config, *rest, **kwargs)
    if not getattr(model_config, "is_dllm_engine", False):
        return
    # The tool parser must be set before vLLM makes the objects that answer.
    serve_tool_calls(args, model_config)
    args.default_chat_template_kwargs = {
        **model_config.hf_config.family.template_defaults,
        **(args.default_chat_template_kwargs or {}),
    }
    # Middleware that is added last runs first. vLLM adds its middleware later, so it
    # checks the API key before we read the body.
    app.add_middleware(BodyCheck)
    requests = app.state.open_requests = OpenRequests()
    app.add_middleware(Answers, requests=requests, rewriter=rewriter)
    logging.getLogger(anthropic.__name__).addFilter(is_failure)
    from dllm_engine.editors import routes as editors

    # These routes answer prompts, and vLLM does not ask for a key there.
    authenticate.GUARDED_PREFIX = tuple(
        {
            *authenticate.GUARDED_PREFIX,
            *editors.GUARDED,
            "/invocations",
            "/generative_scoring",
        }
    )
    from dllm_engine.decisions import routes as decisions
    from dllm_engine.decisions.asking import check_files
    from dllm_engine.evaluation import likelihood_route

    # The first route would stop an engine without experts. vLLM answers decisions only
    # for other models, and its list of models is only for OpenAI's clients.
    routes = app.router.routes
    replaced = ("/scale_elastic_ep", *decisions.ROUTES, *editors.REPLACED)
    routes[:] = [
        route for route in routes if getattr(route, "path", "") not in replaced
    ]
    options = EngineOptions.from_vllm_config(
        args
    )  # Arguments have an ``additional_config`` too.
    check_files(options, args.model)
    decisions.add_routes(app)
    likelihood_route.add_route(app)
    editors.add_routes(app)
    if options.playground:
        playground.add_route(app, options, model_config.hf_config.family)
