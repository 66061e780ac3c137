"""Keeps processes from leaving shared memory behind, however they end.

The ranks of an engine communicate through shared memory, which has a name in ``/dev/shm`` until the process that
created it ends normally. The name is needed only until every rank has attached, so it is removed then; the memory
itself lives as long as a process uses it. Engines of other models are untouched.
"""

from pathlib import Path
from typing import Any

from dllm_engine.vllm_hooks.patch import Original, is_ours

FOLDER = Path("/dev/shm")


def unname_in_engine(post_init: Original, self: Any) -> None:
    """For vLLM's executor, once its workers are ready. From then on the engine ends with its front end, too."""
    post_init(self)
    if is_ours(self):
        from dllm_engine.model_executor.workers.parent import end_vllm_process_with_parent

        _unname_queue(self.rpc_broadcast_mq)
        end_vllm_process_with_parent()


def unname_in_worker(busy_loop: Original, self: Any) -> None:
    """For vLLM's worker process, once its executor has attached to its queue."""
    if is_ours(self.worker):
        from vllm.distributed import get_tp_group

        group = get_tp_group()
        _unname_queue(self.worker_response_mq)
        _unname_queue(group.mq_broadcaster)
        # A rank's segment for vLLM's collectives on CPUs; other platforms have none.
        collectives = getattr(group.device_communicator, "dist_module", None)
        if name := getattr(collectives, "group_name", None):
            (FOLDER / f"{name}_{group.rank_in_group}").unlink(missing_ok=True)
    busy_loop(self)


def _unname_queue(queue: Any) -> None:
    buffer = getattr(queue, "buffer", None)
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False
