"""Imported once by a process that programs and workers of tests are forked from:
everything that they would import.
"""

import multiprocessing.context
import multiprocessing.spawn
import os
import runpy
import sys
from typing import Any

# Each rank would compile vLLM's embedding of a sharded vocabulary for seconds; read
# while that is imported.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
# Ray reads a worker's variables when it is imported, so each program imports it by
# itself.
sys.modules["ray"] = None
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


class Process(multiprocessing.context.ForkProcess):
    """A fork that runs the program's file again before its own work, as a spawned
    process does: a program that starts an engine without ``if __name__ == "__main__"``
    fails here too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Raises where the file is being run again.
        self._main = multiprocessing.spawn.get_preparation_data(self.name).get(
            "init_main_from_path"
        )

    def run(self) -> None:
        if self._main is not None:
            process: Any = multiprocessing.process.current_process()
            process._inheriting = True
            runpy.run_path(self._main, run_name="__mp_main__")
            del process._inheriting
        super().run()


class Context(multiprocessing.context.ForkContext):
    """Its processes are forks of that kind."""

    Process = Process


# On a CPU vLLM spawns its processes, and each would import everything anew.
for module in (
    vllm.v1.engine.coordinator,
    vllm.v1.engine.utils,
    vllm.v1.executor.multiproc_executor,
):
    module.get_mp_context = Context
# These have looked for Ray, and look again.
del sys.modules["ray"]
for name in ("vllm.v1.executor.ray_utils", "vllm.v1.metrics.ray_wrappers"):
    package, _, module = name.rpartition(".")
    sys.modules.pop(name, None)
    vars(sys.modules[package]).pop(module, None)
freeze_imports()
