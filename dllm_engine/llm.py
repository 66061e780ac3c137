"""``LLM``: vLLM's offline class with the options of diffusion engines as keywords."""

from typing import Any, Literal

import vllm

from dllm_engine.demo import model_path
from dllm_engine.options import OPTIONS_KEY, EngineOptions
from dllm_engine.plugin import register

class LLM(vllm.LLM):
    """``vllm.LLM`` for diffusion language models; every argument of it still works.

    Args:
        model: a checkpoint's folder or Hugging Face name, or ``"demo"``.
        cache_method: which cache to use; ``dllm models`` lists them.
        cache_options: options of the cache method; ``"paper"`` for those of its paper.
        page_size: tokens per page of one layer.
        trace: record per forward pass what was unmasked and computed (``outputs[i].diffusion``).

    Raises:
        ValueError: an unknown or out-of-range option, named with its value and range.
    """

    def __init__(
        self,
        model: str,
        *,
        cache_method: str = "none",
        cache_options: dict[str, Any] | Literal["paper"] | None = None,
        page_size: int = 32,
        trace: bool = False,
        **kwargs: Any,
    ) -> None:
        options = {
            "cache_method": cache_method,
            "cache_options": cache_options or {},
            "page_size": page_size,
            "trace": trace,
        }
        EngineOptions.parse(options)
        # vLLM loads plugins later, but the arguments below are checked against the model's config class.
        register()
        additional = {**(kwargs.pop("additional_config", None) or {}), OPTIONS_KEY: options}
        super().__init__(model_path(model), additional_config=additional, **kwargs)

    def beam_search(self, *args: Any, **kwargs: Any) -> Any:
        """Beam search extends a prefix token by token, which diffusion models do not have."""
        raise ValueError("beam search is not supported for diffusion models; use n with a temperature above 0")
