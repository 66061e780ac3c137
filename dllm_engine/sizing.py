"""Sizing: what fits, computed from a model's config alone. No weights are loaded and no GPU is needed.

The bytes of weights and pages are exact, but for checkpoints of a quantization that is not known. The activations are
an estimate of what vLLM measures when an engine starts, and the overhead is whatever the caller says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from dllm_engine.checkpoints import load_config
from dllm_engine.demo import model_path
from dllm_engine.families import family_of
from dllm_engine.options import EngineOptions, checkpoint_section
from dllm_engine.scheduler.methods import methods_for
from dllm_engine.scheduler.methods.base import CacheMethod, guide_pages
from dllm_engine.scheduler.page_layout import PageKind, PoolGeometry, head_dim_of
from dllm_engine.scheduler.progress import Progress
from dllm_engine.scheduler.request import FIRST_BLOCK, DecodingSpec, Guidance
from dllm_engine.scheduler.step_plan import StepPlan
from dllm_engine.text import one_line, readable_size

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
HEAD_CHUNK_NUMBERS, HEAD_CHUNK_ROWS = 1 << 24, 512
"""Logits that are made at once, and the least rows of them: bounds in ``model_executor/token_prediction.py``."""
FLOAT32_BYTES = 4
FILTER_BYTES = FLOAT32_BYTES
"""What top-p and top-k hold for each logit: its float32, or what takes its place."""
VOCABULARY_PADDING = 64
"""vLLM rounds the rows of embedding and head up to this."""
GIB = 1 << 30
CPU_PAGE_POOL_BYTES = GIB
"""Memory for pages on a CPU, unless ``kv_cache_memory_bytes`` (or VLLM_CPU_KVCACHE_SPACE) is set. vLLM's own default of
92% of all memory fails on a machine where anything else runs."""


@dataclass(frozen=True)
class Quantization:
    """How the linear layers within a model's layers are stored."""

    bits: int
    group_size: int | None = None
    """Weights that share a scale; None: all of an output feature; 0: there are no scales."""
    has_zero_points: bool = False
    leaves: Literal["linear", "experts"] | None = None
    """Which of them are as they were."""

    @classmethod
    def of(cls, config: Any) -> "Quantization | None":
        """What a checkpoint's config states; None for a plain checkpoint, and for what is not known."""
        stated = getattr(config, "quantization_config", None) or {}
        groups = list(stated.get("config_groups", {}).values())
        if stated.get("quant_method") in ("gptq", "awq"):
            size = stated.get("group_size", stated.get("q_group_size", -1))
            return cls(stated.get("bits", stated.get("w_bit", 4)), size if size > 0 else None, True)
        if stated.get("quant_method") == "compressed-tensors" and len(groups) == 1:
            weights = groups[0]["weights"]
            if weights["num_bits"] in (4, 8):
                return cls(weights["num_bits"], weights.get("group_size"), not weights.get("symmetric", True))
        return None

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Weights, scales (float32 for 8 bits, else half precision) and zero points of a linear layer."""
        groups = 1 if self.group_size is None else -(-inputs // self.group_size) if self.group_size else 0
        scales = outputs * groups
        scale_bytes = FLOAT32_BYTES if self.bits == 8 else 2
        zeros = scales * self.bits // 8 if self.has_zero_points else 0
        return inputs * outputs * self.bits // 8 + scales * scale_bytes + zeros


QUANTIZATIONS = {
    "fp8": Quantization(8),
    "int8": Quantization(8),
    "int4": Quantization(4, 128, True),
    "gptq": Quantization(4, 128, True),
    "awq": Quantization(4, 128, True),
}
"""By the name that ``dllm plan --quantization`` and ``examples/quantize.py`` have for them."""


class SizingError(ValueError):
    """What was asked for does not fit; says which setting to change."""


@dataclass(frozen=True)
class Deployment:
    """A model, a GPU or a machine without one, and the requests to plan for."""

    model: str
    memory: int
    """Bytes of one GPU, or of the machine."""
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
    page_pool: int | None = None
    """Bytes for pages of each rank; None: what is left of a GPU."""

    @property
    def quantized(self) -> Quantization | None:
        return None if self.quantization is None else QUANTIZATIONS[self.quantization]


@dataclass(frozen=True)
class RequestDemand:
    """One request of the planned lengths under one cache method."""

    cache_method: str
    cache_options: dict[str, Any]
    tokens_retained: int
    """The most per layer, of the canvas."""
    pages: int
    """The most that it holds: over all layers, on each GPU."""
    bytes: int
    rows_per_step: float
    """Positions computed per denoising step, as a mean over the response; an upper bound if it depends on tokens."""
    requests: int
    """How many run at once."""
    limit: str
    """What limits their number; for 0 requests, why the engine would not serve any."""
    admission_pages: int = 0
    """Reserved at admission: ``pages``, or where pages come as blocks come, those of the prompt and the first block."""
    admitted: int = 0
    """How many requests such a reservation lets run at once, until their pages have grown."""


@dataclass(frozen=True)
class Sizing:
    """Everything per GPU, or per rank on a CPU."""

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
    """Of the guide model; 0 without one."""
    activation_bytes: int
    overhead: int
    pool_bytes: int
    page_size: int
    page_bytes: int
    num_pages: int
    """Pages for requests."""
    guide_pages: int
    """Of the pages of a request, those of the guide's keys and values."""
    demand: RequestDemand
    others: list[RequestDemand]
    """The other cache methods, with their papers' options."""
    notes: list[str]


def plan(deployment: Deployment) -> Sizing:
    """Compute what fits.

    Raises:
        SizingError: no request fits, or a setting does not suit the model.
        ValueError: the model or an option is unknown.
    """
    d = deployment
    config, max_model_len = checked_config(d)
    family = family_of(config)
    d = replace(d, options=d.options.with_paper_settings(d.model, family))
    dtype = dtype_of(d.dtype, config)
    rows = max(d.max_num_batched_tokens, max_model_len)
    models, notes = [config], []
    if getattr(config, "quantization_config", None) and Quantization.of(config) is None:
        notes.append(f"the checkpoint is quantized; its weights are counted as {dtype} and take less")
    if d.quantization not in (None, "fp8"):
        notes.append(f"serve a copy of {d.model} with such weights; docs/quantization.md says where from")
    if d.options.guide_model is not None:
        guided, guide, assumed = _with_guide(d)
        d, models, notes = replace(d, options=guided), [config, guide], [*notes, *assumed]
    weights = weights_of_models(models, d.tensor_parallel_size, DTYPE_BYTES[dtype], d.quantized)
    of_method = d.options.method.pass_bytes(rows, max_model_len)
    activations = of_method + _activation_bytes(models, d.tensor_parallel_size, DTYPE_BYTES[dtype], rows)
    pool = d.page_pool
    if pool is None:
        pool = int(d.memory * d.gpu_memory_utilization) - sum(weights) - activations - d.overhead
    if pool <= 0:
        raise SizingError(_does_not_fit(d, models, sum(weights), activations, of_method, DTYPE_BYTES[dtype], rows))
    geometry = d.options.geometry(config, d.tensor_parallel_size)
    page_bytes = bytes_of_page(geometry, DTYPE_BYTES[dtype])

    def demand(options: EngineOptions) -> RequestDemand:
        options = options.with_paper_settings(d.model, family)
        if geometry.guide is not None:
            options.method.check(options.cache, geometry.num_layers, True)
        spec = request_spec(d, config, options)
        pages = options.method.page_demand(spec, geometry)
        at_first = options.method.admission_demand(spec, FIRST_BLOCK, geometry)
        retained, rows_per_step = walk(replace(spec, guidance=None), options, geometry)
        its_pool = d.page_pool or pool + of_method - options.method.pass_bytes(rows, max_model_len)
        its_pages = pages_of_pool(its_pool, page_bytes)
        requests, limit = _requests(d, options, geometry, pages, its_pages, max_model_len)
        return RequestDemand(
            cache_method=options.cache_method,
            cache_options=options.cache.model_dump(),
            tokens_retained=retained,
            pages=pages,
            bytes=pages * page_bytes,
            rows_per_step=rows_per_step,
            requests=requests,
            limit=limit,
            admission_pages=at_first,
            admitted=_requests(d, options, geometry, at_first, its_pages, max_model_len)[0],
        )

    chosen = demand(d.options)
    if not chosen.requests:
        raise SizingError(f"cache_method={chosen.cache_method!r}: {chosen.limit}")
    others = []
    for method in methods_for(family.attention):
        if method != d.options.cache_method:
            options = EngineOptions.parse(d.options.model_dump() | {"cache_method": method, "cache_options": {}})
            try:
                others.append(demand(options))
            except ValueError as error:  # a page_size that does not suit this method, or a guide
                others.append(RequestDemand(method, {}, 0, 0, 0, 0.0, 0, str(error)))
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
        page_size=d.options.page_size,
        page_bytes=page_bytes,
        num_pages=pages_of_pool(pool, page_bytes),
        guide_pages=sum(map(sum, guide_pages(request_spec(d, config, d.options), geometry).values())),
        demand=chosen,
        others=others,
        notes=notes,
    )


def checked_config(deployment: Deployment) -> tuple[Any, int]:
    """The model's config, and the longest request; raises ``SizingError`` where the lengths or the ranks do not fit."""
    config = load_config(deployment.model)
    max_model_len = _max_model_len(deployment, config)
    _check_tensor_parallel(deployment, config)
    return config, max_model_len


@lru_cache
def shares_tokenizer(guide: str, model: str) -> bool:
    """Whether a guide has a model's tokens, as ``has_same_tokens`` says; raises ``ValueError`` where a tokenizer cannot
    be read."""
    from transformers import AutoTokenizer

    from dllm_engine.model_executor.guide.sizes import has_same_tokens
    from dllm_engine.model_executor.models.tokenizers import register_tokenizers

    register_tokenizers()
    try:
        own = AutoTokenizer.from_pretrained(model_path(model), config=load_config(model))
        return has_same_tokens(guide, own.get_vocab())
    except Exception as error:  # whatever a tokenizer that is missing or damaged leads to
        raise ValueError(f"the tokenizers of {model} and {guide} cannot be compared: {one_line(error)}") from None


def _with_guide(d: Deployment) -> tuple[EngineOptions, Any, list[str]]:
    """The options with the guide's sizes, its config, and what is assumed of it."""
    # Imports vLLM's layers.
    from dllm_engine.model_executor.guide.sizes import guide_config, with_shape

    guide, notes = d.options.guide_model, []
    assert guide is not None
    config = guide_config(guide)
    if config.num_attention_heads % d.tensor_parallel_size:
        raise SizingError(
            f"--tensor-parallel-size {d.tensor_parallel_size} does not divide the {config.num_attention_heads} "
            f"attention heads of --guide-model {guide} evenly"
        )
    try:
        same_tokens = shares_tokenizer(guide, d.model)
    except ValueError as error:
        same_tokens = False
        notes.append(f"{error}; {d.options.guide_tokens_per_token:g} guide tokens per token are reserved for the guide")
    return with_shape(d.options, same_tokens=same_tokens), config, notes


def request_spec(deployment: Deployment, config: Any, options: EngineOptions) -> DecodingSpec:
    """The request that the plan is for."""
    family = family_of(config)
    block_length = deployment.block_length
    if block_length is None:
        default = checkpoint_section(config).get("block_length") or family.block_length_of(deployment.response)
        block_length = default if family.attention_block else min(default, deployment.response)
    spec = DecodingSpec(
        prompt_length=deployment.prompt,
        gen_length=deployment.response,
        block_length=block_length,
        steps=deployment.response,
        schedule=family.schedule,
        unmasking=family.default_unmasking,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        shifts_logits=family.shifts_logits,
        attention=family.attention,
        guidance=None if options.guide_model is None else Guidance(),
        cache=options.cache,
    )
    spec = replace(spec, steps=spec.num_masks)
    if reason := options.method.refusal(spec):
        raise SizingError(reason)
    return spec


def walk(spec: DecodingSpec, options: EngineOptions, geometry: PoolGeometry) -> tuple[int, float]:
    """The most tokens that a layer retains at any time and the mean rows of a step, by the method's plans.

    There is a step per token. If layers or heads have different budgets, the tokens are the mean over layers of what
    their pages hold.
    """
    retained = rows = num_steps = 0
    for step_plan, progress in steps_of(spec, options.method):
        num_steps, rows = num_steps + 1, rows + step_plan.max_rows * options.method.runs(spec, step_plan)
        if step_plan.retained > retained:
            pages = options.method.pages(spec, progress.running, geometry)[PageKind.KV]
            retained = max(retained, min(step_plan.retained, sum(pages) * geometry.page_size // geometry.num_layers))
    return retained, rows / num_steps


def steps_of(spec: DecodingSpec, method: CacheMethod) -> Iterator[tuple[StepPlan, Progress]]:
    """The plan of each step and how far the request is then, where every step unmasks the schedule's count. The
    progress is one object, which goes on."""
    progress = Progress.begin(spec)
    while progress.num_unmasked < spec.num_masks:
        plan = method.plan(spec, progress)
        yield plan, progress
        progress.advance(spec, min(plan.quota.count, progress.num_masked), retained=plan.retained)


def attention_matrices(config: Any, tensor_parallel_size: int) -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's matrix products on one rank: q, k and v; the attention's output."""
    tp, hidden, head_dim = tensor_parallel_size, config.hidden_size, head_dim_of(config)
    heads, kv_heads = config.num_attention_heads // tp, max(1, config.num_key_value_heads // tp)
    return [(hidden, (heads + 2 * kv_heads) * head_dim), (heads * head_dim, hidden)]


def mlp_matrices(hidden: int, width: int, tensor_parallel_size: int) -> list[tuple[int, int]]:
    """Those of an MLP: gate and up; down."""
    return [(hidden, 2 * width // tensor_parallel_size), (width // tensor_parallel_size, hidden)]


def layers_by_kind(config: Any) -> list[tuple[int, Any]]:
    """How many layers have an MLP (None) or experts (their ``ExpertShape``)."""
    experts, num_layers = getattr(config, "experts", None), config.num_hidden_layers
    num_dense = num_layers if experts is None else len(experts.dense_layers)
    return [(number, kind) for number, kind in ((num_dense, None), (num_layers - num_dense, experts)) if number]


def weights_of_models(
    models: Sequence[Any], tensor_parallel_size: int, dtype_bytes: int, quantization: Quantization | None
) -> list[int]:
    """``weight_bytes`` of the model, and of its guide if it has one, which is not quantized."""
    return [
        weight_bytes(model, tensor_parallel_size, dtype_bytes, quantization if model is models[0] else None)
        for model in models
    ]


def weight_bytes(
    config: Any, tensor_parallel_size: int, dtype_bytes: int, quantization: Quantization | None = None
) -> int:
    """Bytes of the weights on one tensor-parallel rank; without ``quantization``, as the config states it."""
    tp, hidden = tensor_parallel_size, config.hidden_size
    plain = Quantization(8 * dtype_bytes, 0)
    quantization = quantization or Quantization.of(config) or plain
    of_linear = plain if quantization.leaves == "linear" else quantization
    of_experts = plain if quantization.leaves == "experts" else quantization
    attention = attention_matrices(config, tp)
    linears = config.num_hidden_layers * sum(of_linear.matrix_bytes(*sizes) for sizes in attention)
    numbers = config.num_hidden_layers * 2 * hidden
    if getattr(config, "include_qkv_bias", True):  # Dream has no such key, and always the biases
        numbers += config.num_hidden_layers * attention[0][1]
    if getattr(config, "qk_layernorm", False):
        numbers += config.num_hidden_layers * 2 * head_dim_of(config)
    in_float32 = 0
    for number, experts in layers_by_kind(config):
        width = config.intermediate_size
        if experts is not None:
            width = experts.shared_intermediate_size
            matrices = mlp_matrices(hidden, experts.intermediate_size, tp)
            linears += number * experts.num_experts * sum(of_experts.matrix_bytes(*matrix) for matrix in matrices)
            router = number * hidden * experts.num_experts
            numbers += router if experts.groups is None else 0
            in_float32 += number * experts.num_experts * experts.has_bias + (router if experts.groups else 0)
        if width:
            linears += number * sum(of_linear.matrix_bytes(*matrix) for matrix in mlp_matrices(hidden, width, tp))
    tables = 1 if config.tie_word_embeddings else 2
    numbers += tables * table_numbers(config, tp) + hidden
    return linears + dtype_bytes * numbers + FLOAT32_BYTES * in_float32


def table_numbers(config: Any, tensor_parallel_size: int) -> int:
    """Numbers of the embeddings, or of the head, on one tensor-parallel rank."""
    rows: int = -(-config.vocab_size // VOCABULARY_PADDING) * VOCABULARY_PADDING // tensor_parallel_size
    return rows * int(config.hidden_size)


def _mlp_numbers(config: Any, tensor_parallel_size: int) -> int:
    """The most numbers that a layer's feed-forward branch holds for a row."""
    tp, hidden, most = tensor_parallel_size, config.hidden_size, 0
    for _, experts in layers_by_kind(config):
        if experts is None:
            most = max(most, 3 * config.intermediate_size // tp + hidden)
        else:  # as vLLM's Triton kernels hold it: each of a row's experts has an output of its own
            width, shared = experts.intermediate_size // tp, experts.shared_intermediate_size // tp
            most = max(most, experts.top_k * (max(2 * width, hidden) + width) + 3 * shared + 2 * hidden)
    return most


def activation_bytes(config: Any, tensor_parallel_size: int, dtype_bytes: int, rows: int) -> int:
    """Estimate of the memory that a forward pass over ``rows`` holds at most.

    The larger of a layer's two halves over all rows, counted tensor by tensor (the fused projections, RoPE in
    float32), or a chunk of logits that are filtered, which every rank gathers whole.
    """
    tp, hidden, head_dim = tensor_parallel_size, config.hidden_size, head_dim_of(config)
    q = config.num_attention_heads // tp * head_dim
    kv = max(1, config.num_key_value_heads // tp) * head_dim
    stream = 2 * hidden * dtype_bytes  # hidden states and their norm
    attention = (2 * q + 2 * kv + q) * dtype_bytes + 2 * 4 * q
    mlp = _mlp_numbers(config, tp) * dtype_bytes
    phases = 2 * 4 * head_dim
    head_rows = min(max(HEAD_CHUNK_NUMBERS // config.vocab_size, HEAD_CHUNK_ROWS), rows)
    head = head_rows * config.vocab_size * (dtype_bytes + FILTER_BYTES)
    return max(rows * (stream + max(attention, mlp) + phases), rows * stream + head)


def _activation_bytes(models: list[Any], tensor_parallel_size: int, dtype_bytes: int, rows: int) -> int:
    """Of the model and its guide, which run one after the other."""
    return max(activation_bytes(model, tensor_parallel_size, dtype_bytes, rows) for model in models)


def bytes_of_page(geometry: PoolGeometry, dtype_bytes: int) -> int:
    """Bytes of a page: keys and values of ``page_size`` tokens of one layer, of this rank's KV heads."""
    return 2 * geometry.page_size * geometry.num_kv_heads * geometry.head_dim * dtype_bytes


def pages_of_pool(pool_bytes: int, page_bytes: int) -> int:
    """Pages for requests: vLLM keeps one as its null block."""
    return max(pool_bytes // page_bytes - 1, 0)


def _requests(
    d: Deployment, options: EngineOptions, geometry: PoolGeometry, pages: int, num_pages: int, max_model_len: int
) -> tuple[int, str]:
    """How many requests run at once, and what limits them."""
    longest = options.method.longest_demand(options.cache, geometry, max_model_len)
    if longest > num_pages:
        return 0, (
            f"the pool's {num_pages} pages cannot hold one request of max_model_len={max_model_len}, which may need "
            f"{longest}; lower --prompt, --response or --max-model-len, retain less, or raise "
            f"{'--gpu-memory' if d.page_pool is None else '--kv-cache-memory-bytes'} or --tensor-parallel-size"
        )
    if not pages or num_pages // pages >= d.max_num_seqs:
        return d.max_num_seqs, "max_num_seqs"
    return num_pages // pages, "pages"


def _max_model_len(d: Deployment, config: Any) -> int:
    canvas, most = d.prompt + d.response, config.max_position_embeddings
    if attention_block := family_of(config).attention_block:
        canvas += -canvas % (d.block_length or attention_block)
    if canvas > most:
        raise SizingError(
            f"--prompt {d.prompt} and --response {d.response} need a canvas of {canvas}, the model has {most} "
            f"positions; lower one"
        )
    if d.max_model_len is None:
        return canvas
    if not canvas <= d.max_model_len <= most:
        raise SizingError(
            f"--max-model-len {d.max_model_len} is out of range: prompt and response need {canvas}, the model has "
            f"{most} positions"
        )
    return d.max_model_len


def _check_tensor_parallel(d: Deployment, config: Any) -> None:
    tp, heads, kv_heads = d.tensor_parallel_size, config.num_attention_heads, config.num_key_value_heads
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if tp not in fitting:
        raise SizingError(
            f"--tensor-parallel-size {tp} does not divide the model's {heads} attention heads ({kv_heads} KV heads) "
            f"evenly; choose one of {', '.join(map(str, fitting))}"
        )
    if d.block_length is not None and not 1 <= d.block_length <= d.response and not family_of(config).attention_block:
        raise SizingError(f"--block-length {d.block_length} is out of range: 1 … {d.response} (--response)")


def dtype_of(wanted: str, config: Any) -> str:
    """As vLLM chooses: the checkpoint's, and bfloat16 where that is float32."""
    if wanted != "auto":
        return {"float": "float32", "half": "float16"}.get(wanted, wanted)
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return own if own in ("bfloat16", "float16") else "bfloat16"


def _does_not_fit(
    d: Deployment, models: list[Any], weights: int, activations: int, of_method: int, dtype_bytes: int, rows: int
) -> str:
    share = d.memory * d.gpu_memory_utilization
    advice = "raise --gpu-memory, or lower --max-num-batched-tokens"
    for tp in (2, 4, 8):
        if tp > d.tensor_parallel_size and all(model.num_attention_heads % tp == 0 for model in models):
            needed = sum(weights_of_models(models, tp, dtype_bytes, d.quantized))
            needed += _activation_bytes(models, tp, dtype_bytes, rows)
            if needed + of_method + d.overhead < share:
                advice = f"use --tensor-parallel-size {tp}, or raise --gpu-memory"
                break
    numbers = (d.memory, int(share), weights, activations, d.overhead)
    total, usable, taken, kept, other = map(readable_size, numbers)
    return (
        f"--gpu-memory {total} leaves nothing for pages: of the {usable} that vLLM uses, weights take {taken}, "
        f"activations {kept} and overhead {other}; {advice}"
    )
