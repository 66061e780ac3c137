"""The way of provisional blocks through vLLM's front end, for requests that stream by step.

vLLM takes every output for new tokens, in its latency histograms too, so these go round it. It merges outputs that a
slow consumer has not fetched; of a stream by step a waiting step is replaced by the next one of its block, so that at
most one output per finished block waits, and one of the running block. Each keeps its text.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from dllm_engine.scheduler.messages import PROVISIONAL_KEY
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


def _shows_block(output: Any) -> bool:
    """Whether a ``RequestOutput`` shows the state of a block."""
    return any(getattr(c, PROVISIONAL_KEY, None) is not None for c in getattr(output, "outputs", None) or ())


def _is_overtaken(waiting: Any, output: Any) -> bool:
    """Whether ``waiting`` brings nothing but a step of a running block that ``output`` goes on from. The last step of a
    block, which leaves no mask, comes with its text."""
    indices = {completion.index for completion in output.outputs}
    blocks = [getattr(completion, PROVISIONAL_KEY, None) for completion in waiting.outputs]
    return {completion.index for completion in waiting.outputs} <= indices and all(
        block is not None and any(block.masked) for block in blocks
    )


def putting_latest(put: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def put_latest(self: Any, output: Any) -> None:
        backlog = self.__dict__.setdefault("dllm_backlog", deque())
        nothing_waits = self.output is None or isinstance(self.output, Exception)
        if nothing_waits or isinstance(output, Exception):
            put(self, output)
        elif backlog or _shows_block(self.output) or _shows_block(output):
            waiting = [other for other in (self.output, *backlog) if not _is_overtaken(other, output)]
            self.output, *rest = *waiting, output
            self.dllm_backlog = deque(rest)
        else:
            put(self, output)

    return put_latest


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
