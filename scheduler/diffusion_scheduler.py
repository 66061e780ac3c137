"""The diffusion step scheduler: which requests run in a step, in which refresh state,
with which pages.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from dllm_engine.decoding.messages import (
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    RequestFailure,
    StepReport,
    failure_of,
)
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import RefreshState, StepPlan
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.client_outputs import ClientOutputs
from dllm_engine.scheduler.engine_stats import EngineStats
from dllm_engine.scheduler.model_weights import ModelWeights
from dllm_engine.scheduler.page_pool import PagePool
from dllm_engine.scheduler.page_tables import PageTables, pool_log_line
from dllm_engine.scheduler.probe_queue import ProbeQueue
from dllm_engine.scheduler.refresh_budget import RefreshBudget
from dllm_engine.scheduler.request_resolver import RequestResolver
from dllm_engine.scheduler.scheduled_request import ScheduledRequest, failed_output
from dllm_engine.scheduler.step_rows import PlannedStep, StepRows, in_turn
from dllm_engine.scheduler.waiting_queue import WaitingQueue

logger = init_logger(f"vllm.{__name__}")

_KEPT_FREE = 0.25
"""Share of sequences, rows and pages that a source with more than one sequence leaves
to others.
"""


class DiffusionScheduler(SchedulerInterface):
    """Continuous batching of requests at different denoising steps.

    A running request costs its plan's rows in every step. Requests are admitted, first
    come first served or by priority, while ``max_num_seqs``, ``max_num_batched_tokens``
    and the page pool have room. If running requests need more pages and the pool is
    empty, the newest request is preempted.
    """

    # Read by EngineCore.
    connector = None
    ec_connector = None
    pause_state = PauseState.UNPAUSED

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        """Arguments are vLLM's; ``structured_output_manager``, ``block_size`` and
        ``mm_registry`` are not used.
        """
        hf_config = vllm_config.model_config.hf_config
        scheduling = vllm_config.scheduler_config
        self.options = EngineOptions.from_vllm_config(vllm_config)
        self.method = self.options.method
        if not scheduling.enable_chunked_prefill:
            # A prompt waits until a step has room for all of it.
            self.method = replace(self.method, shortened=None)
        geometry = self.options.geometry(
            hf_config, vllm_config.parallel_config.tensor_parallel_size
        )
        shares_prefixes = (
            self.method.keeps_for_good or self.options.share_prompts
        ) and vllm_config.cache_config.enable_prefix_caching
        self.pages = PagePool(
            kv_cache_config.num_blocks, hash_block_size, shares=shares_prefixes
        )
        self.tables = PageTables(
            *(self.method, geometry, self.pages, scheduling.watermark),
            self.options.num_anchor_pages,
        )
        self.max_num_running = scheduling.max_num_active_seqs or scheduling.max_num_seqs
        self.max_rows = scheduling.max_num_batched_tokens
        self.refreshes = RefreshBudget(
            self.options.refresh_ratio if "full" in self.method.attention else None
        )
        self.resolver = RequestResolver(
            self.options,
            hf_config,
            geometry,
            self.max_rows,
            self.pages.num_pages,
            # Seeded, so that one engine run is repeatable.
            random.Random(vllm_config.model_config.seed),
        )
        self.by_priority = scheduling.policy == "priority"
        self.waiting = WaitingQueue(by_priority=self.by_priority)
        self.running: list[ScheduledRequest] = []
        self.states: dict[str, ScheduledRequest] = {}
        self.finished_req_ids: set[str] = set()
        self.weights = ModelWeights()
        self.probes = ProbeQueue(self.weights)
        self.outputs = ClientOutputs(tells_ended=include_finished_set)
        self.log_stats = log_stats
        self.stats = EngineStats()
        self.rows = StepRows(self.max_rows, self.options.steps_per_dispatch)
        self._num_steps = 0
        page_bytes = sum(
            group.kv_cache_spec.page_size_bytes
            for group in kv_cache_config.kv_cache_groups
        )
        logger.info("%s", pool_log_line(self.options, geometry, self.pages, page_bytes))

    # Requests come and go

    def add_request(self, request: Request) -> None:
        try:
            state = self._new_state(request)
        except Exception as error:
            # The front end has checked the same rules (admission.py): a ValueError
            # means that a client bypasses it.
            if isinstance(error, ValueError):
                failure = RequestFailure("refused", str(error))
            else:
                failure = failure_of(request.request_id, error)
            logger.error("request %s refused: %s", request.request_id, failure.message)
            self._send_error(request, failure, Progress())
            return
        self.states[request.request_id] = state
        self.waiting.add(request, state.source)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def _new_state(self, request: Request) -> ScheduledRequest:
        if self.pause_state == PauseState.UNPAUSED:
            self.weights.require()
        if request.request_id in self.states:
            raise ValueError(
                f"request id {request.request_id!r} is running already; choose another"
            )
        return self.resolver.resolve(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        assert RequestStatus.is_finished(finished_status)
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        ids = dict.fromkeys(self.states if request_ids is None else request_ids)
        states = [self.states[i] for i in ids if i in self.states]
        for state in states:
            state.request.status = finished_status
            self._end(state)
        return [state.request for state in states]

    def _end(self, state: ScheduledRequest) -> None:
        """Free all that a request has. It may wait, run, or be between the two if it
        failed.
        """
        request = state.request
        self.running = remove_all(self.running, {state})
        self.waiting.remove([request])
        del self.states[request.request_id]
        if self.log_stats:  # else nobody empties its lists
            self.stats.add_ended(state.progress)
        self.tables.give_back(state)
        self.refreshes.forget(request.request_id)
        self.finished_req_ids.add(request.request_id)
        self.outputs.end(request)

    def _preempt(self, state: ScheduledRequest) -> None:
        """Take the pages of a running request. The runner keeps its tokens and fills
        new pages from them later.
        """
        request = state.request
        self.running = remove_all(self.running, {state})
        self.tables.take_away(state)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED)
        self.waiting.prepend(request, state.source)

    def _fail(
        self,
        state: ScheduledRequest,
        failure: RequestFailure,
        output: DiffusionSchedulerOutput | None = None,
    ) -> None:
        """End a request with an error. ``output``: the step that it may be part of."""
        logger.error("request %s failed: %s", state.request_id, failure.message)
        if output is not None:
            output.leave_out(state.request_id)
        self._end(state)
        self._send_error(state.request, failure, state.progress)

    @contextmanager
    def _failing_alone(
        self, state: ScheduledRequest, output: DiffusionSchedulerOutput | None = None
    ) -> Iterator[None]:
        """End a request if the block raises an error; the other requests go on.
        ``output`` is as for ``_fail``.
        """
        try:
            yield
        except Exception as error:
            self._fail(state, failure_of(state.request_id, error), output)

    def _send_error(
        self, request: Request, failure: RequestFailure, progress: Progress
    ) -> None:
        self.stats.requests_failed[failure.cause] += 1
        self.outputs.add(request, failed_output(request, failure, progress))

    # A step: who runs

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = DiffusionSchedulerOutput.make_empty()
        assert isinstance(output, DiffusionSchedulerOutput)
        output.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        if self.pause_state == PauseState.PAUSED_ALL:
            return output
        self.tables.begin_step()
        self.refreshes.begin_step(self._canvases())
        if self.method.keeps_for_good:
            output.preempted_req_ids = self._make_room()
        planned = in_turn(
            self._plans(output), short_first=self.method.shortened is not None
        )
        rows_of = ((state.source, plan.max_rows) for state, plan in planned)
        self.rows.begin_step(self._num_steps, rows_of)
        if self.probes.is_due:
            output.probes = self.probes.take(self.rows)
        self._run_planned(planned, output)
        full: set[str] = set()
        if not throttle_prefills and not output.preempted_req_ids:
            full = self._admit(output)
        if not output.probes:
            output.probes = self.probes.take(self.rows)
        canvases = self._canvases()
        self.refreshes.end_step(output.plans, canvases)
        if self._next_waiting(full) is None:
            self._run_on(output, canvases)
        output.total_num_scheduled_tokens = sum(
            output.num_scheduled_tokens.values()
        ) + sum(len(probe.canvas) for probe in output.probes)
        return output

    def _canvases(self) -> dict[str, int]:
        """Canvas lengths of the running requests."""
        return {
            state.request_id: state.spec.layout.canvas_length for state in self.running
        }

    def _make_room(self) -> set[str]:
        """Reserve pages for the tokens of running blocks, for the oldest or most urgent
        request first. If the pool has no room, preempt the last requests. Returns their
        ids."""
        kept = list(self.running)
        if self.by_priority:
            kept.sort(key=lambda state: state.request)
        number, preempted = 0, set()
        while number < len(kept):
            state = kept[number]
            while number < len(kept) and not self.tables.grow(state):
                preempted.add(kept[-1].request_id)
                self._preempt(kept.pop())
            number += 1
        return preempted

    def _plans(self, output: DiffusionSchedulerOutput) -> list[PlannedStep]:
        """The next step of each running request."""
        planned = []
        for state in list(self.running):
            with self._failing_alone(state, output):
                plan = self.method.next_step(state.spec, state.progress)
                planned.append((state, plan))
        return planned

    def _run_planned(
        self, planned: list[PlannedStep], output: DiffusionSchedulerOutput
    ) -> None:
        """Schedule the planned steps that have room in the row budget."""
        due = sum(plan.max_rows for _, plan in planned)
        for state, plan in planned:
            due -= plan.max_rows
            with self._failing_alone(state, output):
                # A part of a long prompt gets the rows that other requests leave, and
                # at least a block.
                least = state.spec.layout.rows_at_once
                room = self.rows.left
                if plan.max_rows > 2 * least:
                    room = max(room - due, least)
                plan = self._fitted(plan, state.spec, room)
                has_room = self.rows.allow(state.source, plan.max_rows)
                if has_room and self.refreshes.allows(state.request_id, plan):
                    self._schedule_one(state, plan, output)
                    self.rows.take(state.source, plan.max_rows)

    def _fitted(self, plan: StepPlan, spec: DecodingSpec, room: int) -> StepPlan:
        """The part of a step that fits ``room`` rows. With ``batch_invariant``, it is
        the same as if the request ran alone.
        """
        return self.method.fitted(
            plan, spec, self.max_rows if self.options.batch_invariant else room
        )

    def _schedule_one(
        self, state: ScheduledRequest, plan: StepPlan, output: DiffusionSchedulerOutput
    ) -> None:
        state.last_scheduled = self._num_steps
        output.plans[state.request_id] = plan
        # A request that has filled no pages yet reads those of other requests.
        needs_pages = plan.state is RefreshState.UPDATE or (
            plan.read > 0 and not state.page_counts
        )
        self.tables.update(state, output, needs_pages=needs_pages)
        if plan.state is RefreshState.UPDATE:
            self.tables.note_filled(state, plan.retained)
        output.num_scheduled_tokens[state.request_id] = plan.max_rows

    def _run_on(
        self, output: DiffusionSchedulerOutput, canvases: dict[str, int]
    ) -> None:
        """Let the runner run several steps, if every step of every request has room."""
        if (
            self.options.steps_per_dispatch == 1
            or self.probes
            or not output.plans
            or output.plans.keys() != canvases.keys()
            or sum(canvases.values()) > self.max_rows
            or self.refreshes.binds(canvases)
            or any(state.spec.reports.streams_steps for state in self.running)
        ):
            return
        output.num_steps = self.options.steps_per_dispatch
        for state in list(self.running):
            with self._failing_alone(state, output):
                # Any of these steps may write pages.
                self.tables.update(state, output, needs_pages=True)
                output.progress[state.request_id] = replace(state.progress, trace={})

    # Who begins

    @property
    def admits(self) -> bool:
        """True if requests may begin: the engine is not paused and has all of its
        weights.
        """
        return (
            self.pause_state == PauseState.UNPAUSED
            and self.weights.incomplete_since is None
        )

    def _admit(self, output: DiffusionSchedulerOutput) -> set[str]:
        """Let waiting requests begin in their order, while there is room. Returns the
        sources that may not begin more requests.
        """
        full = self.rows.resting()
        num_running = Counter(state.source for state in self.running)
        while len(self.running) < self.max_num_running and (
            state := self._next_waiting(full)
        ):
            with self._failing_alone(state, output):
                kept_free = _KEPT_FREE if num_running[state.source] else 0.0
                if self._begin_if_room(state, kept_free, output):
                    num_running[state.source] += 1
                elif num_running[state.source]:
                    full.add(state.source)
                else:
                    break
        return full

    def _next_waiting(self, full: Collection[str]) -> ScheduledRequest | None:
        """The request to admit next, from a source that is not in ``full``. While no
        request may begin, preempted requests still go on."""
        for request in self.waiting:
            state = self.states[request.request_id]
            if (self.admits or request.num_preemptions) and state.source not in full:
                return state
        return None

    def _begin_if_room(
        self,
        state: ScheduledRequest,
        kept_free: float,
        output: DiffusionSchedulerOutput,
    ) -> bool:
        """Let a request begin in this step if there are pages and rows for it. It has
        to leave the share ``kept_free`` of sequences, rows and pages free.
        """
        sequences_free = self.max_num_running - len(self.running)
        if sequences_free <= int(kept_free * self.max_num_running):
            return False
        shared = self.tables.find_prefix(state)
        if shared is None:
            return False
        room = self.rows.left - int(kept_free * self.max_rows)
        plan = self.method.next_step(state.spec, state.progress)
        plan = self._fitted(plan, state.spec, room)
        if plan.max_rows > room or not self.rows.may_begin(state.source, plan.max_rows):
            return False
        if not self.tables.reserve(state, shared, kept_free, output, len(self.running)):
            return False
        self._begin(state, output)
        self._schedule_one(state, plan, output)
        self.rows.begin(state.source, plan.max_rows)
        return True

    def _begin(self, state: ScheduledRequest, output: DiffusionSchedulerOutput) -> None:
        """Let a waiting request run."""
        request = state.request
        self.tables.record_prefix(state)
        self.waiting.remove([request])
        request.status = RequestStatus.RUNNING
        self.running.append(state)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED)
        if not request.num_preemptions:
            output.new_requests[state.request_id] = state.begin()

    # A step: what it did

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(model_runner_output, DiffusionRunnerOutput):
            self._num_steps += len(model_runner_output.reports)
            self.stats.engine_steps += len(model_runner_output.reports)
            for step in model_runner_output.reports:
                for request_id, result in step.items():
                    # A request may have been aborted while the step ran, or ended in an
                    # earlier step.
                    if (state := self.states.get(request_id)) is not None:
                        self._take_in(state, result)
            if model_runner_output.probe_answers:
                self.probes.take_in(model_runner_output.probe_answers)
        return self.outputs.take(self.make_stats())

    def _take_in(
        self, state: ScheduledRequest, result: StepReport | RequestFailure
    ) -> None:
        """Apply the result of a step to a request."""
        if isinstance(result, RequestFailure):
            self._fail(state, result)
            return
        with self._failing_alone(state):
            if result.kv_slots is not None:
                self.tables.release_unused(state, result.kv_slots)
            self.stats.add_step(state.spec, result)
            output = state.advance(result)
            self.tables.share(state)
            if (failure := state.no_progress()) is not None:
                self._fail(state, failure)
                return
            if output is not None:
                self.outputs.add(state.request, output)
            if state.request.is_finished():
                self._end(state)

    # What else EngineCore asks

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state

    @property
    def num_begun(self) -> int:
        """Number of running and of preempted requests."""
        return len(self.running) + sum(
            request.num_preemptions > 0 for request in self.waiting
        )

    def get_num_unfinished_requests(self) -> int:
        if self.pause_state == PauseState.PAUSED_ALL:
            return 0
        unfinished = (
            len(self.running) + len(self.waiting) if self.admits else self.num_begun
        )
        # Errors are sent with the outputs of a step.
        return unfinished + len(self.outputs) + len(self.probes)

    def has_request(self, request_id: str) -> bool:
        """Return True if a request waits or runs here. vLLM 0.33 calls it."""
        return request_id in self.states

    def has_finished_requests(self) -> bool:
        return bool(self.finished_req_ids)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def get_kv_cache_usage(self) -> float:
        """Share of the pages that is reserved, 0 to 1."""
        return self.pages.num_reserved / max(self.pages.num_pages, 1)

    def make_stats(self) -> SchedulerStats | None:
        if not self.log_stats:
            return None
        stats, self.stats = self.stats, EngineStats()
        retained = (state.progress.retained for state in self.running)
        stats.set_gauges(self.pages, sum(retained))
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage=self.get_kv_cache_usage(),
            prefix_cache_stats=self.tables.take_prefix_stats(),
            kv_connector_stats=stats.message(),
        )

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget the shared prefixes. Returns False if running requests hold pages,
        which makes it impossible. ``reset_running_requests``: preempt the requests that
        can go on without their pages."""
        can_lose_pages = (
            self.method.keeps_for_good and not self.options.cache.keeps_running_block
        )
        if reset_running_requests and can_lose_pages:
            for state in reversed(self.running):
                self._preempt(state)
        return self.tables.forget_prefixes()

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: encoders, speculative decoding and vLLM's structured output are
        refused at the start.
        """

    reset_encoder_cache = get_grammar_bitmask = shutdown = _do_nothing
    update_draft_token_ids = update_draft_token_ids_in_output = _do_nothing
