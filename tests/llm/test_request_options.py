"""A request option is declared in one file, and everything else knows it from there."""

import argparse
import importlib
import sys
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import Field

import dllm_engine
from dllm_engine.families import LLADA, SDAR
from dllm_engine.options import EngineOptions

DECLARED_FROM = ("dllm_engine.request_options", "dllm_engine.params", "dllm_engine.cli")
"""Modules that are made anew for an option that is added."""


@pytest.fixture
def toy(monkeypatch):
    """Modules by their names, with the option ``toy`` in the group of end tokens."""
    for name in [name for name in sys.modules if name.startswith(DECLARED_FROM)]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("request_options", "params", "cli"):
        monkeypatch.setattr(dllm_engine, name, getattr(dllm_engine, name, None), False)
    facts = importlib.import_module("dllm_engine.request_options.facts")
    ends: Any = importlib.import_module("dllm_engine.request_options.ends")

    class WithToy(ends.EndOptions):
        toy: Annotated[
            int | None,
            facts.Facts(
                default_by="checkpoint",
                excludes=(facts.Exclusion("early_stop", "both end it"),),
                needs_attention=facts.AttentionNeed("full", "blocks have no toys"),
                decided_by_guide=True,
            ),
        ] = Field(default=None, ge=1, le=9)
        """A toy."""

    ends.EndOptions = WithToy
    return importlib.import_module


def test_a_new_option_is_parsed_defaulted_and_refused_by_its_declaration(toy):
    options = toy("dllm_engine.params").DiffusionParams
    assert options(toy=2).extra_args == {"toy": 2}
    assert repr(options(toy=2)) == "DiffusionParams(toy=2)"
    assert "toy: A toy." in options.__doc__
    for given, said in (
        ({"toy": 0}, "toy=0: .* greater than or equal to 1"),
        ({"toy": 2, "early_stop": True}, "toy=2 and early_stop=True: both end it"),
    ):
        with pytest.raises(ValueError, match=said):
            options(**given)
    defaults = toy("dllm_engine.request_options.defaults")
    config = SimpleNamespace(family=LLADA, dllm={"toy": 3})
    assert defaults.checkpoint_defaults(config) == {"toy": 3}
    defaults.check_request_defaults(EngineOptions(request_defaults={"toy": 3}))


def test_a_new_option_comes_to_the_place_that_uses_it(toy, monkeypatch):
    options = toy("dllm_engine.params").DiffusionParams
    resolve = toy("dllm_engine.request_options.resolve")
    seen, resolve_ends = [], resolve.resolve_ends
    monkeypatch.setattr(
        resolve,
        "resolve_ends",
        lambda request, own, options, layout: (
            seen.append(options.toy) or resolve_ends(request, own, options, layout)
        ),
    )

    def resolved(family=LLADA, guide=None, **asked):
        config = SimpleNamespace(family=family, eos_token_id=1)
        engine = EngineOptions(request_defaults={"toy": 3}, guide_model=guide)
        params = options(gen_length=8, **asked)
        return resolve.resolve_decoding(params, 10, config, engine)

    resolved()
    resolved(toy=4)
    resolved(early_stop=True)
    resolved(guide="demo")
    assert seen == [3, 4, None, None]
    with pytest.raises(ValueError, match=r"toy=4: attention of SDAR .* no toys"):
        resolved(SDAR, toy=4)
    with pytest.raises(ValueError, match="toy=4: the guide decides"):
        resolved(guide="demo", toy=4)


def test_a_new_option_is_an_argument_of_commands(toy):
    parser = argparse.ArgumentParser()
    toy("dllm_engine.cli.engine").add_decoding_arguments(parser)
    assert parser.parse_args(["--toy", "4"]).toy == 4
