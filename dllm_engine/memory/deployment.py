"""What is planned for: a model, a machine, and requests of one length."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dllm_engine.checkpoints import load_config
from dllm_engine.demo import model_path
from dllm_engine.families import family_of
from dllm_engine.memory.activations import RankLoad
from dllm_engine.memory.weights import DTYPE_BYTES, QUANTIZATIONS, Quantization, weights_of_models
from dllm_engine.options import EngineOptions, checkpoint_section
from dllm_engine.scheduler.request import DecodingSpec, Guidance
from dllm_engine.text import one_line

GIB = 1 << 30
CPU_PAGE_POOL_BYTES = GIB
"""Memory for pages on a CPU, unless ``kv_cache_memory_bytes`` (or VLLM_CPU_KVCACHE_SPACE) is set. vLLM's own default of
92% of all memory fails on a machine where anything else runs."""


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


def settled(deployment: Deployment) -> tuple[Deployment, Any, int]:
    """The deployment with the cache method, its options and the rows that an engine would take, the model's config, and
    the longest request; raises ``SizingError`` where the lengths or the ranks do not fit."""
    config = load_config(deployment.model)
    family = family_of(config)
    max_model_len = _max_model_len(deployment, config)
    _check_tensor_parallel(deployment, config)
    options = deployment.options.with_paper_settings(deployment.model, family)
    least = family.longest_canvas(max_model_len if options.method.shortened is None else 1)
    rows = max(deployment.max_num_batched_tokens, least)
    return replace(deployment, options=options, max_num_batched_tokens=rows), config, max_model_len


def _max_model_len(d: Deployment, config: Any) -> int:
    canvas, most = d.prompt + d.response, config.longest_sequence
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


def models_of(config: Any, options: EngineOptions) -> list[Any]:
    """Configs of the model, and of its guide if it has one."""
    if options.guide_model is None:
        return [config]
    from dllm_engine.model_executor.guide.sizes import guide_config  # imports vLLM's layers

    return [config, guide_config(options.guide_model)]


def load_of(d: Deployment, config: Any, max_model_len: int) -> tuple[RankLoad, str]:
    """What each rank works on, and in which type, from what ``settled`` returns."""
    dtype, ranks = dtype_of(d.dtype, config), d.tensor_parallel_size
    models, dtype_bytes = models_of(config, d.options), DTYPE_BYTES[dtype]
    weights = weights_of_models(models, ranks, dtype_bytes, d.quantized)
    rows = d.max_num_batched_tokens
    return RankLoad(models, weights, d.options, ranks, dtype_bytes, rows, max_model_len), dtype


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
        shifts_logits=family.shifts_logits,
        attention=family.attention,
        guidance=None if options.guide_model is None else Guidance(),
        cache=options.cache,
    )
    spec = replace(spec, steps=spec.num_masks)
    if reason := options.method.refusal(spec):
        raise SizingError(reason)
    return spec


def shares_tokenizer(guide: str, model: str) -> bool:
    """Whether a guide has a model's tokens, as ``has_same_tokens`` says; raises ``ValueError`` where a tokenizer cannot
    be read."""
    same_tokens, problem = _compared_tokenizers(guide, model)
    if problem:
        raise ValueError(f"the tokenizers of {model} and {guide} cannot be compared: {problem}")
    return same_tokens


@lru_cache
def _compared_tokenizers(guide: str, model: str) -> tuple[bool, str]:
    """Whether the tokens are the same, and what went wrong. A problem is kept too: ``plan_others`` asks for each
    method, and without a network each try takes minutes."""
    from transformers import AutoTokenizer

    from dllm_engine.model_executor.guide.sizes import has_same_tokens
    from dllm_engine.model_executor.models.tokenizers import register_tokenizers

    register_tokenizers()
    try:
        own = AutoTokenizer.from_pretrained(model_path(model), config=load_config(model))
        return has_same_tokens(guide, own.get_vocab()), ""
    except Exception as error:  # whatever a tokenizer that is missing or damaged leads to
        return False, one_line(error)


def with_guide(d: Deployment) -> tuple[EngineOptions, list[str]]:
    """The options with the guide's sizes, and what is assumed of it."""
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
    return with_shape(d.options, same_tokens=same_tokens), notes
