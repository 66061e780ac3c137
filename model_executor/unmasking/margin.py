"""``margin``: every position whose two likeliest tokens are at least that far apart."""

from dllm_engine.model_executor.unmasking.parallel import ParallelUnmasking
from dllm_engine.model_executor.unmasking.threshold import reaching

MARGIN = ParallelUnmasking("margin", measures="margin", passes=reaching)
