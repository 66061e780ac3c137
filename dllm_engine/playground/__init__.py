"""The playground: a page at ``/playground`` of the server itself, to chat with the model and watch it denoise.

One HTML file without a build step and without anything from elsewhere. It holds no data: whatever it shows it asks of
the server's own API, with the API key that the user types.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

PATH = "/playground"
_PAGE = Path(__file__).with_name("page.html")


@functools.cache
def page() -> str:
    """The HTML."""
    return _PAGE.read_text(encoding="utf-8")


@functools.cache
def page_headers() -> dict[str, str]:
    """The headers that go with it. Only its own style and script may run, and it may talk to its own server only."""
    policy = {
        "default-src": "'none'",
        "script-src": _hashes("script"),
        "style-src": _hashes("style"),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashes(tag: str) -> str:
    """What the page has between the tags of this name, as sources of a content security policy."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page(), flags=re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def add_route(app: Any) -> None:
    """Serve the page from a FastAPI ``app``."""
    from starlette.responses import HTMLResponse

    async def playground() -> HTMLResponse:
        return HTMLResponse(page(), headers=page_headers())

    app.add_api_route(PATH, playground, methods=["GET", "HEAD"], include_in_schema=False, response_class=HTMLResponse)
