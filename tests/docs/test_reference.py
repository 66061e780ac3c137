"""``docs/reference.md`` lists every option with its values, default and meaning, as the code has them.

The tables are made from the classes of the options and the docstrings of their fields. To write them anew:
``python -m tests.docs.test_reference``
"""

import ast
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dllm_engine.cli.main import build_parser
from dllm_engine.cli.models import allowed
from dllm_engine.families import FAMILIES
from dllm_engine.llm import LLM
from dllm_engine.options import EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.options.request_fields import DEFAULTABLE_OPTIONS, PARALLEL_OPTIONS, RequestOptions
from dllm_engine.scheduler.options.request_options import DEFAULT_GEN_LENGTH
from dllm_engine.scheduler.request import Guidance
from dllm_engine.scheduler.unmasking_policies import UNMASKING_POLICIES, SlowFast

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "reference.md"
HEAD = ("| option | values | default | meaning |", "|---|---|---|---|")
# Fields that the engine fills in itself.
INTERNAL = {"guide_shape"}
NAMES = {"unmasking": UNMASKING_POLICIES, "cache_method": CACHE_METHODS, "request_defaults": DEFAULTABLE_OPTIONS}
"""The names that an option of no particular type may have."""


def test_tables_are_those_of_the_code():
    assert written() == PAGE.read_text(encoding="utf-8"), "update it: python -m tests.docs.test_reference"


def test_engine_options_can_be_given_as_the_page_says():
    options = set(EngineOptions.model_fields) - INTERNAL
    assert set(inspect.signature(LLM.__init__).parameters) - {"self", "model", "kwargs"} == options - {"playground"}
    flags = vars(build_parser().parse_args(["serve", "demo"]))
    without = {"dense_attention", "cache_options", "request_defaults", "retention_ratio"}  # the last is a cache option
    assert {*options, *DEFAULTABLE_OPTIONS} - set(flags) == without


def test_methods_names_what_there_is():
    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    options = CACHE_METHODS["maskkv"].options.model_json_schema()["properties"]
    for heading, registry in {
        "Choosing a method": CACHE_METHODS,
        "Scorers": options["scorer"]["enum"],
        "Layer budgets": options["layer_budget"]["enum"],
        "Head budgets": options["head_budget"]["enum"],
        "Policies": UNMASKING_POLICIES,
        "Rules": PARALLEL_OPTIONS,
    }.items():
        section = re.search(rf"^##+ {heading}\n(.*?)(^#|\Z)", page, re.DOTALL | re.MULTILINE)
        assert section is not None, heading
        names = re.findall(r"^\| (\S+)", section[1], re.MULTILINE)
        assert names[1:] == [f"`{name}`" for name in registry], heading  # behind the head of the table


def written() -> str:
    """The page with its tables made anew."""
    tables = {"request": request_table, "slow_fast": slow_fast_table, "engine": engine_table, "cache": cache_tables}
    tables["checkpoints"] = checkpoint_table
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        page, found = re.subn(pattern, lambda m, t=table: m[1] + "\n".join(t()) + "\n" + m[2], page, flags=re.DOTALL)
        assert found == 1, name
    return page


def request_table() -> list[str]:
    family, guidance = FAMILIES.values(), Guidance()
    defaults: dict[str, Any] = {
        "gen_length": DEFAULT_GEN_LENGTH,
        "block_length": ", ".join(f"{f.name} {f.default_block_length or 'the whole response'}" for f in family),
        "steps": "one per token",
        "unmasking": ", ".join(f"{f.name} `{f.default_unmasking}`" for f in family),
        "retention_ratio": "the engine's",
        "guided": "True with a guide",
        "speculation_length": guidance.speculation_length,
        "guide_top_k": guidance.top_k,
        "guide_threshold": "off" if guidance.threshold is None else guidance.threshold,
        "guide_fallback": f'`"{guidance.fallback}"`',
        "guide_correction": guidance.correction,
        "stream_granularity": '`"block"`',
        "top_p": DiffusionParams().top_p,
        "top_k": DiffusionParams().top_k,
    }
    schemas = {"gen_length": {"type": "integer", "minimum": 1}} | RequestOptions.model_json_schema()["properties"]
    assert all(getattr(DiffusionParams(), name) is None for name in schemas if name not in ("top_p", "top_k"))
    meanings = docstrings(DiffusionParams) | docstrings(RequestOptions)
    return [*HEAD, *(row(name, schema, meanings[name], defaults.get(name, "off")) for name, schema in schemas.items())]


def slow_fast_table() -> list[str]:
    schemas, others = SlowFast.model_json_schema()["properties"], [f for f in FAMILIES.values() if f.slow_fast]

    def default(name: str) -> str:
        return ", ".join(
            [str(schemas[name]["default"]), *(f"{f.name} {f.slow_fast[name]}" for f in others if name in f.slow_fast)]
        )

    return [*HEAD, *(row(name, schema, schema["description"], default(name)) for name, schema in schemas.items())]


def engine_table() -> list[str]:
    return [*HEAD, *rows(EngineOptions)]


def cache_tables() -> list[str]:
    lines = []
    for name, method in CACHE_METHODS.items():
        if method.options.model_fields:
            lines += [f"### `{name}`", *HEAD, *rows(method.options), ""]
    return lines[:-1]


def checkpoint_table() -> list[str]:
    """A row per released checkpoint, a column per cache method that has settings of its own for some of them."""
    found = {
        checkpoint: {name: method.settings_for(checkpoint, family)[1] for name, method in CACHE_METHODS.items()}
        for family in FAMILIES.values()
        for checkpoint in family.checkpoints
    }
    methods = [method for method in CACHE_METHODS if any(settings[method] for settings in found.values())]
    lines = [f"| checkpoint | {' | '.join(f'`{method}`' for method in methods)} |", "|---" * (len(methods) + 1) + "|"]
    for checkpoint, settings in found.items():
        if not any(settings.values()):
            continue
        cells = [", ".join(f"`{name}` {value}" for name, value in settings[method].items()) for method in methods]
        lines.append(f"| {checkpoint} | {' | '.join(cells)} |")
    return lines


def rows(options: type[BaseModel]) -> list[str]:
    schemas = options.model_json_schema()["properties"]
    return [row(name, schemas[name], schemas[name]["description"]) for name in schemas if name not in INTERNAL]


def row(name: str, schema: dict[str, Any], meaning: str, default: object = None) -> str:
    """``default`` is shown as it is; None stands for that of the schema, which then may allow None as a value."""
    values = ", ".join(f"`{value}`" for value in NAMES[name]) if name in NAMES else allowed(schema)
    if default is None:
        default = f"`{schema['default']!r}`"
    else:
        values = values.removesuffix(" or None")
    meaning = " ".join(meaning.split()).replace("``", "`").replace("|", "\\|")
    return f"| `{name}` | {values} | {default} | {meaning} |"


def docstrings(cls: type) -> dict[str, str]:
    """The strings that stand below the fields in a class's source."""
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    return {
        ast.unparse(field.target): ast.literal_eval(text.value)
        for field, text in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
