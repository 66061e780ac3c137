"""What a machine without a network is given: vLLM without what is compiled, in a folder that is small enough."""

import subprocess
import sys
import zipfile

import gpu_bundle
import pytest


@pytest.fixture
def wheel(tmp_path):
    """A wheel with a compiled part, as vLLM's is."""
    path = tmp_path / "vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    files = {
        "vllm/__init__.py": "import vllm._C_stable_libtorch",
        gpu_bundle.EDITED: f"FA2_AVAILABLE = FA3_AVAILABLE = False\n{gpu_bundle.BEFORE}\n    raise ImportError",
        "vllm/configs/block=[128, 128].json": "{}",
        "vllm/_C_stable_libtorch.abi3.so": "machine code",
        "vllm/third_party/include/gemm.hpp": "#pragma once",
        "vllm-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
        "vllm-0.32.0.dist-info/RECORD": "vllm/__init__.py,sha256=of-the-original,1\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_a_wheel_without_its_compiled_part_installs_and_imports(wheel, tmp_path):
    (folder := tmp_path / "bundle").mkdir()
    made = gpu_bundle.without_compiled(wheel, folder)
    assert [file.name for file in folder.iterdir()] == ["vllm-0.32.0-py3-none-any.whl"]
    assert not [name for name in zipfile.ZipFile(made).namelist() if name.endswith((".so", ".hpp"))]
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", site, made], check=True, capture_output=True)
    ask = "from importlib.metadata import version; import vllm.vllm_flash_attn; print(vllm.__file__, version('vllm'))"
    ran = subprocess.run(
        [sys.executable, "-c", ask], env={"PYTHONPATH": str(site)}, check=True, capture_output=True, text=True
    )
    assert ran.stdout.split() == [str(site / "vllm" / "__init__.py"), "0.32.0"]


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "vllm-0.31.0-py3-none-any.whl").touch()
    assert gpu_bundle.main([str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
