"""Imported once by a process that programs and workers of tests are forked from: everything that they would import."""

import multiprocessing
import os
import sys

# Each rank would compile vLLM's embedding of a sharded vocabulary for seconds; read while that is imported.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
# Ray reads a worker's variables when it is imported, so each program imports it by itself.
sys.modules["ray"] = None  # type: ignore[assignment]
# ruff: noqa: E402

import vllm.entrypoints.cli.main
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.coordinator
import vllm.v1.engine.core
import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor

import dllm_engine.cli.main
import dllm_engine.model_executor.workers.cpu  # noqa: F401
from tests.support.engines import freeze_imports

# On a CPU vLLM spawns its processes, and each would import everything anew.
for module in (vllm.v1.engine.coordinator, vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
    module.get_mp_context = lambda: multiprocessing.get_context("fork")
# These have looked for Ray, and look again.
del sys.modules["ray"]
for name in ("vllm.v1.executor.ray_utils", "vllm.v1.metrics.ray_wrappers"):
    package, _, module = name.rpartition(".")
    sys.modules.pop(name, None)
    vars(sys.modules[package]).pop(module, None)
freeze_imports()
