"""Processes that end when their parent process ends. This module imports nothing large."""

import atexit
import gc
import multiprocessing
import os
import signal
import threading
import time

GRACE_SECONDS = 3
_POLL_SECONDS = 0.1


def end_with_parent() -> None:
    """End this process soon after its parent, which may have ended before this call."""
    started_by = multiprocessing.parent_process()
    parent = os.getppid()

    def watch() -> None:
        # Either condition alone could stay true: the first if a process is forked
        # later, the second if the parent ended before this call.
        while (started_by is None or started_by.is_alive()) and os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        # A signal that the kernel handles: it waits for no thread, not even for one
        # that holds Python's lock.
        signal.alarm(GRACE_SECONDS)

    threading.Thread(target=watch, name="ParentWatcher", daemon=True).start()


def end_vllm_process_with_parent() -> None:
    """``end_with_parent`` in a process of vLLM's own: an engine or one of its workers.

    vLLM tells a worker that its engine has ended, and the worker ends after the current
    step. But a step that waits for another rank, or the loading of a model, may not end
    soon, or never. And nobody tells an engine that its front end was killed.

    The process also leaves the process group of its parent: only the front end reacts
    to a signal for the whole group, such as Ctrl-C, so that its requests may still
    finish. When the process ends, it skips Python's garbage collection of everything
    that vLLM has imported, which takes seconds.
    """
    if multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker")):
        atexit.register(gc.freeze)
        os.setpgid(0, 0)
        end_with_parent()
