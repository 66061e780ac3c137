"""The diffusion step scheduler: which requests run in a step, in which refresh state,
with which pages.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from dllm_engine.cache_methods.base import guide_pages
from dllm_engine.decoding.messages import (
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    NewRequest,
    RequestFailure,
    StepReport,
)
from dllm_engine.decoding.page_layout import PageCounts, PageKind, pages_for
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.step_plan import RefreshState, StepPlan
from dllm_engine.scheduler.page_pool import prefix_keys
from dllm_engine.scheduler.request_queue import RequestQueue
from dllm_engine.scheduler.request_state import RequestState
from dllm_engine.scheduler.step_shares import StepShares

_KEPT_FREE = 0.25
"""Share of sequences, rows and pages that a source leaves to others, where it has more
than one sequence.
"""


class DiffusionScheduler(RequestQueue):
    """Continuous batching of requests at different denoising steps.

    A running request costs its plan's rows in every step. Requests are admitted, first
    come first served or by priority, while ``max_num_seqs``, ``max_num_batched_tokens``
    and the page pool have room. Where what they hold grows and the pool is empty, the
    newest one is preempted.
    """

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = DiffusionSchedulerOutput.make_empty()
        assert isinstance(output, DiffusionSchedulerOutput)
        output.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        if self.pause_state == PauseState.PAUSED_ALL:
            return output
        self._num_steps += 1
        self._being_filled.clear()
        self.refreshes.begin_step(self._canvases())
        budget = self.max_rows
        if self.method.keeps_for_good:
            output.preempted_req_ids = self._make_room()
        planned = self._plans_in_order(output)
        shares = StepShares(
            ((state.source, plan.max_rows) for state, plan in planned), self.max_rows
        )
        due = sum(plan.max_rows for _, plan in planned)
        for state, plan in planned:
            due -= plan.max_rows
            with self._failing_alone(state, output):
                # A part of a long prompt takes what the others leave, and one that was
                # left out a block at least.
                block_length = state.spec.layout.block_length
                is_short = plan.max_rows <= 2 * block_length
                plan = self._fitted(
                    plan,
                    state.spec,
                    budget if is_short else max(budget - due, block_length),
                )
                has_room = plan.max_rows <= budget and shares.allow(
                    state.source, plan.max_rows
                )
                if has_room and self.refreshes.allows(state.request_id, plan):
                    self._schedule_one(state, plan, output)
                    shares.take(state.source, plan.max_rows)
                    budget -= plan.max_rows
        if not throttle_prefills and not output.preempted_req_ids:
            self._admit(output, budget, shares)
        canvases = self._canvases()
        self.refreshes.end_step(output.plans, canvases)
        self._run_on(output, canvases)
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        return output

    def _admit(
        self, output: DiffusionSchedulerOutput, budget: int, shares: StepShares
    ) -> None:
        full: set[str] = set()
        """Sources that have all that one may have: others find room beside them."""
        num_running = Counter(state.source for state in self.running)
        while len(self.running) < self.max_num_running and (
            state := self._next_waiting(full)
        ):
            with self._failing_alone(state, output):
                kept_free = _KEPT_FREE if num_running[state.source] else 0.0
                if len(self.running) >= self.max_num_running - int(
                    kept_free * self.max_num_running
                ):
                    full.add(state.source)
                    continue
                request, spec, progress = state.request, state.spec, state.progress
                keys = (
                    []
                    if request.skip_reading_prefix_cache
                    else self._new_keys(state, request.num_tokens)
                )
                shared = self.pages.find(keys, self.geometry.num_layers)
                num_shared = len(shared[0]) if shared else 0
                if self._being_filled.intersection(keys[num_shared : num_shared + 1]):
                    break  # another request fills the next page in this step
                progress.retained = num_shared * self.geometry.page_size
                demand = self.method.admission_demand(
                    spec, progress.running, self.geometry
                )
                spare = max(
                    self.watermark if self.running else 0,
                    int(kept_free * self.pages.num_pages),
                )
                room = budget - int(kept_free * self.max_rows)
                plan = self._fitted(self.method.next_step(spec, progress), spec, room)
                if (
                    not self.pages.can_reserve(demand + spare, shared)
                    or plan.max_rows > room
                ):
                    if not kept_free:
                        break
                    full.add(state.source)
                    continue
                if not shares.allow(state.source, plan.max_rows):
                    full.add(state.source)
                    continue
                self.pages.reserve(state.request_id, demand, shared)
                self._begin(state, output)
                self._schedule_one(state, plan, output)
                shares.admit(state.source, plan.max_rows)
                budget -= plan.max_rows
                num_running[state.source] += 1

    def _begin(self, state: RequestState, output: DiffusionSchedulerOutput) -> None:
        """Let a waiting request run, with the pages that were found for it."""
        request, resumes = state.request, state.request.num_preemptions > 0
        if self.shares_prefixes and not request.skip_reading_prefix_cache:
            self.prefix_stats.record(
                request.num_tokens, state.progress.retained, preempted=resumes
            )
        self.waiting.remove([request])
        request.status = RequestStatus.RUNNING
        self.running.append(state)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED)
        if resumes:
            return
        if request.prefill_stats is not None:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=state.progress.retained,
                num_external_cached_tokens=0,
            )
        assert request.prompt_token_ids is not None
        output.new_requests[state.request_id] = NewRequest(
            request.prompt_token_ids, state.spec, state.seed
        )

    def _make_room(self) -> set[str]:
        """Reserve what the running blocks of requests add to pages, for the oldest or
        most urgent one first. Where the pool has no room, the last of them are
        preempted; returns their ids."""
        by_priority = self.policy == SchedulingPolicy.PRIORITY
        kept = (
            sorted(self.running, key=lambda state: state.request)
            if by_priority
            else list(self.running)
        )
        number, preempted = 0, set()
        while number < len(kept):
            state = kept[number]
            needed = self.method.num_held(
                state.spec, state.progress.running, self.geometry
            )
            while number < len(kept) and not self.pages.grow(state.request_id, needed):
                preempted.add(kept[-1].request_id)
                self._preempt(kept.pop())
            number += 1
        return preempted

    def _run_on(
        self, output: DiffusionSchedulerOutput, canvases: dict[str, int]
    ) -> None:
        """Let the runner run several steps, if no request waits and every step of every
        request has room.
        """
        if (
            self.options.steps_per_dispatch == 1
            or self.waiting
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
                # Whichever of its steps writes them.
                self._hold_pages(state, output, needs_pages=True)
                output.progress[state.request_id] = replace(state.progress, trace={})

    def _canvases(self) -> dict[str, int]:
        """Canvas lengths of the running requests."""
        return {
            state.request_id: state.spec.layout.canvas_length for state in self.running
        }

    def _new_keys(self, state: RequestState, num_tokens: int) -> list[BlockHash]:
        """Keys of the pages that a request's first tokens fill for good, without those
        that others can find already.
        """
        if not self.shares_prefixes:
            return []
        size = self.geometry.page_size
        pages = range(self.pages.num_keyed[state.request_id], num_tokens // size)
        return prefix_keys(
            state.request.block_hashes, size, state.spec.layout.block_length, pages
        )

    def _plans_in_order(
        self, output: DiffusionSchedulerOutput
    ) -> list[tuple[RequestState, StepPlan]]:
        """The next step of each running request, in the order in which they get rows of
        the budget.
        """
        planned = []
        for state in list(self.running):
            with self._failing_alone(state, output):
                planned.append(
                    (state, self.method.next_step(state.spec, state.progress))
                )
        # Those left out of the last steps first: a row budget too small for all must
        # not starve anyone.
        by_rows = self.method.shortened is not None
        planned.sort(
            key=lambda pair: (pair[0].last_scheduled, by_rows * pair[1].max_rows)
        )
        # Sources take turns: each one's first, then each one's second.
        numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        turns = {state.request_id: next(numbers[state.source]) for state, _ in planned}
        return sorted(planned, key=lambda pair: turns[pair[0].request_id])

    def _fitted(self, plan: StepPlan, spec: DecodingSpec, room: int) -> StepPlan:
        """The part of a step that fits ``room`` rows; with ``batch_invariant``, that of
        a request that runs alone.
        """
        return self.method.fitted(
            plan, spec, self.max_rows if self.options.batch_invariant else room
        )

    def _schedule_one(
        self, state: RequestState, plan: StepPlan, output: DiffusionSchedulerOutput
    ) -> None:
        state.last_scheduled = self._num_steps
        output.plans[state.request_id] = plan
        # What it reads without having written it, other requests wrote.
        needs_pages = plan.state is RefreshState.UPDATE or (
            plan.read > 0 and not state.page_counts
        )
        self._hold_pages(state, output, needs_pages=needs_pages)
        if plan.state is RefreshState.UPDATE:
            self._being_filled.update(self._new_keys(state, plan.retained))
        output.num_scheduled_tokens[state.request_id] = plan.max_rows

    def _hold_pages(
        self,
        state: RequestState,
        output: DiffusionSchedulerOutput,
        *,
        needs_pages: bool,
    ) -> None:
        """``needs_pages``: also what a step of the running blocks writes."""
        counts = state.page_counts | guide_pages(state.spec, self.geometry)
        if needs_pages and not state.pages_settled:
            counts |= self.method.held(
                state.spec, state.progress.running, self.geometry
            )
        if counts != state.page_counts:
            output.page_tables[state.request_id] = self._resize_tables(state, counts)
        state.progress.pages_held = max(
            state.progress.pages_held, sum(map(sum, counts.values()))
        )

    def _resize_tables(
        self, state: RequestState, counts: PageCounts
    ) -> dict[PageKind, list[list[int]]]:
        state.page_counts = counts
        tables = iter(
            self.pages.resize(
                state.request_id,
                [n for per_layer in counts.values() for n in per_layer],
            )
        )
        return {
            kind: [next(tables) for _ in per_layer]
            for kind, per_layer in counts.items()
        }

    def _settle_pages(self, state: RequestState, kv_slots: int) -> None:
        """Give back what was reserved for the worst case. The table loses its last
        pages only, which hold nothing.
        """
        slots_per_page = self.geometry.page_size * self.geometry.num_kv_heads
        self._resize_tables(
            state,
            state.page_counts | {PageKind.KV: [pages_for(kv_slots, slots_per_page)]},
        )
        self.pages.settle(state.request_id)
        state.pages_settled = True

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        reports = (
            model_runner_output.reports
            if isinstance(model_runner_output, DiffusionRunnerOutput)
            else []
        )
        self._stats.engine_steps += len(reports)
        for request_id, result in itertools.chain.from_iterable(
            step.items() for step in reports
        ):
            state = self.states.get(request_id)
            if (
                state is None
            ):  # aborted while the step ran, or ended in a step before this one
                continue
            if isinstance(result, RequestFailure):
                self._fail(state, result)
                continue
            with self._failing_alone(state):
                output = self._take_in(state, result)
                if (failure := state.no_progress()) is not None:
                    self._fail(state, failure)
                elif output is not None:
                    outputs[state.request.client_index].append(output)
            if state.request.is_finished() and request_id in self.states:
                self.running = remove_all(self.running, {state})
                self._free(state)
        for client_index, error in self._errors:
            outputs[client_index].append(error)
        self._errors.clear()
        return self._outputs_per_client(outputs)

    def _take_in(
        self, state: RequestState, report: StepReport
    ) -> EngineCoreOutput | None:
        """Apply the report of a step to a request; returns the output for its client,
        if any.
        """
        if report.kv_slots is not None:
            self._settle_pages(state, report.kv_slots)
        self._stats.add_step(state.spec, report)
        output = state.advance(report)
        if keys := self._new_keys(state, state.progress.retained):
            self.pages.add_keys(state.request_id, keys)
        return output
