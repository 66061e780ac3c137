"""A model family is a row of the table: other code knows no family by its name."""

import re

from dllm_engine.families import FAMILIES
from dllm_engine.model_name import own_name
from tests.support import tiny_checkpoints
from tests.support.checkout import CHECKOUT

FOLDERS = ("dllm_engine", "model_executor", "scheduler", "kernels")
FORMATS = (".py", ".toml", ".html", ".js")
MAY_NAME = {
    "dllm_engine/families/": "the table",
    "dllm_engine/evaluation/paper_tasks.toml": "models that papers report",
    "dllm_engine/cache_methods/dkv/method.py": "settings that its paper has for models",
    "dllm_engine/cache_methods/dllm_cache/method.py": "the same",
    "dllm_engine/checkpoints.py": "a shape that users name, as an example",
    "dllm_engine/cli/bench.py": "the same",
    "dllm_engine/cli/check.py": "the same",
}
"""Files that name families, and what for."""
SHARED_TYPES = {"llama", "qwen2"}
"""Types that the guide's models have."""
AS_A_PAPER = r"(?![\w.]*,?\s+\(?arXiv \d)"
"""What follows a name that is a paper's title: its number."""


def test_only_the_table_names_a_family():
    names = {
        name
        for family in FAMILIES.values()
        for name in (
            family.name,
            family.name.partition("-Qwen")[0],
            family.model_type,
            family.architecture,
            *map(own_name, family.checkpoints),
            *family.shapes,
        )
    } - SHARED_TYPES
    words = re.compile(
        rf"(?<![a-z])(?:{'|'.join(map(re.escape, names))}){AS_A_PAPER}", re.IGNORECASE
    )
    named = {
        f"{path}: {match[0]}"
        for path, text in product_texts()
        if not path.startswith((*MAY_NAME,))
        for match in words.finditer(text)
    }
    assert not named


def test_each_file_that_may_name_one_does():
    names = "|".join(re.escape(family.name) for family in FAMILIES.values())
    texts = [(p, t) for p, t in product_texts() if p.startswith((*MAY_NAME,))]
    naming = {p for p, text in texts if re.search(names, text, re.IGNORECASE)}
    assert all(any(p.startswith(listed) for p in naming) for listed in MAY_NAME)


def product_texts() -> list[tuple[str, str]]:
    """Paths of the product's files in the checkout, and what they hold."""
    return [
        (str(path.relative_to(CHECKOUT)), path.read_text(encoding="utf-8"))
        for folder in FOLDERS
        for path in (CHECKOUT / folder).rglob("*")
        if path.suffix in FORMATS
    ]


def test_every_family_has_a_random_checkpoint_which_tests_of_all_families_use():
    configs = tiny_checkpoints.CONFIGS.values()
    assert {config["architectures"][0] for config in configs} == {*FAMILIES}
