"""The base class of the forms of answers."""

import json
from typing import Any

from dllm_engine.editors.cursor import Answer, Part


class Form:
    """The form of a route's answers: JSON, or a stream of events."""

    media_type = "text/event-stream"
    ending = ""
    """Text behind the last event of a stream."""

    def __init__(self, body: Any) -> None:
        """``body``: body of the request."""
        self.body = body

    def whole(self, answer: Answer) -> Any:
        """A complete answer."""
        raise NotImplementedError

    def part(self, answer: Answer, part: Part) -> dict[str, Any] | None:
        """The event of a new part; None: there is none."""
        return None

    def final(self, answer: Answer) -> dict[str, Any] | None:
        """The event of the end; None: there is none."""
        return None

    @staticmethod
    def error(status: int, message: str) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {
            "error": {"message": message, "type": kind, "param": None, "code": status}
        }

    @staticmethod
    def event(body: dict[str, Any]) -> str:
        return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
