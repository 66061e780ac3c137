"""The model runner: owns tokens, masks and batch layout; turns step plans into forward passes and unmasked tokens."""

import itertools
import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.model_loader import get_model
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

from dllm_engine.families import family_of
from dllm_engine.kernels.attention import use_dense_backend
from dllm_engine.kernels.xformers_attention import check_xformers
from dllm_engine.model_executor.candidates import (
    CHOSEN,
    NOT_FINITE,
    BatchCandidates,
    Candidates,
    Filled,
    StepOutcome,
    must_fill,
    outcomes_of,
)
from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.guide.accept import select_guided
from dllm_engine.model_executor.guide.model import Draft, Guide
from dllm_engine.model_executor.guide.text import GuideReader, Retokenizer, SameTokens
from dllm_engine.model_executor.models.checkpoint import check_safetensors
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.noise import NO_TOKEN, uniform
from dllm_engine.model_executor.page_memory import POOL_LAYER, PageMemory, PagePoolSpec
from dllm_engine.model_executor.passes import CACHE_METHODS
from dllm_engine.model_executor.passes.base import DensePass, LayerPass
from dllm_engine.model_executor.probes import ProfilingPass
from dllm_engine.model_executor.step_batch import Canvas, StepBatch, ranges
from dllm_engine.model_executor.step_graphs import CudaRecorder, StepGraphs
from dllm_engine.model_executor.token_prediction import Counters, SamplingSettings, TokenPredictor
from dllm_engine.model_executor.transfer import on_device
from dllm_engine.model_executor.unmasking import UNMASKING_POLICIES
from dllm_engine.model_executor.unmasking.policy import TokenLogprobs, TokenStatistics
from dllm_engine.options import EngineOptions
from dllm_engine.params import model_end_tokens
from dllm_engine.scheduler.messages import (
    BlockChange,
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    NewRequest,
    StepReport,
)
from dllm_engine.scheduler.page_layout import PoolGeometry
from dllm_engine.scheduler.refresh_plan import REFRESH_PLANS, longest_demand
from dllm_engine.scheduler.request import DecodingSpec, Progress, Span
from dllm_engine.scheduler.request_failure import RequestFailure, failure_of
from dllm_engine.scheduler.step_plan import RowRule, StepPlan
from dllm_engine.scheduler.steps_ahead import foreseen, is_watched

_BY_MASK = (RowRule.MASKED_BEFORE, RowRule.MASKED_BEFORE_AND_LAST)


class DiffusionModelRunner:
    """Runs one model on one rank. Every rank runs the same code on the same tokens."""

    # Read by vLLM's GPU worker.
    is_pooling_model = False

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.options = EngineOptions.from_vllm_config(vllm_config)
        if self.options.dense_attention == "xformers":
            check_xformers(device, self.model_config.dtype)
        if self.options.cuda_graphs and device.type != "cuda":
            raise ValueError(f"cuda_graphs=True needs a CUDA device, and the engine runs on {device}; leave it out")
        use_dense_backend(self.options.dense_attention)
        self.mask_token_id = self.model_config.hf_config.mask_token_id
        self.end_tokens = torch.tensor(model_end_tokens(self.model_config.hf_config), dtype=torch.int64, device=device)
        self.make_layer_pass = CACHE_METHODS[self.options.cache_method]
        self.plan = REFRESH_PLANS[self.options.cache_method].plan
        # A CPU is never waited for, and what is filled meanwhile would go through the head for nothing.
        self.looks_ahead = device.type != "cpu"
        self.canvases: dict[str, Canvas] = {}
        self.failures: dict[str, RequestFailure] = {}
        """Of requests whose own part of the work in hand raised an exception."""
        self.store = CanvasStore(device)
        self.pages: PageMemory | None = None
        self.graphs: StepGraphs | None = None
        self.model_memory_usage = 0
        # vLLM's CPU worker reads it; there are none outside the page pool.
        self.kv_caches: list[torch.Tensor] = []

    # Called by the worker once

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            self.vllm_config.load_config.load_format = "dummy"
        if self.vllm_config.load_config.load_format != "dummy":
            check_safetensors(self.model_config.model)
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        model = get_model(vllm_config=self.vllm_config)
        assert isinstance(model, DiffusionDecoder)
        self.model = model.eval()
        if self.device.type == "cuda":
            self.model_memory_usage = torch.cuda.memory_allocated() - before
        self.guide: Guide | None = None
        if self.options.guide_model is not None:
            config = AutoConfig.from_pretrained(self.options.guide_model)
            self.guide = Guide(config, self._guide_reader(), self.vllm_config, self.device)
        self.predictor = TokenPredictor(
            self.model.compute_logits, self.model.shape.vocab_size, self.mask_token_id, get_tp_group()
        )

    def _guide_reader(self) -> GuideReader:
        assert self.options.guide_model is not None
        assert self.options.guide_shape is not None
        if self.options.guide_shape.same_tokens:
            return SameTokens(self.mask_token_id)
        return Retokenizer.between(self.model_config, self.options.guide_model)

    def get_model(self) -> DiffusionDecoder:
        return self.model

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One pseudo-layer that stands for the page pool; nothing for a method that keeps nothing."""
        if not self.options.uses_pages:
            return {}
        geometry = PoolGeometry.of_model(
            self.model_config.hf_config,
            self.options,
            self.vllm_config.parallel_config.tensor_parallel_size,
        )
        spec = PagePoolSpec(
            block_size=self.options.page_size,
            num_kv_heads=self.model.num_kv_heads,
            head_size=self.model.shape.head_dim,
            dtype=self.model_config.dtype,
            pages_per_request=max(1, longest_demand(self.options, geometry, self.model_config.max_model_len)),
        )
        return {POOL_LAYER: spec}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, **kwargs: Any) -> None:
        if POOL_LAYER not in {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}:
            return
        with kwargs.get("kv_cache_allocation_context") or nullcontext():
            self.pages = PageMemory(
                kv_cache_config.num_blocks,
                self.options.page_size,
                self.model.num_kv_heads,
                self.model.shape.head_dim,
                self.model.shape.num_kv_heads,
                self.model.shape.hidden_size,
                self.model_config.dtype,
                self.device,
            )
        if self.guide is not None:
            self.guide.attach(self.pages)
        if self.options.cuda_graphs:
            longest_table = -(-self.model_config.max_model_len // self.options.page_size)
            self.graphs = StepGraphs(self.model, self.pages, longest_table, CudaRecorder(self.device))

    def update_max_model_len(self, max_model_len: int) -> None:
        """Canvases are as long as their requests; nothing here is sized by the longest."""

    @torch.inference_mode()
    def profile_run(self, randomize_inputs: bool = False) -> None:
        """One forward pass of the largest batch, for vLLM to measure its memory."""
        num_rows = self.vllm_config.scheduler_config.max_num_batched_tokens
        ids = torch.full((num_rows,), self.mask_token_id, device=self.device)
        positions = torch.arange(num_rows, device=self.device) % self.model_config.max_model_len
        sequences = range(0, num_rows, self.model_config.max_model_len)
        hidden = self.model(ids, positions, DensePass([*sequences, num_rows]))
        rows = min(self.predictor.max_rows, num_rows)
        self.model.compute_logits(hidden[:rows]).logits.float().softmax(dim=-1)

    @torch.inference_mode()
    def profile_layers(self, prompt_token_ids: list[int], gen_length: int) -> list[float]:
        """Importance of each layer in a forward pass over a prompt and a masked response; see ``ProfilingPass``."""
        tokens = prompt_token_ids + [self.mask_token_id] * gen_length
        layer_pass = ProfilingPass(len(tokens))
        self.model(torch.tensor(tokens, device=self.device), torch.arange(len(tokens), device=self.device), layer_pass)
        return layer_pass.importance

    @torch.inference_mode()
    def masked_logprobs(self, sequences: list[list[int]], masked: list[list[int]]) -> list[list[float]]:
        """Log-probability of each token that is masked, given the rest of its sequence; one forward pass for all."""
        shift = int(family_of(self.model_config.hf_config).shifts_logits)
        cu_seqlens = list(itertools.accumulate(map(len, sequences), initial=0))
        starts = torch.tensor(cu_seqlens[:-1], device=self.device)
        sizes = torch.tensor([len(positions) for positions in masked], device=self.device)
        tokens = torch.tensor(list(itertools.chain.from_iterable(sequences)), device=self.device)
        places = torch.tensor(list(itertools.chain.from_iterable(masked)), dtype=torch.int64, device=self.device)
        rows = starts.repeat_interleave(sizes) + places
        ids = tokens.index_fill(0, rows, self.mask_token_id)
        positions = torch.cat([torch.arange(len(sequence), device=self.device) for sequence in sequences])
        hidden = self.model(ids, positions, DensePass(cu_seqlens))
        # As in a response, the first position of a sequence has no row before it.
        predicting = rows - (places > 0).long() * shift
        logprobs = self.predictor.logprobs_of(hidden[predicting], tokens[rows])
        return [part.tolist() for part in logprobs.split(sizes.tolist())]

    def reset_mm_cache(self) -> None:
        """There are no multimodal inputs."""

    def reset_encoder_cache(self) -> None:
        """There is no encoder."""

    def shutdown(self) -> None:
        self.canvases.clear()

    # A step

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: object = None
    ) -> ModelRunnerOutput:
        assert isinstance(scheduler_output, DiffusionSchedulerOutput)
        for request_id in scheduler_output.finished_req_ids:
            self.canvases.pop(request_id, None)
        if not scheduler_output.plans:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.failures = {}
        self._take_in(scheduler_output)
        plans = {i: plan for i, plan in scheduler_output.plans.items() if i not in self.failures}
        progress = scheduler_output.progress
        reports: list[dict[str, StepReport]] = []
        while plans:
            ran = self._run_steps(plans, progress, scheduler_output.num_steps - len(reports))
            reports += ran
            # What the scheduler must know of ends the dispatch.
            if (
                self.failures
                or len(reports) == scheduler_output.num_steps
                or any(r.block_tokens or r.failure for r in reports[-1].values())
            ):
                break
            for request_id, report in itertools.chain.from_iterable(step.items() for step in ran):
                progress[request_id].advance(self.canvases[request_id].spec, report.num_unmasked, block_done=False)
            plans = self._next_plans(progress)
        failed = {request_id: StepReport.failed(failure) for request_id, failure in self.failures.items()}
        if failed:
            reports = reports or [{}]
            reports[-1] |= failed
        request_ids = list(reports[-1])
        return DiffusionRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=[report.block_tokens or [] for report in reports[-1].values()],
            reports=reports,
        )

    def _next_plans(self, progress: dict[str, Progress]) -> dict[str, StepPlan]:
        """None at all where one request has none: the scheduler must know first."""
        plans = {}
        for request_id, of_request in progress.items():
            try:
                plans[request_id] = self.plan(self.canvases[request_id].spec, of_request)
            except Exception as error:
                self.failures[request_id] = failure_of(request_id, error)
        return {} if self.failures else plans

    def _take_in(self, scheduler_output: DiffusionSchedulerOutput) -> None:
        """Canvases of new requests, and page tables that have changed."""
        new, tables = scheduler_output.new_requests, scheduler_output.page_tables
        for request_id in new | tables:
            try:
                if request_id in new:
                    self.canvases[request_id] = self._new_canvas(new[request_id])
                if request_id in tables:
                    self.canvases[request_id].page_tables = {
                        kind: self._page_table(ids) for kind, ids in tables[request_id].items()
                    }
            except Exception as error:
                self.failures[request_id] = failure_of(request_id, error)

    def _run_steps(
        self, plans: dict[str, StepPlan], progress: dict[str, Progress], num_steps: int
    ) -> list[dict[str, StepReport]]:
        """Run ``plans``, and of the ``num_steps`` allowed those that follow as far as they are foreseen."""
        if not self.options.batch_invariant:
            return self._run_batch(plans, progress, num_steps)
        # How a library sums depends on the shapes it is given, so a request is given its own alone.
        reports: dict[str, StepReport] = {}
        for request_id, plan in plans.items():
            reports |= self._run_batch({request_id: plan}, {}, 1)[0]
        return [reports]

    def _run_batch(
        self, plans: dict[str, StepPlan], progress: dict[str, Progress], num_steps: int
    ) -> list[dict[str, StepReport]]:
        batch = self._build_batch(plans)
        # Before the forward pass: a device that still computes would have to be waited for.
        candidates = BatchCandidates.of(batch, self.store)
        layer_pass = self.make_layer_pass(batch, self.pages)
        run = [plans]
        if self.looks_ahead and layer_pass.repeats and num_steps > 1:
            run = foreseen(plans, progress, self.canvases, self.plan, num_steps)
        return self._report(batch, self._denoise(batch, candidates, layer_pass, run), layer_pass)

    def _denoise(
        self, batch: StepBatch, candidates: BatchCandidates, layer_pass: LayerPass, run: list[dict[str, StepPlan]]
    ) -> list[StepOutcome]:
        """Run steps of one batch. Between steps the device is not waited for.

        An exception in here is no one request's and ends the engine: pages have been written in part, by some layers
        and perhaps by some ranks, so that running the requests again, one by one, would not compute the same.
        """
        groups = self._by_settings(candidates)
        filled = [self._step(batch, groups, layer_pass)]
        if len(run) > 1:
            starts = on_device([canvas.start for canvas in batch.canvases], self.device)
            places = starts[batch.request_of_row()] + batch.positions
            for plans in run[1:]:
                in_order = [plans[request_id] for request_id in batch.request_ids]
                batch = replace(batch, plans=in_order, input_ids=self.store.tokens[places])
                groups = [replace(group, batch=batch) for group in groups]
                filled.append(self._step(batch, groups, layer_pass))
        return outcomes_of(filled, len(batch.plans))

    def _by_settings(self, candidates: BatchCandidates) -> list[BatchCandidates]:
        """Those that go through the head together."""
        members: dict[SamplingSettings, list[int]] = defaultdict(list)
        for index in candidates.members:
            members[candidates.batch.canvases[index].settings].append(index)
        return [candidates.of_requests(of_group) for of_group in members.values()]

    def forward(self, batch: StepBatch, layer_pass: LayerPass) -> torch.Tensor:
        """Hidden states of a batch's rows, ``[num_rows, hidden_size]``, to be read before the next pass."""
        if self.graphs is not None:
            return self.graphs(batch, layer_pass)
        return self.model(batch.input_ids, batch.positions, layer_pass)

    def _new_canvas(self, request: NewRequest) -> Canvas:
        spec = request.spec
        canvas = Canvas(spec, _signed_seed(request.seed), _sampling_settings(spec))
        self.store.add(canvas, list(self.canvases.values()))
        canvas.tokens[: spec.prompt_length] = torch.tensor(request.prompt_token_ids, device=self.device)
        canvas.tokens[spec.prompt_length :] = self.mask_token_id
        canvas.masked[: spec.prompt_length] = False
        canvas.masked[spec.prompt_length :] = True
        if spec.num_logprobs is not None:
            shape = (spec.canvas_length, spec.num_logprobs)
            canvas.logprobs = TokenLogprobs(
                token=torch.zeros(spec.canvas_length, device=self.device),
                rank=torch.zeros(spec.canvas_length, dtype=torch.int64, device=self.device),
                top_tokens=torch.zeros(shape, dtype=torch.int64, device=self.device),
                top=torch.zeros(shape, device=self.device),
            )
        if spec.streams_steps:
            canvas.confidences = torch.full((spec.canvas_length,), torch.nan, device=self.device)
        return canvas

    def _page_table(self, ids: list[list[int]]) -> torch.Tensor:
        widest = max(map(len, ids))
        # Page 0 is never handed out; what pads a layer is never read.
        padded = [pages + [0] * (widest - len(pages)) for pages in ids]
        return torch.tensor(padded, dtype=torch.int32, device=self.device)

    def _build_batch(self, plans: dict[str, StepPlan]) -> StepBatch:
        spans = {request_id: _row_span(plan, self.canvases[request_id]) for request_id, plan in plans.items()}
        # Sequences of equal length side by side share one attention call.
        ordered = sorted(plans, key=lambda request_id: (spans[request_id].size, plans[request_id].read))
        in_order = [plans[request_id] for request_id in ordered]
        canvases = [self.canvases[request_id] for request_id in ordered]
        sizes = [spans[request_id].size for request_id in ordered]
        owners, positions = ranges([spans[request_id].start for request_id in ordered], sizes)
        starts = np.array([canvas.start for canvas in canvases])
        of_rows = on_device(np.stack((owners, positions, starts[owners] + positions)), self.device)
        by_mask = any(plan.rows in _BY_MASK for plan in in_order)
        if by_mask:
            of_rows = of_rows[:, self._fed(in_order, canvases, of_rows[0], of_rows[1])]
            sizes = of_rows[0].bincount(minlength=len(ordered)).tolist()
        return StepBatch(
            request_ids=ordered,
            plans=in_order,
            canvases=canvases,
            cu_seqlens=list(itertools.accumulate(sizes, initial=0)),
            input_ids=self.store.tokens[of_rows[2]],
            positions=of_rows[1],
            spans=None if by_mask else [spans[request_id] for request_id in ordered],
        )

    def _fed(
        self, plans: list[StepPlan], canvases: list[Canvas], requests: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Which rows of the plans' spans are fed to the model, where masks decide; bool, one per row."""
        was_masked = self.store.masked.clone()
        last = [canvas.start + position for canvas in canvases for position in canvas.last_unmasked]
        was_masked[torch.tensor(last, dtype=torch.int64, device=self.device)] = True

        def per_row(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=self.device)[requests]

        # The last row of a canvas predicts nothing with shifted logits: what follows in the store is another's.
        predicted = positions + int(canvases[0].spec.shifts_logits)
        stops = per_row([plan.span.stop for plan in plans])
        places = per_row([canvas.start for canvas in canvases]) + predicted.minimum(stops - 1)
        by_mask = was_masked[places] & (predicted < stops)
        and_last = per_row([plan.rows is RowRule.MASKED_BEFORE_AND_LAST for plan in plans]) & (positions == stops - 1)
        return by_mask | and_last | per_row([plan.rows not in _BY_MASK for plan in plans])

    def _step(self, batch: StepBatch, groups: list[BatchCandidates], layer_pass: LayerPass) -> list[Filled]:
        """One forward pass, and what it fills of the candidates."""
        hidden = self.forward(batch, layer_pass)
        if layer_pass.finished is not None:
            groups = [group.take(layer_pass.finished[group.rows]) for group in groups]
        drafted: list[tuple[Candidates, TokenStatistics]] = []
        filled = []
        for group in groups:
            if not group.positions.numel():
                continue
            canvases = [batch.canvases[index] for index in group.members]
            statistics = self._predict(hidden, group)
            if any(canvas.spec.delay_eos for canvas in canvases):
                statistics.held_back = self._held_back(group, statistics.token)
            if layer_pass.observes or any(map(is_watched, canvases)):
                for of_request, its_statistics in group.split(statistics):
                    layer_pass.observe(of_request.index, of_request.positions, its_statistics)
                    _record(of_request, its_statistics)
                    if of_request.canvas.spec.guidance is not None:
                        drafted.append((of_request, its_statistics))
            filled.append(self._fill(group, statistics))
        return filled + self._fill_guided(drafted)

    def _predict(self, hidden: torch.Tensor, group: BatchCandidates) -> TokenStatistics:
        """Statistics of candidates of equal settings, in one pass through the head."""
        canvases = [group.batch.canvases[index] for index in group.members]
        settings = canvases[0].settings
        policies = [UNMASKING_POLICIES[name] for name in {canvas.spec.unmasking for canvas in canvases}]
        needs_noise = any(policy.needs_noise for policy in policies)
        counters = None
        if needs_noise or settings.temperature > 0:

            def per_candidate(values: list[int]) -> torch.Tensor:
                return on_device(values, self.device)[group.requests]

            counters = Counters(
                per_candidate([canvas.seed for canvas in group.batch.canvases]),
                per_candidate([plan.forward for plan in group.batch.plans]),
                group.positions,
            )
        num_logprobs = [canvas.spec.num_logprobs for canvas in canvases if canvas.spec.num_logprobs is not None]
        statistics = self.predictor.predict(
            hidden[group.rows],
            settings,
            counters,
            with_entropy=any(policy.needs_entropy for policy in policies),
            with_margin=any(policy.needs_margin for policy in policies),
            num_logprobs=max(num_logprobs, default=None),
        )
        if needs_noise and counters is not None:
            statistics.noise = uniform(
                counters.seeds, counters.forwards, counters.positions, torch.full_like(counters.positions, NO_TOKEN)
            )
        return statistics

    def _held_back(self, group: BatchCandidates, tokens: torch.Tensor) -> torch.Tensor:
        """Predicted end tokens after a masked position, while the response has none, where the request delays them;
        bool ``[num_candidates]``."""
        canvases = group.batch.canvases
        delays = [canvas.spec.delay_eos for canvas in canvases]
        starts = [canvas.start + canvas.spec.prompt_length for canvas in canvases]
        sizes = [canvas.spec.gen_length * delayed for canvas, delayed in zip(canvases, delays, strict=True)]
        owners, places = on_device(np.stack(ranges(starts, sizes)), self.device).unbind()
        ends = torch.isin(self.store.tokens[places], self.end_tokens)
        num_ends = torch.zeros(len(canvases), dtype=torch.int64, device=self.device).index_add_(0, owners, ends.long())
        delayed = on_device(delays, self.device, torch.bool) & (num_ends == 0)
        after_mask = self.store.masked[group.places - 1]
        return torch.isin(tokens, self.end_tokens) & after_mask & delayed[group.requests]

    def _fill(self, group: BatchCandidates, statistics: TokenStatistics) -> Filled:
        """Unmask the plans' quotas of the candidates."""
        masked, tokens = self.store.masked[group.places], self.store.tokens[group.places]
        chosen = group.choose(statistics, masked)
        self.store.tokens[group.places] = torch.where(chosen, statistics.token, tokens)
        self.store.masked[group.places] = masked & ~chosen
        # A NaN or an infinity among a row's logits makes every probability of the row NaN.
        outcome = torch.where(statistics.probability < torch.inf, chosen, NOT_FINITE)
        return Filled(group.requests, group.positions, outcome)

    def _fill_guided(self, drafted: list[tuple[Candidates, TokenStatistics]]) -> list[Filled]:
        """Unmask what the guide lets pass of each request's draft."""
        if not drafted:
            return []
        assert self.guide is not None
        drafts, probabilities = [], []
        for candidates, statistics in drafted:
            guidance = candidates.canvas.spec.guidance
            assert guidance is not None
            window = slice(guidance.speculation_length)
            request_id = candidates.request_id
            drafts.append(Draft(request_id, candidates.canvas, candidates.positions[window], statistics.token[window]))
            probabilities.append(statistics.probability[window].tolist())
        filled = []
        for draft, probability, verdict, (candidates, _) in zip(
            drafts, probabilities, self.guide.check(drafts), drafted, strict=True
        ):
            if isinstance(verdict, RequestFailure):
                self.failures[draft.request_id] = verdict
                continue
            canvas, plan = draft.canvas, candidates.plan
            assert canvas.spec.guidance is not None
            chosen = select_guided(
                canvas.spec.guidance,
                verdict.drafted,
                probability,
                verdict.ranks,
                verdict.tokens,
                first_needed=plan.quota.first_needed,
            )
            positions = draft.positions[list(chosen)]
            canvas.tokens[positions] = torch.tensor(list(chosen.values()), device=self.device)
            canvas.masked[positions] = False
            positions = positions.sort().values
            of_request = torch.full_like(positions, candidates.index)
            filled.append(Filled(of_request, positions, torch.full_like(positions, CHOSEN)))
        return filled

    def _report(
        self, batch: StepBatch, outcomes: list[StepOutcome], layer_pass: LayerPass
    ) -> list[dict[str, StepReport]]:
        """A dictionary per step. No step but the last completes a block."""
        reports: list[dict[str, StepReport]] = [{} for _ in outcomes]
        for index, request_id in enumerate(batch.request_ids):
            try:
                of_request = self._reports_of_request(batch, index, outcomes, layer_pass)
            except Exception as error:
                self.failures[request_id] = failure_of(request_id, error)
                continue
            for reports_of_step, report in zip(reports, of_request, strict=False):
                reports_of_step[request_id] = report
        return reports

    def _reports_of_request(
        self, batch: StepBatch, index: int, outcomes: list[StepOutcome], layer_pass: LayerPass
    ) -> list[StepReport]:
        """A report per step, up to the first that fails."""
        plan, canvas, block = batch.plans[index], batch.canvases[index], slice(*batch.plans[index].block)
        unmasked = [outcome.positions[index] for outcome in outcomes]
        left = canvas.num_masked.get(plan.block, plan.block.size) - sum(map(len, unmasked))
        canvas.num_masked[plan.block] = left
        canvas.last_unmasked = unmasked[-1]
        reports: list[StepReport] = []
        for number, outcome in enumerate(outcomes):
            if failure := _failure(plan, canvas, index, outcome, plan.forward + number):
                return [*reports, StepReport.failed(failure)]
            done = number == len(outcomes) - 1 and left == 0
            report = StepReport(
                rows_computed=layer_pass.rows_computed(index, batch.num_rows(index)),
                num_unmasked=len(unmasked[number]),
                block_tokens=canvas.tokens[block].tolist() if done else None,
                trace=_trace(batch, index, unmasked[number], layer_pass) if self.options.trace else None,
                kv_slots=layer_pass.kv_slots(index),
                logprobs=_block_logprobs(canvas, block) if done and canvas.logprobs is not None else None,
                block_change=self._block_change(canvas, plan.block, unmasked[number])
                if canvas.confidences is not None
                else None,
            )
            reports.append(report)
        return reports

    def _block_change(self, canvas: Canvas, block: Span, unmasked: list[int]) -> BlockChange:
        """``unmasked``: the canvas positions that the step filled."""
        assert canvas.confidences is not None
        here = slice(*block)
        known = [None if math.isnan(confidence) else confidence for confidence in canvas.confidences[here].tolist()]
        filled = [position - block.start for position in unmasked]
        return BlockChange(
            positions=filled,
            token_ids=canvas.tokens[unmasked].tolist(),
            confidences=[known[position] for position in filled],
            guesses=[known[position] for position in canvas.masked[here].nonzero().flatten().tolist()],
            mask_token_id=self.mask_token_id,
        )


def _failure(plan: StepPlan, canvas: Canvas, index: int, outcome: StepOutcome, forward: int) -> RequestFailure | None:
    """What is wrong with a request's part of a step, its forward pass number ``forward`` from 0."""
    if index in outcome.not_finite:
        return RequestFailure(
            "not_finite", f"the model produced logits that are NaN or infinite in forward pass {forward + 1}"
        )
    if not outcome.positions[index] and must_fill(plan, canvas):
        return RequestFailure("no_progress", f"forward pass {forward + 1} unmasked no token, although it has to")
    return None


def _trace(batch: StepBatch, index: int, unmasked: list[int], layer_pass: LayerPass) -> dict[str, Any]:
    """What a step did, by the names of ``DiffusionFigures.trace``."""
    whole = batch.num_rows(index) == batch.canvases[index].spec.canvas_length
    return {
        "refresh_states": batch.plans[index].state.value,
        "unmasked_per_step": unmasked,
        "computed_positions": None if whole else batch.positions[batch.rows(index)].tolist(),
    } | layer_pass.record(index)


def _record(candidates: Candidates, statistics: TokenStatistics) -> None:
    """Keep what a request asks to know of its predictions. A position that was filled is predicted no more, so what is
    kept of it is that of the step that filled it."""
    if candidates.canvas.confidences is not None:
        candidates.canvas.confidences[candidates.positions] = statistics.probability
    kept, made = candidates.canvas.logprobs, statistics.logprobs
    if kept is None or made is None:
        return
    positions, wanted = candidates.positions, kept.top.shape[1]
    kept.token[positions] = made.token
    kept.rank[positions] = made.rank
    kept.top_tokens[positions] = made.top_tokens[:, :wanted]
    kept.top[positions] = made.top[:, :wanted]


def _block_logprobs(canvas: Canvas, block: slice) -> LogprobsLists:
    """In vLLM's form: the committed token first, then the likeliest ones."""
    kept = canvas.logprobs
    assert kept is not None
    tokens = torch.cat((canvas.tokens[block, None], kept.top_tokens[block]), dim=-1)
    values = torch.cat((kept.token[block, None], kept.top[block]), dim=-1)
    return LogprobsLists(tokens.cpu().numpy(), values.cpu().numpy(), kept.rank[block].cpu().numpy())


def _row_span(plan: StepPlan, canvas: Canvas) -> Span:
    """The canvas positions that a plan's rows are chosen from; all of them, unless masks decide."""
    if plan.rows is RowRule.FROM_LAST_UNMASKED and canvas.last_unmasked:
        first = max(canvas.last_unmasked[0] - canvas.spec.shifts_logits, 0)
        return Span(min(plan.span.start, first), plan.span.stop)
    return plan.span


def _signed_seed(seed: int) -> int:
    """A seed of up to 64 bits as the int64 of the same bits."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _sampling_settings(spec: DecodingSpec) -> SamplingSettings:
    """Settings of a request; those that make no difference are equal, so that such requests share the head."""
    greedy_unfiltered = spec.temperature == 0 and spec.top_p >= 1.0 and spec.top_k == 0
    tempered = UNMASKING_POLICIES[spec.unmasking].tempered and not greedy_unfiltered
    if spec.temperature == 0 and not tempered:
        # The most likely token survives every filter.
        return SamplingSettings(0.0, 1.0, 0, False)
    return SamplingSettings(spec.temperature, spec.top_p, spec.top_k, tempered)
