"""The structure of the source: imports without a circle, declared seams, and one meaning for each class name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src"

Modules = dict[str, list[ast.AST]]  # all nodes of a module, by its path below the package

# Objects that are not the project's: of the operating system, of images and arrays, of pydantic, and of modules that
# are imported by name. `file: the call`.
FOREIGN = {
    "__init__.py: getattr(api, name)",
    "cli/data.py: getattr(annotation, '__name__', annotation)",
    "cli/data.py: getattr(item, 'metadata', [item])",
    "cli/data.py: getattr(part, key)",
    "cli/data.py: hasattr(part, key)",
    "cli/list.py: getattr(import_module(module), name)",
    "base/signatures.py: getattr(thing, name)",
    "base/signatures.py: hasattr(type(thing), name)",
    "base/signatures.py: hasattr(thing, name)",  # what a user's own file has made, and nothing else
    "base/registry.py: getattr(checked, name)",
    "base/registry.py: getattr(factory, '__name__', type(factory).__name__)",
    "base/registry.py: getattr(importlib.import_module(module), attribute)",
    "base/registry.py: getattr(module, attribute)",
    "base/threads.py: hasattr(os, 'sched_getaffinity')",
    "data/dataset.py: getattr(array, 'dtype', type(array).__name__)",
    "data/dataset.py: getattr(array, 'shape', [])",
    "data/download.py: getattr(error, 'reason', error)",
    "data/formats/registry.py: getattr(import_module(f'{__package__}.{self.module}'), self.module)",
    "data/formats/probe.py: getattr(image, 'n_frames', 1)",
    "data/formats/probe.py: getattr(image, 'tile', '')",
    "engines/shared_memory.py: hasattr(os, 'memfd_create')",
    "base/setting_errors.py: getattr(checked, name, None)",
    "settings/resolve.py: getattr(checked, name)",
    "run/rundir.py: hasattr(value, 'item')",
    "local/vectorized/context.py: getattr(value, f.name)",
    "local/vectorized/layers.py: getattr(layer, name, None)",
}


def parsed(pattern: str = "") -> dict[str, ast.Module]:
    """The modules of the package whose text matches `pattern`, by path below it."""
    package = SOURCE / "fedlens"
    texts = {path.relative_to(package).as_posix(): path.read_text("utf-8") for path in package.rglob("*.py")}
    return {path: ast.parse(text) for path, text in texts.items() if re.search(pattern, text)}


LONGEST = 70  # lines of a function


def too_long(modules: Modules) -> set[str]:
    """The functions of more than `LONGEST` lines, docstrings left out, with their lines."""
    found = set()
    for path, inside in modules.items():
        for node in inside:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                documented = ast.get_docstring(node) is not None
                lines = _lines(node) - (_lines(first) if documented else 0)
                found |= {f"{path}: {node.name}, {lines} lines"} if lines > LONGEST else set()
    return found


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.fixture(scope="module")
def source() -> Modules:
    """The whole package, parsed once."""
    return {path: [*ast.walk(tree)] for path, tree in parsed().items()}


def nodes(text: str) -> list[ast.AST]:
    """The nodes of a module with this text."""
    return [*ast.walk(ast.parse(text))]


def imports(modules: Modules) -> dict[str, set[str]]:
    """What each module imports of the package, wherever the import stands: in functions and for type checkers too."""
    files = {_module(path): inner for path, inner in modules.items()}
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, inside in files.items():
        for node in inside:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    graph[name].add(inner if inner in files else node.module)
            elif isinstance(node, ast.Import):
                graph[name].update(alias.name for alias in node.names)
    return {name: (targets & files.keys()) - {name} for name, targets in graph.items()}


def _module(path: str) -> str:
    return ".".join(("fedlens", *Path(path).with_suffix("").parts)).removesuffix(".__init__")


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def probes(modules: Modules) -> set[str]:
    """The calls that look for an attribute by its name as a string."""
    return {
        f"{path}: {ast.unparse(node)}"
        for path, inside in modules.items()
        for node in inside
        if isinstance(node, ast.Call) and _called(node) in ("hasattr", "getattr")
    }


def repeated(modules: Modules) -> set[str]:
    """The public class names that are defined in more than one place."""
    places = defaultdict(list)
    for path, inside in modules.items():
        for node in inside:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return {name for name, paths in places.items() if len(paths) > 1}


def asked_by_class(modules: Modules) -> set[str]:
    """The modules outside `algorithms` and `engines` that ask for the class of an algorithm or an engine."""
    bases = {node.name: {ast.unparse(base) for base in node.bases} for node in _classes(modules)}
    kinds = {"Algorithm", "Engine"}
    while more := {name for name, of in bases.items() if of & kinds} - kinds:
        kinds |= more
    return {
        f"{path}: {ast.unparse(node)}"
        for path, inside in modules.items()
        for node in inside
        if not path.startswith(("algorithms/", "engines/"))
        and isinstance(node, ast.Call)
        and _called(node) in ("isinstance", "issubclass")
        and {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)} & kinds
    }


def naming_an_engine(modules: Modules) -> set[str]:
    """The modules outside `engines` that compare with an engine's name, or list engines by name."""
    names = {
        "inline",
        "vectorized",
        "processes",
        "ray",
    }  # `default` and `auto` are values of other settings too
    rooms = ("core/", "local/", "algorithms/", "settings/", "run/", "observers/", "use/")
    rooms += ("studies/", "analyses/", "api.py", "result.py")
    found = set()
    for path, inside in modules.items():
        for node in inside if path.startswith(rooms) else ():
            match node:
                case ast.Compare():
                    parts = [node.left, *node.comparators]
                case (
                    ast.List(elts=parts) | ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.Dict(keys=parts)
                ):
                    pass
                case _:
                    continue
            if any(isinstance(part, ast.Constant) and part.value in names for part in parts):
                found.add(f"{path}: {ast.unparse(node)}")
    return found


def telling_clients(modules: Modules) -> set[str]:
    """The places, besides `core.types.is_client`, that tell a client from data at the server."""
    return {
        f"{path}: {ast.unparse(node)}"
        for path, inside in modules.items()
        for node in inside
        if path != "core/types.py"
        and isinstance(node, ast.Call)
        and _called(node) == "isinstance"
        and ast.unparse(node.args[0]).rpartition(".")[2] in ("client", "holder")
        and ast.unparse(node.args[1]) in ("int", "str")
    }


def _called(call: ast.Call) -> str | None:
    return call.func.id if isinstance(call.func, ast.Name) else None


def _classes(modules: Modules) -> list[ast.ClassDef]:
    return [node for inside in modules.values() for node in inside if isinstance(node, ast.ClassDef)]


def naming_a_task(modules: Modules) -> set[str]:
    """The modules that name classification in their code, where only the dataset's kind may say what the task is."""
    rooms = ("local/", "engines/", "algorithms/", "settings/", "run/", "observers/", "use/")
    return {
        path
        for path, inside in modules.items()
        for node in inside
        if path.startswith(rooms) and "classification" in (_named(node) or "").lower().rpartition(".")[2]
    }


def _named(node: ast.AST) -> str | None:
    match node:
        case ast.ImportFrom(module=name) | ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Constant(value=str(text)) if text.isidentifier():
            return text
    return None


def test_no_modules_import_one_another_in_a_circle(source: Modules) -> None:
    graph = imports(source)
    # The package looks `Experiment`, `cost`, `pretrain` and `Study` up when it is asked for them.
    graph["fedlens"] -= {
        "fedlens.api",
        "fedlens.studies.cost_study",
        "fedlens.pretraining",
        "fedlens.studies.study",
    }
    assert circle(graph) == []


def test_no_attribute_of_the_project_is_looked_for_by_a_string(source: Modules) -> None:
    assert probes(source) - FOREIGN == set()


def test_a_function_fits_on_a_screen(source: Modules) -> None:
    assert too_long(source) == set(), "move a part that has a name of its own into a function"
    body = "\n    x = 1" * LONGEST
    assert too_long({"a.py": nodes(f'def f():\n    """Does\n\n    nothing."""{body}')}) == {
        "a.py: f, 71 lines"
    }
    assert too_long({"a.py": nodes(f"async def f():{body.removesuffix('x = 1').rstrip()}")}) == set()


def test_no_class_name_stands_for_two_things(source: Modules) -> None:
    assert repeated(source) == set()


def test_no_algorithm_or_engine_is_asked_for_its_class(source: Modules) -> None:
    assert asked_by_class(source) == set()
    for line in ("isinstance(algorithm, Averaging)", "issubclass(kind, (int, Ray))"):
        assert asked_by_class(source | {"run/new.py": nodes(line)}) == {f"run/new.py: {line}"}


def test_no_engine_is_told_by_its_name(source: Modules) -> None:
    assert naming_an_engine(source) == set()
    for line in ("engine['name'] == 'ray'", "frozenset({'default', 'inline'})"):
        assert naming_an_engine({"run/new.py": nodes(line)}), line


def test_one_predicate_tells_a_client_from_data_at_the_server(source: Modules) -> None:
    assert telling_clients(source) == {"data/partition/partition.py: isinstance(client, str)"}  # checks names
    assert telling_clients({"core/new.py": nodes("isinstance(reply.client, str)")})


def test_only_the_kind_of_the_data_says_what_the_task_is(source: Modules) -> None:
    assert naming_a_task(source) == set()
    for line in (
        "from fedlens.tasks.classification import X",
        "kind == 'classification'",
        "Classification()",
    ):
        assert naming_a_task({"engines/new.py": nodes(line)}) == {"engines/new.py"}


@pytest.mark.parametrize(
    "second",
    [
        "from fedlens.one import A",
        "def later():\n    from fedlens import one",
        "if TYPE_CHECKING:\n    import fedlens.one",
    ],
)
def test_each_kind_of_fault_is_found(second: str) -> None:
    one = "from fedlens.two import B\nclass A: ...\nhasattr(B, 'together')"
    modules = {"one.py": nodes(one), "two.py": nodes(f"{second}\nclass A: ...\nclass _B: ...")}
    assert set(circle(imports(modules))) == {"fedlens.one", "fedlens.two"}
    assert probes(modules) == {"one.py: hasattr(B, 'together')"}
    assert repeated(modules) == {"A"}
