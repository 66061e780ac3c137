"""Additions to vLLM's output processor, which attaches the scheduler's figures and
running blocks to outputs.

A request has figures, and if it streams by step a running block. vLLM counts every
output as new tokens, also in its latency histograms, so outputs that only show the
running block bypass it.
"""

import json
from dataclasses import replace
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import RequestState

from dllm_engine.decoding.messages import COMPLETE_KEY, FIGURES_KEY, PROVISIONAL_KEY
from dllm_engine.figures import PER_TOKEN, DiffusionFigures, ErrorReason
from dllm_engine.provisional import BlockReader, ProvisionalBlock
from dllm_engine.request_options.sampling_params import LENGTH_FIGURES, bytes_in
from dllm_engine.vllm_hooks.patch import Original


class Detokenizer:
    """vLLM's detokenizer, which returns the whole text. vLLM omits the last token of a
    response that stops, because it assumes an end token.
    """

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer
        self.is_complete = False
        """True if the response has stopped without an end token."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._detokenizer, name)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        return self._detokenizer.update(
            new_token_ids, stop_terminated and not self.is_complete
        )


class DiffusionRequestState(RequestState):
    """vLLM's state of a request, with the messages of our scheduler."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.detokenizer: Any = Detokenizer(self.detokenizer)
        self._length_figures: dict[str, int] = {}
        self._figures: DiffusionFigures | None = None
        self._provisional: ProvisionalBlock | None = None
        self._reader: BlockReader | None = None

    def read_request(self, request: Any) -> None:
        """Read the figures about the choice of the length from a request."""
        if (figures := bytes_in(request.sampling_params, LENGTH_FIGURES)) is not None:
            self._length_figures = json.loads(figures)

    def read(self, message: dict[str, Any]) -> None:
        """Read a message for the next completion."""
        figures = message[FIGURES_KEY] | self._length_figures
        self._figures = DiffusionFigures(**figures)
        self.detokenizer.is_complete = COMPLETE_KEY in message
        self._provisional = None
        if PROVISIONAL_KEY in message:
            if self._reader is None:
                assert self.logprobs_processor is not None
                self._reader = BlockReader(self.logprobs_processor.tokenizer)
            self._provisional = self._reader.read(message[PROVISIONAL_KEY])

    def output_without_tokens(self) -> Any:
        completion = self._new_completion_output([], None, None)
        if completion.logprobs is not None and not completion.token_ids:
            # Before the first token vLLM returns its internal list.
            completion.logprobs = completion.logprobs[:0]
        request = self.parent_req or self
        return self._new_request_output(request.external_req_id, [completion], False)

    def _new_completion_output(self, *args: Any, **kwargs: Any) -> Any:
        completion: Any = super()._new_completion_output(*args, **kwargs)
        completion.diffusion = self._figures
        completion.provisional, self._provisional = self._provisional, None
        if (figures := self._figures) is not None:
            # Only tokens before a stop string.
            returned = slice(self.detokenizer.num_output_tokens())
            completion.diffusion = replace(
                figures,
                **{name: getattr(figures, name)[returned] for name in PER_TOKEN},
            )
            if figures.error is not None:
                completion.finish_reason = ErrorReason(figures.error)
        return completion

    def _new_request_output(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._new_request_output(*args, **kwargs)
        return DiffusionRequestOutput(**vars(output))


class DiffusionRequestOutput(RequestOutput):
    """vLLM's output of a request. Its completions have figures and running blocks."""

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a new output into one that a slow consumer has not fetched: keep the
        latest figures, and the latest state of each running block.
        """
        before = {
            completion.index: shown_blocks(completion) for completion in self.outputs
        }
        super().add(next_output, aggregate)
        newest: dict[int, Any] = {
            completion.index: completion for completion in next_output.outputs
        }
        completion: Any
        for completion in self.outputs:
            if (latest := newest.get(completion.index)) is not None:
                completion.diffusion = latest.diffusion
                completion.provisional = block = latest.provisional
                completion.earlier_blocks = [
                    earlier
                    for earlier in before.get(completion.index, ())
                    if block is None or earlier.window != block.window
                ]


def state_with_figures(
    from_new_request: Original, cls: type, *args: Any, **kwargs: Any
) -> Any:
    """Make vLLM's state of a request, with our class that has figures."""
    is_pooling = kwargs["request"].sampling_params is None
    state_class = cls if is_pooling else DiffusionRequestState
    state = from_new_request(state_class, *args, **kwargs)
    if not is_pooling:
        state.read_request(kwargs["request"])
    return state


def process_messages(
    process_outputs: Original,
    self: Any,
    engine_core_outputs: list[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Read figures and running blocks from the engine's messages, and remove them."""
    settled, shown = [], []
    for output in engine_core_outputs:
        message = output.kv_transfer_params or {}
        state = self.request_states.get(output.request_id)
        if state is not None and FIGURES_KEY in message:
            output.kv_transfer_params = None
            state.read(message)
        if (
            output.new_token_ids
            or output.finish_reason is not None
            or PROVISIONAL_KEY not in message
        ):
            settled.append(output)
        elif state is not None:
            request_output = state.output_without_tokens()
            if state.queue is not None:
                state.queue.put(request_output)
            else:
                shown.append(request_output)
    processed = process_outputs(self, settled, *args, **kwargs)
    processed.request_outputs[:0] = shown
    return processed


def shown_blocks(completion: Any) -> list[ProvisionalBlock]:
    """The running blocks of a completion: blocks that have ended since the consumer
    fetched the last output, then the latest one."""
    latest = getattr(completion, PROVISIONAL_KEY, None)
    return [
        *getattr(completion, "earlier_blocks", ()),
        *([] if latest is None else [latest]),
    ]
