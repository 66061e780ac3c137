"""``docs/reference.md`` lists every option, ``docs/papers.md`` every table of a paper, and
``docs/methods.md`` every name, as the code has them.
"""

import inspect
import re
from typing import get_type_hints

import pytest
from option_tables import DOCS, INTERNAL, OTHERS, PAGES, written

from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.cli.commands import build_parser
from dllm_engine.decoding.unmasking_policies import UNMASKING_POLICIES
from dllm_engine.llm import LLM
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.fields import DEFAULTABLE_OPTIONS
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_code(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == PAGES[page]
    assert written(text) == text, "update it: python scripts/option_tables.py"


def test_engine_options_can_be_given_as_the_page_says():
    options = set(EngineOptions.model_fields) - INTERNAL
    assert set(inspect.signature(LLM.__init__).parameters) - {
        "self",
        "model",
        "kwargs",
    } == options - {"playground", "fim_markers"}
    flags = vars(build_parser().parse_args(["serve", "demo"]))
    without = {
        "dense_attention",
        "cache_options",
        "request_defaults",
        "retention_ratio",
    }  # the last is a cache option
    assert {*options, *DEFAULTABLE_OPTIONS} - set(flags) == without


def test_llm_has_the_defaults_and_types_of_engine_options():
    types = get_type_hints(LLM.__init__)
    for name, parameter in inspect.signature(LLM.__init__).parameters.items():
        if (field := EngineOptions.model_fields.get(name)) is None:
            continue
        # None stands for an empty dictionary.
        default = None if field.default == {} else field.default
        assert parameter.default == default, name
        type_here = field.annotation | None if field.default == {} else field.annotation
        assert types[name] == type_here, name


def test_methods_names_what_there_is():
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    options = CACHE_METHODS["maskkv"].options.model_json_schema()["properties"]
    for heading, registry in {
        "Choosing a method": CACHE_METHODS.own,
        "Scorers": options["scorer"]["enum"],
        "Layer budgets": options["layer_budget"]["enum"],
        "Head budgets": options["head_budget"]["enum"],
        "Policies": UNMASKING_POLICIES,
        "Rules": [name for name in PARALLEL_OPTIONS if name not in OTHERS],
    }.items():
        section = re.search(
            rf"^##+ {heading}\n(.*?)(^#|\Z)", page, re.DOTALL | re.MULTILINE
        )
        assert section is not None, heading
        names = re.findall(r"^\| (\S+)", section[1], re.MULTILINE)
        # Behind the head of the table.
        assert sorted(names[1:]) == sorted(f"`{name}`" for name in registry), heading
