"""What a newcomer meets when the set-up cannot go on, and that it repeats nothing needlessly."""

import platform
import subprocess
import sys

import environment
import pytest
from environment import CHECKOUT, Environment, SetupError, check_machine


@pytest.fixture
def made(tmp_path, monkeypatch):
    """An environment and what it installs, which is only noted."""
    installed: list[str] = []
    monkeypatch.setattr(Environment, "_uv", lambda self, what, *arguments, advice="": installed.append(what))
    monkeypatch.setattr(Environment, "_create", lambda self: self.directory.mkdir(exist_ok=True))
    monkeypatch.setattr(environment, "check_machine", lambda: None)
    monkeypatch.setattr(environment, "CHECK", "")
    made = Environment(tmp_path / "venv")
    made.python = sys.executable
    return made, installed


def test_what_is_installed_is_not_installed_again_and_extras_stay(made, monkeypatch, capsys, tmp_path):
    made, installed = made
    made.install()
    assert installed.pop() == "dllm-engine from this checkout"
    installed.clear()
    made.install()
    assert not installed
    assert "up to date" in capsys.readouterr().out
    made.install(["test"])
    assert installed.pop() == "dllm-engine from this checkout"
    installed.clear()
    made.install()
    assert not installed
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


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_unsuitable_machine_is_told_what_is_supported(monkeypatch, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(SetupError, match=f"supports Linux on x86-64, and this is {system} on {machine}"):
        check_machine()


def test_older_python_gets_an_explanation(tmp_path):
    """The interpreter is this one, made to believe that it is older."""
    program = (
        "import platform, runpy, sys\n"
        "sys.version_info = (3, 8, 10, 'final', 0)\n"
        "platform.python_version = lambda: '3.8.10'\n"
        "sys.argv = ['scripts/dev.py', 'demo']\n"
        f"runpy.run_path({str(CHECKOUT / 'scripts' / 'dev.py')!r}, run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "needs CPython 3.11, 3.12, 3.13 or 3.14, and this is CPython 3.8.10" in result.stderr
    assert "Traceback" not in result.stderr
