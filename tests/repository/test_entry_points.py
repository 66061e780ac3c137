"""Methods and rules by entry point: a package that is broken, or takes a name that is
taken, is named in one sentence.
"""

import importlib.metadata
import re

import pytest

from dllm_engine import plugin
from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.cache_methods.base import CacheMethod
from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES, UnmaskingRule
from dllm_engine.entry_points import EntryPointGroup, PluginError
from tests.repository.test_imports import PROJECT
from tests.support.environments import install

MODULE = """
from dllm_engine.cache_methods.base import CacheMethod, plan_whole

OTHER = CacheMethod(plan_whole)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def methods():
    """The group read anew."""
    return EntryPointGroup("dllm.cache_methods", CacheMethod, reserved=("auto",))


def test_ours_are_those_of_the_project_file():
    groups = PROJECT["entry-points"]
    assert CACHE_METHODS.own == sorted(groups["dllm.cache_methods"])
    assert PARALLEL_RULES.own == sorted(groups["dllm.unmasking_rules"])


def test_a_package_beside_ours_adds_a_method(folder):
    install(folder, "dllm-other", {"good": MODULE}, cache_methods={"x1": "good:OTHER"})
    group = methods()
    assert set(group) == {*CACHE_METHODS.own, "x1"}
    assert group.package("x1") == "dllm-other"
    assert "x1" not in group.own


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"x": "nowhere:X"}, "'nowhere:X' cannot be imported: ModuleNotFoundError: "),
        ({"x": "raises:OTHER"}, "'raises:OTHER' cannot be imported: KeyError: 'key'"),
        ({"x": "good:ABSENT"}, "'good:ABSENT' cannot be imported: AttributeError: "),
        ({"x": "good:plan_whole"}, "'good:plan_whole' names <function plan_whole"),
        ({"auto": "good:OTHER"}, "a name consists of lower-case letters, "),
        ({"X-1": "good:OTHER"}, "a name consists of lower-case letters, "),
    ],
    ids=str,
)
def test_a_broken_package_is_named_with_its_entry_point(folder, entry, message):
    modules = {"good": MODULE, "raises": "{}['key']"}
    install(folder, "dllm-other", modules, cache_methods=entry)
    (name,) = entry
    with pytest.raises(PluginError, match=re.escape(message)) as caught:
        list(methods())
    start = f"entry point {name!r} (dllm.cache_methods) of the package dllm-other: "
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith("; mend that package, or uninstall it")


def test_packages_that_use_the_same_name_are_named(folder):
    entry = {"dual": "good:OTHER"}
    install(folder, "dllm-other", {"good": MODULE}, cache_methods=entry)
    with pytest.raises(PluginError) as caught:
        list(methods())
    assert str(caught.value) == (
        "the packages dllm-engine and dllm-other both have an entry point 'dual' "
        "(dllm.cache_methods); rename one, or uninstall a package"
    )


def test_metadata_that_are_older_than_the_code_are_told(folder, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(PluginError, match="older than its code; install dllm-engine"):
        list(methods())


def test_a_function_that_a_declaration_names_may_be_absent():
    with pytest.raises(PluginError, match="'nowhere:rule' cannot be imported"):
        PARALLEL_RULES.function("threshold", "nowhere:rule")
    with pytest.raises(PluginError, match="'math:pi' is not a function or class"):
        PARALLEL_RULES.function("threshold", "math:pi")
    for name, rule in PARALLEL_RULES.items():
        assert isinstance(rule, UnmaskingRule)
        assert callable(PARALLEL_RULES.function(name, rule.selects))


def test_vllm_serves_other_models_beside_a_broken_package(monkeypatch):
    def broken():
        raise PluginError("entry point 'x'")

    given = []
    monkeypatch.setattr(plugin, "register_or_raise", broken)
    monkeypatch.setattr(plugin.logger, "warning", lambda *args: given.append(args))
    plugin.register()  # as vLLM does
    assert "entry point 'x'" in str(given)
