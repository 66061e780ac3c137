"""Fixtures of the command line's tests."""

import logging

import pytest

from dllm_engine.cli import evaluate, tune


@pytest.fixture(scope="session")
def demo(engines):
    """The demo model, two requests at a time."""
    return engines("demo", skip_tokenizer_init=False, max_num_seqs=2, trace=False)


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch):
    """As in a process of its own, where a command silences vLLM before
    it is imported.
    """
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [logging.NullHandler()])
    monkeypatch.setattr(
        "vllm.engine.arg_utils.configure_logging_if_needed", lambda config: None
    )


@pytest.fixture
def started(demo, monkeypatch):
    """Every engine of `dllm eval` and `dllm tune` is the demo's; holds the arguments
    that they were asked for with.
    """
    settings = []

    def load(arguments):
        settings.append(arguments)
        return demo

    for command in (evaluate, tune):
        monkeypatch.setattr(command, "load", load)
    # An engine that ends takes vLLM's process groups from the others.
    monkeypatch.setattr(demo.llm_engine.engine_core, "shutdown", lambda: None)
    # lm_eval runs pip, to list what is installed, after each evaluation.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    return settings
