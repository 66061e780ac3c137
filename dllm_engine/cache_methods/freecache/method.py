"""FreeCache (arXiv 2505.21467, section 3.2.1): the prompt and finished blocks are
computed once.
"""

from typing import ClassVar

from dllm_engine.cache_methods.base import (
    CacheMethod,
    hold_tokens,
    plan_behind_prefix,
)
from dllm_engine.decoding.canvas_layout import Blocks
from dllm_engine.decoding.option_types import Positive
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec, TunedValues
from dllm_engine.decoding.step_plan import StepPlan


class FreeCacheOptions(CacheOptions):
    """Options of ``freecache`` (FreeCache, arXiv 2505.21467, section 3.2.1)."""

    tuned: ClassVar[TunedValues] = {"include_suffix": (True, False)}

    include_suffix: bool = True
    """Compute the masked tokens behind the window in every step too. False: the window
    alone.
    """
    cache_block_length: Positive | None = None
    """Response tokens whose keys and values are kept together, once all of them are
    finished; until then every step computes them. A multiple of ``block_length`` (the
    paper: 256, with blocks of 64). None: one block."""

    def refusal(self, spec: DecodingSpec) -> str | None:
        """Reason why a request is refused: cache blocks must be whole blocks, unless
        the response is a single block.
        """
        length = self.cache_block_length
        if (
            length is None
            or spec.layout.num_blocks == 1
            or length % spec.layout.block_length == 0
        ):
            return None
        return (
            f"block_length={spec.layout.block_length} does not divide the engine's "
            f"cache_block_length={length}; choose one that does, or start the engine with "
            f"another cache_block_length"
        )


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Plan a step. The first step computes the whole canvas and keeps the prompt. A
    finished cache block is fed once more with its final tokens: the first step after it
    has left the window keeps it. With shifted logits its last row then predicts the
    window's first position.
    """
    window = progress.window(spec)
    clean = clean_tokens(spec, progress.running)
    visible = spec.layout.visible(window)
    if progress.num_forwards == 0:
        return plan_behind_prefix(spec, progress, 0, visible.stop, keep=clean)
    start = clean_tokens(spec, progress.before) if progress.step == 0 else clean
    stop = visible.stop if FreeCacheOptions.of(spec).include_suffix else window.stop
    return plan_behind_prefix(spec, progress, start, stop, keep=clean)


def clean_tokens(spec: DecodingSpec, running: Blocks) -> int:
    """Number of tokens that are kept while these blocks run: the prompt, and whole
    cache blocks before the window.
    """
    finished = spec.layout.span_of(running).start - spec.layout.prompt_length
    together = FreeCacheOptions.of(spec).cache_block_length or spec.layout.block_length
    return spec.layout.prompt_length + finished - finished % together


FREECACHE = CacheMethod(
    plan,
    hold_tokens(clean_tokens),
    FreeCacheOptions,
    trims_suffix=True,
)
