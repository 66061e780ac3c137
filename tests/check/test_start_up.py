"""What starts on a GPU for the first time checks its kernels, once, and does without those that are wrong.

The device is a pretended one, where each operator's plain kernel stands in for the one that it would launch.
"""

import json
import logging
import pkgutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dllm_engine.check import operators, start_up
from dllm_engine.check.operators import Sizes
from dllm_engine.check.start_up import DENSE, check_kernels_once, take_right_kernels
from dllm_engine.checkpoints import RELEASED_CONFIGS, load_config
from dllm_engine.kernels import attention
from dllm_engine.kernels._operator import plain_on_cuda
from dllm_engine.kernels.dense_backends import BACKENDS, attend_with_sdpa
from dllm_engine.kernels.features import read_features
from dllm_engine.kernels.slots import write_slots
from dllm_engine.kernels.triton.tiles import tiles_by_rule
from dllm_engine.kernels.voting import voting_scores
from dllm_engine.model_executor.workers.gpu import DiffusionGPUWorker
from dllm_engine.vllm_hooks.engine_config import WORKER_CLASSES
from tests.support.engines import runner_of
from tests.support.kernels import all_operators
from tests.support.pretended_cuda import CUDA, pretended_cuda

SIZES = Sizes(num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64, vocab_size=150, slots_per_page=16)
OPERATORS = all_operators()
PAGED_CASES = operators._PAGED_CASES


class Device:
    """The pretended device of a test: ``run`` checks its kernels, and ``launches`` says which it then launched."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch, self.folder, self.launches = monkeypatch, folder, []
        for name in OPERATORS:
            self.launch(name, OPERATORS[name].kernel)

    def launch(self, name, kernel):
        """Let the operator launch ``kernel``."""

        def launched(*arguments):
            self.launches.append(name)
            return kernel(*arguments)

        self.monkeypatch.setattr(OPERATORS[name], "triton_kernel", launched)

    def run(self, dtype=torch.float32, models=(SIZES,), dense=None):
        self.launches.clear()
        with pretended_cuda(self.monkeypatch):
            return check_kernels_once(CUDA, dtype, models, dense, self.folder)

    @property
    def file(self):
        (file,) = (self.folder / "dllm").iterdir()
        return file


@pytest.fixture
def machine():
    return dict.fromkeys(start_up._VERSIONS, "1") | {"processor": "GPU 1", "uuid": "1"}


@pytest.fixture
def device(monkeypatch, tmp_path, machine):
    monkeypatch.setattr(operators, "PAGED", (([1, 3], [9, 12]),))
    monkeypatch.setattr(operators, "_PAGED_CASES", {})  # which take longest
    monkeypatch.setattr(start_up, "provenance", lambda: machine)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU 1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=machine["uuid"]))
    monkeypatch.setattr(attention, "_attend", None)
    yield Device(monkeypatch, tmp_path)
    plain_on_cuda.clear()


@pytest.fixture
def with_pages(device, monkeypatch):
    """``device`` with attention to pages."""
    monkeypatch.setattr(operators, "_PAGED_CASES", PAGED_CASES)
    return device


@pytest.fixture
def warnings():
    """The texts of what is warned of."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    start_up.logger.addHandler(handler)
    yield texts
    start_up.logger.removeHandler(handler)


def wrong_scores(q, k, lse):
    scores = voting_scores.kernel(q, k, lse)
    scores[-1, -1] += scores.abs().max()
    return scores


def no_kernel(values, pages, slots):
    raise RuntimeError("no kernel image\nis available")


def test_kernels_that_are_right_stay(with_pages):
    assert with_pages.run() == {}
    assert set(with_pages.launches) == {name for name, each in OPERATORS.items() if each._triton}
    assert not plain_on_cuda
    assert with_pages.file.name.startswith("kernels-")


def test_what_an_engine_before_replaced_stays_replaced_and_is_found_again(device):
    plain_on_cuda.add("rotate_")
    assert device.run() == {}
    device.launch("voting_scores", wrong_scores)
    device.run(dtype=torch.float16)
    assert "voting_scores" in device.run(dtype=torch.bfloat16)
    assert plain_on_cuda == {"rotate_", "voting_scores"}


@pytest.mark.parametrize("changed", [{"torch": "2"}, {"uuid": "2"}, {"driver": "2"}])
def test_another_device_or_version_is_checked_again(device, machine, changed):
    device.launch("voting_scores", wrong_scores)
    device.run()
    device.launch("voting_scores", voting_scores.kernel)
    machine |= changed
    assert device.run() == {}
    assert "voting_scores" in device.launches


def test_other_sizes_and_types_are_checked_too(device):
    device.run()
    for settings in ({"dtype": torch.float16}, {"models": (SIZES, SIZES)}, {"models": (SIZES.with_head_dim(32),)}):
        device.run(**settings)
        assert device.launches


def test_logits_are_checked_in_float32_as_well(device):
    def wrong_in_float32(logits, *arguments):
        results = OPERATORS["token_statistics"].kernel(logits, *arguments)
        if logits.dtype == torch.float32:
            results[0][0] += 1
        return results

    device.launch("token_statistics", wrong_in_float32)
    assert list(device.run(dtype=torch.bfloat16)) == ["token_statistics"]


def test_only_a_guide_attends_with_limits(with_pages):
    def wrong_with_limits(out, *arguments):
        OPERATORS["paged_attention"].kernel(out, *arguments)
        limits = arguments[5]
        out += limits is not None

    with_pages.launch("paged_attention", wrong_with_limits)
    assert with_pages.run() == {}
    found = with_pages.run(models=(SIZES, replace(SIZES, limited=(True,))))
    assert ", guide: error " in found["paged_attention"]


@pytest.mark.parametrize("content", ["[]", '{"key": {}}', "\0"])
def test_a_damaged_file_counts_for_nothing(device, content):
    device.launch("voting_scores", wrong_scores)
    found = device.run()
    stored = json.loads(device.file.read_text())
    device.file.write_text(content)
    assert device.run() == found
    assert device.launches
    assert json.loads(device.file.read_text())["key"]["processor"] == "GPU 1"
    # Nor do results of something else.
    device.file.write_text(json.dumps({"key": {}, "results": dict.fromkeys(stored["results"], "")}))
    assert device.run() == found
    device.file.write_text(json.dumps({**stored, "results": dict.fromkeys(stored["results"], "")}))
    assert device.run() == {}  # its own are believed


def test_a_folder_that_cannot_be_written_is_survived(device, warnings):
    (device.folder / "dllm").write_text("a file where the folder would be")
    device.launch("voting_scores", wrong_scores)
    assert list(device.run()) == ["voting_scores"]
    assert warnings[0].startswith("Cannot keep what the check of kernels found")
    assert list(device.run()) == ["voting_scores"]
    assert device.launches


def test_what_had_no_memory_is_checked_at_the_next_start(device, warnings):
    def no_memory(rows, slots):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    device.launch("read_features", no_memory)
    assert device.run() == {}
    assert warnings[0].startswith("read_features, float32, rows of 64 could not be checked")
    device.launch("read_features", read_features.kernel)
    assert device.run() == {}
    assert device.launches == ["read_features"]


def test_a_kernel_that_ends_the_device_is_left_out_at_the_next_start(with_pages, monkeypatch):
    device = with_pages

    def ended(device=None):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def illegal_access(*arguments):
        monkeypatch.setattr(torch.cuda, "synchronize", ended)
        ended()

    device.launch("paged_attention", illegal_access)
    with pytest.raises(RuntimeError, match=r"the kernel of paged_attention, .* leaves the GPU unusable.* Start again"):
        device.run()
    assert device.launches == ["paged_attention"]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    plain_on_cuda.clear()  # another process
    (reason,) = device.run().values()
    assert "an illegal memory access" in reason
    assert "write_slots" in device.launches  # one of those that the first start did not come to
    assert "paged_attention" not in device.launches


def test_a_plain_version_that_fails_too_is_named(device, monkeypatch):
    monkeypatch.setattr(write_slots, "kernel", no_kernel)
    assert "write_slots" in (found := device.run())
    assert "its plain version on the device: RuntimeError" in found["write_slots"]


class TestOfAnEngine:
    @pytest.fixture
    def take(self, engines, device):
        """Checks the kernels of the demo model's engine, as its worker does."""
        config = runner_of(engines("demo")).vllm_config

        def taken(on=CUDA):
            device.monkeypatch.setattr(start_up, "envs", SimpleNamespace(VLLM_CACHE_ROOT=str(device.folder)))
            with pretended_cuda(device.monkeypatch):
                take_right_kernels(config, on)

        return taken

    def test_wrong_kernels_are_replaced_with_a_warning_each(self, device, take, warnings):
        device.launch("voting_scores", wrong_scores)
        device.launch("write_slots", no_kernel)
        device.monkeypatch.setitem(BACKENDS, "flash", lambda *arguments: lambda q, *others: torch.zeros_like(q))
        for runs in (True, False):  # the second time from the file
            device.launches.clear()
            warnings.clear()
            plain_on_cuda.clear()
            attention._attend = None
            take()
            assert bool(device.launches) == runs
            assert plain_on_cuda == {"voting_scores", "write_slots"}
            assert attention._attend is attend_with_sdpa
            first, second, third = warnings
            assert first.startswith("The kernel of write_slots fails its check on GPU 1 (write_slots, float32, 4 heads")
            assert "RuntimeError: no kernel image" in first
            assert second.startswith("The kernel of voting_scores fails its check on GPU 1 (voting_scores, float32, ")
            assert ": error 1.0e+00, bound 5.0e-05)" in second
            assert third.startswith(f"The kernel of {DENSE} fails its check")
            assert third.endswith("Run `dllm check` and report what it says")
        with pretended_cuda(device.monkeypatch):
            q, k = torch.randn(3, 4, 8, device=CUDA), torch.randn(9, 4, 8, device=CUDA)
            lse = torch.ones(3, 4, device=CUDA)
            assert voting_scores(q, k, lse).equal(voting_scores.kernel(q, k, lse))

    def test_what_fails_on_another_rank_is_replaced_on_all(self, device, take, monkeypatch, warnings):
        group = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group=None)
        monkeypatch.setattr(start_up, "get_tp_group", lambda: group)

        def gathered(of_ranks, found, group):
            of_ranks[:] = [{"rotate_": "error 1.0, bound 0.1"}, found]

        monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
        take()
        assert plain_on_cuda == {"rotate_"}
        assert not warnings  # the first rank says it

    def test_a_gpus_worker_does_so_before_there_is_a_model(self, device, engines, monkeypatch):
        config = runner_of(engines("demo")).vllm_config
        worker_class = pkgutil.resolve_name(WORKER_CLASSES["cuda"])
        worker = object.__new__(worker_class)
        worker.vllm_config, order = config, []

        def init_device(self):
            order.append("device")
            self.device = CUDA

        monkeypatch.setattr(DiffusionGPUWorker, "init_device", init_device)
        monkeypatch.setattr("dllm_engine.check.worker.take_right_kernels", lambda *given: order.append(given))
        worker.init_device()
        assert order == ["device", (config, CUDA)]

    def test_on_a_cpu_there_is_nothing_to_check(self, device, take):
        take(torch.device("cpu"))
        assert not device.launches
        assert not (device.folder / "dllm").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", RELEASED_CONFIGS)
def test_attention_is_checked_with_every_tile_of_a_released_model(model, dtype):
    sizes = Sizes.of_model(load_config(model))
    sharing = sizes.num_heads // sizes.num_kv_heads

    def tiles(rows):
        return tiles_by_rule(rows * sharing, sizes.head_dim, dtype)

    assert {tiles(max(rows)) for rows, _ in operators.PAGED} == {tiles(rows) for rows in range(1, 1025)}
