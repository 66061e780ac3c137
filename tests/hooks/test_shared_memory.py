"""Shared memory loses its name once all have attached, so that no killed process leaves any; workers end with their
engine."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest

from dllm_engine.vllm_hooks.engine_core.shared_memory import FOLDER, unname_in_engine
from tests.support.preloaded import Program, wait_until


@pytest.fixture
def queues():
    """A message queue of vLLM's and its reader, both ready; at the end they are closed."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    writer = MessageQueue(1, 1, max_chunk_bytes=1 << 16)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor() as pool:
        for ready in [pool.submit(queue.wait_until_ready) for queue in (writer, reader)]:
            ready.result(timeout=20)
    yield writer, reader
    for queue in (writer, reader):
        queue.shutdown()


def executor(queue, *, ours: bool):
    config = SimpleNamespace(model_config=SimpleNamespace(is_dllm_engine=ours))
    return SimpleNamespace(vllm_config=config, rpc_broadcast_mq=queue)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_queue_goes_on_without_its_name(queues):
    writer, reader = queues
    name = writer.buffer.shared_memory.name
    assert (FOLDER / name).exists()
    unname_in_engine(lambda self: None, executor(writer, ours=True))
    assert not (FOLDER / name).exists()
    for message in ("one", "two"):
        writer.enqueue(message)
        assert reader.dequeue(timeout=20) == message


def test_queues_of_other_models_keep_their_names(queues):
    writer, _ = queues
    unname_in_engine(lambda self: None, executor(writer, ours=False))
    assert (FOLDER / writer.buffer.shared_memory.name).exists()


WORKER = """
import multiprocessing, os, signal, time
from dllm_engine.model_executor.workers.parent import end_vllm_process_with_parent

def work(started):
    end_vllm_process_with_parent()
    started.send(os.getpid())
    while True:  # as a step that waits for a rank that is gone
        time.sleep(1)

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    for name in ("EngineCore_DP0", "VllmWorker-0"):
        fork.Process(target=work, args=(theirs,), name=name).start()
    print(ours.recv(), ours.recv(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow  # a process is killed
def test_engines_and_workers_that_are_stuck_end_with_the_process_that_started_them(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(WORKER)
    log = tmp_path / "log"
    with log.open("wb") as output:
        Program([program], stdout=output).wait(120)
    pids = [int(pid) for pid in log.read_text().splitlines()[-1].split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 20)
