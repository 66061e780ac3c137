"""Checkpoints are read ahead of what is done with their tensors."""

import re
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file

from dllm_engine.model_executor.loading import files
from dllm_engine.model_executor.loading.files import mapped_tensors, read_ahead, with_progress
from dllm_engine.model_executor.loading.parameters import is_finite
from tests.support import tiny_checkpoints
from tests.support.engines import start_engine, tokens_of

SETTINGS = {"gen_length": 16, "block_length": 8, "ignore_eos": True}


def test_vllms_own_ways_to_read_give_the_same_tokens(engines, tiny_llada):
    """A strategy that is asked for is vLLM's."""
    ours = tokens_of(engines(tiny_llada), [11, 12, 13], **SETTINGS)
    assert tokens_of(engines(tiny_llada, safetensors_load_strategy="eager"), [11, 12, 13], **SETTINGS) == ours


def test_a_tensor_that_comes_twice_is_named(tmp_path):
    folder = tiny_checkpoints.write_llada(tmp_path)
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"attn_norm\.weight' comes twice"):
        start_engine(folder)


# Reading


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "redirected"])
def test_tensors_are_those_of_the_files_in_their_order(tmp_path, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(files, "_BAR_DELAY_SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    folder = tiny_checkpoints.shard(tiny_checkpoints.write_llada(tmp_path))
    paths = sorted(folder.glob("*.safetensors"))
    expected = {name: tensor for path in paths for name, tensor in load_file(path).items()}
    found = dict(with_progress([str(path) for path in paths], shown=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [name for name, _ in mapped_tensors(paths)] == list(found)
    shown = capsys.readouterr().err
    assert bool(re.search(r"Loading weights: 100%.* \[\d\d:\d\d<00:00, .*B/s\]", shown)) == is_terminal
    assert bool(shown) == is_terminal


def test_no_more_is_read_ahead_than_allowed(monkeypatch):
    monkeypatch.setattr(files, "_BYTES_AHEAD", 10)
    made = []

    def tensors():
        for number in range(9):
            made.append(number)
            yield str(number), torch.zeros(4, dtype=torch.uint8)

    reader = read_ahead(tensors())
    assert [next(reader)[0] for _ in range(2)] == ["0", "1"]
    assert made == [0, 1, 2, 3]
    assert [name for name, _ in reader] == [str(number) for number in range(2, 9)]


def test_an_error_of_a_file_is_raised_where_its_tensors_are_used():
    def tensors():
        yield "good", torch.zeros(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        dict(read_ahead(tensors()))


def test_a_reader_that_nobody_wants_ends(tmp_path):
    folder = tiny_checkpoints.write_llada(tmp_path)
    weights = with_progress([str(folder / "model.safetensors")], shown=False)
    next(weights)
    weights.close()
    for thread in threading.enumerate():
        assert not thread.name.startswith("CheckpointReader")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_one_number_that_is_none_is_found(dtype, value):
    tensor = torch.ones(3, 1000).to(dtype)
    assert is_finite(tensor)
    tensor[1, 77] = value
    assert not is_finite(tensor)


def test_integers_and_no_numbers_are_finite():
    assert is_finite(torch.zeros(3, dtype=torch.int32))
    assert is_finite(torch.zeros(0))
