"""Streaming by denoising step: the running block as it is after each step, before its text is final.

A request asks with ``stream_granularity="step"``. The model runner reports the block with every step, the scheduler
sends it with an output that has no new tokens, and ``vllm_hooks`` hands it on, as
``RequestOutput.outputs[i].provisional`` and to HTTP clients.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

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
