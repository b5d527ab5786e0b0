"""Imports run one way through labkit, files stay small, and importing the package costs next to nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "labkit"

# A module may import what has its own rank or a lower one. A package's rank holds for all in it.
RANKS = [
    {"_paths", "_check", "_compat", "_lock", "_progress", "_table"},
    {"hardware", "devices", "ceilings", "_threads", "measure", "ledger", "kernels"},
    {"roofline", "sizing", "step_costs", "quality", "models", "model_files", "corpora", "training", "training_file"},
    {"quantization", "attention", "kv_cache", "compression"},
    {"engine.decode"},
    {"speculative"},
    {"engine"},
    {"claims", "_claim_ledger", "course_claims", "labs", "exercises"},
    {"cli", "__main__", "speculative.train"},
]
FRONT_ENDS = {"ipywidgets", "plotly", "anywidget", "kaleido", "matplotlib"}
FILE_LINES, KERNEL_FILE_LINES = 250, 400
FUNCTION_LINES = 40


def modules() -> dict[str, Path]:
    """Dotted name below labkit (`""` is labkit itself) to file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imported(name: str, tree: ast.Module | None = None) -> Iterator[tuple[str, int]]:
    """Absolute dotted names of what a module imports, with line numbers; in functions too."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree or tree_of(name)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["labkit", *filter(None, package.split("."))]
                base = ".".join(filter(None, [*parents[: len(parents) - node.level + 1], base]))
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def module_of(dotted: str) -> str | None:
    """The module below labkit that an absolute name lies in; None if it is outside the package."""
    if dotted != "labkit" and not dotted.startswith("labkit."):
        return None
    parts = dotted.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def needed_by(name: str, within: str) -> set[str]:
    """`name` and the modules inside the package `within` that it reaches by imports."""
    seen, queue = set(), [name]
    while queue:
        current = queue.pop()
        if current not in MODULES or current in seen:
            continue
        seen.add(current)
        targets = (module_of(dotted) for dotted, _ in imported(current))
        queue += [target for target in targets if target and target.startswith(f"{within}.")]
    return seen


DECODE = needed_by("engine.decode", "engine")


def rank(name: str) -> int | None:
    """The rank of a module, or None for one that nobody gave a rank. `engine.decode` takes what it needs along."""
    if name in DECODE:
        name = "engine.decode"
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for number, names in enumerate(RANKS):
            if ".".join(parts[:length]) in names:
                return number
    return None


def wrong_imports(name: str, tree: ast.Module | None = None) -> list[str]:
    """The imports of a module that go up the ranks."""
    wrong = []
    for dotted, line in imported(name, tree):
        target = module_of(dotted)
        if not target:  # outside, or labkit's own lazy names
            continue
        upward = rank(target) is None or rank(name) is None or rank(target) > rank(name)
        if upward or (name in ("measure", "ledger") and target == "hardware"):
            wrong.append(f"{name}:{line} (rank {rank(name)}) imports {target} (rank {rank(target)})")
    return wrong


def outside_imports(name: str) -> set[str]:
    return {dotted.split(".")[0] for dotted, _ in imported(name)} - {"labkit"} - set(sys.stdlib_module_names)


def lazy_packages() -> set[str]:
    """Packages whose `__init__` loads its names on first use: what their functions import is not theirs."""
    return {name for name in ("", "engine") if name in MODULES}


def test_every_module_has_a_rank():
    unranked = [name for name in MODULES if name and rank(name) is None]
    assert not unranked, f"give {unranked} a rank in RANKS, beside the modules that may use them"


@pytest.mark.parametrize("name", [name for name in MODULES if name not in lazy_packages()])
def test_imports_go_down(name):
    assert wrong_imports(name) == []


@pytest.mark.parametrize("name", sorted(lazy_packages()))
def test_lazy_package_imports_nothing_above_at_its_top(name):
    tree = tree_of(name)
    top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    loaded = {module_of(dotted) for dotted, _ in imported(name, top)} - {None, ""}
    assert {module for module in loaded if not name or (rank(module) or 0) > rank("engine.decode")} == set()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("measure", "from labkit.hardware import describe"),
        ("measure", "def late():\n    from labkit import models"),
        ("hardware", "import labkit.roofline"),
        ("_paths", "from . import measure"),
    ],
)
def test_an_upward_import_is_seen(name, source):
    assert wrong_imports(name, ast.parse(source))


def test_only_labs_draw():
    drawing = {name: outside_imports(name) & FRONT_ENDS for name in MODULES}
    assert {n: found for n, found in drawing.items() if found and n.split(".")[0] != "labs"} == {}


def test_kernels_need_torch_and_triton_only():
    outside = {name: outside_imports(name) for name in MODULES if name.split(".")[0] == "kernels"}
    assert {name: found for name, found in outside.items() if found - {"torch", "triton"}} == {}


def test_importing_labkit_is_quick_and_brings_no_torch():
    program = (
        "import sys, time; start = time.perf_counter(); import labkit; took = time.perf_counter() - start;"
        "print(took, *(name for name in ('torch', 'transformers', 'numpy', 'ipywidgets') if name in sys.modules))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
        for _ in range(5)
    ]
    printed = [run.stdout.split() for run in runs]
    assert printed[0][1:] == []
    assert min(float(line[0]) for line in printed) < 0.3


def python_files() -> list[Path]:
    return [*MODULES.values(), *sorted((ROOT / "tools").rglob("*.py"))]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, source: list[str]) -> int:
    """Lines of a function's body, without the docstring, blank lines and comments."""
    body = function.body[ast.get_docstring(function) is not None :]
    if not body:
        return 0
    texts = (line.strip() for line in source[body[0].lineno - 1 : function.end_lineno])
    return sum(bool(text) and not text.startswith("#") for text in texts)


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    source = path.read_text(encoding="utf-8").splitlines()
    limit = KERNEL_FILE_LINES if path.is_relative_to(PACKAGE / "kernels") else FILE_LINES
    assert len(source) <= limit, f"{len(source)} lines: name one concept in it and give that a file"
    functions = [
        n for n in ast.walk(ast.parse("\n".join(source))) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {function.name: body_lines(function, source) for function in functions}
    assert {name: lines for name, lines in long.items() if lines > FUNCTION_LINES} == {}
