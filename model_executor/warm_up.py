"""Warm-up of a GPU worker: compile kernels, record graphs, and check the graphs."""

import itertools
from dataclasses import replace

import torch
from tqdm import tqdm
from vllm import SamplingParams
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from dllm_engine.cache_methods.page_demand import PageDemand
from dllm_engine.decoding.messages import (
    DiffusionSchedulerOutput,
    NewRequest,
    StepReport,
)
from dllm_engine.decoding.page_layout import PageCounts
from dllm_engine.decoding.progress import Progress
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.model_executor.graphs import recording
from dllm_engine.model_executor.graphs.forward import ForwardSize
from dllm_engine.model_executor.graphs.step import StepGraphs
from dllm_engine.model_executor.model_runner import DiffusionModelRunner
from dllm_engine.quiet import progress_line
from dllm_engine.request_options.resolve import resolve_decoding
from dllm_engine.request_options.sampling_params import DEFAULT_GEN_LENGTH

logger = init_logger(f"vllm.{__name__}")

CANVAS_LENGTHS = (16, 64, 256)
"""Canvas lengths of made-up requests, beside the longest one."""
TOKENS_PER_STEP = 4
STEPS_OF_LONGEST = 24
"""Limit on the steps of the longest canvas, because each takes long."""
MAX_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative difference between the hidden states of a recorded and a launched
pass, by their type. Both do the same work on the same shapes."""


class WarmUp:
    """Made-up requests on an idle engine."""

    def __init__(self, runner: DiffusionModelRunner) -> None:
        rank = runner.rank
        self.runner = runner
        self.family = runner.family
        self.longest = rank.max_model_len
        self.max_requests = rank.max_num_seqs
        self.max_rows = rank.max_num_batched_tokens
        self.num_pages = 0 if rank.pages is None else rank.pages.memory.shape[0] - 1

    def spec(self, canvas_length: int, temperature: float = 0.0) -> DecodingSpec:
        """A request with the engine's defaults, but with few steps and one block at a
        time. At most half of its canvas is the response."""
        gen_length = min(DEFAULT_GEN_LENGTH, canvas_length // 2)
        params = SamplingParams(
            max_tokens=gen_length, temperature=temperature, ignore_eos=True
        )
        # Leave room, because the canvas ends with a whole block.
        prompt_length = max(
            1, canvas_length - gen_length - (self.family.attention_block or 1) + 1
        )
        spec = resolve_decoding(
            params,
            prompt_length,
            self.runner.model_config.hf_config,
            self.runner.options,
        )
        # Each block needs a first step and later ones.
        steps = min(
            max(2 * spec.layout.num_blocks, spec.schedule.steps // TOKENS_PER_STEP),
            spec.schedule.steps,
        )
        schedule = replace(spec.schedule, steps=steps, block_add_threshold=None)
        return replace(spec, schedule=schedule)

    def compile(self) -> None:
        """Answer requests until every kernel was launched: requests alone and together,
        greedy and sampled, with every step of a response; the longest request; and the
        largest batch, which vLLM has run only if the method has pages."""
        if self.runner.rank.pages is None:
            self.runner.profile_run()
        for length in sorted({min(length, self.longest) for length in CANVAS_LENGTHS}):
            spec = self.spec(length)
            pages = max(1, sum(map(sum, self._pages(spec).values())))
            together = min(
                self.max_requests, self.max_rows // length, self.num_pages // pages or 1
            )
            for num_requests in sorted({1, together}):
                self._answer(spec, num_requests)
            self._answer(self.spec(length, temperature=1.0), 1)
        self._answer(self.spec(self.longest), 1, most_steps=STEPS_OF_LONGEST)

    @torch.inference_mode()
    def record(self, record: recording.Record, show_progress: bool) -> None:
        """Record the graphs that requests with the engine's defaults need. The engine
        uses no graphs if recording fails, or if a graph computes something else than a
        launched step."""
        runner = self.runner
        graphs = runner.use_graphs(record)
        try:
            # This records the graphs that requests with the defaults need.
            self._answer(self.spec(self.longest), 1, STEPS_OF_LONGEST)
            for size in tqdm(
                self._forward_sizes(graphs),
                desc="Recording steps",
                disable=not show_progress or None,
            ):
                graphs.forwards.get(size)
            for filling in list(graphs.fillings.graphs):
                max_candidates = min(
                    self.max_requests * filling.width, recording.MAX_ROWS
                )
                for number in sorted(
                    filter(
                        None, set(map(recording.padded, range(1, max_candidates + 1)))
                    )
                ):
                    graphs.fillings.get(filling._replace(num_candidates=number))
            problem = graphs.problem(MAX_ERROR[runner.model_config.dtype])
            graphs.launches_before = recording.LAUNCHES_BEFORE
        except Exception as error:
            logger.debug("recording failed", exc_info=error)
            problem = f"recording failed with {type(error).__name__}: {error}"
        group = get_tp_group()
        problems = [problem] * group.world_size
        torch.distributed.all_gather_object(problems, problem, group=group.cpu_group)
        if any(problems):
            runner.denoiser.graphs = None
            logger.warning(
                "Steps are launched, not replayed from CUDA graphs, which is slower: "
                "%s. `dllm check` shows more; cuda_graphs=False leaves recording out.",
                next(filter(None, problems)),
            )

    def _forward_sizes(self, graphs: StepGraphs) -> list[ForwardSize]:
        """Sizes of the steps that were recorded for one request, in larger batches of
        such requests. The largest comes first, so that their shared memory is allocated
        once."""
        sizes = set()
        for size in [size for size in graphs.forwards.graphs if size.reads]:
            max_rows = (
                recording.HOST_BOUND_ROWS
                if size.adds or size.overwrites
                else recording.MAX_ROWS
            )
            for number in range(1, self.max_requests + 1):
                # Batches mix requests that keep a block with others, which have half as
                # many rows.
                least = number * size.longest // (2 if size.adds else 1)
                rows = range(least, number * size.longest + 1, size.longest // 2)
                for num_rows in set(map(recording.padded, rows)):
                    if num_rows is not None and num_rows <= max_rows:
                        sizes.add(
                            size._replace(
                                num_requests=recording.padded_requests(number),
                                num_rows=num_rows,
                            )
                        )
        return sorted(sizes, reverse=True)

    def _pages(self, spec: DecodingSpec) -> PageCounts:
        """The largest size of each table over the life of a request."""
        demand = PageDemand(self.runner.options.method, self.runner.geometry)
        counts = PageCounts()
        for running in spec.extreme_windows:
            for kind, per_layer in demand.held(spec, running).items():
                counts[kind] = [
                    max(pair)
                    for pair in zip(per_layer, counts.get(kind, per_layer), strict=True)
                ]
        return counts

    def _answer(
        self, spec: DecodingSpec, num_requests: int, most_steps: int | None = None
    ) -> None:
        """Run requests on the first pages of the pool, to their end or for
        ``most_steps``.
        """
        runner = self.runner
        method = self.runner.options.method
        output = DiffusionSchedulerOutput.make_empty()
        assert isinstance(output, DiffusionSchedulerOutput)
        draw = torch.Generator().manual_seed(spec.layout.canvas_length)
        free_pages = iter(range(1, self.num_pages + 1))
        progress = {}
        for number in range(num_requests):
            request_id = f"warm-up-{number}"
            prompt = torch.randint(
                runner.mask_token_id, (spec.layout.prompt_length,), generator=draw
            ).tolist()
            output.new_requests[request_id] = NewRequest(prompt, spec, seed=number)
            output.page_tables[request_id] = {
                kind: [list(itertools.islice(free_pages, pages)) for pages in per_layer]
                for kind, per_layer in self._pages(spec).items()
            }
            progress[request_id] = Progress.begin(spec)
        try:
            for _ in itertools.count() if most_steps is None else range(most_steps):
                if not progress:
                    break
                output.plans = {
                    request_id: method.fitted(
                        runner.plan(spec, its), spec, self.max_rows
                    )
                    for request_id, its in progress.items()
                }
                (reports,) = runner.execute_model(output).reports
                output = DiffusionSchedulerOutput.make_empty()
                for request_id, report in reports.items():
                    # Random weights may compute a NaN, which ends a request.
                    if isinstance(report, StepReport):
                        report.advance(progress[request_id], spec)
                    if (
                        not isinstance(report, StepReport)
                        or progress[request_id].num_unmasked == spec.layout.num_masks
                    ):
                        del progress[request_id]
                        runner.forget(request_id)
        finally:
            for request_id in progress:
                runner.forget(request_id)


def warm_up(runner: DiffusionModelRunner, show_progress: bool) -> None:
    """Run the whole warm-up of a GPU worker."""
    requests = WarmUp(runner)
    with progress_line("Compiling kernels", shown=show_progress):
        requests.compile()
    if runner.options.cuda_graphs:
        requests.record(recording.GraphRecorder(runner.device), show_progress)
