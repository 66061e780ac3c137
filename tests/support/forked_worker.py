"""Imported by the process that workers are forked from, once for all of them."""

import dllm_engine.model_executor.workers.cpu  # noqa: F401
from tests.support.engines import freeze_imports

freeze_imports()
