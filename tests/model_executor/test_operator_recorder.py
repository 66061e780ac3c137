"""Operators that are recorded, and called again on what their tensors hold by then."""

import pytest
import torch

from dllm_engine.kernels.slots import write_slots
from dllm_engine.kernels.token_statistics import token_statistics
from dllm_engine.model_executor.recording import operator_recorder
from dllm_engine.model_executor.recording.operator_recorder import OperatorRecorder


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


X, PAGES = torch.zeros(4, 6), torch.zeros(2, 3, 6)
LIBRARY = torch.library.Library("recorder_test", "FRAGMENT")
LIBRARY.define("halve_and_square(Tensor(a!) x) -> Tensor")
LIBRARY.impl("halve_and_square", lambda x: x.mul_(0.5).square(), "CPU")


def composite():
    return torch.nn.functional.linear(X, X).reshape(2, 8).contiguous() + X.sum()


def made_in_place():
    made = X.new_full((4, 6), 2.0)
    made[:, 1] = X[:, 2]
    first, second = made.mul_(X).chunk(2, dim=1)
    return torch.cat((second, first), dim=1)


def several_results():
    ordered, order = X.sort(dim=1, descending=True, stable=True)
    token, *statistics = token_statistics(X, 2, True, True)
    return torch.cat((ordered, order, token[:, None], *(s.view(4, -1) for s in statistics)), dim=1)


def of_ours():
    write_slots(X[:, None], PAGES, torch.tensor([[4], [-1], [3], [5]]))
    return PAGES[1:].clone()


def written_and_made():
    y = X.clone()
    return torch.ops.recorder_test.halve_and_square(y) + y


@pytest.mark.parametrize("run", [composite, made_in_place, several_results, of_ours, written_and_made])
def test_a_replay_does_the_same_work_on_other_numbers(run):
    X.normal_()
    replay = OperatorRecorder()(run)
    assert replay is not run
    for _ in range(2):
        X.normal_()
        PAGES.zero_()
        found = replay().clone()
        PAGES.zero_()
        assert torch.equal(found, run())


@pytest.mark.parametrize(
    "run", [lambda: X * int(X.sum()), lambda: X[X > 0], lambda: X[X[:, 0].nonzero()[:, 0]], lambda: X * X.equal(X)]
)
def test_what_the_host_must_know_is_run_again_as_a_whole(run):
    assert OperatorRecorder()(run) is run


def test_recordings_share_their_memory_but_not_what_they_return_or_what_is_kept():
    recorder, table = OperatorRecorder(), []

    def with_table():
        if not table:
            table.append(torch.arange(6.0))
        return X + table[0]

    X.normal_()
    replays = [recorder(with_table), recorder(lambda: X * 2 + table[0] * 2)]
    expected = X + torch.arange(6.0)
    for _ in range(2):
        first, second = [replay() for replay in replays]
        assert torch.equal(first, expected)
        assert torch.equal(second, expected * 2)


def test_results_that_take_too_much_are_not_kept(monkeypatch):
    monkeypatch.setattr(operator_recorder, "MOST_BYTES", X.nbytes)
    assert OperatorRecorder()(once := lambda: X + 1) is not once
    assert OperatorRecorder()(twice := lambda: X + 1 + 1) is twice
