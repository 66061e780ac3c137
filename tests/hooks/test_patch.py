"""Functions that we replace in vLLM are checked first: another vLLM gets a sentence."""

from pkgutil import resolve_name

import pytest
from vllm import outputs

from dllm_engine.plugin import register
from dllm_engine.vllm_hooks import patch, table
from dllm_engine.vllm_hooks.release import IncompatibleVLLMError

REPLACED = table.STARTING | table.EVERY_PROCESS | table.SERVING


@pytest.fixture(autouse=True)
def _applied():
    register()
    patch.apply(table.STARTING)
    patch.apply(table.SERVING)


@pytest.mark.parametrize("target", REPLACED)
def test_a_function_that_is_gone_or_has_other_parameters_is_named(target, monkeypatch):
    module, _, path = target.partition(":")
    owner_path, _, name = path.rpartition(".")
    owner = resolve_name(f"{module}:{owner_path}")
    entry = {target: REPLACED[target]}
    monkeypatch.setattr(owner, name, lambda *, changed: None)
    with pytest.raises(
        IncompatibleVLLMError, match=rf"It replaces {target}, which takes \(changed\)"
    ):
        patch.apply(entry)
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        IncompatibleVLLMError, match=f"It replaces {target}, which is not there"
    ):
        patch.apply(entry)
    monkeypatch.undo()
    patch.apply(entry)
    replaced = getattr(owner, name)
    patch.apply(entry)
    assert getattr(owner, name) == replaced, "applying twice changes nothing"


def test_a_function_that_others_have_imported_is_replaced_there_too():
    from vllm.entrypoints.openai.completion import serving
    from vllm.entrypoints.serve.utils import api_utils

    assert serving.get_max_tokens is api_utils.get_max_tokens
    assert hasattr(api_utils.get_max_tokens, "__wrapped__")


def test_where_one_function_is_gone_none_is_replaced(monkeypatch):
    monkeypatch.setattr(
        outputs.RequestOutput,
        "add",
        original := lambda self, next_output, aggregate: None,
    )
    with pytest.raises(IncompatibleVLLMError):
        patch.apply(
            table.EVERY_PROCESS
            | {"vllm.outputs:gone": "input_processor:process_checked_inputs"}
        )
    assert outputs.RequestOutput.add is original
