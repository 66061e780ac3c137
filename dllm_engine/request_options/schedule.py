"""Options of the schedule: number of tokens that a step unmasks, and number of blocks
that run.
"""

from dataclasses import replace
from typing import Annotated

from dllm_engine.decoding.canvas_layout import CanvasLayout
from dllm_engine.decoding.option_types import Count, Share
from dllm_engine.decoding.spec import ParallelRule, Schedule, Unmasking
from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES
from dllm_engine.request_options.context import RequestContext, refused
from dllm_engine.request_options.facts import (
    AttentionNeed,
    Exclusion,
    Facts,
    OptionGroup,
)
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS

_Steps = Annotated[
    Count | None,
    Facts(
        default_by="checkpoint",
        one_of="counts",
        # A fixed count needs one block at a time.
        replaces=("rules", "block_add_threshold"),
        decided_by_guide=True,
    ),
]
_MOST_STEPS_PER_TOKEN = 16
"""Limit on steps per token for policies that take tokens back, with which more steps
than tokens make sense.
"""


class ScheduleOptions(OptionGroup):
    steps: _Steps = None
    """Denoising steps of the whole response, at most ``gen_length``. They are split
    between blocks by their length; each block gets at least one."""
    steps_per_block: _Steps = None
    """Denoising steps of each block, instead of ``steps``; at most one per token. With
    a rule of parallel unmasking, a step fills at least what this schedule would fill.
    No effect with ``entropy_budget``."""
    tokens_per_step: _Steps = None
    """Tokens that each step unmasks, instead of ``steps`` and of a family's schedule.
    With a rule of parallel unmasking, the least number (d2Cache)."""
    block_add_threshold: Annotated[
        Share | None,
        Facts(
            default_by="checkpoint",
            excludes=(
                Exclusion(
                    "steps_per_block", "blocks that run at once share their steps"
                ),
            ),
            decided_by_guide=True,
            needs_decided=True,
            needs_attention=AttentionNeed(
                "full",
                "blocks run one at a time; the model was not trained for several",
            ),
        ),
    ] = None
    """Several blocks at once (d3LLM): the next block joins the running ones once this
    share of the last one is decided. 0: one more block in every step; 1 or unset: one
    block at a time. Needs a rule of parallel unmasking."""


def resolve_schedule(
    request: RequestContext,
    own: ScheduleOptions,
    options: ScheduleOptions,
    layout: CanvasLayout,
    unmasking: Unmasking,
) -> Schedule:
    """Schedule of a request. With a rule of parallel unmasking, blocks end by
    themselves; computations with steps then assume one token per step."""
    parallel = unmasking.parallel
    check_several_blocks(options, parallel)
    positions = layout.canvas_length - layout.prompt_length
    steps = _steps(own, options, layout, takes_back=unmasking.policy.takes_back)
    by_schedule = parallel is None or PARALLEL_RULES[parallel.kind].least_by_schedule
    schedule = Schedule(
        steps=steps if parallel is None else positions,
        kind=request.family.schedule,
        block_steps=options.steps_per_block if by_schedule else None,
        tokens_per_step=options.tokens_per_step,
        block_add_threshold=options.block_add_threshold,
    )
    if parallel is not None:
        return schedule
    if schedule.tokens_per_step or schedule.block_steps:
        return replace(schedule, steps=sum(schedule.steps_per_block(layout)))
    if steps < layout.num_blocks:
        parts = layout.block_length < layout.attended_length
        raise refused(
            f"steps={steps} is out of range: each of the {layout.num_blocks} "
            f"{'parts' if parts else 'blocks'} of {layout.block_length} tokens needs at "
            f"least one; raise steps or {'sub_block_length' if parts else 'block_length'}"
        )
    return schedule


def _steps(
    own: ScheduleOptions,
    options: ScheduleOptions,
    layout: CanvasLayout,
    *,
    takes_back: bool,
) -> int:
    """Number of steps of the response, fitted to it if the request names none: each
    block gets at least one.
    """
    positions = layout.canvas_length - layout.prompt_length
    steps = options.steps or positions
    if own.steps is None:
        return max(min(steps, positions), layout.num_blocks)
    if takes_back:
        if steps > (limit := _MOST_STEPS_PER_TOKEN * positions):
            raise refused(
                f"steps={steps} is out of range: it must be 1 … {limit}, "
                f"{_MOST_STEPS_PER_TOKEN} for each token"
            )
    elif steps > positions:
        added = layout.canvas_length - layout.response_span.stop
        behind = f" and {added} behind it in its last block" if added else ""
        raise refused(
            f"steps={steps} is out of range: it must be 1 … gen_length (max_tokens), "
            f"here {layout.gen_length}{behind}; a step unmasks at least one token"
        )
    return steps


def check_several_blocks(
    options: ScheduleOptions, parallel: ParallelRule | None
) -> None:
    """Refuse several blocks at once without a rule of parallel unmasking."""
    threshold = options.block_add_threshold
    if threshold is not None and parallel is None:
        raise refused(
            f"block_add_threshold={threshold}: several blocks at once need a rule of "
            f"parallel unmasking; set one of {', '.join(PARALLEL_OPTIONS)}, or leave "
            f"block_add_threshold unset"
        )
