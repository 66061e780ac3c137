"""Every cache method as slow, plain PyTorch, by the engine's names of methods, options and request fields."""

from collections.abc import Callable
from typing import Any

from tests.oracles.d2_cache import plain_d2_cache
from tests.oracles.decoding import Decoding
from tests.oracles.delayed import plain_delayed
from tests.oracles.dkv import plain_dkv
from tests.oracles.dllm_cache import plain_dllm_cache
from tests.oracles.es_dllm import plain_es_dllm
from tests.oracles.fast_dllm import plain_block, plain_dual, plain_none, plain_prefix
from tests.oracles.freecache import plain_freecache
from tests.oracles.maskkv import plain_maskkv
from tests.oracles.models import PlainModel
from tests.oracles.sparse import plain_sparse

METHODS: dict[str, Callable[..., None]] = {
    plain.__name__.removeprefix("plain_"): plain
    for plain in (
        *(plain_none, plain_prefix, plain_dual, plain_sparse, plain_dkv, plain_dllm_cache, plain_maskkv),
        *(plain_es_dllm, plain_freecache, plain_delayed, plain_d2_cache, plain_block),
    )
}


def decode(
    model: PlainModel,
    prompt: list[int],
    cache_method: str = "none",
    cache_options: dict[str, Any] | None = None,
    **asked: Any,
) -> Decoding:
    """A whole response. ``asked`` are fields of ``DiffusionParams`` that ``Decoding`` has too."""
    options = dict(cache_options or {})
    assert asked.pop("ignore_eos", True), "plain responses are whole"
    if "retention_ratio" in asked:
        options["retention_ratio"] = asked.pop("retention_ratio")
    run = Decoding(model, prompt, **asked)
    METHODS[cache_method](run, **options)
    return run
