"""``/v1/likelihoods``: log-likelihoods of answers that a client gives.

OpenAI's ``echo`` with ``logprobs`` asks for each token's probability after those before it, which a masked model does
not have. The bound that it has instead needs to know where the answer begins.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from starlette.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from dllm_engine.admission import check_tokens
from dllm_engine.evaluation.likelihood import NUM_SAMPLES, num_canvases, weighted_canvases
from dllm_engine.scheduler.options.request_options import InvalidRequestError
from dllm_engine.vllm_hooks.server.bodies import error_response

ROUTE = "/v1/likelihoods"
MOST_SAMPLES, MOST_ANSWERS = 1024, 256
MOST_FULL_CANVASES = 256
"""Most rows of forward passes that a request may take, in canvases of ``max_model_len``."""

Canvas = tuple[list[int], list[int]]
"""Tokens, and positions to mask."""
Tokens = list[NonNegativeInt]


class LikelihoodRequest(BaseModel):
    """The body of a request. A prompt or messages, and answers that would follow them, as texts or token ids."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | Tokens | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    answers: list[str] | list[Tokens] = Field(min_length=1, max_length=MOST_ANSWERS)
    num_samples: int = Field(NUM_SAMPLES, ge=1, le=MOST_SAMPLES)
    seed: int = Field(0, ge=0, lt=1 << 63)
    masks: list[Tokens] | None = None


class EngineNotReadyError(Exception):
    """The engine is paused, or its weights are changing."""


@dataclass(eq=False)
class _Job:
    """The canvases of a request, and who takes the log-probabilities of each."""

    canvases: Iterator[Canvas]
    take: Callable[[list[float]], None]
    finished: asyncio.Future[None]
    next_canvas: Canvas | None = None
    num_weight_changes: int | None = None


class PassQueue:
    """Forward passes over canvases of all requests in turn. The engine's steps go on between two passes."""

    def __init__(self) -> None:
        self._jobs: deque[_Job] = deque()
        """Those with canvases that no pass has taken yet."""
        self._open: set[_Job] = set()
        self._task: asyncio.Task[None] | None = None

    async def compute(self, engine: Any, canvases: Iterator[Canvas], take: Callable[[list[float]], None]) -> None:
        """Compute canvases, and hand on the log-probabilities of each one's masked tokens, in order.

        Raises ``EngineNotReadyError``, also if weights change between two passes, and what the engine raises.
        """
        job = _Job(canvases, take, asyncio.get_running_loop().create_future(), next(canvases, None))
        if job.next_canvas is None:
            return
        self._jobs.append(job)
        self._open.add(job)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(engine))
        try:
            await job.finished
        finally:
            self._leave(job)

    def end(self, error: Exception) -> None:
        """End all requests with an error: no engine is left."""
        for job in list(self._open):
            self._fail(job, error)

    async def _run(self, engine: Any) -> None:
        max_rows = engine.vllm_config.scheduler_config.max_num_batched_tokens
        while batch := self._next_batch(max_rows):
            sequences, masked = zip(*(canvas for _, canvas in batch), strict=True)
            try:
                answers, num_changes = await engine.collective_rpc(
                    "masked_logprobs", args=(list(sequences), list(masked))
                )
            except Exception as error:
                for job in {job for job, _ in batch}:
                    self._fail(job, error)
                continue
            for (job, _), logprobs in zip(batch, answers or [None] * len(batch), strict=True):
                job.num_weight_changes = num_changes if job.num_weight_changes is None else job.num_weight_changes
                if logprobs is None or job.num_weight_changes != num_changes:
                    self._fail(job, EngineNotReadyError("the engine is paused, or its weights changed; ask again"))
                    continue
                job.take(logprobs)
            for job in {job for job, _ in batch if job.next_canvas is None and not job.finished.done()}:
                job.finished.set_result(None)

    def _next_batch(self, max_rows: int) -> list[tuple[_Job, Canvas]]:
        """As many canvases as fit into a pass, one of each job in turn."""
        batch: list[tuple[_Job, Canvas]] = []
        num_rows = 0
        while self._jobs:
            job = self._jobs[0]
            assert job.next_canvas is not None
            num_rows += len(job.next_canvas[0])
            if batch and num_rows > max_rows:
                break
            batch.append((job, job.next_canvas))
            job.next_canvas = next(job.canvases, None)
            if job.next_canvas is None:
                self._jobs.popleft()
            else:
                self._jobs.rotate(-1)
        return batch

    def _fail(self, job: _Job, error: Exception) -> None:
        self._leave(job)
        if not job.finished.done():
            job.finished.set_exception(error)

    def _leave(self, job: _Job) -> None:
        self._open.discard(job)
        if job in self._jobs:
            self._jobs.remove(job)


def add_route(app: Any) -> None:
    """Serve ``/v1/likelihoods`` from a FastAPI ``app`` of vLLM's."""
    queue = app.state.likelihoods = PassQueue()

    async def create_likelihoods(request: LikelihoodRequest, raw_request: Request) -> JSONResponse:
        state = raw_request.app.state
        prompt = await _prompt_tokens(request, state)
        if isinstance(prompt, ErrorResponse):
            return _json(prompt)
        asked = CompletionRequest(model=request.model, prompt=request.answers, add_special_tokens=False, max_tokens=1)
        answers = await state.openai_serving_completion.render_completion_request(asked)
        if isinstance(answers, ErrorResponse):
            return _json(answers)
        answers = [list(answer["prompt_token_ids"]) for answer in answers]
        _check(request, prompt, answers, state.engine_client.model_config)
        try:
            data = await _computed(queue, state.engine_client, request, prompt, answers)
        except EngineNotReadyError as error:
            return error_response(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
        num_tokens = len(prompt) + sum(map(len, answers))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        model = request.model or state.openai_serving_models.model_name()
        return JSONResponse({"object": "list", "model": model, "data": data, "usage": usage})

    app.add_api_route(ROUTE, with_cancellation(load_aware_call(create_likelihoods)), methods=["POST"])


async def _prompt_tokens(request: LikelihoodRequest, state: Any) -> list[int] | ErrorResponse:
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("give either prompt or messages")
    if request.prompt is not None:
        asked = CompletionRequest(model=request.model, prompt=request.prompt, max_tokens=1)
        rendered = await state.openai_serving_completion.render_completion_request(asked)
    else:
        chat = ChatCompletionRequest(
            model=request.model,
            messages=request.messages,
            chat_template_kwargs=request.chat_template_kwargs,
            max_completion_tokens=1,
        )
        rendered = await state.openai_serving_chat.render_chat_request(chat)
        rendered = rendered if isinstance(rendered, ErrorResponse) else rendered[1]
    return rendered if isinstance(rendered, ErrorResponse) else list(rendered[0]["prompt_token_ids"])


def _check(request: LikelihoodRequest, prompt: list[int], answers: list[list[int]], model_config: Any) -> None:
    """Raise ``InvalidRequestError`` naming what cannot be computed."""
    limit = model_config.max_model_len
    check_tokens(prompt, model_config.hf_config)
    num_rows = 0
    for index, answer in enumerate(answers):
        check_tokens(answer, model_config.hf_config, f"answers[{index}]")
        length = len(prompt) + len(answer)
        if length > limit:
            raise InvalidRequestError(
                f"answers[{index}]: prompt ({len(prompt)} tokens) and answer ({len(answer)}) need a canvas of "
                f"{length}, max_model_len is {limit}; shorten one or raise max_model_len"
            )
        canvases = num_canvases(len(answer), request.num_samples) if request.masks is None else len(request.masks)
        num_rows += canvases * length
    shortest = min(map(len, answers))
    for number, mask in enumerate(request.masks or ()):
        if max(mask, default=0) >= shortest or len(set(mask)) < len(mask):
            raise InvalidRequestError(
                f"masks[{number}] must hold different positions in an answer, and the shortest has {shortest} tokens"
            )
    if num_rows > MOST_FULL_CANVASES * limit:
        asked = f"num_samples={request.num_samples}" if request.masks is None else f"{len(request.masks)} masks"
        raise InvalidRequestError(
            f"{asked}: forward passes over {num_rows} rows in all, a request may take {MOST_FULL_CANVASES * limit}; "
            f"ask for less, or for fewer answers at once"
        )


async def _computed(
    queue: PassQueue, engine: Any, request: LikelihoodRequest, prompt: list[int], answers: list[list[int]]
) -> list[dict[str, Any]]:
    """Per answer its log-likelihood, or the log-probabilities of each mask's tokens."""
    data: list[dict[str, Any]] = [{"index": i, "num_tokens": len(answer)} for i, answer in enumerate(answers)]
    terms: deque[tuple[int, float]] = deque()

    def weighted() -> Iterator[Canvas]:
        for index, answer in enumerate(answers):
            data[index]["log_likelihood"] = 0.0
            for weight, canvas in weighted_canvases(prompt, answer, request.num_samples, request.seed):
                terms.append((index, weight))
                yield canvas

    def masked() -> Iterator[Canvas]:
        for index, answer in enumerate(answers):
            data[index]["logprobs"] = []
            for mask in request.masks or ():
                terms.append((index, 1.0))
                yield prompt + answer, [len(prompt) + position for position in mask]

    def take(logprobs: list[float]) -> None:
        index, weight = terms.popleft()
        if request.masks is None:
            data[index]["log_likelihood"] += weight * sum(logprobs)
        else:
            data[index]["logprobs"].append(logprobs)

    await queue.compute(engine, weighted() if request.masks is None else masked(), take)
    return data


def _json(error: ErrorResponse) -> JSONResponse:
    return JSONResponse(error.model_dump(), status_code=error.error.code)
