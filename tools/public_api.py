"""The public API as one text, docs/api/public.txt: each name of the pages of docs/api, with its signature and members.

`python -m tools.public_api` writes it anew. A change of it is a change for users: CHANGELOG.md names it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILE = DOCS / "api" / "public.txt"
EXPORTING = ("fedlens", "fedlens.aggregates", "fedlens.parts", "fedlens.rules")
_SPECIAL = ("__init__", "__call__", "__iter__", "__len__", "__getitem__")
_SILENT = {"description", "examples"}  # of a setting: docs/settings.md has them
Function = ast.FunctionDef | ast.AsyncFunctionDef


def documented() -> list[str]:
    """The names of docs/api, and those of `fedlens` itself and of its collections, by their import path."""
    pages = sorted((DOCS / "api").glob("*.md"))
    listed = {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M)}
    return sorted(listed | {f"{module}.{name}" for module in EXPORTING for name in exported(module)})


def used() -> dict[str, set[str]]:
    """The names that examples and pages import from fedlens, by import path, with the files that do."""
    names: dict[str, set[str]] = {}
    for path in sorted([*DOCS.rglob("*.py"), *DOCS.rglob("*.md")]):
        if path.is_relative_to(DOCS / "theme"):  # of the build
            continue
        text = path.read_text("utf-8")
        codes = [text] if path.suffix == ".py" else re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        for code in codes:
            for node in ast.walk(_parsed(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedlens":
                    for alias in node.names:
                        names.setdefault(f"{node.module}.{alias.name}", set()).add(path.name)
    return names


def _parsed(code: str) -> ast.Module:
    """The code; of a piece that is no module by itself, its imports."""
    try:
        return ast.parse(code)
    except SyntaxError:
        return ast.parse("\n".join(line for line in code.splitlines() if line.startswith("from fedlens")))


def rendered() -> str:
    """The text of the file."""
    names = documented()
    return "\n\n".join("\n".join(_lines(name, set(names))) for name in names) + "\n"


def exported(module: str) -> list[str]:
    """The names in `__all__` of a module, without its version and those of collections."""
    (listed,) = [
        n.value for n in _module(module).body if isinstance(n, ast.Assign) and _target(n) == "__all__"
    ]
    names: list[str] = ast.literal_eval(listed)
    return [name for name in names if name != "__version__" and f"{module}.{name}" not in EXPORTING]


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    return ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


@cache
def _module(name: str) -> ast.Module:
    path = ROOT / "src" / Path(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text("utf-8"))


def _lines(name: str, declared: set[str]) -> Iterator[str]:
    module, _, short = name.rpartition(".")
    home, node = _found(module, short)
    if (home, short) != (module, short) or module in EXPORTING:
        yield f"{name} is {home}.{short}"
        return
    if isinstance(node, Function):
        yield f"{name}{_signature(node)}"
    elif isinstance(node, ast.ClassDef):
        bases = (
            f"({', '.join(ast.unparse(base) for base in [*node.bases, *node.keywords])})"
            if node.bases
            else ""
        )
        yield f"class {name}{bases}"
        yield from (f"    {line}" for line in _members(home, node, declared).values())
    else:
        value = node.value
        # The names in a table of names are no names of Python.
        yield f"{name} = " + (
            f"{ast.unparse(value.func)}(...)" if isinstance(value, ast.Call) else _plain(value)
        )


def _found(module: str, name: str) -> tuple[str, Function | ast.ClassDef | ast.Assign | ast.AnnAssign]:
    """The module and the node that define a name which `module` defines or imports."""
    for node in ast.walk(_module(module)):
        match node:
            case ast.ImportFrom(module=str(home), names=names) if home.startswith("fedlens"):
                if name in [alias.asname or alias.name for alias in names]:
                    return _found(home, name)
    for node in _module(module).body:
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign | ast.AnnAssign) and _target(node) == name:
            return module, node
    raise LookupError(f"{module} does not define {name}")


def _members(module: str, node: ast.ClassDef, declared: set[str]) -> dict[str, str]:
    """The public members by name, in order, with those of bases of fedlens that are not declared themselves."""
    members: dict[str, str] = {}
    for base in node.bases:
        name = ast.unparse(base)
        try:
            home, inherited = _found(module, name)
        except LookupError:
            continue  # of another package
        if isinstance(inherited, ast.ClassDef) and f"{home}.{name}" not in declared:
            members |= _members(home, inherited, declared)
    for one in node.body:
        if isinstance(one, Function) and (one.name[0] != "_" or one.name in _SPECIAL):
            kinds = [ast.unparse(decorator).rpartition(".")[2] for decorator in one.decorator_list]
            marks = [kind for kind in kinds if kind in ("abstractmethod", "classmethod", "staticmethod")]
            shown = " ".join([*marks, one.name])
            property = any(kind in ("property", "cached_property") for kind in kinds)
            returned = f": {ast.unparse(one.returns)}" if one.returns else ""
            members[one.name] = shown + (returned if property else _signature(one))
        elif isinstance(one, ast.Assign | ast.AnnAssign) and _target(one)[0] != "_":
            kind = f": {_plain(one.annotation)}" if isinstance(one, ast.AnnAssign) else ""
            members[_target(one)] = _target(one) + kind + (f" = {_plain(one.value)}" if one.value else "")
    return members


def _signature(node: Function) -> str:
    return f"({_plain(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


class _WithoutWords(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in _SILENT]
        return node


def _plain(node: ast.AST | None) -> str:
    return ast.unparse(_WithoutWords().visit(node)) if node else ""


if __name__ == "__main__":
    FILE.write_text(rendered(), "utf-8")
