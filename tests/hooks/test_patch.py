"""What we replace in vLLM is checked first: another vLLM gets a sentence."""

from importlib import import_module
from operator import attrgetter

import pytest
from vllm import outputs

from dllm_engine.plugin import register
from dllm_engine.vllm_hooks import patch, table
from dllm_engine.vllm_hooks.patch import Patch
from dllm_engine.vllm_hooks.release import IncompatibleVLLMError

PATCHES = (*table.EVERY_PROCESS, *table.SERVING)


def owner_of(target: str):
    """(owner, name) of a patched attribute."""
    module, _, path = target.partition(":")
    owner, _, name = path.rpartition(".")
    found = import_module(module)
    return (attrgetter(owner)(found) if owner else found), name


@pytest.fixture(autouse=True)
def _registered():
    register()


@pytest.mark.parametrize("of_vllm", PATCHES, ids=lambda of_vllm: of_vllm.target)
def test_an_attribute_that_is_gone_or_has_other_parameters_is_named(of_vllm, monkeypatch):
    owner, name = owner_of(of_vllm.target)
    monkeypatch.setattr(owner, name, lambda *, changed: None)
    with pytest.raises(IncompatibleVLLMError) as changed:
        patch.apply([of_vllm])
    assert "(changed)" in str(changed.value)
    monkeypatch.delattr(owner, name)
    with pytest.raises(IncompatibleVLLMError) as gone:
        patch.apply([of_vllm])
    assert of_vllm.why in str(gone.value)
    assert of_vllm.target in str(changed.value)
    assert of_vllm.target in str(gone.value)
    monkeypatch.undo()
    patch.apply([of_vllm])
    replaced = getattr(owner, name)
    patch.apply([of_vllm])
    assert getattr(owner, name) is replaced, "applying twice changes nothing"


def test_a_function_that_others_have_imported_is_replaced_there_too():
    from vllm.entrypoints.openai.completion import serving
    from vllm.entrypoints.serve.utils import api_utils

    assert serving.get_max_tokens is api_utils.get_max_tokens
    assert api_utils.get_max_tokens.__module__.startswith("dllm_engine.")


def test_a_module_that_is_not_loaded_is_left_alone():
    patch.apply(
        [Patch("vllm.no_such_module:attribute", "input_processor:process_checked_inputs", "test", scope="if_imported")]
    )


def test_where_one_attribute_is_gone_none_is_replaced(monkeypatch):
    monkeypatch.setattr(outputs.RequestOutput, "add", original := lambda self, next_output, aggregate: None)
    with pytest.raises(IncompatibleVLLMError):
        patch.apply(
            [*table.EVERY_PROCESS, Patch("vllm.outputs:gone", "input_processor:process_checked_inputs", "test")]
        )
    assert outputs.RequestOutput.add is original
