"""Memory of weights, activations and pages, and the number of requests that fit a GPU,
computed from a model's config.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    field_validator,
)

from dllm_engine.cache_methods import methods_for
from dllm_engine.cache_methods.page_demand import PageDemand
from dllm_engine.checkpoints import load_config
from dllm_engine.decoding.option_types import Positive
from dllm_engine.decoding.page_layout import PageKind
from dllm_engine.demo import model_path
from dllm_engine.families import ModelFamily
from dllm_engine.model_bytes import (
    activation_bytes,
    draft_adapter_bytes,
    weight_bytes,
)
from dllm_engine.model_executor.models.config_facts import stated_config
from dllm_engine.model_executor.models.quantization import (
    FLOAT32_BYTES,
    QUANTIZATIONS,
    Quantization,
)
from dllm_engine.options import EngineOptions, checkpoint_section
from dllm_engine.request_options.resolve import resolve_decoding
from dllm_engine.text import readable_size

_DTYPES = {
    "bfloat16": ("bfloat16", 2),
    "float16": ("float16", 2),
    "half": ("float16", 2),
    "float32": ("float32", FLOAT32_BYTES),
    "float": ("float32", FLOAT32_BYTES),
}
"""Types of weights and bytes of a number, by vLLM's names."""
CPU_PAGE_POOL_BYTES = 1 << 30
"""Memory for pages on a CPU, unless ``kv_cache_memory_bytes`` (or
VLLM_CPU_KVCACHE_SPACE) is set. vLLM's own default of 92% of all memory fails on a
machine where anything else runs."""


class Deployment(BaseModel):
    """A model, a GPU or a CPU, and the requests to plan for."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    model: str
    options: EngineOptions
    gpu_memory: ByteSize | None = None
    """Memory of one GPU, such as 80GiB. None: compute the needs of a CPU."""
    prompt: Positive = 1024
    """Tokens of a prompt."""
    response: Positive = 256
    """Tokens of a response."""
    block_length: Positive | None = None
    """Tokens denoised together. None: the checkpoint's default, else the family's."""
    quantization: Literal["fp8", "int8", "int4", "gptq", "awq"] | None = None
    """Weights of a quantized copy that does not exist yet; 4 bits in groups of 128.
    None: as in the checkpoint.
    """
    dtype: str = "auto"
    tensor_parallel_size: Positive = 1
    max_model_len: Positive | None = None
    """None: the length of prompt and response together."""
    max_num_seqs: Positive = 256
    """The most requests at once."""
    max_num_batched_tokens: Positive = 8192
    """Rows of one forward pass, at least ``max_model_len``, or a block of a block
    diffusion model.
    """
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)
    """Share of the GPU that vLLM may use."""
    overhead: ByteSize | None = None
    """Memory for everything else: processes, CUDA context, libraries, communication. An
    assumption. None: 1GiB per GPU; 2GiB on a CPU, for the three processes of a server.
    """

    @field_validator("gpu_memory", "overhead", mode="before")
    @classmethod
    def _is_size(cls, size: Any) -> Any:
        if isinstance(size, str) and not re.fullmatch(r"\s*[\d.]+\s*\w*\s*", size):
            raise ValueError("give a number and its unit, as in 80GiB")
        return size

    @field_validator("gpu_memory", "overhead")
    @classmethod
    def _with_unit(cls, size: ByteSize | None) -> ByteSize | None:
        if size is not None and 0 < size < 1 << 20:
            raise ValueError(f"{size} bytes; give the unit too, as in {size}GiB")
        return size


@dataclass(frozen=True)
class RequestDemand:
    """One request of the planned lengths under one cache method."""

    cache_method: str
    cache_options: dict[str, Any]
    tokens_retained: int = 0
    """The most retained canvas tokens per layer."""
    pages: int = 0
    """The most pages that it holds: over all layers, on each GPU."""
    bytes: int = 0
    rows_per_step: float = 0.0
    """Mean number of positions computed per denoising step, at one token per step."""
    requests: int = 0
    """The most requests that run at once."""
    limit: str = ""
    """The reason why no more requests run at once; for 0 requests, why the engine would
    serve none.
    """


class CompleteDeployment(Deployment):
    """A deployment with its open settings filled in."""

    overhead: ByteSize
    max_model_len: int


class Sizing(CompleteDeployment):
    """A deployment and the memory that it needs. All numbers are per GPU, or per
    process of a CPU.
    """

    weight_bytes: int
    guide_weight_bytes: int
    """0 without a guide model."""
    activation_bytes: int
    pool_bytes: int
    page_bytes: int
    num_pages: int
    """Pages for requests."""
    demand: RequestDemand
    """Demand under the cache method of the options."""
    others: list[RequestDemand]
    """Demand under the other cache methods of the model, with their papers' options."""
    notes: list[str]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, activations and pages together."""
        return (
            self.weight_bytes
            + self.guide_weight_bytes
            + self.activation_bytes
            + self.overhead
            + self.pool_bytes
        )


def plan(deployment: Deployment) -> Sizing:
    """Compute what fits. Raises ``ValueError`` if no request fits, or if a setting does
    not suit the model.
    """
    config = load_config(deployment.model)
    d, guides = _completed(deployment, config)
    tp, dtype_bytes = d.tensor_parallel_size, _DTYPES[d.dtype][1]
    weights = weight_bytes(
        config, tp, dtype_bytes, d.quantization and QUANTIZATIONS[d.quantization]
    )
    weights += draft_adapter_bytes(d.model, d.options, config, tp, dtype_bytes)
    guide_weights = sum(weight_bytes(guide, tp, dtype_bytes) for guide in guides)
    activations = max(
        activation_bytes(
            model,
            tp,
            dtype_bytes,
            d.max_num_batched_tokens,
            on_gpu=d.gpu_memory is not None,
        )
        for model in (config, *guides)
    )
    for_pass = _pass_bytes(d, d.options)
    pool = _pool_bytes(d, weights + guide_weights, activations + for_pass)
    demand_of = partial(request_demand, d, config, pool + for_pass)
    demand = demand_of(d.options)
    if not demand.requests:
        raise ValueError(f"cache_method={demand.cache_method!r}: {demand.limit}")
    page_bytes = d.options.geometry(config, tp).page_bytes(dtype_bytes)
    return Sizing(
        **vars(d),
        weight_bytes=weights,
        guide_weight_bytes=guide_weights,
        activation_bytes=activations + for_pass,
        pool_bytes=pool,
        page_bytes=page_bytes,
        num_pages=pages_of_pool(pool, page_bytes),
        demand=demand,
        others=_demand_of_others(d, config.family, demand_of),
        notes=_notes(d, config),
    )


def _completed(d: Deployment, config: Any) -> tuple[CompleteDeployment, list[Any]]:
    """The deployment with its open settings filled in, and the configs of its guides.
    Raises ``ValueError`` if a setting does not suit the model.
    """
    longest = canvas_limit(
        config, d.prompt, d.response, d.block_length, d.max_model_len
    )
    if (heads := config.num_attention_heads) % d.tensor_parallel_size:
        raise ValueError(
            f"--tensor-parallel-size {d.tensor_parallel_size} does not divide the "
            f"model's {heads} attention heads"
        )
    options, guides = _with_guide(
        d.options.with_paper_settings(d.model, config.family), d.model
    )
    rows = config.family.longest_canvas(
        longest if options.method.shortened is None else 1
    )
    stated = str(getattr(config, "dtype", None)).removeprefix("torch.")
    # vLLM's choice: the checkpoint's type, or bfloat16 instead of float32.
    default = stated if stated in ("bfloat16", "float16") else "bfloat16"
    settings = vars(d) | {
        "options": options,
        "dtype": _DTYPES[default if d.dtype == "auto" else d.dtype][0],
        "max_model_len": longest,
        "max_num_batched_tokens": max(d.max_num_batched_tokens, rows),
    }
    if d.overhead is None:
        settings["overhead"] = (2 if d.gpu_memory is None else 1) << 30
    return CompleteDeployment(**settings), guides


def _pass_bytes(d: CompleteDeployment, options: EngineOptions) -> int:
    """Memory that a pass of the cache method holds."""
    return options.method.cost.num_bytes(d.max_num_batched_tokens, d.max_model_len)


def _pool_bytes(d: CompleteDeployment, weights: int, activations: int) -> int:
    """Bytes that are left for pages. Raises ``ValueError`` if none are."""
    if d.gpu_memory is None:
        return CPU_PAGE_POOL_BYTES
    usable = int(d.gpu_memory * d.gpu_memory_utilization)
    pool = usable - weights - activations - d.overhead
    if pool <= 0:
        raise ValueError(
            f"--gpu-memory {readable_size(d.gpu_memory)} leaves nothing for pages: "
            f"weights take {readable_size(weights)}, activations "
            f"{readable_size(activations)} and overhead "
            f"{readable_size(d.overhead)}, and vLLM uses "
            f"{d.gpu_memory_utilization:.0%} of the memory; raise "
            f"--tensor-parallel-size or --gpu-memory, or lower --max-num-batched-tokens"
        )
    return pool


def _demand_of_others(
    d: CompleteDeployment,
    family: ModelFamily,
    demand_of: Callable[[EngineOptions], RequestDemand],
) -> list[RequestDemand]:
    """Demand under the cache methods that the options do not name."""
    others = []
    for method in methods_for(family.attention):
        if method == d.options.cache_method:
            continue
        raw = d.options.model_dump() | {"cache_method": method, "cache_options": {}}
        try:
            options = EngineOptions.parse(raw).with_paper_settings(d.model, family)
            others.append(demand_of(options))
        except ValueError as error:
            # The page_size does not suit this method, or a guide.
            others.append(RequestDemand(method, {}, limit=str(error)))
    return others


def _notes(d: Deployment, config: Any) -> list[str]:
    notes = []
    if getattr(config, "quantization_config", None) and Quantization.of(config) is None:
        notes.append(
            f"the checkpoint is quantized; its weights are counted as {d.dtype} and "
            f"take less"
        )
    if d.quantization not in (None, "fp8"):
        notes.append(
            f"serve a copy of {d.model} with such weights; docs/quantization.md says "
            f"where from"
        )
    return notes


def request_demand(
    d: CompleteDeployment, config: Any, room: int, options: EngineOptions
) -> RequestDemand:
    """A request of a deployment under ``options``. ``room``: bytes for pages, and for
    what a pass holds.
    """
    method = options.method
    geometry = options.geometry(config, d.tensor_parallel_size)
    page_bytes = geometry.page_bytes(_DTYPES[d.dtype][1])
    section = checkpoint_section(config)
    defaults = {name: section[name] for name in section if name == "block_length"}
    length_options = {"block_length": d.block_length} if d.block_length else {}
    with_defaults = options.model_copy(update={"request_defaults": defaults})
    params = planned_params(d.response, length_options)
    spec = resolve_decoding(params, d.prompt, config, with_defaults)
    num_pages = pages_of_pool(room - _pass_bytes(d, options), page_bytes)
    page_demand = PageDemand(method, geometry, options.share_prompts)
    pages = page_demand.peak(spec)
    upper_bound = page_demand.upper_bound(
        options.cache, config.family.longest_canvas(d.max_model_len)
    )
    requests = d.max_num_seqs
    limit = "max_num_seqs"
    if upper_bound > num_pages:
        requests = 0
        more = "--gpu-memory or --tensor-parallel-size"
        if d.gpu_memory is None:
            more = "--kv-cache-memory-bytes of the server"
        limit = (
            f"the pool's {num_pages} pages cannot hold one request of "
            f"max_model_len={d.max_model_len}, which may need {upper_bound}; lower "
            f"--prompt, --response or --max-model-len, retain less, or raise {more}"
        )
    elif pages and num_pages // pages < d.max_num_seqs:
        requests = num_pages // pages
        limit = "pages"
    spec = replace(spec, guidance=None)
    retained = rows = num_steps = 0
    for step_plan, progress in method.steps(spec):
        num_steps += 1
        rows += step_plan.max_rows * method.cost.num_runs(spec, step_plan)
        if step_plan.retained > retained:
            num_kv_pages = sum(page_demand.held(spec, progress.running)[PageKind.KV])
            tokens_held = num_kv_pages * geometry.page_size // geometry.num_layers
            retained = max(retained, min(step_plan.retained, tokens_held))
    return RequestDemand(
        options.cache_method,
        options.cache.model_dump(),
        tokens_retained=retained,
        pages=pages,
        bytes=pages * page_bytes,
        rows_per_step=rows / num_steps,
        requests=requests,
        limit=limit,
    )


def planned_params(gen_length: int, options: dict[str, Any]) -> Any:
    """Parameters of a planned request, which states only lengths. They stand for vLLM's
    class, which takes seconds to import.
    """
    return SimpleNamespace(
        max_tokens=gen_length,
        extra_args=options,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_tokens=0,
        ignore_eos=False,
        logit_bias=None,
        logprobs=None,
        thinking_token_budget=None,
        eos_token_id=None,
        stop_token_ids=(),
        all_stop_token_ids=frozenset(),
    )


def canvas_limit(
    config: Any,
    prompt: int,
    response: int,
    block_length: int | None,
    max_model_len: int | None,
) -> int:
    """``max_model_len``, by default the canvas of a request with these lengths. Raises
    ``ValueError`` if it is out of range.
    """
    canvas = prompt + response
    max_positions = config.longest_sequence
    if attention_block := config.family.attention_block:
        canvas += -canvas % (block_length or attention_block)
    elif block_length is not None and not 1 <= block_length <= response:
        raise ValueError(
            f"--block-length {block_length} is out of range: 1 … {response} "
            f"(--response)"
        )
    if canvas > max_positions:
        raise ValueError(
            f"--prompt {prompt} and --response {response} need a canvas of {canvas}, "
            f"the model has {max_positions} positions; lower one"
        )
    if max_model_len is not None and not canvas <= max_model_len <= max_positions:
        raise ValueError(
            f"--max-model-len {max_model_len} is out of range: prompt and response "
            f"need {canvas}, the model has {max_positions} positions"
        )
    return max_model_len or canvas


def _with_guide(options: EngineOptions, model: str) -> tuple[EngineOptions, list[Any]]:
    """The options with the guide's sizes, and a list with the guide's config; empty
    without a guide.
    """
    if options.guide_model is None:
        return options, []
    from transformers import AutoTokenizer

    # Imported here, because it imports vLLM.
    from dllm_engine.model_executor.guide.sizes import (
        guide_config,
        guide_shape,
    )
    from dllm_engine.model_executor.models.configs import (
        parse_config,
        register_tokenizers,
    )

    register_tokenizers()
    source = model_path(model)
    guide = guide_config(options.guide_model)
    try:
        vocabulary = AutoTokenizer.from_pretrained(
            source, config=parse_config(stated_config(source, {}), source)
        ).get_vocab()
        shape = guide_shape(
            options.guide_model, vocabulary, options.guide_tokens_per_token
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--guide-model needs the tokenizers of both models: {error}"
        ) from None
    return options.model_copy(update={"guide_shape": shape}), [guide]


def pages_of_pool(pool_bytes: int, page_bytes: int) -> int:
    """Pages for requests: all but one, which is vLLM's null block."""
    return max(pool_bytes // page_bytes - 1, 0)
