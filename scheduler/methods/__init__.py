"""The cache methods under the name that programs import them by."""

from dllm_engine.cache_methods import CACHE_METHODS as CACHE_METHODS
