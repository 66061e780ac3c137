"""The messages between scheduler and model runner, one in each direction, and from the
scheduler to front ends.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from dllm_engine.decoding.probe import Logprobs, Probe
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import RefreshState, StepPlan
from dllm_engine.decoding.unmasking_policies import SlowFastObservation

logger = init_logger(f"vllm.{__name__}")

FIGURES_KEY = "diffusion"
PROVISIONAL_KEY = "provisional"
COMPLETE_KEY = "complete"
"""Keys of ``EngineCoreOutput.kv_transfer_params``, the only field of vLLM's output for
an arbitrary dictionary. ``COMPLETE_KEY``: the response stops although its last token is
not an end token."""


@dataclass(frozen=True)
class NewRequest:
    """A request that the runner has not seen."""

    prompt_token_ids: list[int]
    spec: DecodingSpec
    seed: int
    """Seed of the request's random numbers. The scheduler chooses it, so that all ranks
    agree.
    """


@dataclass
class DiffusionSchedulerOutput(SchedulerOutput):
    """vLLM's message with our fields. Of vLLM's fields, only the numbers of rows and
    the requests that ended are used.
    """

    new_requests: dict[str, NewRequest] = field(default_factory=dict)
    plans: dict[str, StepPlan] = field(default_factory=dict)
    page_tables: dict[str, dict[str, list[list[int]]]] = field(default_factory=dict)
    """Page ids per kind and layer, of requests whose tables have changed."""
    page_copies: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """For requests that begin: ids of pages that other requests have filled, and ids of
    new pages that become copies of them before the step.
    """
    num_steps: int = 1
    """The most steps to run before a report. Fewer run if a step has tokens to send, or
    if a block joins.
    """
    progress: dict[str, Progress] = field(default_factory=dict)
    """Progress from which the runner plans steps after the first."""
    probes: list[Probe] = field(default_factory=list)
    """Computed beside the requests."""

    def leave_out(self, request_id: str) -> None:
        """Remove a request from the step."""
        for table in (
            self.plans,
            self.new_requests,
            self.page_tables,
            self.page_copies,
            self.progress,
            self.num_scheduled_tokens,
        ):
            table.pop(request_id, None)


@dataclass(frozen=True)
class ShownWindow:
    """The part of the running blocks in the response after a step. Lists have an entry
    per position.
    """

    start: int
    """First position, counted from the start of the response."""
    sent: int
    """Number of response tokens that are sent, including this step."""
    token_ids: list[int]
    """The mask token where masked."""
    masked: list[bool]
    confidences: list[float | None]
    """Probability of the token, or at a mask of the best token; None if nothing was
    predicted yet.
    """


class Commits(NamedTuple):
    """Forward pass and log-probability of each response token, as in
    ``DiffusionFigures``.
    """

    committed_at: list[int]
    committed_logprobs: list[float]


# Not frozen: one is made per request and step, and a frozen one takes longer to make.
@dataclass(slots=True)
class StepReport:
    """Result of a step for one request."""

    plan: StepPlan
    rows_computed: int
    num_unmasked: int
    masked: list[int]
    """Masked tokens left in each running block."""
    tokens: list[int] | None
    """Response tokens to send now, in order; None: none. They belong to complete blocks
    with no mask before them, or end with an end token that has no mask before it."""
    trace: dict[str, Any] | None
    """One entry per trace name; None when the engine does not trace."""
    edited: list[int] = field(default_factory=list)
    """Canvas positions of decided tokens or drafts that the step replaced, ascending.
    """
    revises: bool = False
    """As ``Progress.revises``."""
    observation: SlowFastObservation | None = None
    """Observation of SlowFast sampling; None: the request has another rule."""
    ends: bool = False
    """True if the response ends with the running blocks (``Ends.early_stop``).
    """
    kv_slots: int | None = None
    """Final number of key slots in the table that layers share, on the rank with the
    most; None: this step does not decide it.
    """
    logprobs: LogprobsLists | None = None
    commits: Commits | None = None
    """Commits of ``tokens``. ``logprobs``, ``commits`` and the fields below are set if
    the request asks for them.
    """
    shown: ShownWindow | None = None
    decision: dict[str, Any] | None = None
    """Value, probability and distribution of each field, after the last pass of a
    decision.
    """

    def advance(self, progress: Progress, spec: DecodingSpec) -> None:
        """Advance a request's progress by this step."""
        retained = (
            self.plan.retained if self.plan.state is RefreshState.UPDATE else None
        )
        if retained is not None and self.edited:
            # Keys and values from the first edited position on belong to the old
            # tokens.
            retained = min(retained, spec.layout.block_start(self.edited[0]))
        if progress.slow_fast is not None and self.observation is not None:
            progress.slow_fast = progress.slow_fast.after(self.observation)
        progress.num_edited += len(self.edited)
        progress.revises = self.revises
        progress.ended |= self.ends
        progress.advance(
            spec,
            self.num_unmasked,
            self.masked,
            retained=retained,
            prefills=self.plan.quota.is_empty,
        )


FailureCause = Literal["not_finite", "no_progress", "exception", "refused"]
FAILURE_CAUSES: tuple[str, ...] = get_args(FailureCause)


class RequestFailure(NamedTuple):
    """End of a request with an error."""

    cause: FailureCause
    message: str
    """For the client."""


def failure_of(request_id: str, error: Exception) -> RequestFailure:
    """The failure of the request whose work raised ``error``. Raises the error again if
    it concerns the whole process.
    """
    if isinstance(error, MemoryError):
        raise error
    logger.error(
        "request %s ends with an error, the others go on", request_id, exc_info=error
    )
    return RequestFailure(
        "exception",
        f"an exception in the engine ended this request: {type(error).__name__}: "
        f"{error}; the server's log has its "
        "traceback",
    )


Failures = dict[str, RequestFailure]
"""Failures by request id."""
StepResult = StepReport | RequestFailure


@dataclass
class DiffusionRunnerOutput(ModelRunnerOutput):
    """vLLM's message with a report per request for each step that has run."""

    reports: list[dict[str, StepResult]] = field(default_factory=list)
    probe_answers: list[Logprobs] = field(default_factory=list)
    """Answers to the probes of the step."""


def figures_message(progress: Progress, **others: Any) -> dict[str, Any]:
    """A request's figures (the fields of ``DiffusionFigures``) for
    ``EngineCoreOutput.kv_transfer_params``.
    """
    counts = {
        "denoising_steps": progress.num_denoised,
        "forward_passes": progress.num_forwards,
        "tokens_unmasked": progress.num_unmasked,
        "tokens_edited": progress.num_edited,
        "tokens_computed": progress.num_rows_computed,
        "pages_held": progress.pages_held,
        "tokens_retained": progress.tokens_retained,
    }
    return {FIGURES_KEY: counts | others}


def provisional_message(
    spec: DecodingSpec, progress: Progress, shown: ShownWindow
) -> dict[str, Any]:
    """The running blocks for ``EngineCoreOutput.kv_transfer_params``. ``progress``:
    progress before the step.
    """
    return {
        PROVISIONAL_KEY: {
            "block": progress.running.first,
            "num_blocks": spec.layout.num_blocks,
            "gen_length": spec.layout.gen_length,
            "block_length": spec.layout.block_length,
            "first_block_length": min(
                spec.layout.block_span(0).size, spec.layout.gen_length
            ),
            "step": progress.step + 1,
            "forward_pass": progress.num_forwards + 1,
            **asdict(shown),
        }
    }
