"""Changes of an engine's weights, its probes, and its sleep. Engines of other models
are untouched.

vLLM calls workers between two steps, also while requests run. A response would then
come from two sets of weights, or from pages that are gone. So weights do not change
while a request runs, and no request runs while weights are incomplete.
"""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCoreProc

from dllm_engine.checkpoints import check_folder
from dllm_engine.decoding.probe import Probe
from dllm_engine.model_executor.loading.files import check_safetensors
from dllm_engine.vllm_hooks.patch import Original, is_ours

_COMPLETE = ("reload_weights", "finish_weight_update")
"""Calls of workers after which the weights are complete."""
_CHANGES = (
    *_COMPLETE,
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "reset_weights",
)


def call_workers(
    collective_rpc: Original,
    self: Any,
    method: Any,
    timeout: Any = None,
    args: tuple = (),
    kwargs: Any = None,
) -> Any:
    """Guard worker calls that change weights, and give probes to the scheduler."""
    if is_ours(self) and method == "masked_logprobs":
        return _masked_logprobs(collective_rpc, self, *args)
    if is_ours(self) and method == "drop_probes":
        return self.scheduler.probes.drop(*args)
    if method not in _CHANGES or not is_ours(self):
        return collective_rpc(self, method, timeout, args, kwargs)
    _refuse_while_running(
        self, method, "a response must not come from two sets of weights"
    )
    if self.vllm_config.model_config.is_moe and current_platform.is_cpu():
        raise NotImplementedError(
            f"{method}: vLLM cannot pack experts again on a CPU; start a new engine"
        )
    # Pages that requests share come from the old weights.
    self.scheduler.reset_prefix_cache()
    self.scheduler.probes.drop_all()
    if method == "reload_weights":
        path = (kwargs or {}).get("weights_path", args[1] if len(args) > 1 else None)
        if path is not None:
            check_folder(str(path))
            check_safetensors(str(path))
    weights = self.scheduler.weights
    weights.begin_change(method, breaks=method == "reload_weights")
    result = collective_rpc(self, method, timeout, args, kwargs)
    weights.end_change(method, complete=method in _COMPLETE)
    return result


def _masked_logprobs(
    collective_rpc: Original, engine: Any, name: str, *probes: list[list[int]]
) -> Any:
    """Answers to probes (None while no request may begin), and the number of weight
    changes so far. An engine in its own process computes them in its next steps and
    returns a future.
    """
    scheduler = engine.scheduler
    if not scheduler.admits:
        return None, scheduler.weights.num_changes
    if isinstance(engine, EngineCoreProc):
        return scheduler.probes.add(name, list(map(Probe, *probes)))
    answers, *_ = collective_rpc(engine, "masked_logprobs", None, probes)
    return answers, scheduler.weights.num_changes


def sleep_if_possible(
    sleep: Original, self: Any, level: int = 1, mode: str = "abort"
) -> Any:
    """Refuse what a CPU cannot do, and what would lose the pages of running requests."""
    if is_ours(self) and level > 0:
        if current_platform.is_cpu():
            raise NotImplementedError(
                f"sleep(level={level}): vLLM gives memory back with CUDA's allocator, "
                f"which a CPU lacks; use level=0, which stops the engine from running "
                f"requests"
            )
        if mode == "keep":
            _refuse_while_running(
                self, f"sleep(level={level}, mode='keep')", "their pages would be lost"
            )
    return sleep(self, level, mode)


def release_if_unused(release: Original, self: Any) -> None:
    """Release the memory of pages, unless requests run: their pages would be lost."""
    if is_ours(self):
        _refuse_while_running(
            self, "release_kv_cache_memory", "their pages would be lost"
        )
        self.scheduler.reset_prefix_cache()
    release(self)


def _refuse_while_running(engine: Any, call: str, why: str) -> None:
    if running := engine.scheduler.num_begun:
        raise ValueError(
            f"{call}: {running} requests are running, and {why}; let them finish "
            f"(mode='wait' of vLLM's pause and sleep), or abort them (mode='abort')"
        )
