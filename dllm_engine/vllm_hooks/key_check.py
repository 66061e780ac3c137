"""The server's key is asked for wherever it answers a prompt."""

from collections.abc import Awaitable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

ANSWERING = ("/invocations", "/generative_scoring")
"""Routes that answer prompts and that vLLM leaves open when a key is set; it guards those under ``/v1`` and others."""


class KeyCheck(AuthenticationMiddleware):
    """vLLM's own check, for the routes that it leaves out."""

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path.startswith(ANSWERING) and not self.verify_token(Headers(scope=scope)):
                return JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
        return self.app(scope, receive, send)
