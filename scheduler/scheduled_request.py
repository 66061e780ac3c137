"""A request in the scheduler, and the outputs for its client."""

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from dllm_engine.decoding.messages import (
    COMPLETE_KEY,
    Commits,
    NewRequest,
    RequestFailure,
    StepReport,
    figures_message,
    provisional_message,
)
from dllm_engine.decoding.page_layout import PageCounts
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import RefreshState


@dataclass(eq=False)
class ScheduledRequest:
    """A request that waits or runs."""

    request: Request
    spec: DecodingSpec
    progress: Progress
    seed: int
    source: str
    """Key of the HTTP request that the sequence belongs to."""
    page_counts: PageCounts = field(default_factory=dict)
    has_final_pages: bool = False
    """True if the runner has reported the final number of pages."""
    commits: Commits = field(default_factory=lambda: Commits([], []))
    """Commits of the tokens sent so far, if the request asks for them."""
    num_in_order: int = 0
    """Number of tokens before the window when a step last wrote to pages. All of them
    are decided.
    """
    last_scheduled: int = -1
    """Number of the last step that ran the request."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def begin(self) -> NewRequest:
        """Begin to run; returns the message for the runner."""
        request = self.request
        if request.prefill_stats is not None:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=self.progress.num_read,
                num_external_cached_tokens=0,
            )
        assert request.prompt_token_ids is not None
        return NewRequest(request.prompt_token_ids, self.spec, self.seed)

    def advance(self, report: StepReport) -> EngineCoreOutput | None:
        """Apply the report of a step; returns the output for the client, if there is
        any.
        """
        progress = self.progress
        spec = self.spec
        shown = (
            provisional_message(spec, progress, report.shown)
            if report.shown is not None
            else {}
        )
        progress.num_rows_computed += report.rows_computed
        for name, entry in (report.trace or {}).items():
            progress.trace.setdefault(name, []).append(entry)
        report.advance(progress, spec)
        if report.plan.state is RefreshState.UPDATE:
            self.num_in_order = report.plan.window.start
        if report.tokens is not None:
            self._accept(report.tokens)
            if (commits := report.commits) is not None:
                # New lists, because an output that waits to be sent holds the old ones.
                passes, logprobs = self.commits
                self.commits = Commits(
                    passes + commits.committed_at, logprobs + commits.committed_logprobs
                )
            if (
                self.request.status is RequestStatus.FINISHED_STOPPED
                and report.tokens[-1] not in spec.ends.tokens
            ):
                shown |= {COMPLETE_KEY: True}
            return self._output(report.tokens, report, shown)
        if not shown:
            return None
        return EngineCoreOutput(
            self.request_id,
            new_token_ids=[],
            kv_transfer_params=figures_message(progress) | shown,
        )

    def no_progress(self) -> RequestFailure | None:
        """Failure of a request whose running blocks take more steps than they can need."""
        progress = self.progress
        if self.request.is_finished() or progress.step < self.spec.most_steps(
            progress.running
        ):
            return None
        return RequestFailure(
            "no_progress",
            f"block {progress.leftmost} of the response still has "
            f"{progress.num_masked} masked tokens after {progress.step} forward "
            f"passes, more than any block can need",
        )

    def _accept(self, tokens: list[int]) -> None:
        """Append tokens to the request, and set its status if it is complete. Only the
        last token may end it.
        """
        request = self.request
        params = self.request.sampling_params
        assert params is not None
        request.append_output_token_ids(tokens)
        if tokens[-1] in self.spec.ends.tokens:
            request.status = RequestStatus.FINISHED_STOPPED
            if tokens[-1] in (params.stop_token_ids or ()):
                request.stop_reason = tokens[-1]
        elif request.num_output_tokens >= self.spec.layout.num_sent:
            # At the end of the response the text of a constraint or a decision is
            # complete, even without an end token.
            is_whole = (
                self.spec.text.constraint is not None or self.spec.decision is not None
            )
            request.status = (
                RequestStatus.FINISHED_STOPPED
                if is_whole
                else RequestStatus.FINISHED_LENGTH_CAPPED
            )

    def _output(
        self, tokens: list[int], report: StepReport, shown: dict[str, Any]
    ) -> EngineCoreOutput:
        request = self.request
        prefill_stats = request.prefill_stats
        request.prefill_stats = None
        details = {
            "trace": self.progress.trace,
            "decision": report.decision or {},
        } | self.commits._asdict()
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=tokens,
            new_logprobs=report.logprobs,
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            prefill_stats=prefill_stats,
            kv_transfer_params=figures_message(self.progress, **details) | shown,
            trace_headers=request.trace_headers,
        )


def failed_output(
    request: Request, failure: RequestFailure, progress: Progress
) -> EngineCoreOutput:
    """Set the status of a request that fails; returns the output for its client."""
    request.status = RequestStatus.FINISHED_ERROR
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        kv_transfer_params=figures_message(
            progress, trace=progress.trace, error=failure.message
        ),
        trace_headers=request.trace_headers,
    )
