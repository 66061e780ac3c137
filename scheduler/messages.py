"""The one message each way between scheduler and model runner."""

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.request import DecodingSpec, Progress
from dllm_engine.scheduler.request_failure import RequestFailure
from dllm_engine.scheduler.step_plan import StepPlan


@dataclass(frozen=True)
class NewRequest:
    """What the runner must know of a request it has not seen."""

    prompt_token_ids: list[int]
    spec: DecodingSpec
    seed: int
    """Key of the request's random numbers; chosen by the scheduler, so that all ranks agree."""


@dataclass
class DiffusionSchedulerOutput(SchedulerOutput):
    """vLLM's message with a plan per scheduled request. vLLM's own fields are kept true for its logs and metrics."""

    new_requests: dict[str, NewRequest] = field(default_factory=dict)
    plans: dict[str, StepPlan] = field(default_factory=dict)
    page_tables: dict[str, dict[PageKind, list[list[int]]]] = field(default_factory=dict)
    """Page ids per kind and layer of the requests whose tables changed."""
    num_steps: int = 1
    """Steps to run before reporting; fewer where one completes a block."""
    progress: dict[str, Progress] = field(default_factory=dict)
    """Where each request stands, for the runner to plan the steps after the first."""


@dataclass(frozen=True)
class BlockChange:
    """What a step changed in the running block."""

    positions: list[int]
    """Filled by this step; counted from the block's start."""
    token_ids: list[int]
    """Of those positions, and so are ``confidences``: the probability of the token that was committed."""
    confidences: list[float | None]
    guesses: list[float | None]
    """Per position that is still masked, in order: the probability of the token that would have been next; None where
    none was predicted yet."""
    mask_token_id: int


@dataclass(frozen=True)
class StepReport:
    """What a step did to one request."""

    rows_computed: int
    num_unmasked: int
    block_tokens: list[int] | None
    """The block's tokens once no mask is left in it, else None."""
    trace: dict[str, Any] | None
    """One entry per trace name; None when the engine does not trace."""
    kv_slots: list[int] | None = None
    """Slots of keys that each layer turned out to need, on the rank that needs most, where a step has settled that."""
    logprobs: LogprobsLists | None = None
    """Of ``block_tokens``, if the request asks."""
    block_change: BlockChange | None = None
    """If the request streams by step."""
    failure: RequestFailure | None = None
    """Ends the request; nothing else in the report counts then."""

    @classmethod
    def failed(cls, failure: RequestFailure) -> "StepReport":
        return cls(rows_computed=0, num_unmasked=0, block_tokens=None, trace=None, failure=failure)


@dataclass
class DiffusionRunnerOutput(ModelRunnerOutput):
    """vLLM's message with a report per scheduled request of each step that was run."""

    reports: list[dict[str, StepReport]] = field(default_factory=list)
