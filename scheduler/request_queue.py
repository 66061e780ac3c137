"""Requests coming and going: everything vLLM's ``EngineCore`` asks of a scheduler but
the steps themselves.
"""

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.request import Request, RequestStatus

from dllm_engine.decoding.messages import (
    DiffusionSchedulerOutput,
    RequestFailure,
    failure_of,
)
from dllm_engine.decoding.page_layout import PoolGeometry
from dllm_engine.decoding.progress import Progress
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.resolve import check_room, resolve_decoding
from dllm_engine.request_options.resolve_tokens import with_tokens
from dllm_engine.request_options.sampling_params import SOURCE, bytes_in
from dllm_engine.scheduler.engine_stats import STATS_KEY, EngineStats
from dllm_engine.scheduler.page_pool import PagePool
from dllm_engine.scheduler.refresh_budget import RefreshBudget
from dllm_engine.scheduler.request_state import RequestState, failed_output
from dllm_engine.scheduler.waiting_queue import WaitingQueue
from dllm_engine.text import readable_size

logger = init_logger(f"vllm.{__name__}")


class RequestQueue(SchedulerInterface):
    """Requests of a scheduler, from their arrival to their output."""

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
        self.options = EngineOptions.from_vllm_config(vllm_config)
        self.hf_config = vllm_config.model_config.hf_config
        scheduling = vllm_config.scheduler_config
        self.max_num_running = scheduling.max_num_active_seqs or scheduling.max_num_seqs
        self.max_rows = scheduling.max_num_batched_tokens
        self.log_stats = log_stats
        self.method = self.options.method
        if not scheduling.enable_chunked_prefill:
            self.method = replace(
                self.method, shortened=None
            )  # a prompt waits until a step has room for all of it
        self.geometry = self.options.geometry(
            self.hf_config, vllm_config.parallel_config.tensor_parallel_size
        )
        self.refreshes = RefreshBudget(
            self.options.refresh_ratio if "full" in self.method.attention else None
        )
        self.shares_prefixes = (
            self.method.keeps_for_good
            and vllm_config.cache_config.enable_prefix_caching
        )
        if self.shares_prefixes and hash_block_size != self.geometry.page_size:
            raise ValueError(
                f"block_size={hash_block_size}: prefixes are shared by pages of "
                f"page_size={self.geometry.page_size} tokens; leave block_size unset"
            )
        self.pages = PagePool(
            kv_cache_config.num_blocks, hash_block_size, shares=self.shares_prefixes
        )
        self.watermark = (
            int(scheduling.watermark * self.pages.num_pages)
            if self.method.keeps_for_good
            else 0
        )
        """Pages left for running requests to grow into, when another one is admitted
        beside them.
        """
        self.prefix_stats = PrefixCacheStats()
        self._being_filled: set[BlockHash] = set()
        """Keys of the pages that the step in hand fills for good."""
        self.policy = SchedulingPolicy(scheduling.policy)
        self.waiting = WaitingQueue(
            by_priority=self.policy == SchedulingPolicy.PRIORITY
        )
        self.running: list[RequestState] = []
        self.states: dict[str, RequestState] = {}
        self.finished_req_ids: set[str] = set()
        self.finished_req_ids_dict: dict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )
        self._errors: list[tuple[int, EngineCoreOutput]] = []
        """Last outputs of requests that failed, with their clients; sent with those of
        the step.
        """
        self._num_steps = 0
        self._stats = EngineStats()
        self.weights_incomplete_since: str | None = None
        """The call that began to change the weights, until another one completes them.
        No request is admitted then.
        """
        self.num_weight_changes = 0
        # Draws the seeds of requests that name none. Seeded, so that one engine run is
        # repeatable.
        self._seeds = random.Random(vllm_config.model_config.seed)
        page_bytes = sum(
            group.kv_cache_spec.page_size_bytes
            for group in kv_cache_config.kv_cache_groups
        )
        logger.info(
            "%s",
            _what_is_kept(
                self.options, self.geometry, self.pages.num_pages, page_bytes
            ),
        )

    def add_request(self, request: Request) -> None:
        try:
            state = self._new_state(request)
        except Exception as error:
            # The front end has checked the same rules (admission.py): a ValueError is
            # of a client that bypasses it.
            is_refused = isinstance(error, ValueError)
            failure = (
                RequestFailure("refused", str(error))
                if is_refused
                else failure_of(request.request_id, error)
            )
            logger.error("request %s refused: %s", request.request_id, failure.message)
            self._send_error(request, failure, Progress())
            return
        self.states[request.request_id] = state
        self.waiting.add(request, state.source)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    @property
    def admits(self) -> bool:
        """True if requests may begin: the engine is not paused, and has all of its
        weights.
        """
        return (
            self.pause_state == PauseState.UNPAUSED
            and self.weights_incomplete_since is None
        )

    def _next_waiting(self, full: Collection[str] = ()) -> RequestState | None:
        """The request to admit next, of another source than those of ``full``. While
        none may begin, those that were preempted go on."""
        for request in self.waiting:
            state = self.states[request.request_id]
            if (self.admits or request.num_preemptions) and state.source not in full:
                return state
        return None

    @property
    def num_begun(self) -> int:
        """Requests that run, and those that were preempted."""
        return len(self.running) + sum(
            request.num_preemptions > 0 for request in self.waiting
        )

    def _new_state(self, request: Request) -> RequestState:
        if (
            self.weights_incomplete_since is not None
            and self.pause_state == PauseState.UNPAUSED
        ):
            raise ValueError(
                f"the engine's weights are incomplete since "
                f"{self.weights_incomplete_since}; complete them with reload_weights "
                f"or finish_weight_update. A paused engine keeps requests waiting "
                f"meanwhile"
            )
        if request.request_id in self.states:
            raise ValueError(
                f"request id {request.request_id!r} is running already; choose another"
            )
        params = request.sampling_params
        if params is None or not request.prompt_token_ids:
            raise ValueError("a prompt of token ids and sampling parameters are needed")
        spec = resolve_decoding(
            params, len(request.prompt_token_ids), self.hf_config.family, self.options
        )
        spec = with_tokens(spec, params, self.hf_config)
        check_room(
            spec, self.options, self.max_rows, self.geometry, self.pages.num_pages
        )
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        source = bytes_in(params, SOURCE)
        return RequestState(
            request,
            spec,
            Progress.begin(spec),
            seed,
            source.hex() if source else request.request_id,
        )

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        assert RequestStatus.is_finished(finished_status)
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        ids = dict.fromkeys(self.states if request_ids is None else request_ids)
        states = [self.states[i] for i in ids if i in self.states]
        self.running = remove_all(self.running, set(states))
        self.waiting.remove(
            [s.request for s in states if s.request.status != RequestStatus.RUNNING]
        )
        for state in states:
            state.request.status = finished_status
            self._free(state)
        return [state.request for state in states]

    def _preempt(self, state: RequestState) -> None:
        """Take a running request's pages. The runner keeps its tokens, from which it
        fills new pages later.
        """
        request = state.request
        self.running = remove_all(self.running, {state})
        self.pages.free(state.request_id)
        state.page_counts, state.progress.retained = {}, 0
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED)
        self.waiting.prepend(request, state.source)

    def _fail(
        self,
        state: RequestState,
        failure: RequestFailure,
        output: DiffusionSchedulerOutput | None = None,
    ) -> None:
        """End a request with an error. ``output``: the step that it may be part of."""
        logger.error("request %s failed: %s", state.request_id, failure.message)
        if output is not None:
            for table in (
                output.plans,
                output.new_requests,
                output.page_tables,
                output.num_scheduled_tokens,
            ):
                table.pop(state.request_id, None)
        # Wherever it is: what failed may have been on its way from one to the other.
        self.running = remove_all(self.running, {state})
        self.waiting.remove([state.request])
        self._free(state)
        self._send_error(state.request, failure, state.progress)

    @contextmanager
    def _failing_alone(
        self, state: RequestState, output: DiffusionSchedulerOutput | None = None
    ) -> Iterator[None]:
        """End a request whose work raises an error; the others go on. ``output`` as for
        ``_fail``.
        """
        try:
            yield
        except Exception as error:
            self._fail(state, failure_of(state.request_id, error), output)

    def _send_error(
        self, request: Request, failure: RequestFailure, progress: Progress
    ) -> None:
        self._stats.requests_failed[failure.cause] += 1
        self._errors.append(
            (request.client_index, failed_output(request, failure, progress))
        )

    def _free(self, state: RequestState) -> None:
        request_id = state.request_id
        del self.states[request_id]
        if self.log_stats:  # else nobody empties its lists
            self._stats.add_ended(state.progress)
        self.pages.free(request_id)
        self.refreshes.forget(request_id)
        self.finished_req_ids.add(request_id)
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[state.request.client_index].add(request_id)

    def _outputs_per_client(
        self, outputs: dict[int, list[EngineCoreOutput]]
    ) -> dict[int, EngineCoreOutputs]:
        per_client = {
            client: EngineCoreOutputs(outputs=outs) for client, outs in outputs.items()
        }
        if self.finished_req_ids_dict:
            for client, ids in self.finished_req_ids_dict.items():
                per_client.setdefault(
                    client, EngineCoreOutputs()
                ).finished_requests = ids
            self.finished_req_ids_dict.clear()
        if (stats := self.make_stats()) is not None:
            # One front end gets them, also when nobody has output in this step.
            client = next(iter(per_client), 0)
            per_client.setdefault(client, EngineCoreOutputs()).scheduler_stats = stats
        return per_client

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.pause_state = pause_state

    def get_num_unfinished_requests(self) -> int:
        if self.pause_state == PauseState.PAUSED_ALL:
            return 0
        unfinished = (
            len(self.running) + len(self.waiting) if self.admits else self.num_begun
        )
        return unfinished + len(self._errors)

    def has_request(self, request_id: str) -> bool:
        """Return True if a request waits or runs here; vLLM 0.33 asks."""
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
        stats, self._stats = self._stats, EngineStats()
        stats.pages_total = self.pages.num_pages
        stats.pages_reserved = self.pages.num_reserved
        stats.pages_allocated = self.pages.num_allocated
        stats.tokens_retained = sum(state.progress.retained for state in self.running)
        prefix_stats, self.prefix_stats = self.prefix_stats, PrefixCacheStats()
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage=self.get_kv_cache_usage(),
            prefix_cache_stats=prefix_stats,
            # The only free dictionaries of vLLM's message are those of key-value
            # connectors.
            kv_connector_stats={STATS_KEY: vars(stats)},
        )

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Let no request find the pages of those before it; returns False if that
        cannot be done, because requests hold pages. ``reset_running_requests``: preempt
        those that can go on without them."""
        if reset_running_requests and self.method.keeps_for_good:
            for state in reversed(self.running):
                self._preempt(state)
        self.prefix_stats.reset = self.shares_prefixes and self.pages.forget_keys()
        return self.prefix_stats.reset or not self.shares_prefixes

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: encoders, speculative decoding and vLLM's structured output
        are refused before.
        """

    reset_encoder_cache = get_grammar_bitmask = shutdown = _do_nothing
    update_draft_token_ids = update_draft_token_ids_in_output = _do_nothing


def _what_is_kept(
    options: EngineOptions, geometry: PoolGeometry, num_pages: int, page_bytes: int
) -> str:
    method = f"cache_method={options.cache_method!r} {options.cache.model_dump() or ''}".strip()
    if not options.uses_pages:
        return f"{method}: every step computes the whole canvas, no pages are kept"
    tokens = num_pages // geometry.num_layers * geometry.page_size
    page, pool = readable_size(page_bytes), readable_size(num_pages * page_bytes)
    return (
        f"{method}: {num_pages:,} pages of {geometry.page_size} tokens of one layer "
        f"({page} each, together {pool}) retain {tokens:,} tokens of each of the "
        f"{geometry.num_layers} layers"
    )
