"""vLLM's output processor attaches what our scheduler sends beside tokens.

A request has figures and, where it streams by step, its running block. vLLM takes every
output for new tokens, in its latency histograms too, so outputs that only show the
running block bypass it.
"""

from dataclasses import replace
from typing import Any

from dllm_engine.decoding.messages import COMPLETE_KEY, FIGURES_KEY, PROVISIONAL_KEY
from dllm_engine.figures import PER_TOKEN, DiffusionFigures, ErrorReason
from dllm_engine.provisional import BlockReader, ProvisionalBlock
from dllm_engine.vllm_hooks.patch import Original


def process_messages(
    process_outputs: Original,
    self: Any,
    engine_core_outputs: list[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Take figures and the running block out of the engine's messages."""
    settled, shown = [], []
    for output in engine_core_outputs:
        message = output.kv_transfer_params or {}
        state = self.request_states.get(output.request_id)
        if state is not None and FIGURES_KEY in message:
            output.kv_transfer_params = None
            # For the completion that the state makes next.
            state.diffusion = DiffusionFigures(**message[FIGURES_KEY])
            state.detokenizer.is_complete = COMPLETE_KEY in message
            state.provisional = None
            if PROVISIONAL_KEY in message:
                if not hasattr(state, "block_reader"):
                    state.block_reader = BlockReader(state.logprobs_processor.tokenizer)
                state.provisional = state.block_reader.read(message[PROVISIONAL_KEY])
        if (
            output.new_token_ids
            or output.finish_reason is not None
            or PROVISIONAL_KEY not in message
        ):
            settled.append(output)
        elif state is not None:
            request_output = _output_without_tokens(state)
            if state.queue is not None:
                state.queue.put(request_output)
            else:
                shown.append(request_output)
    processed = process_outputs(self, settled, *args, **kwargs)
    processed.request_outputs[:0] = shown
    return processed


def detokenize_all(
    update: Original, self: Any, new_token_ids: list[int], stop_terminated: bool
) -> str | None:
    """vLLM leaves the last token of a response that stops out of the text, since it
    takes it for an end token.
    """
    return update(
        self, new_token_ids, stop_terminated and not getattr(self, "is_complete", False)
    )


def _output_without_tokens(state: Any) -> Any:
    completion = state._new_completion_output([], None, None)
    if completion.logprobs is not None and not completion.token_ids:
        completion.logprobs = completion.logprobs[
            :0
        ]  # before the first token vLLM hands out its own list
    request = state.parent_req or state
    return state._new_request_output(request.external_req_id, [completion], False)


def complete_with_figures(
    new_completion_output: Original, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attach the figures to the completion."""
    completion = new_completion_output(self, *args, **kwargs)
    completion.diffusion = getattr(self, "diffusion", None)
    completion.provisional = vars(self).pop("provisional", None)
    if (figures := completion.diffusion) is not None:
        returned = slice(
            self.detokenizer.num_output_tokens()
        )  # not what is behind a stop string
        completion.diffusion = replace(
            figures, **{name: getattr(figures, name)[returned] for name in PER_TOKEN}
        )
        if figures.error is not None:
            completion.finish_reason = ErrorReason(figures.error)
    return completion


def merge_with_figures(
    merge: Original, self: Any, next_output: Any, aggregate: bool
) -> None:
    """Keep the latest figures, and the latest state of each running block, where a slow
    consumer has not fetched an output."""
    before = {completion.index: shown_blocks(completion) for completion in self.outputs}
    merge(self, next_output, aggregate)
    latest = {completion.index: completion for completion in next_output.outputs}
    for completion in self.outputs:
        if completion.index in latest:
            newest = latest[completion.index]
            completion.diffusion = getattr(newest, "diffusion", None)
            completion.provisional = block = getattr(newest, PROVISIONAL_KEY, None)
            earlier = before.get(completion.index, ())
            completion.earlier_blocks = [
                each for each in earlier if block is None or each.window != block.window
            ]


def shown_blocks(completion: Any) -> list[ProvisionalBlock]:
    """The running blocks that a completion shows: those that have ended since the
    consumer fetched it, then the latest."""
    latest = getattr(completion, PROVISIONAL_KEY, None)
    return [
        *getattr(completion, "earlier_blocks", ()),
        *([] if latest is None else [latest]),
    ]
