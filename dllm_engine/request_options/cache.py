"""Options of the cache method that requests may change."""

from typing import Annotated

from dllm_engine.decoding.option_types import Share
from dllm_engine.decoding.spec import CacheOptions
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.context import refused
from dllm_engine.request_options.facts import Facts, OptionGroup


class CacheChanges(OptionGroup):
    retention_ratio: Annotated[Share | None, Facts(default_by="engine")] = None
    """Share to retain for this request, at most the engine's ``retention_ratio``. Cache
    methods that evict nothing refuse it."""


def resolve_cache(options: CacheChanges, engine: EngineOptions) -> CacheOptions:
    """The engine's cache options with the changes of the request."""
    wanted = options.retention_ratio
    if wanted is None:
        return engine.cache
    allowed = engine.retention_ratio
    if allowed is None:
        raise refused(
            f"retention_ratio={wanted}: cache_method={engine.cache_method!r} evicts "
            f"nothing; leave it unset"
        )
    if wanted > allowed:
        raise refused(
            f"retention_ratio={wanted} is out of range: pages are sized for the "
            f"engine's {allowed}, a request may only lower it"
        )
    return engine.cache.model_copy(update={"retention_ratio": wanted})
