"""vLLM's output processor attaches what our scheduler sends beside tokens: the figures of a request and, where it
streams by step, its running block. Requests of other models are untouched.
"""

from collections.abc import Callable
from typing import Any

from dllm_engine.figures import DiffusionFigures, error_reason
from dllm_engine.provisional import BlockReader
from dllm_engine.scheduler.messages import FIGURES_KEY, PROVISIONAL_KEY


def take_message(state: Any, message: dict[str, Any] | None) -> dict[str, Any] | None:
    """Keep what is ours of a message for the completion that vLLM's ``RequestState`` makes next; returns the rest."""
    state.provisional = None
    if message is None or FIGURES_KEY not in message:
        return message
    if PROVISIONAL_KEY in message:
        if not hasattr(state, "block_reader"):
            state.block_reader = BlockReader(state.logprobs_processor.tokenizer)
        state.provisional = state.block_reader.read(message[PROVISIONAL_KEY])
    state.diffusion = DiffusionFigures(**message[FIGURES_KEY])
    return None


def taking_message(make_request_output: Callable[..., Any]) -> Callable[..., Any]:
    def make_output(
        self: Any,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: dict[str, Any] | None = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        kv_transfer_params = take_message(self, kv_transfer_params)
        return make_request_output(
            self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, *rest, **kwargs
        )

    return make_output


def with_figures(new_completion_output: Callable[..., Any]) -> Callable[..., Any]:
    def make_completion(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = new_completion_output(self, *args, **kwargs)
        completion.diffusion = getattr(self, "diffusion", None)
        completion.provisional = getattr(self, "provisional", None)
        if completion.diffusion is not None and completion.diffusion.error is not None:
            completion.finish_reason = error_reason(completion.diffusion.error)
        return completion

    return make_completion


def merging_figures(merge: Callable[..., None]) -> Callable[..., None]:
    def merge_with_figures(self: Any, next_output: Any, aggregate: bool) -> None:
        merge(self, next_output, aggregate)
        latest = {completion.index: completion for completion in next_output.outputs}
        for completion in self.outputs:
            if completion.index in latest:
                completion.diffusion = getattr(latest[completion.index], "diffusion", None)

    return merge_with_figures
