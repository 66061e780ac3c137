"""The diffusion step scheduler: which requests run in a step, in which refresh state, with which pages."""

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ByteSize
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY, MultiModalRegistry
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from dllm_engine.families import family_of
from dllm_engine.figures import figures_message
from dllm_engine.metrics import attach_stats
from dllm_engine.options import EngineOptions
from dllm_engine.params import check_page_demand, end_token_ids, resolve_decoding
from dllm_engine.provisional import provisional_message
from dllm_engine.scheduler.engine_stats import EngineStats
from dllm_engine.scheduler.messages import DiffusionRunnerOutput, DiffusionSchedulerOutput, NewRequest, StepReport
from dllm_engine.scheduler.page_layout import PageCounts, PageKind, PoolGeometry, pages_for
from dllm_engine.scheduler.page_pool import PagePool
from dllm_engine.scheduler.refresh_budget import RefreshBudget
from dllm_engine.scheduler.refresh_plan import REFRESH_PLANS, guide_pages, page_demand
from dllm_engine.scheduler.request import DecodingSpec, Progress
from dllm_engine.scheduler.request_failure import RequestFailure, failure_of
from dllm_engine.scheduler.step_plan import RefreshState, StepPlan

logger = init_logger(f"vllm.{__name__}")


@dataclass
class RequestState:
    """A request in the scheduler: vLLM's object, its settings, and its progress."""

    request: Request
    spec: DecodingSpec
    progress: Progress
    seed: int
    end_tokens: frozenset[int]
    page_counts: PageCounts = field(default_factory=dict)
    """Pages per table that the request holds."""
    pages_settled: bool = False
    """Whether the runner has said how many pages the request needs for good."""
    tokens_retained: int = 0
    """Tokens per layer that they hold."""
    last_scheduled: int = -1
    """Number of the last step that ran it; those left out longest go first."""


class DiffusionScheduler(SchedulerInterface):
    """Continuous batching of requests at different denoising steps.

    A running request costs its plan's rows in every step. Requests are admitted, first come first served or by
    priority, while ``max_num_seqs``, the row budget ``max_num_batched_tokens`` and the page pool have room. Refreshes
    of long requests beside short ones are bounded (``RefreshBudget``).
    """

    # Read by EngineCore.
    connector = None
    ec_connector = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int,
        mm_registry: MultiModalRegistry = MULTIMODAL_REGISTRY,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        self.options = EngineOptions.from_vllm_config(vllm_config)
        self.family = family_of(vllm_config.model_config.hf_config)
        self.hf_config = vllm_config.model_config.hf_config
        self.max_num_running = vllm_config.scheduler_config.max_num_seqs
        self.max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.log_stats = log_stats
        refresh_plan = REFRESH_PLANS[self.options.cache_method]
        self.plan, self.page_counts = refresh_plan.plan, refresh_plan.pages
        self.geometry = PoolGeometry.of_model(
            self.hf_config, self.options, vllm_config.parallel_config.tensor_parallel_size
        )
        self.refreshes = RefreshBudget(self.options.refresh_ratio)
        self.pages = PagePool(kv_cache_config.num_blocks, hash_block_size)
        self.waiting = create_request_queue(SchedulingPolicy(vllm_config.scheduler_config.policy))
        self.running: list[Request] = []
        self.states: dict[str, RequestState] = {}
        self.finished_req_ids: set[str] = set()
        self.finished_req_ids_dict: dict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self._errors: list[tuple[int, EngineCoreOutput]] = []
        """Last outputs of requests that failed, with their clients; sent with those of the step."""
        self._num_steps = 0
        self._stats = EngineStats()
        self._pause_state = PauseState.UNPAUSED
        # Draws the seeds of requests that name none. Seeded, so that one engine run is repeatable.
        self._seeds = random.Random(vllm_config.model_config.seed)
        page_bytes = sum(group.kv_cache_spec.page_size_bytes for group in kv_cache_config.kv_cache_groups)
        logger.info("%s", _what_is_kept(self.options, self.geometry, self.pages.num_pages, page_bytes))

    # Requests coming and going

    def add_request(self, request: Request) -> None:
        try:
            state = self._new_state(request)
        except ValueError as error:
            # The front end has checked the same rules (admission.py); only a client that bypasses it comes here.
            self._refuse(request, RequestFailure("refused", str(error)))
            return
        except Exception as error:
            self._refuse(request, failure_of(request.request_id, error))
            return
        self.states[request.request_id] = state
        self.waiting.add_request(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def _refuse(self, request: Request, failure: RequestFailure) -> None:
        logger.error("request %s refused: %s", request.request_id, failure.message)
        self._send_error(request, failure, Progress())

    def _new_state(self, request: Request) -> RequestState:
        if request.request_id in self.states:
            raise ValueError(f"request id {request.request_id!r} is running already; choose another")
        params = request.sampling_params
        if params is None or not request.prompt_token_ids:
            raise ValueError("a prompt of token ids and sampling parameters are needed")
        spec = resolve_decoding(params, len(request.prompt_token_ids), self.family, self.options)
        if spec.canvas_length > self.max_rows:
            raise ValueError(
                f"prompt and response need {spec.canvas_length} rows, max_num_batched_tokens={self.max_rows} has fewer"
            )
        check_page_demand(spec, self.options, self.geometry, self.pages.num_pages)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        progress = Progress(num_masked=spec.block_span(0).size)
        return RequestState(request, spec, progress, seed, end_token_ids(params, self.hf_config))

    def page_demand(self, spec: DecodingSpec) -> int:
        """Pages reserved for a request at admission."""
        return page_demand(spec, self.options, self.geometry)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        assert RequestStatus.is_finished(finished_status)
        if request_ids is None:
            ids = list(self.states)
        elif isinstance(request_ids, str):
            ids = [request_ids]
        else:
            ids = list(dict.fromkeys(request_ids))
        requests = [self.states[i].request for i in ids if i in self.states]
        running = {r for r in requests if r.status == RequestStatus.RUNNING}
        self.running = remove_all(self.running, running)
        self.waiting.remove_requests([r for r in requests if r not in running])
        for request in requests:
            request.status = finished_status
            self._free(request)
        return requests

    def _fail(self, request: Request, failure: RequestFailure, output: DiffusionSchedulerOutput | None = None) -> None:
        """End a request with an error. ``output``: the step that it may be part of."""
        state = self.states[request.request_id]
        logger.error("request %s failed: %s", request.request_id, failure.message)
        if output is not None:
            for of_requests in (output.plans, output.new_requests, output.page_tables, output.num_scheduled_tokens):
                of_requests.pop(request.request_id, None)
        # Wherever it is: what failed may have been on its way from one to the other.
        self.running = remove_all(self.running, {request})
        self.waiting.remove_requests([request])
        self._free(request)
        self._send_error(request, failure, state.progress)

    def _send_error(self, request: Request, failure: RequestFailure, progress: Progress) -> None:
        request.status = RequestStatus.FINISHED_ERROR
        self._stats.requests_failed[failure.cause] += 1
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            kv_transfer_params=figures_message(progress, error=failure.message),
            trace_headers=request.trace_headers,
        )
        self._errors.append((request.client_index, output))

    def _free(self, request: Request) -> None:
        state = self.states.pop(request.request_id)
        if self.log_stats:  # else nobody empties its lists
            self._stats.add_ended(state.progress)
        self.pages.free(request.request_id)
        self.refreshes.forget(request.request_id)
        self.finished_req_ids.add(request.request_id)
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[request.client_index].add(request.request_id)

    # A step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = DiffusionSchedulerOutput.make_empty()
        assert isinstance(output, DiffusionSchedulerOutput)
        output.finished_req_ids, self.finished_req_ids = self.finished_req_ids, set()
        if self._pause_state == PauseState.PAUSED_ALL:
            return output
        self._num_steps += 1
        self.refreshes.begin_step(self._canvases())
        budget = self.max_rows
        # Those left out of the last steps first: a row budget too small for all must not starve anyone.
        for request in sorted(self.running, key=lambda r: self.states[r.request_id].last_scheduled):
            try:
                plan = self._next_plan(request)
                if plan.max_rows <= budget and self.refreshes.allows(request.request_id, plan):
                    self._schedule_one(request, plan, output)
                    budget -= plan.max_rows
            except Exception as error:
                self._fail(request, failure_of(request.request_id, error), output)
        if self._pause_state == PauseState.UNPAUSED and not throttle_prefills:
            self._admit(output, budget)
        canvases = self._canvases()
        self.refreshes.end_step(output.plans, canvases)
        if output.plans and self._can_run_on(output, canvases):
            self._run_on(output)
        self._describe_to_vllm(output)
        return output

    def _admit(self, output: DiffusionSchedulerOutput, budget: int) -> None:
        while self.waiting and len(self.running) < self.max_num_running:
            request = self.waiting.peek_request()
            try:
                demand, plan = self.page_demand(self.states[request.request_id].spec), self._next_plan(request)
                if not self.pages.can_reserve(demand) or plan.max_rows > budget:
                    break
                self._admit_one(request, demand, plan, output)
                budget -= plan.max_rows
            except Exception as error:
                self._fail(request, failure_of(request.request_id, error), output)

    def _admit_one(self, request: Request, demand: int, plan: StepPlan, output: DiffusionSchedulerOutput) -> None:
        state = self.states[request.request_id]
        self.pages.reserve(request.request_id, demand)
        self.waiting.pop_request()
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED)
        if request.prefill_stats is not None:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=0,
                num_external_cached_tokens=0,
            )
        assert request.prompt_token_ids is not None
        output.new_requests[request.request_id] = NewRequest(request.prompt_token_ids, state.spec, state.seed)
        self._schedule_one(request, plan, output)

    def _can_run_on(self, output: DiffusionSchedulerOutput, canvases: dict[str, int]) -> bool:
        """Whether the runner may go on by itself: nobody waits, and every step of every request has room."""
        return (
            self.options.steps_per_dispatch > 1
            and not self.waiting
            and output.plans.keys() == canvases.keys()
            and sum(canvases.values()) <= self.max_rows
            and not self.refreshes.binds(canvases)
            and not any(self.states[request_id].spec.streams_steps for request_id in canvases)
        )

    def _run_on(self, output: DiffusionSchedulerOutput) -> None:
        output.num_steps = self.options.steps_per_dispatch
        for request_id in list(output.plans):
            state = self.states[request_id]
            try:
                # Whichever of its steps writes them.
                self._hold_pages(state, output, of_block=True)
                output.progress[request_id] = replace(state.progress, trace={})
            except Exception as error:
                self._fail(state.request, failure_of(request_id, error), output)

    def _canvases(self) -> dict[str, int]:
        """Canvas lengths of the running requests."""
        return {r.request_id: self.states[r.request_id].spec.canvas_length for r in self.running}

    def _next_plan(self, request: Request) -> StepPlan:
        state = self.states[request.request_id]
        return self.plan(state.spec, state.progress)

    def _schedule_one(self, request: Request, plan: StepPlan, output: DiffusionSchedulerOutput) -> None:
        """Put the request's next step into ``output``."""
        state = self.states[request.request_id]
        state.last_scheduled = self._num_steps
        output.plans[request.request_id] = plan
        self._hold_pages(state, output, of_block=plan.state is RefreshState.UPDATE)
        output.num_scheduled_tokens[request.request_id] = plan.max_rows

    def _hold_pages(self, state: RequestState, output: DiffusionSchedulerOutput, *, of_block: bool) -> None:
        """``of_block``: also what a step of the running block writes."""
        request_id, progress = state.request.request_id, state.progress
        counts = state.page_counts | guide_pages(state.spec, self.geometry)
        if of_block and not state.pages_settled:
            counts |= self.page_counts(state.spec, progress.block, self.geometry)
        if counts != state.page_counts:
            state.page_counts = counts
            output.page_tables[request_id] = self._resize_tables(request_id, counts)
        progress.pages_held = max(progress.pages_held, sum(map(sum, counts.values())))

    def _resize_tables(self, request_id: str, counts: PageCounts) -> dict[PageKind, list[list[int]]]:
        tables = iter(self.pages.resize(request_id, [n for per_layer in counts.values() for n in per_layer]))
        return {kind: [next(tables) for _ in per_layer] for kind, per_layer in counts.items()}

    def _settle_pages(self, state: RequestState, kv_slots: list[int]) -> None:
        """Give back what was reserved for the worst case. Tables lose their last pages only, which hold nothing."""
        slots_per_page = self.geometry.page_size * self.geometry.num_kv_heads
        state.page_counts = state.page_counts | {PageKind.KV: [pages_for(slots, slots_per_page) for slots in kv_slots]}
        self._resize_tables(state.request.request_id, state.page_counts)
        self.pages.settle(state.request.request_id)
        state.pages_settled = True

    def _describe_to_vllm(self, output: DiffusionSchedulerOutput) -> None:
        """Fill the fields that vLLM's logging and iteration details read."""
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        cached = CachedRequestData.make_empty()
        for request_id in output.plans:
            request = self.states[request_id].request
            if request_id in output.new_requests:
                output.scheduled_new_reqs.append(NewRequestData.from_request(request, block_ids=()))
            else:
                cached.req_ids.append(request_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(request.num_tokens)
                cached.num_output_tokens.append(request.num_output_tokens)
        output.scheduled_cached_reqs = cached

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        finished: set[Request] = set()
        if isinstance(model_runner_output, DiffusionRunnerOutput):
            assert isinstance(scheduler_output, DiffusionSchedulerOutput)
            self._stats.engine_steps += len(model_runner_output.reports)
            plans = dict(scheduler_output.plans)
            for request_id, report in itertools.chain.from_iterable(r.items() for r in model_runner_output.reports):
                state = self.states.get(request_id)
                if state is None:  # aborted while the step ran, or failed in a step before this one
                    continue
                if report.failure is not None:
                    self._fail(state.request, report.failure)
                    continue
                try:
                    # The steps after the first were planned by the runner.
                    plan = plans.pop(request_id, None) or self.plan(state.spec, state.progress)
                    output = self._account(state, plan, report)
                except Exception as error:
                    self._fail(state.request, failure_of(request_id, error))
                    continue
                if output is not None:
                    outputs[state.request.client_index].append(output)
                if state.request.is_finished():
                    finished.add(state.request)
                elif state.progress.step >= state.spec.most_steps_in_block(state.progress.block):
                    self._fail(state.request, _stuck(state))
        self.running = remove_all(self.running, finished)
        for request in finished:
            self._free(request)
        for client_index, output in self._errors:
            outputs[client_index].append(output)
        self._errors.clear()
        return self._per_client(outputs)

    def _account(self, state: RequestState, plan: StepPlan, report: StepReport) -> EngineCoreOutput | None:
        """Take in what a step did to a request; returns what its client gets to see."""
        if report.kv_slots is not None:
            self._settle_pages(state, report.kv_slots)
        progress, spec = state.progress, state.spec
        self._stats.add_step(plan, spec, report)
        shown = provisional_message(spec, progress, report.block_change) if report.block_change is not None else {}
        if plan.state is RefreshState.UPDATE:
            state.tokens_retained = plan.retained
            progress.tokens_retained = max(progress.tokens_retained, plan.retained)
        progress.num_rows_computed += report.rows_computed
        for name, entry in (report.trace or {}).items():
            progress.trace.setdefault(name, []).append(entry)
        progress.advance(spec, report.num_unmasked, report.block_tokens is not None)
        if report.block_tokens is not None:
            return self._engine_output(state, self._accept(state, report.block_tokens), report.logprobs, shown)
        if not shown:
            return None
        message = figures_message(progress, with_trace=False) | shown
        return EngineCoreOutput(state.request.request_id, new_token_ids=[], kv_transfer_params=message)

    @staticmethod
    def _accept(state: RequestState, block_tokens: list[int]) -> list[int]:
        """Append a finished block to the request up to its first end token; sets the status when it is done."""
        request, params = state.request, state.request.sampling_params
        assert params is not None
        end = next((i for i, token in enumerate(block_tokens) if token in state.end_tokens), None)
        tokens = block_tokens if end is None else block_tokens[: end + 1]
        request.append_output_token_ids(tokens)
        if end is not None:
            request.status = RequestStatus.FINISHED_STOPPED
            if tokens[-1] in (params.stop_token_ids or ()):
                request.stop_reason = tokens[-1]
        elif request.num_output_tokens >= state.spec.gen_length:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return tokens

    def _engine_output(
        self, state: RequestState, tokens: list[int], logprobs: LogprobsLists | None, shown: dict[str, Any]
    ) -> EngineCoreOutput:
        request = state.request
        prefill_stats, request.prefill_stats = request.prefill_stats, None
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=tokens,
            # The block's tokens behind an end token are not sent.
            new_logprobs=logprobs.slice_request(0, len(tokens)) if logprobs is not None else None,
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            prefill_stats=prefill_stats,
            kv_transfer_params=figures_message(state.progress) | shown,
            trace_headers=request.trace_headers,
        )

    def _per_client(self, outputs: dict[int, list[EngineCoreOutput]]) -> dict[int, EngineCoreOutputs]:
        per_client = {client: EngineCoreOutputs(outputs=outs) for client, outs in outputs.items()}
        if self.finished_req_ids_dict:
            for client, ids in self.finished_req_ids_dict.items():
                per_client.setdefault(client, EngineCoreOutputs()).finished_requests = ids
            self.finished_req_ids_dict.clear()
        stats = self.make_stats()
        if stats is not None:
            # One front end gets them, also when nobody has output in this step.
            if not per_client:
                per_client[0] = EngineCoreOutputs()
            next(iter(per_client.values())).scheduler_stats = stats
        return per_client

    # State that EngineCore asks for

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state

    def get_num_unfinished_requests(self) -> int:
        if self._pause_state == PauseState.PAUSED_ALL:
            return 0
        waiting = 0 if self._pause_state == PauseState.PAUSED_NEW else len(self.waiting)
        return waiting + len(self.running) + len(self._errors)

    def has_request(self, request_id: str) -> bool:
        """Whether it waits or runs here; asked by vLLM 0.33."""
        return request_id in self.states

    def has_finished_requests(self) -> bool:
        return bool(self.finished_req_ids)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def get_kv_cache_usage(self) -> float:
        return self.pages.usage

    def make_stats(self) -> SchedulerStats | None:
        if not self.log_stats:
            return None
        num_running, num_waiting = self.get_request_counts()
        scheduler_stats = SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            kv_cache_usage=self.pages.usage,
            prefix_cache_stats=PrefixCacheStats(),
        )
        stats, self._stats = self._stats, EngineStats()
        stats.pages_total = self.pages.num_pages
        stats.pages_reserved = self.pages.num_reserved
        stats.pages_allocated = self.pages.num_allocated
        stats.tokens_retained = sum(state.tokens_retained for state in self.states.values())
        attach_stats(scheduler_stats, stats)
        return scheduler_stats

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Nothing is shared between requests, so there is nothing to reset."""
        return True

    def reset_encoder_cache(self) -> None:
        """There is no encoder."""

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Structured output is refused at admission."""
        return None

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Speculative decoding is refused at start-up."""

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Speculative decoding is refused at start-up."""

    def shutdown(self) -> None:
        """Nothing to release."""


def _stuck(state: RequestState) -> RequestFailure:
    progress = state.progress
    return RequestFailure(
        "no_progress",
        f"block {progress.block} of the response still has {progress.num_masked} masked tokens after {progress.step} "
        "forward passes, more than any block can need",
    )


def _what_is_kept(options: EngineOptions, geometry: PoolGeometry, num_pages: int, page_bytes: int) -> str:
    """The engine's cache method and pages, for its log."""
    method = f"cache_method={options.cache_method!r} {options.cache.model_dump() or ''}".strip()
    if not options.uses_pages:
        return f"{method}: every step computes the whole canvas, no pages are kept"
    tokens = num_pages // geometry.num_layers * geometry.page_size
    page, pool = (ByteSize(number).human_readable() for number in (page_bytes, num_pages * page_bytes))
    return (
        f"{method}: {num_pages:,} pages of {geometry.page_size} tokens of one layer ({page} each, together {pool}) "
        f"retain {tokens:,} tokens of each of the {geometry.num_layers} layers"
    )
