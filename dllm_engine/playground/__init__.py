"""The playground: a page at ``/playground`` of the server, to chat with the model and
watch it denoise.

It is one HTML file without a build step, and loads nothing from other hosts. It reads
everything from the server's own API, with the API key that the user types.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

from starlette.responses import HTMLResponse

from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions

ROUTE = "/playground"


@functools.cache
def page() -> str:
    """The HTML, without the options of an engine."""
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def page_headers() -> dict[str, str]:
    """HTTP headers of the page: only its own style and script may run, and it may
    connect only to its own server.
    """
    policy = (
        f"default-src 'none'; script-src {_hashes('script')}; style-src "
        f"{_hashes('style')}; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashes(tag: str) -> str:
    """Hashes of the page's inline scripts or styles, as sources of a content security
    policy.
    """
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page(), flags=re.DOTALL)
    digests = (
        base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        for body in bodies
    )
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def add_route(app: Any, options: EngineOptions, family: ModelFamily) -> None:
    """Serve the page from a FastAPI ``app``. Attributes of the page have the highest
    retention ratio of a request, whether requests may return a trace, and whether
    attention goes by blocks."""
    page_data = {
        "retention-ratio": options.retention_ratio,
        "trace": options.trace and "true",
        "by-blocks": family.attention == "block_causal" and "true",
    }
    attributes = "".join(
        f' data-{name}="{value}"' for name, value in page_data.items() if value
    )
    html = page().replace('<html lang="en"', f'<html lang="en"{attributes}', 1)
    headers = page_headers()

    async def playground() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    app.add_api_route(
        ROUTE, playground, methods=["GET", "HEAD"], include_in_schema=False
    )
