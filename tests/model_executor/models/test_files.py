"""Folders with files that Git LFS has not downloaded: one sentence that names the file and what to do."""

import shutil
from pathlib import Path

import pytest

from dllm_engine.checkpoints import load_config
from dllm_engine.demo import demo_model_path
from dllm_engine.model_executor.guide.sizes import guide_config
from dllm_engine.model_executor.loading.lora import LoraAdapter
from tests.support import tiny_checkpoints
from tests.support.engines import start_engine

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 16060522240\n"


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        start_engine(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_each_file_of_a_checkpoint_that_is_a_pointer_is_named(tmp_path, name):
    folder = shutil.copytree(demo_model_path(), tmp_path / "model")
    (folder / name).write_text(POINTER)
    expected = f"{folder / name} is a Git LFS pointer, not the file itself; run git lfs pull in {folder}"
    assert refusal(folder) == expected
    for check in (load_config, guide_config):
        with pytest.raises(ValueError, match="is a Git LFS pointer") as caught:
            check(str(folder))
        assert str(caught.value) == expected


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_of_pointers_is_named(tiny_llada, tmp_path, name):
    tiny_checkpoints.write_adapter(tmp_path, tiny_llada, ["model.transformer.blocks.0.q_proj"])
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ValueError, match=f"^{tmp_path / name} is a Git LFS pointer"):
        LoraAdapter(str(tmp_path))
