"""Processes that end when the one that started them is gone. Imports nothing large."""

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
    """End this process soon after the one that started it, which may have ended before
    this call.
    """
    started_by = multiprocessing.parent_process()
    parent = os.getppid()

    def watch() -> None:
        # What was forked later keeps the first of the two alive, as one that ended
        # before keeps the second.
        while (started_by is None or started_by.is_alive()) and os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        # The kernel's own end of a process: it waits for no thread, not even one that
        # does not let Python run.
        signal.alarm(GRACE_SECONDS)

    threading.Thread(target=watch, name="ParentWatcher", daemon=True).start()


def end_vllm_process_with_parent() -> None:
    """``end_with_parent`` in a process of vLLM's own: an engine or one of its workers.

    vLLM tells a worker that its engine is gone, and the worker ends after the step in
    hand. A step that waits for another rank, or a model that is being loaded, does not
    end soon or at all. Nobody tells an engine that its front end was killed.

    The process also leaves the group of its parent: what stops all processes of a
    group, such as Ctrl-C, is the front end's to answer, whose requests may still have
    time to finish. At its own end it does not look for garbage in all that vLLM has
    imported, for which its parent would wait seconds.
    """
    if multiprocessing.current_process().name.startswith(("EngineCore", "VllmWorker")):
        atexit.register(gc.freeze)
        os.setpgid(0, 0)
        end_with_parent()
