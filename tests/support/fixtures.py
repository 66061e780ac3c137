"""Fixtures shared by all tests."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_checkpoints
from tests.support.checkout import REFERENCE
from tests.support.engines import EngineFactory, freeze_imports
from tests.support.http_app import openai_client, served
from tests.support.server import ServerFactory


@pytest.fixture(scope="session")
def engines() -> EngineFactory:
    """``engines(model, **settings)``: a small in-process engine, shared by all tests
    that ask for the same one.
    """
    freeze_imports()
    return EngineFactory()


@pytest.fixture(scope="session")
def demo(engines: EngineFactory) -> Any:
    """The demo model's engine, with its tokenizer."""
    return engines("demo", skip_tokenizer_init=False)


@pytest.fixture(scope="session")
def client(demo: Any) -> Any:
    """A client of the application that ``vllm serve`` builds, with the demo model's
    engine in this process.
    """
    return served(demo, "--served-model-name", "demo")


@pytest.fixture(scope="session")
def openai(client: Any) -> Any:
    """OpenAI's own client of that application."""
    return openai_client(client)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """``servers(program, *arguments)``: a real server, shared by all tests (see
    ``IN_ONE_PROCESS``) that ask for it.
    """
    factory = ServerFactory(tmp_path_factory.mktemp("servers"))
    yield factory
    factory.shutdown()


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """``dllm serve`` takes over the signals of its process, which the tests need."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def reference_checkpoints() -> Path:
    return REFERENCE / "checkpoints"


@pytest.fixture
def checkpoint_of(request: pytest.FixtureRequest, reference_checkpoints: Path) -> Any:
    """``checkpoint_of(model)``: the folder of a reference case's model, or of a random
    checkpoint by its fixture.
    """
    return lambda model: (
        request.getfixturevalue(model)
        if "_" in model
        else reference_checkpoints / model
    )


@pytest.fixture
def lines_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``lines_of(logger, level)``: the lines that a logger gets at a level from now
    on.
    """

    def lines_of(logger: Any, level: str) -> list[str]:
        lines: list[str] = []
        monkeypatch.setattr(
            logger, level, lambda text, *values: lines.append(text % values)
        )
        return lines

    return lines_of


def checkpoint(family: str, **config: Any) -> Any:
    """A random checkpoint: vocabulary 150, canvas up to 256."""

    @pytest.fixture(scope="session", name=f"tiny_{family}")
    def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_checkpoints.write(
            family, tmp_path_factory.mktemp(family.replace("_", "-")), **config
        )

    return written


tiny_llada = checkpoint("llada")
tiny_dream = checkpoint("dream")  # grouped queries
tiny_llada_moe = checkpoint(
    "llada_moe", **tiny_checkpoints.ALL_KINDS_OF_EXPERTS
)  # six experts
tiny_sdar = checkpoint("sdar")  # blocks of 4
tiny_sdar_moe = checkpoint(
    "sdar_moe", mlp_only_layers=[0]
)  # blocks of 4, six experts, a dense layer
tiny_illada = checkpoint("illada")
tiny_dream_reasoner = checkpoint("dream_reasoner")  # blocks of 8
tiny_stable_diffcoder = checkpoint(
    "stable_diffcoder"
)  # blocks of 4, of which the last ends with the response
tiny_a2d = checkpoint("a2d")
tiny_a2d_bd3lm = checkpoint("a2d_bd3lm")  # blocks of 8, counted from the response
tiny_fast_dllm_v2 = checkpoint("fast_dllm_v2")  # blocks of 8 that begin with a seed
tiny_nemotron_labs = checkpoint("nemotron_labs")  # the same, causal before them
tiny_open_dcoder = checkpoint("open_dcoder")
tiny_llada2 = checkpoint("llada2")  # blocks of 8, eight experts, a dense layer
