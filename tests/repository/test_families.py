"""A model family is a row of the table: other code knows no family by its name."""

import ast
import re
from pathlib import Path

from dllm_engine.families import FAMILIES
from tests.support import tiny_checkpoints

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDERS = ("dllm_engine", "model_executor", "scheduler", "kernels")
MAY_NAME = (
    CHECKOUT / "dllm_engine" / "families",
    CHECKOUT / "dllm_engine" / "cache_methods",
)
"""The table, and methods whose papers have settings for some models."""
SHARED_TYPES = {"llama", "qwen2"}
"""Types that the guide's models have."""
MODEL_CODE = ("model_executor", "scheduler", "kernels")
"""Folders that name no family in comments either."""


def test_only_the_table_names_a_family():
    names = {
        name
        for family in FAMILIES.values()
        for name in (
            family.model_type,
            family.architecture,
            *family.checkpoints,
            *family.shapes,
        )
    } - SHARED_TYPES
    named = [
        f"{path.relative_to(CHECKOUT)}:{node.lineno}: {node.value}"
        for folder in FOLDERS
        for path in (CHECKOUT / folder).rglob("*.py")
        if not {*MAY_NAME} & {*path.parents}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not named


def test_code_of_models_names_none_in_words_either():
    words = re.compile("|".join(re.escape(f.name) for f in FAMILIES.values()))
    named = [
        f"{path.relative_to(CHECKOUT)}:{number}: {line.strip()}"
        for folder in MODEL_CODE
        for path in (CHECKOUT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if words.search(line)
    ]
    assert not named


def test_every_family_has_a_random_checkpoint_which_tests_of_all_families_use():
    configs = tiny_checkpoints.CONFIGS.values()
    assert {config["architectures"][0] for config in configs} == {*FAMILIES}
