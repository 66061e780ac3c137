"""What fits, computed from a model's config alone. No weights are loaded and no GPU is needed.

The bytes of weights and pages are exact, the activations an estimate, and the overhead is whatever the caller says.
"""

from dataclasses import dataclass, replace
from typing import Any

from dllm_engine.families import family_of
from dllm_engine.memory.activations import RankLoad
from dllm_engine.memory.deployment import Deployment, SizingError, load_of, request_spec, settled, with_guide
from dllm_engine.memory.weights import Quantization, weights_of_models
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import methods_for
from dllm_engine.scheduler.methods.base import CacheMethod, guide_pages
from dllm_engine.scheduler.page_layout import PageKind, PoolGeometry
from dllm_engine.scheduler.request import FIRST_BLOCK, DecodingSpec
from dllm_engine.text import readable_size


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
    notes: list[str]


def plan(deployment: Deployment) -> Sizing:
    """Compute what fits.

    Raises:
        SizingError: no request fits, or a setting does not suit the model.
        ValueError: the model or an option is unknown.
    """
    sizing = _sizing(deployment)
    if not sizing.demand.requests:
        raise SizingError(f"cache_method={sizing.demand.cache_method!r}: {sizing.demand.limit}")
    return sizing


def plan_others(deployment: Deployment) -> list[RequestDemand]:
    """The same requests under the other cache methods of the model, with their papers' options."""
    d, config, _ = settled(deployment)
    own, demands = d.options, []
    for method in methods_for(family_of(config).attention):
        if method != own.cache_method:
            options = EngineOptions.parse(own.model_dump() | {"cache_method": method, "cache_options": {}})
            try:
                demands.append(_sizing(replace(deployment, options=options)).demand)
            except ValueError as error:  # a page_size that does not suit this method, or a guide
                demands.append(RequestDemand(method, {}, 0, 0, 0, 0.0, 0, str(error)))
    return demands


def _sizing(deployment: Deployment) -> Sizing:
    d, config, max_model_len = settled(deployment)
    load, dtype = load_of(d, config, max_model_len)
    notes = []
    if getattr(config, "quantization_config", None) and Quantization.of(config) is None:
        notes.append(f"the checkpoint is quantized; its weights are counted as {dtype} and take less")
    if d.quantization not in (None, "fp8"):
        notes.append(f"serve a copy of {d.model} with such weights; docs/quantization.md says where from")
    if d.options.guide_model is not None:
        options, assumed = with_guide(d)
        d, notes = replace(d, options=options), [*notes, *assumed]
    load = replace(load, options=d.options)
    pool = d.page_pool
    if pool is None:
        pool = int(d.memory * d.gpu_memory_utilization) - sum(load.weights) - load.activation_bytes - d.overhead
    if pool <= 0:
        raise SizingError(_does_not_fit(d, load))
    geometry = d.options.geometry(config, d.tensor_parallel_size)
    page_bytes = bytes_of_page(geometry, load.dtype_bytes)
    num_pages = pages_of_pool(pool, page_bytes)
    demand = _demand(d, config, geometry, page_bytes, num_pages, load.max_model_len)
    return Sizing(
        model=d.model,
        dtype=dtype,
        memory=d.memory,
        tensor_parallel_size=d.tensor_parallel_size,
        max_model_len=load.max_model_len,
        max_num_seqs=d.max_num_seqs,
        max_num_batched_tokens=load.rows,
        canvas=d.prompt + d.response,
        weight_bytes=load.weights[0],
        guide_weight_bytes=sum(load.weights[1:]),
        activation_bytes=load.activation_bytes,
        overhead=d.overhead,
        pool_bytes=pool,
        page_size=d.options.page_size,
        page_bytes=page_bytes,
        num_pages=num_pages,
        guide_pages=sum(map(sum, guide_pages(request_spec(d, config, d.options), geometry).values())),
        demand=demand,
        notes=notes,
    )


def _demand(
    d: Deployment, config: Any, geometry: PoolGeometry, page_bytes: int, num_pages: int, max_model_len: int
) -> RequestDemand:
    options = d.options
    if geometry.guide is not None:
        options.method.check(options.cache, geometry.num_layers, True)
    spec = request_spec(d, config, options)
    pages = options.method.page_demand(spec, geometry)
    at_first = options.method.admission_demand(spec, FIRST_BLOCK, geometry)
    retained, rows_per_step = walk(replace(spec, guidance=None), options.method, geometry)
    requests, limit = _requests(d, geometry, pages, num_pages, max_model_len)
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
        admitted=_requests(d, geometry, at_first, num_pages, max_model_len)[0],
    )


def walk(spec: DecodingSpec, method: CacheMethod, geometry: PoolGeometry) -> tuple[int, float]:
    """The most tokens that a layer retains at any time and the mean rows of a step, by the method's plans.

    There is a step per token. If layers or heads have different budgets, the tokens are the mean over layers of what
    their pages hold.
    """
    retained = rows = num_steps = 0
    for step_plan, progress in method.steps(spec):
        num_steps, rows = num_steps + 1, rows + step_plan.max_rows * method.runs(spec, step_plan)
        if step_plan.retained > retained:
            pages = method.pages(spec, progress.running, geometry)[PageKind.KV]
            retained = max(retained, min(step_plan.retained, sum(pages) * geometry.page_size // geometry.num_layers))
    return retained, rows / num_steps


def bytes_of_page(geometry: PoolGeometry, dtype_bytes: int) -> int:
    """Bytes of a page: keys and values of ``page_size`` tokens of one layer, of this rank's KV heads."""
    return 2 * geometry.page_size * geometry.num_kv_heads * geometry.head_dim * dtype_bytes


def pages_of_pool(pool_bytes: int, page_bytes: int) -> int:
    """Pages for requests: vLLM keeps one as its null block."""
    return max(pool_bytes // page_bytes - 1, 0)


def _requests(d: Deployment, geometry: PoolGeometry, pages: int, num_pages: int, max_model_len: int) -> tuple[int, str]:
    """How many requests run at once, and what limits them."""
    longest = d.options.method.longest_demand(d.options.cache, geometry, max_model_len)
    if longest > num_pages:
        return 0, (
            f"the pool's {num_pages} pages cannot hold one request of max_model_len={max_model_len}, which may need "
            f"{longest}; lower --prompt, --response or --max-model-len, retain less, or raise "
            f"{'--gpu-memory' if d.page_pool is None else '--kv-cache-memory-bytes'} or --tensor-parallel-size"
        )
    if not pages or num_pages // pages >= d.max_num_seqs:
        return d.max_num_seqs, "max_num_seqs"
    return num_pages // pages, "pages"


def _does_not_fit(d: Deployment, load: RankLoad) -> str:
    share = d.memory * d.gpu_memory_utilization
    advice = "raise --gpu-memory, or lower --max-num-batched-tokens"
    for ranks in (2, 4, 8):
        if ranks > load.num_ranks and all(model.num_attention_heads % ranks == 0 for model in load.models):
            weights = weights_of_models(load.models, ranks, load.dtype_bytes, d.quantized)
            split = replace(load, weights=weights, num_ranks=ranks)
            if sum(split.weights) + split.activation_bytes + d.overhead < share:
                advice = f"use --tensor-parallel-size {ranks}, or raise --gpu-memory"
                break
    numbers = (d.memory, int(share), sum(load.weights), load.activation_bytes, d.overhead)
    total, usable, taken, kept, other = map(readable_size, numbers)
    return (
        f"--gpu-memory {total} leaves nothing for pages: of the {usable} that vLLM uses, weights take {taken}, "
        f"activations {kept} and overhead {other}; {advice}"
    )
