"""How long the steps of requests take on a GPU, and the tokens per second that follow."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from dllm_engine.bench.floor import PassShape
from dllm_engine.families import family_of
from dllm_engine.memory.deployment import Deployment, SizingError, dtype_of, request_spec, settled
from dllm_engine.memory.weights import DTYPE_BYTES, layers_by_kind
from dllm_engine.model_executor.recording.forward import padded_size
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import CACHE_METHODS, methods_for
from dllm_engine.scheduler.request import DecodingSpec
from dllm_engine.scheduler.step_plan import StepPlan
from dllm_engine.speed.gpus import GPU, GPUS, TILE_HEAD_DIM
from dllm_engine.speed.kernels import Decoder, Kernel

STREAM_GAP, GRAPH_GAP = 2.1e-6, 1.3e-6
"""Seconds that a kernel which does nothing takes on an H100, launched and replayed from a CUDA graph: Hazy Research,
"Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B" (2025). Assumed beside each kernel's work."""
HOST_LAUNCH = 17e-6
"""Seconds of the host per launch, Python included: in transformers, a step of Qwen2.5-7B at batch 1 runs 1,025
operators of PyTorch and took 17 ms on an H100 (57.3 tokens/s: hao-ai-lab.github.io/blogs/text-diffusion; 27 % of its
floor: arXiv 2605.30571)."""
DISPATCH, DISPATCH_OF_REQUEST = 0.845e-3, 0.053e-3
"""Seconds of the host beside the model per pass, and more per request, for which the GPU waits: scheduling, laying out
the batch, unmasking, reports. From ``benchmarks/results/engine_overhead_cpu.json``: REUSE steps of 1 and 32 requests,
without the token statistics."""


@dataclass(frozen=True)
class Times:
    """Three ways to run the same: seconds, or tokens per second."""

    floor: float
    """The weights, keys, values and FLOPs that no implementation can leave out, at the GPU's peaks."""
    launched: float
    """With every kernel launched by the host."""
    recorded: float
    """With the steps replayed from CUDA graphs that are by default; other steps as launched."""

    @classmethod
    def sum(cls, times: Iterable["Times"]) -> "Times":
        return cls(*map(sum, zip(*map(astuple, times), strict=True)))


@dataclass(frozen=True)
class StepPrediction:
    """A step in which every request of a batch is in the same refresh state; a mean over such steps."""

    cache_method: str
    batch: int
    state: str
    steps: int
    """How many there are in a response."""
    rows: float
    """Computed for each request."""
    keys: float
    """Attended to by each row."""
    launches: float
    """Of kernels."""
    seconds: Times


@dataclass(frozen=True)
class SpeedPrediction:
    """Whole responses of a batch; its requests begin together and take every step together."""

    cache_method: str
    batch: int
    tokens_per_second: Times
    """Of all requests."""


@dataclass(frozen=True)
class Prediction:
    """Of equal requests, under the cache method asked for and then those others that can be predicted."""

    model: str
    dtype: str
    gpu: str
    prompt: int
    response: int
    block_length: int
    denoising_steps: int
    steps: list[StepPrediction]
    speeds: list[SpeedPrediction]


def predict(deployment: Deployment, gpu: str, batches: Sequence[int], denoising_steps: int | None = None) -> Prediction:
    """Predict the steps of batches of requests.

    Args:
        deployment: its ``memory`` is not looked at: ``sizing.plan`` says whether so many requests fit.
        gpu: a name in ``GPUS``.
        denoising_steps: of a response; None: one per token.

    Raises:
        SizingError: what was asked for cannot be predicted.
        ValueError: the model or an option is unknown.
    """
    d, config, _ = settled(deployment)
    family = family_of(config)
    dtype = dtype_of(d.dtype, config)
    decoder = Decoder(config, DTYPE_BYTES[dtype])
    _check(d, decoder)
    steps: list[StepPrediction] = []
    speeds = []
    others = [EngineOptions(cache_method=name) for name in methods_for(family.attention)]
    others = [options for options in others if options.cache_method != d.options.cache_method]
    for options in (d.options, *others):
        if options.method.launches is None:
            continue
        spec = request_spec(d, config, options.with_paper_settings(d.model, family))
        steps_asked = spec.num_masks if denoising_steps is None else denoising_steps
        if not spec.num_blocks <= steps_asked <= spec.num_masks:
            allowed = f"{spec.num_blocks} (one per block) … {spec.num_masks} (one per token)"
            raise SizingError(f"--steps {steps_asked} is out of range: {allowed}")
        spec = replace(spec, steps=steps_asked)
        clock = _Clock(decoder, GPUS[gpu], options, spec, d.max_num_batched_tokens)
        for batch in batches:
            by_state: dict[str, list[StepPrediction]] = defaultdict(list)
            for plan, progress in options.method.steps(spec):
                head_rows = min(progress.num_masked, plan.quota.candidates.size)
                by_state[plan.state.value].append(clock.step(plan, head_rows, batch))
            steps += map(_mean, by_state.values())
            total = Times.sum(step.seconds for of_state in by_state.values() for step in of_state)
            rates = Times(*(batch * spec.gen_length / seconds for seconds in astuple(total)))
            speeds.append(SpeedPrediction(options.cache_method, batch, rates))
    return Prediction(d.model, dtype, gpu, d.prompt, d.response, spec.block_length, spec.steps, steps, speeds)


@dataclass(frozen=True)
class _Clock:
    """Times the steps of requests without running them."""

    decoder: Decoder
    gpu: GPU
    options: EngineOptions
    spec: DecodingSpec
    max_rows: int
    """Of a forward pass."""

    def step(self, plan: StepPlan, head_rows: int, batch: int) -> StepPrediction:
        """It takes as many passes as its rows need."""
        most = max(1, self.max_rows // plan.max_rows)
        passes = [self._pass(plan, head_rows, min(most, batch - first)) for first in range(0, batch, most)]
        launches, seconds = zip(*passes, strict=True)
        (_, keys), *_ = self._shape(plan, head_rows, 1).requests
        name, state = self.options.cache_method, plan.state.value
        return StepPrediction(name, batch, state, 1, plan.max_rows, keys, sum(launches), Times.sum(seconds))

    def _pass(self, plan: StepPlan, head_rows: int, batch: int) -> tuple[int, Times]:
        """Launches and seconds of one forward pass and the dispatch around it."""
        kernels = self._kernels(plan, head_rows, batch)
        launches = sum(number * len(alike) for number, alike in kernels)
        floor = sum(number * sum(kernel.floor(self.gpu) for kernel in alike) for number, alike in kernels)
        beside = DISPATCH + batch * DISPATCH_OF_REQUEST
        launched = recorded = beside + max(launches * HOST_LAUNCH, self._on_device(kernels, STREAM_GAP))
        records = self.options.method.records
        size = None
        if records is not None and records(self.spec, plan):
            size = padded_size([plan.max_rows] * batch, pads=True)
        if size is not None:
            num_requests, num_rows = size
            kernels = self._kernels(replace(plan, max_rows=num_rows), head_rows, num_requests)
            recorded = beside + self._on_device(kernels, GRAPH_GAP)
        return launches, Times(floor, launched, recorded)

    def _on_device(self, kernels: list[tuple[int, list[Kernel]]], gap: float) -> float:
        return sum(number * sum(kernel.seconds(self.gpu) + gap for kernel in alike) for number, alike in kernels)

    def _kernels(self, plan: StepPlan, head_rows: int, batch: int) -> list[tuple[int, list[Kernel]]]:
        """Of each kind of layer, with their number, and of what comes before and behind all layers."""
        launches = self.options.method.launches
        assert launches is not None
        shape, of_method = self._shape(plan, head_rows, batch), launches.get(plan.state, 0)
        # What is not there yet, or in place of what is.
        written = batch * (plan.retained - plan.read or plan.max_rows)
        layers = [
            (number, self.decoder.layer(shape, self.gpu, of_method, written, experts))
            for number, experts in layers_by_kind(self.decoder.config)
        ]
        return [*layers, (1, self.decoder.ends(shape))]

    def _shape(self, plan: StepPlan, head_rows: int, batch: int) -> PassShape:
        canvases = [self.spec.canvas_length] * batch
        blocks = [self.spec.block_length if self.spec.is_block_causal else None] * batch
        return PassShape.of_plans([plan] * batch, [plan.max_rows] * batch, canvases, batch * head_rows, blocks)


def _mean(steps: list[StepPrediction]) -> StepPrediction:
    count = len(steps)
    rows, keys, launches = (sum(getattr(step, name) for step in steps) / count for name in ("rows", "keys", "launches"))
    seconds = Times(*(total / count for total in astuple(Times.sum(step.seconds for step in steps))))
    return replace(steps[0], steps=count, rows=rows, keys=keys, launches=launches, seconds=seconds)


def _check(d: Deployment, decoder: Decoder) -> None:
    known = [name for name, method in CACHE_METHODS.items() if method.launches is not None]
    for refused, what in (
        (d.tensor_parallel_size != 1, "more than one GPU; leave --tensor-parallel-size at 1"),
        (d.options.guide_model is not None, "a guide; leave --guide-model unset"),
        (decoder.number_bytes != 2, "float32; choose --dtype bfloat16"),
        (d.quantization or getattr(decoder.config, "quantization_config", None), "quantized weights"),
        (decoder.head_dim != TILE_HEAD_DIM, f"heads of {decoder.head_dim} numbers, only of {TILE_HEAD_DIM}"),
        (d.options.cache_method not in known, f"cache_method={d.options.cache_method!r}; choose {', '.join(known)}"),
    ):
        if refused:
            raise SizingError(f"--speed does not predict {what}")
