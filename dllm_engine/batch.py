"""Batch runs: a file of requests is answered into a file of records. An interrupted run
can be resumed.

An input line is a request, and an output line is a record; its ``index`` is the number
of the input line, from 0. A record is appended and synced to disk as soon as its
request has finished. It has digests of its input and settings, so that a run never
resumes the output of another input or other settings.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict

from dllm_engine.output_lock import lock_output
from dllm_engine.text import one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams


@with_config(ConfigDict(extra="allow", strict=True))
class Message(TypedDict):
    """A message of a conversation. A chat template may read more keys."""

    role: str
    content: str


def prompt_tokens(prompt: str | list[Message], tokenizer: Any) -> list[int]:
    """Tokens of a prompt by the tokenizer's chat template; without a template, of the
    plain text.
    """
    if isinstance(prompt, str):
        if not getattr(tokenizer, "chat_template", None):
            return list(tokenizer.encode(prompt))
        prompt = [Message(role="user", content=prompt)]
    return list(
        tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False
        )
    )


class BatchRequest(BaseModel):
    """Request of an input line. Other keys are ignored."""

    model_config = ConfigDict(strict=True)

    id: str | int | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        return self


@dataclass(frozen=True)
class InputLine:
    """One line of the input that is not blank."""

    index: int
    text: bytes

    @property
    def digest(self) -> str:
        return _digest(self.text)


Answer = tuple[InputLine, dict[str, Any]]
"""A line, and the fields of its record that come from the answer: the request's id and
its result.
"""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def settings_digest(settings: Any) -> str:
    """Digest of the settings (JSON values) that a response depends on."""
    return _digest(json.dumps(settings, sort_keys=True).encode())


def read_input(path: Path) -> list[InputLine]:
    """The lines of a file. They are not parsed yet, because a bad line must not stop
    the others.
    """
    lines = path.read_bytes().split(b"\n")
    return [
        InputLine(index, line.strip())
        for index, line in enumerate(lines)
        if line.strip()
    ]


def answer_lines(
    llm: "LLM", lines: Sequence[InputLine], params: "DiffusionParams", *, use_chat: bool
) -> Iterator[list[Answer]]:
    """Answer lines, and yield the lines that each step has finished. A line that cannot
    be served gets an error. The engine holds twice as many requests as it can run at
    once, so that steps are full and memory is limited.
    """
    from vllm.exceptions import VLLMClientError

    window = 2 * llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    pending = deque(lines)
    running: dict[str, Answer] = {}
    while pending or running:
        answers: list[Answer] = []
        while pending and len(running) < window:
            line = pending.popleft()
            fields = {}
            try:
                request = BatchRequest.model_validate_json(line.text)
                fields = {} if request.id is None else {"id": request.id}
                line_params = params.clone()
                if line_params.seed is not None:
                    # Equal prompts get different responses, and a resumed run makes the
                    # same responses.
                    line_params.seed += line.index
                running[_enqueue(llm, request, line_params, use_chat=use_chat)] = (
                    line,
                    fields,
                )
            except (ValueError, VLLMClientError) as error:
                answers.append((line, fields | {"error": one_line(error)}))
        for output in llm.llm_engine.step() if running else ():
            line, fields = running.pop(output.request_id)
            answers.append((line, fields | outcome(output.outputs[0])))
        if answers:
            yield answers


def _enqueue(
    llm: "LLM", request: BatchRequest, params: "DiffusionParams", *, use_chat: bool
) -> str:
    """Add a request to the engine; returns the request id of its outputs."""
    if use_chat:
        messages = request.messages or [
            Message(role="user", content=request.prompt or "")
        ]
        (internal_id,) = llm.enqueue_chat(messages, params, use_tqdm=False)
    elif request.messages is None:
        (internal_id,) = llm.enqueue([request.prompt], params, use_tqdm=False)
    else:
        raise ValueError(
            "'messages' need the tokenizer's chat template: the model has none, or "
            "--raw is set"
        )
    # vLLM returns "<number>-<random>", but outputs have the number.
    return str(internal_id).split("-")[0]


def outcome(completion: Any) -> dict[str, Any]:
    """The fields of a record with the result of its request: text and figures, or an
    ``error``.
    """
    if completion.finish_reason not in ("stop", "length"):
        why = getattr(completion.diffusion, "error", None) or completion.finish_reason
        return {"error": f"the engine ended the request: {why}"}
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "figures": completion.diffusion.to_json(),
    }


class _Record(BaseModel):
    """The fields of an output line that a resumed run reads."""

    model_config = ConfigDict(strict=True)

    index: int
    input_hash: str
    settings_hash: str
    error: str | None = None


class ResultFile(AbstractContextManager["ResultFile"]):
    """The output of a run, which may resume an earlier run. Pipes and devices can be
    written, but not resumed. Raises ``OSError`` for a file that cannot be written, and
    ``ValueError`` for a file that another run is writing, or that holds anything but
    records of the same input and settings."""

    def __init__(self, path: Path, lines: Sequence[InputLine], settings: str) -> None:
        self.path = path
        self.num_errors = 0
        self._settings = settings
        self._file = path.open("ab+", buffering=0)
        self._is_regular = path.is_file()
        try:
            finished = self._resume(lines) if self._is_regular else set()
        except BaseException:
            self._file.close()
            raise
        self.num_resumed = len(finished)
        self.pending = [line for line in lines if line.index not in finished]

    def _resume(self, lines: Sequence[InputLine]) -> set[int]:
        """Lock the file and cut off a torn last line; returns the indices of its
        records.
        """
        lock_output(self._file, self.path)
        inputs = {line.index: line.digest for line in lines}
        finished: set[int] = set()
        num_bytes = 0
        with self.path.open("rb") as existing:
            for number, raw in enumerate(existing, start=1):
                is_torn = not raw.endswith(b"\n")
                if is_torn and raw.startswith(b'{"index": '[: len(raw)]):
                    break
                try:
                    record = None if is_torn else _Record.model_validate_json(raw)
                except ValidationError:
                    record = None
                if record is None:
                    problem = "is not a record of this command"
                elif record.input_hash != inputs.get(record.index):
                    problem = f"was made from another input (its line {record.index})"
                elif record.settings_hash != self._settings:
                    problem = "was made with another model or other settings"
                elif record.index in finished:
                    problem = f"is a second record of input line {record.index}"
                else:
                    finished.add(record.index)
                    self.num_errors += record.error is not None
                    num_bytes += len(raw)
                    continue
                raise ValueError(
                    f"{self.path}: line {number} {problem}; choose another output, or "
                    f"remove this one"
                )
        self._file.truncate(num_bytes)
        return finished

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, answers: Sequence[Answer]) -> None:
        """Write the records of finished requests. Once this returns, they survive a
        crash of the machine.
        """
        data = b""
        for line, fields in answers:
            made_from = {"input_hash": line.digest, "settings_hash": self._settings}
            data += (
                json.dumps({"index": line.index, **fields, **made_from}).encode()
                + b"\n"
            )
        try:
            while data:
                data = data[self._file.write(data) :]
            if self._is_regular:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise ValueError(
                f"cannot write {self.path}: {error.strerror}; the same command goes on "
                f"with what is in it"
            ) from error
        self.num_errors += sum("error" in fields for _, fields in answers)
