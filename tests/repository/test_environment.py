"""What a newcomer meets when the set-up cannot go on, and that it repeats nothing
needlessly.
"""

import platform
import subprocess
import sys
import zipfile

import environment
import gpu_bundle
import pytest
from environment import CHECKOUT, Environment, SetupError, check_machine


@pytest.fixture
def made(tmp_path, monkeypatch):
    """An environment and what it installs, which is only noted."""
    installed: list[str] = []
    monkeypatch.setattr(
        Environment,
        "_uv",
        lambda self, what, *arguments, advice="": installed.append(what),
    )
    monkeypatch.setattr(
        Environment, "_create", lambda self: self.directory.mkdir(exist_ok=True)
    )
    monkeypatch.setattr(environment, "check_machine", lambda: None)
    monkeypatch.setattr(environment, "CHECK", "")
    made = Environment(tmp_path / "venv")
    made.python = type(made.python)(sys.executable)
    return made, installed


def test_what_is_installed_is_not_installed_again_and_extras_stay(
    made, monkeypatch, capsys, tmp_path
):
    made, installed = made
    for extras, is_needed in ((), True), ((), False), (["test"], True), ((), False):
        installed.clear()
        made.install(extras)
        assert installed[-1:] == ["dllm-engine from this checkout"] * is_needed
    assert "up to date" in capsys.readouterr().out
    (tmp_path / "cpu.txt").write_text("another-package\n")
    monkeypatch.setattr(environment, "REQUIREMENTS", tmp_path)
    made.install()
    assert installed[-1] == "dllm-engine from this checkout"


def test_an_installation_that_failed_is_repeated(made, monkeypatch):
    made, installed = made
    monkeypatch.setattr(environment, "CHECK", "raise SystemExit(1)")
    for _ in range(2):
        with pytest.raises(SetupError, match="vLLM does not start"):
            made.install()
    assert installed.count("dllm-engine from this checkout") == 2


def test_folder_made_by_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(SetupError, match="is no virtual environment"):
        Environment(tmp_path).install()
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64")]
)
def test_unsuitable_machine_is_told_what_is_supported(monkeypatch, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(
        SetupError, match=f"supports Linux on x86-64, and this is {system} on {machine}"
    ):
        check_machine()


def test_older_python_gets_an_explanation(tmp_path):
    """The interpreter is this one, made to believe that it is older."""
    program = (
        "import platform, runpy, sys\n"
        "sys.version_info = (3, 8, 10, 'final', 0)\n"
        "platform.python_version = lambda: '3.8.10'\n"
        "sys.argv = ['scripts/dev.py', 'demo']\n"
        f"runpy.run_path({str(CHECKOUT / 'scripts' / 'dev.py')!r}, "
        f"run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert (
        "needs CPython 3.11, 3.12, 3.13 or 3.14, and this is CPython 3.8.10"
        in result.stderr
    )
    assert "Traceback" not in result.stderr


# What a machine without a network is given: vLLM without what is compiled, in a folder
# that is small enough


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
        "vllm-0.32.0.dist-info/METADATA": (
            "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n"
        ),
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
    assert not [
        name
        for name in zipfile.ZipFile(made).namelist()
        if name.endswith((".so", ".hpp"))
    ]
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "--target", site, made], check=True, capture_output=True)
    ask = (
        "from importlib.metadata import version; import vllm.vllm_flash_attn; "
        "print(vllm.__file__, version('vllm'))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", ask],
        env={"PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout.split() == [str(site / "vllm" / "__init__.py"), "0.32.0"]


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "vllm-0.31.0-py3-none-any.whl").touch()
    assert gpu_bundle.main([str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
