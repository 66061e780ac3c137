"""Requests that fit a GPU, computed from a model's config alone.

Bytes of weights and pages are exact. Activations are an estimate, which vLLM replaces by a measurement at start.
"""

from dataclasses import dataclass, replace
from typing import Any

from dllm_engine.checkpoints import load_config
from dllm_engine.demo import model_path
from dllm_engine.families import ModelFamily, family_of
from dllm_engine.memory.weights import (
    DTYPE_BYTES,
    QUANTIZATIONS,
    Quantization,
    activation_bytes,
    weights_of_models,
)
from dllm_engine.options import EngineOptions, checkpoint_section
from dllm_engine.scheduler.methods import methods_for
from dllm_engine.scheduler.page_layout import PageKind, PoolGeometry
from dllm_engine.scheduler.request import DecodingSpec, Guidance
from dllm_engine.text import one_line, readable_size

GIB = 1 << 30


class SizingError(ValueError):
    """A deployment that does not fit; says which setting to change."""


@dataclass(frozen=True)
class Deployment:
    """A model, a GPU, and the requests to plan for."""

    model: str
    memory: int
    """Bytes of one GPU."""
    prompt: int
    response: int
    options: EngineOptions
    block_length: int | None = None
    """None: the checkpoint's default, else the family's."""
    dtype: str = "auto"
    quantization: str | None = None
    """One of ``QUANTIZATIONS``; None: as the checkpoint states."""
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    """None: the length of prompt and response."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.92
    overhead: int = GIB
    """Bytes for everything else: processes, CUDA context, libraries, communication buffers."""


@dataclass(frozen=True)
class RequestDemand:
    """One request of the planned lengths under one cache method."""

    cache_method: str
    cache_options: dict[str, Any]
    tokens_retained: int = 0
    """The most per layer, of the canvas."""
    pages: int = 0
    """The most that it holds: over all layers, on each GPU."""
    bytes: int = 0
    rows_per_step: float = 0.0
    """Positions computed per denoising step: the mean over the response, at a token per step."""
    requests: int = 0
    """The most that run at once."""
    limit: str = ""
    """The reason why no more run; for 0 requests, why the engine would serve none."""


@dataclass(frozen=True)
class Sizing:
    """Everything per GPU."""

    model: str
    dtype: str
    memory: int
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    canvas: int
    weight_bytes: int
    guide_weight_bytes: int
    """0 without a guide model."""
    activation_bytes: int
    overhead: int
    pool_bytes: int
    page_size: int
    page_bytes: int
    num_pages: int
    """Pages for requests."""
    demand: RequestDemand
    """Under the cache method of the options."""
    others: list[RequestDemand]
    """Under the other cache methods of the model, with their papers' options."""
    notes: list[str]


def plan(d: Deployment) -> Sizing:
    """Compute what fits.

    Raises:
        SizingError: no request fits, or a setting does not suit the model.
        ValueError: the model or an option is unknown.
    """
    config = load_config(d.model)
    family = family_of(config)
    max_model_len = _max_model_len(d, config)
    _check_tensor_parallel(d, config)
    notes: list[str] = []
    options = _with_guide(d.options.with_paper_settings(d.model, family), d, notes)
    models = models_of(config, options)
    dtype = dtype_of(d.dtype, config)
    dtype_bytes = DTYPE_BYTES[dtype]
    least_rows = family.longest_canvas(max_model_len if options.method.shortened is None else 1)
    rows = max(d.max_num_batched_tokens, least_rows)
    quantization = None if d.quantization is None else QUANTIZATIONS[d.quantization]
    weights = weights_of_models(models, d.tensor_parallel_size, dtype_bytes, quantization)
    activations = max(activation_bytes(model, d.tensor_parallel_size, dtype_bytes, rows) for model in models)
    usable = int(d.memory * d.gpu_memory_utilization)
    room = usable - sum(weights) - activations - d.overhead  # without what a pass holds for its cache method
    activations += options.method.pass_bytes(rows, max_model_len)
    pool = usable - sum(weights) - activations - d.overhead
    if pool <= 0:
        raise SizingError(
            f"--gpu-memory {readable_size(d.memory)} leaves nothing for pages: of the {readable_size(usable)} that "
            f"vLLM uses, weights take {readable_size(sum(weights))}, activations {readable_size(activations)} and "
            f"overhead {readable_size(d.overhead)}; raise --tensor-parallel-size or --gpu-memory, or lower "
            f"--max-num-batched-tokens"
        )
    page_bytes = bytes_of_page(options.geometry(config, d.tensor_parallel_size), dtype_bytes)
    request = _PlannedRequest(d, config, room, rows, page_bytes, max_model_len)
    demand = request.demand(options)
    if not demand.requests:
        raise SizingError(f"cache_method={demand.cache_method!r}: {demand.limit}")
    if getattr(config, "quantization_config", None) and Quantization.of(config) is None:
        notes.append(f"the checkpoint is quantized; its weights are counted as {dtype} and take less")
    if d.quantization not in (None, "fp8"):
        notes.append(f"serve a copy of {d.model} with such weights; docs/quantization.md says where from")
    return Sizing(
        model=d.model,
        dtype=dtype,
        memory=d.memory,
        tensor_parallel_size=d.tensor_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=d.max_num_seqs,
        max_num_batched_tokens=rows,
        canvas=d.prompt + d.response,
        weight_bytes=weights[0],
        guide_weight_bytes=sum(weights[1:]),
        activation_bytes=activations,
        overhead=d.overhead,
        pool_bytes=pool,
        page_size=options.page_size,
        page_bytes=page_bytes,
        num_pages=pages_of_pool(pool, page_bytes),
        demand=demand,
        others=request.demand_of_others(options, family),
        notes=notes,
    )


@dataclass(frozen=True)
class _PlannedRequest:
    """The planned request, and the memory that is left for its pages."""

    deployment: Deployment
    config: Any
    room: int
    """Bytes for pages, and for what a pass holds for its cache method."""
    rows: int
    page_bytes: int
    max_model_len: int

    def demand(self, options: EngineOptions) -> RequestDemand:
        d, method = self.deployment, options.method
        geometry = options.geometry(self.config, d.tensor_parallel_size)
        method.check(options.cache, geometry.num_layers, geometry.guide is not None)
        spec = _request(d, self.config, options)
        num_pages = pages_of_pool(self.room - method.pass_bytes(self.rows, self.max_model_len), self.page_bytes)
        pages = method.page_demand(spec, geometry)
        longest = method.longest_demand(options.cache, geometry, self.max_model_len)
        requests, limit = d.max_num_seqs, "max_num_seqs"
        if longest > num_pages:
            requests = 0
            limit = (
                f"the pool's {num_pages} pages cannot hold one request of max_model_len={self.max_model_len}, which "
                f"may need {longest}; lower --prompt, --response or --max-model-len, retain less, or raise "
                f"--gpu-memory or --tensor-parallel-size"
            )
        elif pages and num_pages // pages < d.max_num_seqs:
            requests, limit = num_pages // pages, "pages"
        retained, rows = _steps(replace(spec, guidance=None), options, geometry)
        cache_options, size = options.cache.model_dump(), pages * self.page_bytes
        return RequestDemand(options.cache_method, cache_options, retained, pages, size, rows, requests, limit)

    def demand_of_others(self, own: EngineOptions, family: ModelFamily) -> list[RequestDemand]:
        """Under the other cache methods of the model, with their papers' options."""
        demands = []
        for method in methods_for(family.attention):
            if method == own.cache_method:
                continue
            try:
                options = EngineOptions.parse(own.model_dump() | {"cache_method": method, "cache_options": {}})
                demands.append(self.demand(options.with_paper_settings(self.deployment.model, family)))
            except ValueError as error:  # a page_size that does not suit this method, or a guide
                demands.append(RequestDemand(method, {}, limit=str(error)))
        return demands


def _steps(spec: DecodingSpec, options: EngineOptions, geometry: PoolGeometry) -> tuple[int, float]:
    """The most tokens that a layer retains at any time, and the mean rows of a step, with a step per token.

    If layers or heads have different budgets, the tokens are the mean over layers of what their pages hold.
    """
    method = options.method
    retained = rows = num_steps = 0
    for step_plan, progress in method.steps(spec):
        num_steps, rows = num_steps + 1, rows + step_plan.max_rows * method.runs(spec, step_plan)
        if step_plan.retained > retained:
            pages = method.pages(spec, progress.running, geometry)[PageKind.KV]
            retained = max(retained, min(step_plan.retained, sum(pages) * geometry.page_size // geometry.num_layers))
    return retained, rows / num_steps


def _request(d: Deployment, config: Any, options: EngineOptions) -> DecodingSpec:
    """The request that the plan is for."""
    family, block_length = family_of(config), d.block_length
    if block_length is None:
        default = checkpoint_section(config).get("block_length") or family.block_length_of(d.response)
        block_length = default if family.attention_block else min(default, d.response)
    spec = DecodingSpec(
        prompt_length=d.prompt,
        gen_length=d.response,
        block_length=block_length,
        steps=d.response,
        schedule=family.schedule,
        unmasking=family.default_unmasking,
        shifts_logits=family.shifts_logits,
        attention=family.attention,
        whole_blocks=family.whole_blocks,
        guidance=None if options.guide_model is None else Guidance(),
        cache=options.cache,
    )
    spec = replace(spec, steps=spec.num_masks)
    if reason := options.method.refusal(spec):
        raise SizingError(reason)
    return spec


def _max_model_len(d: Deployment, config: Any) -> int:
    canvas, most = d.prompt + d.response, config.longest_sequence
    if attention_block := family_of(config).attention_block:
        canvas += -canvas % (d.block_length or attention_block)
    elif d.block_length is not None and not 1 <= d.block_length <= d.response:
        raise SizingError(f"--block-length {d.block_length} is out of range: 1 … {d.response} (--response)")
    if canvas > most:
        raise SizingError(
            f"--prompt {d.prompt} and --response {d.response} need a canvas of {canvas}, the model has {most} "
            f"positions; lower one"
        )
    if d.max_model_len is not None and not canvas <= d.max_model_len <= most:
        raise SizingError(
            f"--max-model-len {d.max_model_len} is out of range: prompt and response need {canvas}, the model has "
            f"{most} positions"
        )
    return d.max_model_len or canvas


def _check_tensor_parallel(d: Deployment, config: Any) -> None:
    tp, heads, kv_heads = d.tensor_parallel_size, config.num_attention_heads, config.num_key_value_heads
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if tp not in fitting:
        raise SizingError(
            f"--tensor-parallel-size {tp} does not divide the model's {heads} attention heads ({kv_heads} KV heads) "
            f"evenly; choose one of {', '.join(map(str, fitting))}"
        )


def _with_guide(options: EngineOptions, d: Deployment, notes: list[str]) -> EngineOptions:
    """The options with the guide's sizes."""
    if (guide := options.guide_model) is None:
        return options
    from dllm_engine.model_executor.guide.sizes import guide_config, with_shape  # imports vLLM's layers

    if (heads := guide_config(guide).num_attention_heads) % d.tensor_parallel_size:
        raise SizingError(
            f"--tensor-parallel-size {d.tensor_parallel_size} does not divide the {heads} attention heads of "
            f"--guide-model {guide} evenly"
        )
    try:
        same_tokens = shares_tokenizer(guide, d.model)
    except ValueError as error:
        same_tokens = False
        notes.append(f"{error}; {options.guide_tokens_per_token:g} guide tokens per token are reserved for the guide")
    return with_shape(options, same_tokens=same_tokens)


def shares_tokenizer(guide: str, model: str) -> bool:
    """True if a guide has a model's tokens, as ``has_same_tokens`` says; raises ``ValueError`` where a tokenizer cannot
    be read."""
    from transformers import AutoTokenizer

    from dllm_engine.model_executor.guide.sizes import has_same_tokens
    from dllm_engine.model_executor.loading.tokenizers import register_tokenizers

    register_tokenizers()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path(model), config=load_config(model))
        return has_same_tokens(guide, tokenizer.get_vocab())
    except Exception as error:  # a tokenizer may be missing or damaged in any way
        raise ValueError(f"the tokenizers of {model} and {guide} cannot be compared: {one_line(error)}") from None


def dtype_of(wanted: str, config: Any) -> str:
    """The type that vLLM chooses: the checkpoint's, and bfloat16 where that is float32."""
    if wanted != "auto":
        return {"float": "float32", "half": "float16"}.get(wanted, wanted)
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return own if own in ("bfloat16", "float16") else "bfloat16"


def models_of(config: Any, options: EngineOptions) -> list[Any]:
    """Configs of the model, and of its guide if it has one."""
    if options.guide_model is None:
        return [config]
    from dllm_engine.model_executor.guide.sizes import guide_config  # imports vLLM's layers

    return [config, guide_config(options.guide_model)]


def bytes_of_page(geometry: PoolGeometry, dtype_bytes: int) -> int:
    """Bytes of a page: keys and values of ``page_size`` tokens of one layer, of this rank's KV heads."""
    return 2 * geometry.page_size * geometry.num_kv_heads * geometry.head_dim * dtype_bytes


def pages_of_pool(pool_bytes: int, page_bytes: int) -> int:
    """Pages for requests: vLLM keeps one as its null block."""
    return max(pool_bytes // page_bytes - 1, 0)
