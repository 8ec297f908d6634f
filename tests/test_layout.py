"""The style contract, checked: sizes, import direction, completeness, no hidden state.

Everything is read with ast; nothing is imported, so a broken module fails here with its line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sparsekv"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
KERNELS = [f for f in FILES if f.startswith("kernels/") and f.count("/") == 1 and "/_" not in f]
POLICIES = [f for f in FILES if f.startswith("policies/") and "/_" not in f]
POLICY_HELPERS = ("base", "budgets", "features", "noise", "wrapper")
POLICIES = [f for f in POLICIES if Path(f).stem not in POLICY_HELPERS]

MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 400, 40, 120
# callers -> attention -> kernels, cache, policies; cache -> kernels.
CALLERS = {"bench", "diagnose", "evaluation", "hf", "lm_harness", "vllm", "cli"}
MAY_IMPORT = {"cache": {"cache", "kernels"}, "policies": {"policies"}, "kernels": {"kernels"}}
THIRD_PARTY = {"policies": {"torch"}, "kernels": {"torch", "triton"}}
ENVIRONMENT = ("os.environ", "os.getenv")
TYPE_MAKERS = ("TypeVar", "NewType", "ParamSpec")


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(), filename=file)


def functions(file: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def room(file: str) -> str:
    """hf/cache.py -> hf; attention.py -> attention."""
    return file.split("/")[0].removesuffix(".py")


def imports(file: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, the imported names included."""
    here = ["sparsekv", *file.removesuffix(".py").split("/")]
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("triton.jit" in text or "gluon.jit" in text for text in decorators)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from def to the end, without the docstring."""
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def names(file: str) -> set[str]:
    """Functions and classes that a module defines or imports by name."""
    found = set()
    for node in tree(file).body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("file", FILES)
def test_sizes(file: str) -> None:
    lines = len((PACKAGE / file).read_text().splitlines())
    assert lines <= MAX_FILE, f"expected {file} to have <= {MAX_FILE} lines, got {lines}"
    for node in functions(file):
        limit = MAX_KERNEL if is_kernel(node) else MAX_FUNCTION
        lines = body_lines(node)
        assert lines <= limit, f"{file}:{node.lineno} {node.name}: {lines} lines, limit {limit}"


@pytest.mark.parametrize("file", FILES)
def test_import_direction(file: str) -> None:
    own = room(file)
    for line, name in imports(file):
        where = f"{file}:{line} imports {name}"
        top, *rest = name.split(".")
        if top != "sparsekv":
            foreign = own in THIRD_PARTY and top not in sys.stdlib_module_names
            assert not foreign or top in THIRD_PARTY[own], f"{where}, not in {THIRD_PARTY[own]}"
            continue
        assert own in ("cli", "__init__", "__main__") or rest[:1] != ["cli"], where
        fine = own not in MAY_IMPORT or set(rest[:1]) <= MAY_IMPORT[own]
        assert fine, f"{where}, against the flow"
        if file in KERNELS:
            fine = len(rest) > 1 and (rest[1].startswith("_") or rest[1] == "reference")
            assert fine, f"{where}, expected kernels._* or kernels.reference"


def test_attention_knows_no_caller() -> None:
    """Whatever attention.py imports, directly or not, leads to no caller."""
    waiting, seen = ["attention.py"], set()
    while waiting:
        file = waiting.pop()
        for line, name in imports(file):
            top, *rest = name.split(".")
            here = top == "sparsekv"
            assert not (here and CALLERS & set(rest[:1])), f"{file}:{line} imports {name}"
            targets = {f"{'/'.join(rest[:depth])}.py" for depth in (1, 2, 3) if here}
            waiting += sorted(targets & set(FILES) - seen)
            seen |= targets


@pytest.mark.parametrize("file", KERNELS)
def test_kernel_is_complete(file: str) -> None:
    """Each launcher has a reference of its name, and the file has a test."""
    found = names(file)
    launched = {n.removesuffix("_triton") for n in found if n.endswith("_triton")}
    missing = sorted(f"{op}_reference" for op in launched if f"{op}_reference" not in found)
    assert launched and not missing, f"{file}: launchers {sorted(launched)}, missing {missing}"
    test = ROOT / "tests" / "kernels" / f"test_{Path(file).name}"
    assert test.exists(), f"expected {test.relative_to(ROOT)}"


def test_policies_are_exported() -> None:
    """Each policy class stands in sparsekv.policies.POLICIES, so that every test meets it."""
    exported: set[str] = set()
    for node in tree("policies/__init__.py").body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == "POLICIES" for t in targets):
                exported = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for file in POLICIES:
        classes = [n for n in tree(file).body if isinstance(n, ast.ClassDef)]
        public = [n.name for n in classes if not n.name.startswith("_") and has_name(n)]
        assert public, f"{file}: expected a policy class (a class with a `name`)"
        assert set(public) <= exported, f"{file}: {public} missing in policies.POLICIES"


def has_name(node: ast.ClassDef) -> bool:
    """Policies carry `name: ClassVar[str] = "..."`."""
    fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    return any(ast.unparse(field.target) == "name" for field in fields)


@pytest.mark.parametrize("file", FILES)
def test_no_hidden_state(file: str) -> None:
    """Module globals are UPPER_CASE constants or types; nothing is read from the environment."""
    for node in tree(file).body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = ast.unparse(target)
                fine = name.isupper() or name.startswith("__") or is_type(name, node.value)
                assert fine, f"{file}:{node.lineno} module global {name}"
    read = [(line, name) for line, name in imports(file) if name in ENVIRONMENT]
    assert not read, f"{file} imports {read}"
    for node in ast.walk(tree(file)):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        assert text not in ENVIRONMENT, f"{file}:{node.lineno} reads {text}"
        assert not isinstance(node, ast.Global), f"{file}:{node.lineno} global statement"


def is_type(name: str, value: ast.expr | None) -> bool:
    """`TopK = Callable[...]`, a union, a TypeVar: a type, and so CamelCase."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in TYPE_MAKERS
    return name.lstrip("_")[:1].isupper() and isinstance(
        value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute
    )


@pytest.mark.parametrize("file", FILES)
def test_docstrings(file: str) -> None:
    """Modules, public functions and classes, and public methods that do not override another."""
    assert ast.get_docstring(tree(file)), f"{file}: expected a module docstring"
    for node in tree(file).body if "/_" not in file else []:
        methods = node.body if isinstance(node, ast.ClassDef) and not node.bases else []
        for item in (node, *methods):
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                public = not (item.name.startswith("_") or node.name.startswith("_"))
                assert not public or ast.get_docstring(item), f"{file}:{item.lineno} {item.name}"
