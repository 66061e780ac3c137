"""Cache methods: what a step writes to and reads from pages, and which layer pass it runs.

A new method is one file here, and its row in ``scheduler/refresh_plan.py``.
"""

from dllm_engine.model_executor.cache_methods.none import NoCache

CACHE_METHODS = {"none": NoCache}
