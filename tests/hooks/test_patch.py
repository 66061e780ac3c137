"""What we replace in vLLM is checked first, so that another vLLM is refused with a sentence."""

from importlib import import_module
from operator import attrgetter

import pytest

from dllm_engine.vllm_hooks import patch, table
from dllm_engine.vllm_hooks.patch import Patch, PatchError

PATCHES = (*table.EVERY_PROCESS, *table.SERVING)


def owner_of(target: str):
    """(owner, name) of a patched attribute."""
    module, _, path = target.partition(":")
    owner, _, name = path.rpartition(".")
    found = import_module(module)
    return (attrgetter(owner)(found) if owner else found), name


@pytest.fixture(autouse=True)
def _registered():
    from dllm_engine.plugin import register

    register()


@pytest.mark.parametrize("of_vllm", PATCHES, ids=lambda of_vllm: of_vllm.target)
def test_an_attribute_that_is_gone_is_named(of_vllm, monkeypatch):
    monkeypatch.delattr(*owner_of(of_vllm.target))
    with pytest.raises(PatchError) as raised:
        patch.apply([of_vllm])
    assert of_vllm.target in str(raised.value)
    assert of_vllm.why in str(raised.value)


@pytest.mark.parametrize("of_vllm", PATCHES, ids=lambda of_vllm: of_vllm.target)
def test_an_attribute_with_other_parameters_is_named(of_vllm, monkeypatch):
    owner, name = owner_of(of_vllm.target)
    monkeypatch.setattr(owner, name, lambda *, changed: None)
    with pytest.raises(PatchError) as raised:
        patch.apply([of_vllm])
    assert of_vllm.target in str(raised.value)
    assert "(changed)" in str(raised.value)


@pytest.mark.parametrize("of_vllm", PATCHES, ids=lambda of_vllm: of_vllm.target)
def test_applying_twice_changes_nothing(of_vllm):
    patch.apply([of_vllm])
    owner, name = owner_of(of_vllm.target)
    replaced = getattr(owner, name)
    patch.apply([of_vllm])
    assert getattr(owner, name) is replaced


def test_a_function_that_others_have_imported_is_replaced_there_too():
    from vllm.entrypoints.openai.completion import serving
    from vllm.entrypoints.serve.utils import api_utils

    assert serving.get_max_tokens is api_utils.get_max_tokens
    assert api_utils.get_max_tokens.__module__.startswith("dllm_engine.")


def test_a_module_that_is_not_loaded_is_left_alone():
    patch.apply([Patch("vllm.no_such_module:attribute", "admission:checked_inputs", "", "test", scope="if_imported")])
