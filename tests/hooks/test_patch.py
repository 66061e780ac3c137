"""Functions that we replace in vLLM are checked first: another vLLM gets a sentence."""

import ast
from glob import glob
from pathlib import Path
from pkgutil import resolve_name

import pytest
from vllm.v1.engine.core import EngineCore

import dllm_engine
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
        EngineCore, "sleep", original := lambda self, level=1, mode="abort": None
    )
    with pytest.raises(IncompatibleVLLMError):
        patch.apply(
            table.EVERY_PROCESS
            | {"vllm.outputs:gone": "input_processor:process_checked_inputs"}
        )
    assert EngineCore.sleep is original


def test_the_table_lists_the_files_that_change_vllm():
    """They assign to what they import from vLLM, or call a registry of it."""
    root = Path(dllm_engine.__file__).parent
    changing = set()
    for name in glob("**/*.py", root_dir=root, recursive=True):
        tree = ast.parse((root / name).read_text())
        nodes = list(ast.walk(tree))
        imported = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith(("vllm", "transformers"))
            for alias in node.names
        }
        changed = [
            each
            for node in nodes
            if isinstance(node, ast.Attribute | ast.Subscript)
            and isinstance(each := node.value, ast.Name)
            and (
                isinstance(node.ctx, ast.Store)
                or getattr(node, "attr", "").startswith("register")
            )
        ]
        if imported & {each.id for each in changed}:
            changing.add(name)
    assert len(changing) >= 5
    assert changing <= {*table.BESIDE}
    assert all((root / name).is_file() for name in table.BESIDE)
