"""A package of PyTorch's that is of another build is named, with the command that removes it."""

import importlib
import os
import subprocess
import sys

import pytest

from dllm_engine.cli import models
from dllm_engine.cli.main import main
from dllm_engine.vllm_hooks import companions
from dllm_engine.vllm_hooks.companions import COMPANIONS, broken_companion, explain_uncaught

REASON = "operator {name}::nms does not exist"
REMOVE = "run pip uninstall torchvision torchaudio torchcodec"


@pytest.fixture(params=COMPANIONS)
def broken(request, tmp_path, monkeypatch):
    """A companion whose import fails inside of it, as that of another build does."""
    name = request.param
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(f"import {name}._registrations\n")
    (tmp_path / name / "_registrations.py").write_text(f"raise RuntimeError({REASON.format(name=name)!r})\n")
    (tmp_path / f"{name}-9.9.dist-info").mkdir()
    (tmp_path / f"{name}-9.9.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_command_and_a_program_end_with_the_sentence(broken, monkeypatch, capsys):
    monkeypatch.setattr(models, "describe", lambda: importlib.import_module(broken))
    assert main(["models"]) == 2
    expected = f"{broken} 9.9 does not load with PyTorch "
    said = capsys.readouterr().err
    assert said.startswith(f"dllm: error: {expected}")
    assert f"({REASON.format(name=broken)}): it is of another build" in said
    assert said.endswith(f"{REMOVE}\n")
    monkeypatch.setattr(sys, "excepthook", lambda *error: pytest.fail("a traceback"))
    explain_uncaught(broken_companion)
    with pytest.raises(RuntimeError) as caught:
        importlib.import_module(broken)
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err.startswith(expected)


def test_other_errors_keep_their_traceback(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error))
    explain_uncaught(companions.broken_companion)
    error = RuntimeError("operator torchvision::nms does not exist")
    sys.excepthook(RuntimeError, error, None)
    assert shown == [(RuntimeError, error, None)]


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["torchvision"], indirect=True)
def test_vllms_own_command_ends_with_the_sentence(broken, tmp_path):
    """A process of its own, in which nothing is imported yet."""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "from vllm.entrypoints.cli.main import main; main()"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().splitlines()[-1].endswith(REMOVE)
    assert "Traceback" not in ended.stderr
