"""Writes the tables of ``docs/reference.md``, ``docs/papers.md`` and ``docs/models.md``
anew: every option, every table of a paper and every model, as the code has them.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dllm_engine.cache_methods import CACHE_METHODS
from dllm_engine.checkpoints import SHAPES, load_config
from dllm_engine.cli.models import allowed
from dllm_engine.decoding.spec import Guidance
from dllm_engine.decoding.unmasking_policies import (
    PARALLEL_RULES,
    UNMASKING_POLICIES,
    SlowFast,
)
from dllm_engine.evaluation.paper_tasks import PAPER_TABLES, PAPERS
from dllm_engine.families import FAMILIES, NOT_SUPPORTED
from dllm_engine.model_bytes import weight_bytes
from dllm_engine.options import EngineOptions
from dllm_engine.params import AUTO, DiffusionParams
from dllm_engine.request_options.fields import DEFAULTABLE_OPTIONS, RequestOptions
from dllm_engine.request_options.sampling_params import DEFAULT_GEN_LENGTH
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS
from dllm_engine.text import readable_size

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {DOCS / "reference.md": 5, DOCS / "papers.md": 1, DOCS / "models.md": 3}
"""Pages with their number of tables."""
HEAD = "option", "values", "default", "meaning"
# Fields that the engine fills in itself.
INTERNAL = {"guide_shape"}
OTHERS = {name for name in PARALLEL_OPTIONS if name not in PARALLEL_RULES.own}
"""Options that packages installed beside this one add; the pages do not list them."""
NAMES = {
    "unmasking": UNMASKING_POLICIES,
    "cache_method": CACHE_METHODS.own,
    "request_defaults": [name for name in DEFAULTABLE_OPTIONS if name not in OTHERS],
}
"""The names that an option of no particular type may have."""


def written(page: str) -> str:
    """A page with its tables made anew."""
    tables: dict[str, Callable[[], list[str]]] = {
        "request": request_table,
        "slow_fast": slow_fast_table,
        "engine": lambda: table(HEAD, rows(EngineOptions)),
        "cache": cache_tables,
        "checkpoints": checkpoint_table,
        "papers": paper_tables,
        "families": family_table,
        "shapes": shape_table,
        "not_served": not_served_table,
    }
    pattern = r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)"
    return re.sub(
        pattern,
        lambda m: m[1] + "\n".join(tables[m[2]]()) + "\n" + m[3],
        page,
        flags=re.DOTALL,
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def request_table() -> list[str]:
    family, guidance = FAMILIES.values(), Guidance()
    defaults: dict[str, Any] = {
        "gen_length": DEFAULT_GEN_LENGTH,
        "block_length": ", ".join(
            f"{f.name} {f.default_block_length or 'the whole response'}" for f in family
        ),
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
    meaning = re.search(
        r'gen_length: int \| Literal\["auto"\] \| None = None\n    """(.*?)"""',
        inspect.getsource(DiffusionParams),
        re.DOTALL,
    )
    assert meaning is not None
    schemas = {
        "gen_length": {
            "anyOf": [{"type": "integer", "minimum": 1}, {"const": AUTO}],
            "description": meaning[1],
        }
    }
    schemas |= RequestOptions.model_json_schema()["properties"]
    return table(
        HEAD,
        [
            row(name, schema, defaults.get(name, "off"))
            for name, schema in schemas.items()
            if name not in OTHERS
        ],
    )


def slow_fast_table() -> list[str]:
    lines = []
    for name, schema in SlowFast.model_json_schema()["properties"].items():
        own = [
            f"{family.name} {family.slow_fast[name]}"
            for family in FAMILIES.values()
            if name in family.slow_fast
        ]
        lines.append(row(name, schema, ", ".join([str(schema["default"]), *own])))
    return table(HEAD, lines)


def cache_tables() -> list[str]:
    lines = []
    for name in CACHE_METHODS.own:
        method = CACHE_METHODS[name]
        if method.options.model_fields:
            lines += [f"### `{name}`", *table(HEAD, rows(method.options)), ""]
    return lines[:-1]


def checkpoint_table() -> list[str]:
    """A row per released checkpoint, a column per cache method that has settings of its
    own for some of them.
    """
    settings = {
        checkpoint: {
            name: CACHE_METHODS[name].settings_for(checkpoint, family)[1]
            for name in CACHE_METHODS.own
        }
        for family in FAMILIES.values()
        for checkpoint in family.checkpoints
    }
    methods = [
        method
        for method in CACHE_METHODS.own
        if any(each[method] for each in settings.values())
    ]
    lines = []
    for checkpoint, by_method in settings.items():
        cells = [
            ", ".join(f"`{name}` {value}" for name, value in by_method[method].items())
            for method in methods
        ]
        if any(cells):
            lines.append([checkpoint, *cells])
    return table(["checkpoint", *(f"`{method}`" for method in methods)], lines)


ATTENTION = {
    "full": "the whole canvas",
    "block_causal": "its block, and those before it",
    "causal": "what is before it, and the running block",
}
"""What a position attends to."""


def family_table() -> list[str]:
    lines = []
    for family in FAMILIES.values():
        attention = "; ".join(
            f"`{kind}`: {ATTENTION[facts.get('attention', family.attention)]}"
            for kind, facts in family.kinds.items()
        )
        words = attention or ATTENTION[family.attention]
        lines.append([family.name, quoted(family.checkpoints), words])
    return table(["family", "checkpoints", "a position attends to"], lines)


def shape_table() -> list[str]:
    sizes = {name: weight_bytes(load_config(name), 1, 2) for name in SHAPES}
    lines = []
    for name in sorted(sizes, key=lambda name: sizes[name]):
        family, shape = SHAPES[name]
        checkpoints = quoted(shape.checkpoints or family.checkpoints)
        lines.append([f"`{name}`", readable_size(sizes[name]), checkpoints])
    return table(["shape", "weights", "checkpoints"], lines)


def not_served_table() -> list[str]:
    reasons = [f"- {reason}." for reason in NOT_SUPPORTED.values()]
    reasons += [
        f"- {other.name} {other.reason}."
        for family in FAMILIES.values()
        for other in (*family.unsupported, *filter(None, [family.barred]))
    ]
    return reasons


def paper_tables() -> list[str]:
    head = "`--paper-table`", "compares", "models", "missing, or not as in the paper"
    lines = []
    for paper, title in PAPERS.items():
        cells = [
            (
                f"`{key}`"
                if each["benchmarks"]
                else each["name"].replace("-", " ").capitalize(),
                each["about"],
                each.get("models", "–"),
                each.get("without", "–"),
            )
            for key, each in PAPER_TABLES.items()
            if each["paper"] == paper
        ]
        lines += [f"## {title}", *table(head, cells), ""]
    return lines[:-1]


def rows(options: type[BaseModel]) -> list[list[str]]:
    schemas = options.model_json_schema()["properties"]
    return [
        row(name, schema) for name, schema in schemas.items() if name not in INTERNAL
    ]


def row(name: str, schema: dict[str, Any], default: object = None) -> list[str]:
    """``default`` is shown as it is; None stands for that of the schema, which then may
    allow None as a value.
    """
    values = quoted(NAMES[name]) if name in NAMES else allowed(schema)
    if default is None:
        default = f"`{schema['default']!r}`"
    else:
        values = values.removesuffix(" or None")
    meaning = " ".join(schema["description"].split())
    meaning = meaning.replace("``", "`").replace("|", "\\|")
    return [f"`{name}`", values, str(default), meaning]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
