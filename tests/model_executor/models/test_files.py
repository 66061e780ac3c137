"""Folders whose files are not what their names say: one sentence that says what they are and what to do."""

import shutil
from pathlib import Path

import pytest

from dllm_engine.checkpoints import load_config
from dllm_engine.demo import demo_model_path
from dllm_engine.model_executor.guide.sizes import guide_config
from dllm_engine.model_executor.loading.file_kinds import check_files
from dllm_engine.model_executor.loading.lora import LoraAdapter
from tests.support import tiny_checkpoints
from tests.support.engines import start_engine

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 16060522240\n"


def refusal(folder: Path | str, **settings) -> str:
    with pytest.raises(ValueError) as caught:
        start_engine(folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(path.name for path in Path(demo_model_path()).glob("*.[js]*")))
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


@pytest.mark.parametrize(
    "model", ["/models/LLaDA-8B-Q4_K_M.gguf", "llada.GGUF", "someone/LLaDA-8B-GGUF", "a/b-gguf:Q4"]
)
def test_a_gguf_model_is_named(model):
    assert refusal(model) == f"model {model!r}: GGUF is not supported; take the checkpoint's safetensors"


def test_a_folder_of_gguf_is_named(tmp_path):
    tiny_checkpoints.write_llada(tmp_path)
    (tmp_path / "llada.Q4_K_M.gguf").write_bytes(b"GGUF")
    check_files(str(tmp_path))  # beside safetensors, it is not looked at
    (tmp_path / "model.safetensors").unlink()
    message = f"{tmp_path} holds a *.gguf file and no *.safetensors file; GGUF is not supported"
    assert message in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert message in refusal(tmp_path)
    file = tmp_path / "llada.Q4_K_M.gguf"
    assert refusal(file).startswith(f"model {str(file)!r}: GGUF is not supported")
