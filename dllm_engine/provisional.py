"""Streaming by denoising step: the running block as it is after each step, before its text is final.

A request asks with ``stream_granularity="step"``. The model runner reports the block with every step, the scheduler
sends it with an output that has no new tokens, and ``install`` lets vLLM's front end hand it on, as
``RequestOutput.outputs[i].provisional``; ``response_fields`` gives it to HTTP clients. vLLM takes every output for new
tokens, in its latency histograms too, so these go round it; and it merges outputs that a slow consumer has not
fetched, which would lose steps, so these are kept one by one.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dllm_engine.figures import take_figures
from dllm_engine.inspection import pieces_of

if TYPE_CHECKING:
    from dllm_engine.scheduler.decoding import DecodingSpec, Progress
    from dllm_engine.scheduler.messages import BlockState

PROVISIONAL_KEY = "provisional"
MASK_MARK = "░"
"""Stands for a masked position in the text of a block."""


@dataclass(frozen=True)
class ProvisionalBlock:
    """The running block after a denoising step. Lists have an entry per position of the block."""

    block: int
    """Number of the block, from 0."""
    num_blocks: int
    """Blocks of the response; an end token may leave the last ones out."""
    start: int
    """Where in the response the block starts, in tokens."""
    step: int
    """Denoising steps of this block so far."""
    forward_pass: int
    """Forward passes of the response so far."""
    token_ids: list[int]
    """The mask token's id where masked."""
    masked: list[bool]
    confidences: list[float | None]
    """Probability of the position's token as its unmasking policy saw it: at the step that committed it; where masked,
    of the token that the last step would have put there. None where no step has predicted one."""
    pieces: list[str | None] | None = None
    """The text of each token, end tokens too; None where masked. None as a whole without a tokenizer."""
    text: str | None = None
    """The block's text without special tokens, ``░`` for each masked position; None without a tokenizer."""

    def to_json(self) -> dict[str, Any]:
        """The HTTP form."""
        rounded = [None if confidence is None else round(confidence, 6) for confidence in self.confidences]
        return asdict(self) | {"confidences": rounded}


def provisional_message(spec: "DecodingSpec", progress: "Progress", state: "BlockState") -> dict[str, Any]:
    """The block that a step worked on, for ``EngineCoreOutput.kv_transfer_params``. ``progress`` is that before the
    step."""
    return {
        PROVISIONAL_KEY: {
            "block": progress.block,
            "num_blocks": spec.num_blocks,
            "start": progress.block * spec.block_length,
            "step": progress.step + 1,
            "forward_pass": progress.num_forwards + 1,
            **asdict(state),
        }
    }


def read_message(message: dict[str, Any], tokenizer: Any) -> ProvisionalBlock:
    """The block of a message, with its text where there is a ``tokenizer``."""
    block = ProvisionalBlock(**message)
    if tokenizer is None:
        return block
    pieces = _pieces(block.token_ids, block.masked, tokenizer)
    special = set(tokenizer.all_special_ids)
    shown = (
        MASK_MARK if piece is None else "" if token in special else piece
        for piece, token in zip(pieces, block.token_ids, strict=True)
    )
    return ProvisionalBlock(**message, pieces=pieces, text="".join(shown))


def _pieces(token_ids: Sequence[int], masked: Sequence[bool], tokenizer: Any) -> list[str | None]:
    """The text of each token; tokens that make one character together only do so without a mask between them."""
    pieces: list[str | None] = []
    run: list[int] = []
    for token, is_masked in zip(token_ids, masked, strict=True):
        if is_masked:
            pieces += [*pieces_of(run, tokenizer.decode), None]
            run = []
        else:
            run.append(token)
    return pieces + pieces_of(run, tokenizer.decode)


def carries_provisional(output: Any) -> bool:
    """Whether a ``RequestOutput`` shows the state of a block."""
    return any(getattr(c, PROVISIONAL_KEY, None) is not None for c in getattr(output, "outputs", None) or ())


def install() -> None:
    """Make vLLM's front end hand provisional blocks on. Idempotent; requests that do not ask are untouched."""
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState

    if getattr(RequestState, "_dllm_provisional", False):
        return
    make_request_output = RequestState.make_request_output
    new_completion_output = RequestState._new_completion_output
    process_outputs = OutputProcessor.process_outputs
    put, get, get_nowait = RequestOutputCollector.put, RequestOutputCollector.get, RequestOutputCollector.get_nowait

    def take_block(self: Any, message: dict[str, Any] | None) -> dict[str, Any] | None:
        """Keep the block of a message for the completion that is made next; returns the rest."""
        if message is None or PROVISIONAL_KEY not in message:
            self.provisional = None
            return message
        self.provisional = read_message(message[PROVISIONAL_KEY], self.logprobs_processor.tokenizer)
        return {key: value for key, value in message.items() if key != PROVISIONAL_KEY}

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
        kv_transfer_params = take_block(self, kv_transfer_params)
        return make_request_output(
            self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, *rest, **kwargs
        )

    def attach_to_completion(self: Any, *args: Any, **kwargs: Any) -> Any:
        completion = new_completion_output(self, *args, **kwargs)
        completion.provisional = getattr(self, PROVISIONAL_KEY, None)
        return completion

    def process(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        settled, shown = [], []
        for output in engine_core_outputs:
            message = output.kv_transfer_params or {}
            if output.new_token_ids or output.finish_reason is not None or PROVISIONAL_KEY not in message:
                settled.append(output)
            elif (state := self.request_states.get(output.request_id)) is not None:
                take_figures(state, take_block(state, message))
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

    def put_one_by_one(self: Any, output: Any) -> None:
        backlog = self.__dict__.setdefault("dllm_backlog", deque())
        takes_turn = self.output is not None and not isinstance(output, Exception)
        if takes_turn and (backlog or carries_provisional(self.output) or carries_provisional(output)):
            backlog.append(output)
        else:
            put(self, output)

    def fetched(self: Any, output: Any) -> Any:
        if output is not None and (backlog := self.__dict__.get("dllm_backlog")):
            put(self, backlog.popleft())
        return output

    async def get_one(self: Any) -> Any:
        return fetched(self, await get(self))

    def get_one_nowait(self: Any) -> Any:
        return fetched(self, get_nowait(self))

    RequestState.make_request_output = make_output
    RequestState._new_completion_output = attach_to_completion
    RequestState._dllm_provisional = True
    OutputProcessor.process_outputs = process
    RequestOutputCollector.put = put_one_by_one
    RequestOutputCollector.get = get_one
    RequestOutputCollector.get_nowait = get_one_nowait
