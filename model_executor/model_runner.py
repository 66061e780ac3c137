"""The model runner: holds the model, canvases and pages of one rank, and turns step
plans into forward passes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.tasks import SupportedTask
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from dllm_engine.cache_methods.page_demand import PageDemand
from dllm_engine.decoding.messages import (
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    Failures,
    RequestFailure,
    StepReport,
    StepResult,
)
from dllm_engine.decoding.probe import Logprobs, Probe
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.step_plan import StepPlan
from dllm_engine.families import model_end_tokens
from dllm_engine.kernels.attention import (
    choose_backend,
    choose_paged_flash,
    use_dense_backend,
)
from dllm_engine.kernels.paged_attention import use_paged_flash
from dllm_engine.model_executor.candidates import BatchCandidates
from dllm_engine.model_executor.canvas_store import CanvasStore
from dllm_engine.model_executor.denoiser import Denoiser
from dllm_engine.model_executor.failures import failure_of
from dllm_engine.model_executor.graphs.recording import Record
from dllm_engine.model_executor.graphs.step import StepGraphs
from dllm_engine.model_executor.guide.model import Guide
from dllm_engine.model_executor.loading.files import check_safetensors
from dllm_engine.model_executor.loading.parameters import files_named
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.page_memory import (
    POOL_LAYER,
    PageMemory,
    PagePoolSpec,
    page_table,
)
from dllm_engine.model_executor.passes.base import (
    LayerPass,
    PassInput,
    Repeats,
    Results,
    can_join,
)
from dllm_engine.model_executor.passes.paged import WholePass
from dllm_engine.model_executor.probes import ProbeBatch, run_largest_batch
from dllm_engine.model_executor.rank import Rank
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.step_report import Reporter, StepsRun
from dllm_engine.model_executor.steps_ahead import does_same_work, steps_known_ahead
from dllm_engine.model_executor.token_prediction import TokenPredictor
from dllm_engine.model_executor.unmasking.filling import Filled, outcomes_of
from dllm_engine.options import EngineOptions

Layout = tuple[StepBatch, LayerPass]
"""Rows of a step, and the pass that runs the layers over them."""


class DiffusionModelRunner:
    """Runs one model on one rank. Every rank runs the same code on the same tokens."""

    # Read by vLLM's GPU worker.
    is_pooling_model = False

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.options = EngineOptions.from_vllm_config(vllm_config)
        heads = device, self.model_config.dtype, self.model_config.get_head_size()
        use_dense_backend(choose_backend(self.options.dense_attention, *heads))
        use_paged_flash(choose_paged_flash(*heads, self.options.page_size))
        self.family = self.model_config.hf_config.family
        self.geometry = self.options.geometry(
            self.model_config.hf_config,
            vllm_config.parallel_config.tensor_parallel_size,
        )
        self.mask_token_id = self.model_config.hf_config.mask_token_id
        self.layer_pass_class: type[LayerPass] = self.options.layer_pass
        self.plan = self.options.method.next_step
        self.store = CanvasStore(device, self.mask_token_id)
        self.canvases = self.store.canvases
        self.last_layout: Layout | None = None
        """Batch and pass of the last step. None after a request came or left, or a page
        table changed.
        """
        # vLLM's CPU worker reads it. All KV caches are in the page pool.
        self.kv_caches: list[Tensor] = []

    # Called by the worker once

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            self.vllm_config.load_config.load_format = "dummy"
        is_dummy = self.vllm_config.load_config.load_format == "dummy"
        tensors = {} if is_dummy else check_safetensors(self.model_config.model)
        before = torch.cuda.memory_allocated()  # 0 on a CPU
        with files_named(tensors):
            self.model: DiffusionDecoder = get_model(vllm_config=self.vllm_config)
        self.model_memory_usage = torch.cuda.memory_allocated() - before
        scheduler_config = self.vllm_config.scheduler_config
        self.rank = Rank(
            options=self.options,
            device=self.device,
            dtype=self.model_config.dtype,
            model=self.model,
            predictor=TokenPredictor(
                self.model.compute_logits,
                self.model.config.vocab_size,
                self.mask_token_id,
                get_tp_group(),
            ),
            guide=None
            if self.options.guide_model is None
            else Guide(self.vllm_config, self.device),
            end_tokens=torch.tensor(
                model_end_tokens(self.model_config.hf_config),
                dtype=torch.int64,
                device=self.device,
            ),
            store=self.store,
            max_model_len=self.model_config.max_model_len,
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        )
        self.denoiser = Denoiser(self.rank)

    def get_model(self) -> DiffusionDecoder:
        return self.model

    def reload_weights(
        self,
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Read the weights again in place, as vLLM's runner does. The weights of a
        guide are read too, unless other weights are named.
        """
        tensors = {}
        if weights_iterator is None:
            tensors = check_safetensors(weights_path or self.model_config.model)
        with files_named(tensors):
            reload_weights(
                self.vllm_config,
                self.model,
                weights_iterator,
                weights_path,
                is_checkpoint_format,
            )
        guide = self.rank.guide
        if guide is not None and weights_iterator is None and weights_path is None:
            reload_weights(
                guide.vllm_config, guide.model, None, None, is_checkpoint_format=True
            )

    def _refuse_lora(self, *arguments: Any) -> NoReturn:
        raise NotImplementedError(
            "an adapter serves all requests of an engine: name its folder as lora_path"
        )

    add_lora = remove_lora = pin_lora = list_loras = _refuse_lora

    def get_encoder_timing_stats(self) -> dict[str, dict[str, float | int]]:
        """Empty, because there is no encoder."""
        return {}

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One pseudo-layer that stands for the page pool. Empty for a cache method
        without pages.
        """
        if not self.options.uses_pages:
            return {}
        geometry = self.geometry
        longest = self.model_config.hf_config.family.longest_canvas(
            self.model_config.max_model_len
        )
        demand = PageDemand(self.options.method, geometry, self.options.share_prompts)
        spec = PagePoolSpec(
            block_size=geometry.page_size,
            num_kv_heads=geometry.num_kv_heads,
            head_size=geometry.head_dim,
            dtype=self.model_config.dtype,
            pages_per_request=max(
                1,
                demand.upper_bound(self.options.cache, longest),
            ),
        )
        return {POOL_LAYER: spec}

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, **kwargs: Any
    ) -> None:
        if POOL_LAYER not in {
            name
            for group in kv_cache_config.kv_cache_groups
            for name in group.layer_names
        }:
            return
        with kwargs.get("kv_cache_allocation_context") or nullcontext():
            pages = PageMemory(
                kv_cache_config.num_blocks,
                self.geometry,
                self.model_config.dtype,
                self.device,
            )
        self.rank = replace(self.rank, pages=pages)
        if self.rank.guide is not None:
            shape = self.geometry.guide
            assert shape is not None
            self.rank.guide.pages = pages.view_for(shape.num_kv_heads, shape.head_dim)

    def use_graphs(self, record: Record) -> StepGraphs:
        """From now on, run the parts that can be recorded from graphs that ``record``
        makes.
        """
        self.denoiser.graphs = StepGraphs(self.rank, record)
        return self.denoiser.graphs

    def _do_nothing(self, *arguments: Any) -> None:
        """Do nothing. There is no encoder, no adapter apart from the weights, and no
        draft model: a guide is read again with the model. vLLM only lowers the maximum
        length: canvases are as long as their requests, and a table of RoPE may have
        spare positions."""

    get_draft_model = reset_lora_state = reset_mm_cache = reset_encoder_cache = (
        update_max_model_len
    ) = _do_nothing

    def profile_run(self, randomize_inputs: bool = False) -> None:
        run_largest_batch(self.rank)

    def shutdown(self) -> None:
        self.canvases.clear()

    # A step

    @torch.inference_mode()
    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: object = None
    ) -> ModelRunnerOutput:
        assert isinstance(scheduler_output, DiffusionSchedulerOutput)
        for request_id in scheduler_output.finished_req_ids:
            self.forget(request_id)
        if not scheduler_output.plans and not scheduler_output.probes:
            return EMPTY_MODEL_RUNNER_OUTPUT
        failures = self._take_in(scheduler_output)
        plans = {
            i: plan for i, plan in scheduler_output.plans.items() if i not in failures
        }
        progress = scheduler_output.progress
        probes = scheduler_output.probes
        reports: list[dict[str, StepResult]] = []
        answers: list[Logprobs] = []
        while plans or probes:
            num_left = scheduler_output.num_steps - len(reports)
            ran, answers = self._run_steps(plans, progress, num_left, probes)
            reports += ran
            results = [
                (request_id, result)
                for step in ran
                for request_id, result in step.items()
            ]
            # The scheduler must see tokens to send, and failures, before the next step.
            tells = any(
                isinstance(result, RequestFailure) or result.tokens is not None
                for _, result in results
            )
            if len(reports) == scheduler_output.num_steps or failures or tells:
                break
            for request_id, report in results:
                assert isinstance(report, StepReport)
                report.advance(progress[request_id], self.canvases[request_id].spec)
            # A block that has joined needs other pages.
            if any(
                request_progress.step == 0 for request_progress in progress.values()
            ):
                break
            plans, failures = self._next_plans(progress)
        if failures:
            reports = reports or [{}]
            reports[-1] |= failures
        return DiffusionRunnerOutput(
            req_ids=[], req_id_to_index={}, reports=reports, probe_answers=answers
        )

    def _next_plans(
        self, progress: dict[str, Progress]
    ) -> tuple[dict[str, StepPlan], Failures]:
        """The next step of each request. Empty if planning fails for one of them: the
        scheduler must know first.
        """
        plans: dict[str, StepPlan] = {}
        failures: Failures = {}
        for request_id, request_progress in progress.items():
            try:
                plans[request_id] = self.plan(
                    self.canvases[request_id].spec, request_progress
                )
            except Exception as error:
                failures[request_id] = failure_of(request_id, error)
        return {} if failures else plans, failures

    def forget(self, request_id: str) -> None:
        """Free what a request has here. Does nothing for an unknown request."""
        self.canvases.pop(request_id, None)
        self.last_layout = None

    def _take_in(self, scheduler_output: DiffusionSchedulerOutput) -> Failures:
        """Make the canvases of new requests, take changed page tables, and copy pages.
        Returns the failures.
        """
        if copies := scheduler_output.page_copies.values():
            assert self.rank.pages is not None
            self.rank.pages.copy(copies)
        new = scheduler_output.new_requests
        tables = scheduler_output.page_tables
        failures: Failures = {}
        if new or tables:
            self.last_layout = None
        for request_id in new | tables:
            try:
                if request_id in new:
                    self.store.open(request_id, new[request_id])
                if request_id in tables:
                    self.canvases[request_id].page_tables = {
                        kind: page_table(ids, self.device)
                        for kind, ids in tables[request_id].items()
                    }
            except Exception as error:
                failures[request_id] = failure_of(request_id, error)
        return failures

    def _run_steps(
        self,
        plans: dict[str, StepPlan],
        progress: dict[str, Progress],
        num_steps: int,
        probes: Sequence[Probe],
    ) -> tuple[list[dict[str, StepResult]], list[Logprobs]]:
        """Run ``plans``, and then further steps that are known ahead, ``num_steps`` in
        all at most. With ``probes``, run one step. Returns the reports of the steps,
        and the answers to the probes.
        """
        parts: dict[str | type[LayerPass], dict[str, StepPlan]] = defaultdict(dict)
        for request_id, plan in plans.items():
            # The order in which libraries sum depends on shapes, so with
            # batch_invariant each request is a batch. A cache method's pass and a pass
            # over whole canvases are different batches too.
            is_alone = self.options.batch_invariant
            key = request_id if is_alone else self._layer_pass_class(request_id)
            parts[key][request_id] = plan
        if len(parts) == 1 and not probes:
            return self._run_batch(self._lay_out(plans), plans, progress, num_steps), []
        reports, answers = self._run_together([*parts.values()], probes)
        return [reports], answers

    def _run_together(
        self, parts: Sequence[dict[str, StepPlan]], probes: Sequence[Probe]
    ) -> tuple[dict[str, StepResult], list[Logprobs]]:
        """Run one step of several batches, and probes. Passes that can join become one
        forward pass.
        """
        layouts = [self._lay_out(plans) for plans in parts]
        inputs: dict[int | str, PassInput] = {}
        if not self.options.batch_invariant:
            for number, (batch, layer_pass) in enumerate(layouts):
                if can_join(layer_pass):
                    tokens = self.store.tokens[batch.places]
                    inputs[number] = PassInput(tokens, batch.positions, layer_pass)
        probe_batch = ProbeBatch(self.rank, probes) if probes else None
        if probe_batch is not None:
            inputs["probes"] = probe_batch.input
        computed: dict[int | str, tuple[Tensor, Results]] = {}
        if probes or len(inputs) > 1:
            outputs = self.denoiser.forward_together([*inputs.values()])
            computed = dict(zip(inputs, outputs, strict=True))
        reports: dict[str, StepResult] = {}
        for number, (layout, plans) in enumerate(zip(layouts, parts, strict=True)):
            reports |= self._run_batch(layout, plans, {}, 1, computed.get(number))[0]
        if probe_batch is None:
            return reports, []
        hidden, _ = computed["probes"]
        return reports, probe_batch.answers(hidden)

    def _layer_pass_class(self, request_id: str) -> type[LayerPass]:
        """Class of the pass that runs the layers for a request: the cache method's, if
        the method serves the request.
        """
        serves = self.options.method.serves(self.canvases[request_id].spec)
        return self.layer_pass_class if serves else WholePass

    def _run_batch(
        self,
        layout: Layout,
        plans: dict[str, StepPlan],
        progress: dict[str, Progress],
        num_steps: int,
        computed: tuple[Tensor, Results] | None = None,
    ) -> list[dict[str, StepResult]]:
        """Run steps of one batch, from plans to reports: prepare, then for each step
        forward, predict and unmask, at last report. The steps do the same work on other
        tokens, and nothing waits for the device between them.

        An exception in here does not belong to one request and ends the engine: some
        layers, and perhaps some ranks, have written pages, so running the requests
        again, one by one, would not compute the same.

        ``computed``: hidden states and results of a single step, if its forward pass
        has run.
        """
        batch, layer_pass = layout
        groups = BatchCandidates.of(batch, layer_pass.observed).by_settings()
        steps: list[dict[str, StepPlan]] = []
        filled: list[list[Filled]] = []
        results: list[Results] = []
        failures: Failures = {}
        for step in self._known_ahead(plans, progress, num_steps, layer_pass.repeats):
            if steps and layer_pass.repeats is Repeats.AFTER_FOLLOW:
                layer_pass.follow(self.store.masked)
            hidden, step_results = computed or self.denoiser.forward(batch, layer_pass)
            finished = layer_pass.finished(step_results)
            step_groups = groups
            if finished is not None:
                step_groups = [group.of_finished(*finished) for group in groups]
            in_order = [step[request_id] for request_id in batch.request_ids]
            step_filled, step_failures = self.denoiser.predict_and_unmask(
                hidden, step_groups, in_order, layer_pass.observe
            )
            steps.append(step)
            filled.append(step_filled)
            results.append(step_results)
            failures |= step_failures
        outcomes, answers = outcomes_of(
            filled, len(batch.plans), layer_pass.tensors_to_read(results[-1])
        )
        run = StepsRun(steps, outcomes, results, answers)
        reporter = Reporter(
            batch, layer_pass, run, self.mask_token_id, self.options.trace
        )
        reports = reporter.reports()
        reports[-1] |= failures
        return reports

    def _known_ahead(
        self,
        plans: dict[str, StepPlan],
        progress: dict[str, Progress],
        num_steps: int,
        repeats: Repeats,
    ) -> Iterable[dict[str, StepPlan]]:
        """Plans of this step, and of the following steps that may run with the same
        rows.
        """
        if num_steps == 1 or repeats is Repeats.OTHER_WORK:
            return [plans]
        specs = {request_id: self.canvases[request_id].spec for request_id in plans}
        may_idle = repeats is Repeats.ONLY_FILLS
        return steps_known_ahead(
            plans, progress, specs, self.plan, num_steps, may_idle=may_idle
        )

    def _lay_out(self, plans: dict[str, StepPlan]) -> Layout:
        """The rows of a step and the pass that runs the layers over them. If the step
        repeats the last one, its layout is returned.
        """
        if self.last_layout is not None:
            batch, layer_pass = self.last_layout
            repeated = dict(zip(batch.request_ids, batch.plans, strict=True))
            if (
                layer_pass.repeats in (Repeats.SAME_WORK, Repeats.ONLY_FILLS)
                and plans.keys() == repeated.keys()
                and all(
                    does_same_work(plan, repeated[request_id])
                    for request_id, plan in plans.items()
                )
            ):
                return self.last_layout
        layer_pass_class = self._layer_pass_class(next(iter(plans)))
        batch = StepBatch.of(plans, self.canvases, layer_pass_class.positions)
        # Without pages, the method's pass does not look at them.
        self.last_layout = (
            batch,
            layer_pass_class.of(batch, cast(PageMemory, self.rank.pages)),
        )
        return self.last_layout
