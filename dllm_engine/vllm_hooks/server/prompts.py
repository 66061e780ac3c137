"""Prompts of our routes, rendered in the same way as for vLLM's routes."""

from collections.abc import Awaitable
from typing import Any

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from dllm_engine.request_options.errors import InvalidRequestError

Tokens = list[NonNegativeInt]


class PromptRequest(BaseModel):
    """The fields of a body for a model and a prompt: a text, token ids, or messages."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | Tokens | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def prompt_tokens(request: PromptRequest, state: Any) -> list[int]:
    """Token ids of the prompt. ``state`` is the state of vLLM's application."""
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("give either prompt or messages")
    if request.prompt is not None:
        completion = CompletionRequest(
            model=request.model, prompt=request.prompt, max_tokens=1
        )
        return (
            await rendered_tokens(
                state.openai_serving_completion.render_completion_request(completion)
            )
        )[0]
    fields = {
        "messages": request.messages,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    chat = ChatCompletionRequest(model=request.model, **fields, max_completion_tokens=1)
    return (await rendered_tokens(state.openai_serving_chat.render_chat_request(chat)))[
        0
    ]


async def rendered_tokens(rendering: Awaitable[Any]) -> list[list[int]]:
    """Token ids of the prompts that vLLM renders. Raises ``HTTPException`` for vLLM's
    error response.
    """
    rendered = await rendering
    if isinstance(rendered, ErrorResponse):
        raise HTTPException(rendered.error.code, rendered.error.message)
    prompts = (
        rendered[1] if isinstance(rendered, tuple) else rendered
    )  # behind a chat's messages
    return [list(prompt["prompt_token_ids"]) for prompt in prompts]
