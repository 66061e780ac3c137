"""d3LLM's cache (arXiv 2601.07568): finished blocks are kept some passes later."""

from typing import ClassVar

from dllm_engine.cache_methods.base import (
    CacheMethod,
    hold_tokens,
    plan_behind_prefix,
)
from dllm_engine.decoding.option_types import NotNegative, Positive
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec, TunedValues
from dllm_engine.decoding.step_plan import StepPlan


class DelayedOptions(CacheOptions):
    """Options of ``delayed`` (d3LLM, arXiv 2601.07568)."""

    tuned: ClassVar[TunedValues] = {"cache_delay": (0, 1, 2)}

    cache_delay: NotNegative = 1
    """Forward passes from the one that finishes a block to the one that keeps it. The
    passes between them compute the whole canvas and renew everything kept."""
    refresh_interval: Positive = 10_000
    """Every so many forward passes, counted over the response, a pass computes the
    whole canvas and renews everything kept."""


def plan(spec: DecodingSpec, progress: Progress) -> StepPlan:
    """Plan a step that keeps a beginning of the canvas, and computes the rest with all
    masked blocks.

    A pass keeps blocks that have waited long enough (UPDATE). Else, while a block waits
    or when a refresh is due, it renews all kept tokens (UPDATE of ALL). Else it reads
    the kept tokens (REUSE). Before anything is kept, it is FULL.
    """
    options = DelayedOptions.of(spec)
    number = progress.num_forwards + 1
    kept, keeping, waits = 0, 0, False
    for end, arrives, keeps in _schedule(spec, progress, options.cache_delay):
        kept = end if keeps < number else kept
        keeping = end if keeps <= number else keeping
        waits = waits or arrives <= number < keeps
    renews = keeping == kept and (waits or number % options.refresh_interval == 0)
    stop = spec.layout.visible(progress.window(spec)).stop
    return plan_behind_prefix(
        spec, progress, 0 if renews else kept, stop, keep=keeping, window_alone=False
    )


def _schedule(
    spec: DecodingSpec, progress: Progress, delay: int
) -> list[tuple[int, int, int]]:
    """For the prompt and each finished block: its end, the forward pass in which it
    begins to wait, and the pass that keeps it, counted from 1. A block waits once the
    block before it is kept; with shifted logits it waits at once."""
    kept_before = max(1, delay)
    schedule = [(spec.layout.prompt_length, 0, kept_before)]
    for block, completed_at in enumerate(progress.completed_at):
        arrives = (
            completed_at + 1
            if spec.layout.shifts_logits
            else max(completed_at + 1, kept_before)
        )
        kept_before = arrives + delay
        schedule.append((spec.layout.block_span(block).stop, arrives, kept_before))
    return schedule


DELAYED = CacheMethod(
    plan,
    # Only blocks before the last running block can be finished.
    hold_tokens(lambda spec, running: spec.layout.block_span(running.stop - 1).start),
    DelayedOptions,
    trims_suffix=True,
)
