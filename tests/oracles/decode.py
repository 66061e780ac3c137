"""Every cache method as slow, plain PyTorch, by the engine's names of methods, options
and request fields.
"""

from collections.abc import Callable
from typing import Any

from tests.oracles import (
    by_rows,
    d2_cache,
    dllm_cache,
    es_dllm,
    focus,
    maskkv,
    sparse,
)
from tests.oracles.decoding import Decoding
from tests.oracles.models import PlainModel
from tests.oracles.rounds import plain_rounds

METHODS: dict[str, Callable[..., None]] = {
    name.removeprefix("plain_"): plain
    for module in (by_rows, d2_cache, dllm_cache, es_dllm, focus, maskkv, sparse)
    for name, plain in vars(module).items()
    if name.startswith("plain_")
}


def decode(
    model: PlainModel,
    prompt: list[int],
    cache_method: str = "none",
    cache_options: dict[str, Any] | None = None,
    **asked: Any,
) -> Decoding:
    """A whole response. ``asked`` are fields of ``DiffusionParams`` that ``Decoding``
    has too.
    """
    options = dict(cache_options or {})
    assert asked.pop("ignore_eos", True), "plain responses are whole"
    if "retention_ratio" in asked:
        options["retention_ratio"] = asked.pop("retention_ratio")
    decoding = asked.pop("decoding", "diffusion")
    model.draft_with(options.pop("draft_lora", None))
    run = Decoding(model, prompt, **({"block_length": 1} | asked))
    if decoding != "diffusion":
        length = run.block_length if decoding == "self_speculation" else 1
        plain_rounds(run, length, keeps=cache_method != "none")
        return run
    METHODS[cache_method](run, **options)
    return run
