"""The routes ``/v1/edit/completions`` and ``/v1/apply/completions`` for clients of
Inception's models.

Only the text at the cursor can change. An edit fills in the rest of the cursor's line,
and an application copies the lines of the file that it keeps.
"""

import re
import time
from typing import Any

from pydantic import BaseModel, Field

from dllm_engine.editors.cursor import Answer, CursorRequest, Part, SamplingFields
from dllm_engine.editors.fim import FimForm
from dllm_engine.editors.merging import Merge
from dllm_engine.request_options.errors import InvalidRequestError

NO_CHANGE = "None"
"""Answer that tells clients: the region needs no edit."""
_REGION = re.compile(
    r"<\|code_to_edit\|>\n?(?P<region>.*?)\n?<\|/code_to_edit\|>", re.DOTALL
)
_CURSOR = "<|cursor|>"
_FILE_END = "<|/current_file_content|>"
_APPLIED = (
    (r"<\|original_code\|>", r"<\|/original_code\|>"),
    (r"<\|update_snippet\|>", r"<\|/update_snippet\|>"),
)
_TAGS = (("<code>", "</code>"), ("<update>", "</update>"))
"""Tags of Relace and Morph."""


class Message(BaseModel):
    """A message of a chat."""

    role: str
    content: str


class ChatBody(SamplingFields):
    """The fields of both routes. Other fields are ignored."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=-1)
    stream: bool | None = False

    @property
    def content(self) -> str:
        """The content of the last message, which has the tags."""
        return self.messages[-1].content


class EditBody(ChatBody):
    """The body of an edit: a region with a cursor, and the text around it."""

    def parts(self) -> tuple[str, str, str, str, str]:
        """The text before the region, the region up to the cursor, the rest of the
        cursor's line, the rest of the region, and the rest of the file.
        """
        match = _REGION.search(self.content)
        if match is None:
            raise InvalidRequestError(
                "the last message has no <|code_to_edit|> … <|/code_to_edit|>; put "
                "them around the region"
            )
        region = match["region"]
        before, cursor, behind = region.partition(_CURSOR)
        if not cursor:
            raise InvalidRequestError(
                f"the region has no {_CURSOR}; put it where the edit begins"
            )
        rest, line_end, following = behind.partition("\n")
        above = self.content[: match.start()]
        below = self.content[match.end() :].partition(_FILE_END)[0]
        return above, before, rest, line_end + following, below

    def request(self) -> CursorRequest:
        above, before, _, behind, below = self.parts()
        stops = ["\n", *self.stops]
        return self.between(
            above + before,
            (behind + below) or "\n",
            budget=self.max_tokens,
            stops=stops,
        )


class ApplyBody(ChatBody):
    """The body of an application: a file, and a snippet with its changes."""

    def request(self) -> Merge:
        for tags in (_APPLIED, _TAGS):
            texts = [
                re.search(rf"{begin}\n?(.*?)\n?{end}", self.content, re.DOTALL)
                for begin, end in tags
            ]
            if texts[0] is not None and texts[1] is not None:
                return Merge(texts[0][1], texts[1][1])
        raise InvalidRequestError(
            "the last message has no <|original_code|> … <|/original_code|> and "
            "<|update_snippet|> … <|/update_snippet|>; put them around file and snippet"
        )


class EditForm(FimForm):
    """The edited region in a fence, from which clients cut it out. It comes in one
    part.
    """

    kind = "edit.completion"

    def content(self, text: str) -> str:
        _, before, rest, behind, _ = self.body.parts()
        if text.rstrip() == rest.rstrip():
            return NO_CHANGE
        return f"```\n{before}{text}{behind}\n```"

    def part(self, answer: Answer, part: Part) -> dict[str, Any] | None:
        return None

    def final(self, answer: Answer) -> dict[str, Any] | None:
        text = self.content(answer.choices[0].text)
        return super().part(answer, Part(0, text, "stop", 0))


def models(config: Any, names: list[str]) -> dict[str, Any]:
    """The answer of routes that list models."""
    listed = [
        {
            "id": name,
            "name": name,
            "object": "model",
            "created": int(time.time()),
            "context_length": config.max_model_len,
            "max_output_length": config.max_model_len,
        }
        for name in names
    ]
    return {"object": "list", "data": listed}
