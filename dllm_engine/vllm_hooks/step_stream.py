"""The way of provisional blocks through vLLM's front end, for requests that stream by step.

vLLM takes every output for new tokens, in its latency histograms too, so these go round it; and it merges outputs that
a slow consumer has not fetched, which would lose steps, so these are kept one by one.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from dllm_engine.provisional import PROVISIONAL_KEY
from dllm_engine.vllm_hooks.request_outputs import take_message


def processing_provisional(process_outputs: Callable[..., Any]) -> Callable[..., Any]:
    def process(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        settled, shown = [], []
        for output in engine_core_outputs:
            message = output.kv_transfer_params or {}
            if output.new_token_ids or output.finish_reason is not None or PROVISIONAL_KEY not in message:
                settled.append(output)
            elif (state := self.request_states.get(output.request_id)) is not None:
                take_message(state, message)
                completion = state._new_completion_output([], None, None)
                if completion.logprobs is not None and not completion.token_ids:
                    completion.logprobs = completion.logprobs[:0]  # before the first token vLLM hands out its own list
                request = state.parent_req or state
                request_output = state._new_request_output(request.external_req_id, [completion], False)
                if state.queue is not None:
                    state.queue.put(request_output)
                else:
                    shown.append(request_output)
        processed = process_outputs(self, settled, *args, **kwargs)
        processed.request_outputs[:0] = shown
        return processed

    return process


def carries_provisional(output: Any) -> bool:
    """Whether a ``RequestOutput`` shows the state of a block."""
    return any(getattr(c, PROVISIONAL_KEY, None) is not None for c in getattr(output, "outputs", None) or ())


def putting_one_by_one(put: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def put_one_by_one(self: Any, output: Any) -> None:
        backlog = self.__dict__.setdefault("dllm_backlog", deque())
        takes_turn = self.output is not None and not isinstance(output, Exception)
        if takes_turn and (backlog or carries_provisional(self.output) or carries_provisional(output)):
            backlog.append(output)
        else:
            put(self, output)

    return put_one_by_one


def _fetched(collector: Any, output: Any) -> Any:
    if output is not None and (backlog := collector.__dict__.get("dllm_backlog")):
        collector.put(backlog.popleft())
    return output


def getting_one(get: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def get_one(self: Any) -> Any:
        return _fetched(self, await get(self))

    return get_one


def getting_one_nowait(get_nowait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_one_nowait(self: Any) -> Any:
        return _fetched(self, get_nowait(self))

    return get_one_nowait
