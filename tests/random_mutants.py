"""Breaks the source at random places and records which test fails: shows whether fewer tests still see the same.

    pip install pytest-cov
    COVERAGE_FILE=map python -m pytest -n 0 --cov=src/fedlens --cov-context=test --cov-report= \\
        tests/unit/{core,local,aggregate,algorithms,engines} tests/identity tests/seam
    python -m tests.random_mutants 60 --seed 1 --coverage map --to before.jsonl
    python -m tests.random_mutants --again before.jsonl --coverage map --to after.jsonl

The map says which tests execute a line. Only lines that a test executes are broken, and only these tests run. The last
command breaks the same places of a later commit, with a map of that commit. It ends with 1 if a place newly survives.
An interrupted command resumes from its file.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sqlite3
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.mutations import ROOT, Mutation, run_tests

SOURCE = ROOT / "src/fedlens"
ROOMS = ("core", "local", "aggregate", "algorithms", "engines")
SWAPPED: dict[type[ast.AST], Any] = {ast.And: ast.Or, ast.Or: ast.And}
SWAPPED |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
SWAPPED |= {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq}
SWAPPED |= {ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
UNBROKEN = ("annotation", "returns", "decorator_list", "bases")  # fields of a node
FIRST, MOST = 30, 150  # tests that run first, and at most, against one mutant

Coverage = dict[str, dict[str, int]]  # file -> test -> its executed lines as bits


def changes(node: ast.AST, scope: ast.AST | None = None) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yields nodes at and below `node`, which is in `scope`, and the text that replaces each.

    Messages, annotations and decorators stay as they are.
    """
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.Expr(ast.Call(func)) if "warn" in ast.unparse(func):
            return
        case ast.ClassDef() | ast.FunctionDef():
            scope = node
        case ast.BinOp(left, op, right) if type(op) in SWAPPED:
            yield node, ast.unparse(ast.BinOp(left, SWAPPED[type(op)](), right))
        case ast.Compare(left, [op], right) if type(op) in SWAPPED:
            yield node, ast.unparse(ast.Compare(left, [SWAPPED[type(op)]()], right))
        case ast.BoolOp(op, values):
            yield node, f"({ast.unparse(ast.BoolOp(SWAPPED[type(op)](), values))})"
        case ast.If(test) | ast.While(test) | ast.IfExp(test) | ast.comprehension(ifs=[test]):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            yield node, repr(number + 1)
        case ast.AnnAssign(value=ast.Constant(bool() as flag) as field):  # of a dataclass
            yield field, repr(not flag)
        case ast.arguments(defaults=defaults, kw_defaults=others):
            for default in (*defaults, *others):
                if isinstance(default, ast.Constant) and isinstance(default.value, bool):
                    yield default, repr(not default.value)
        case ast.AugAssign() | ast.Expr(ast.Call()):
            yield node, "pass"
        case ast.Return(ast.expr()) if isinstance(scope, ast.FunctionDef) and scope.returns:
            if ast.unparse(scope.returns).endswith("| None"):
                yield node, "return None"
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and name not in UNBROKEN:
                yield from changes(child, scope)


def mutants(file: str) -> Iterator[tuple[int, Mutation]]:
    """Yields for each change to a file its line and the mutation.

    The text of a mutation is the changed lines and as many before them as make it occur once in the file.
    """
    source = (SOURCE / file).read_text("utf-8")
    lines = source.splitlines(keepends=True)
    for node, new in changes(ast.parse(source)):
        start, last = node.lineno - 1, node.end_lineno or node.lineno
        head = lines[start].encode()[: node.col_offset].decode()
        tail = lines[last - 1].encode()[node.end_col_offset :].decode()
        while start > 0 and source.count("".join(lines[start:last])) > 1:
            start -= 1
        text, before = "".join(lines[start:last]), "".join(lines[start : node.lineno - 1])
        if text != (broken := f"{before}{head}{new}{tail}"):
            yield node.lineno, Mutation(file, text, broken, "")


def executed_lines(mutation: Mutation) -> range:
    """The lines whose execution shows a mutation: the changed ones, or for defaults the body, or else all of the file.

    An import executes defaults, fields and constants once, in whichever test comes first.
    """
    source = (SOURCE / mutation.file).read_text("utf-8")
    start = source[: source.index(mutation.text)].count("\n") + 1
    pairs = zip_longest(mutation.text.splitlines(), mutation.broken.splitlines())
    line = start + next(at for at, (old, new) in enumerate(pairs) if old != new)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or line)]
    if not around:
        return range(1, source.count("\n") + 1)
    body = range(around[-1].body[0].lineno, (around[-1].end_lineno or line) + 1)
    return range(line, start + mutation.text.count("\n")) if line in body else body


def read_coverage(path: Path) -> Coverage:
    """The executed lines of each file and test, from a data file of coverage.py; those of an import have no test."""
    found: Coverage = defaultdict(lambda: defaultdict(int))
    query = "SELECT path, context, numbits FROM line_bits"
    query += " JOIN file ON file_id = file.id JOIN context ON context_id = context.id"
    with sqlite3.connect(path) as data:
        for name, context, bits in data.execute(query):
            test = context.rpartition("|")[0]  # without "setup", "run" or "teardown"
            found[name.rpartition("src/fedlens/")[2]][test] |= int.from_bytes(bits, "little")
    return found


def draw(count: int, seed: int, coverage: Coverage) -> list[Mutation]:
    """Random lines that tests execute, and for each one of the mutations that begin there."""
    places: dict[tuple[str, int], list[Mutation]] = defaultdict(list)
    for file in sorted(file for file in coverage if file.startswith(ROOMS)):
        for line, mutation in mutants(file):
            if any(bits >> line & 1 for bits in coverage[file].values()):
                places[file, line].append(mutation)
    rng = random.Random(seed)
    return [rng.choice(places[place]) for place in rng.sample(sorted(places), count)]


def select(mutation: Mutation, coverage: Coverage) -> list[str]:
    """The tests that execute the lines of a mutation, and those in a file with the name of the module.

    These come first, then one of each test function; tests that execute few lines first.
    """
    mask = sum(1 << line for line in executed_lines(mutation))
    cost: dict[str, int] = Counter()
    for tests in coverage.values():
        cost.update({test: bits.bit_count() for test, bits in tests.items() if test})
    turn, of_function = {}, Counter[str]()
    for test in sorted(cost, key=cost.__getitem__):
        function = test.partition("[")[0]
        if f"/test_{Path(mutation.file).stem}" in function:
            turn[test] = 0
        elif coverage[mutation.file].get(test, 0) & mask:
            of_function[function] += 1
            turn[test] = of_function[function]
    return sorted(turn, key=lambda test: (turn[test], cost[test]))


def first_failure(mutation: Mutation, tests: list[str]) -> str | None:
    """The first of `tests` that fails twice on the broken source, or pytest's error instead; None if all pass."""
    if not tests:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(tests))
        listed.flush()
        options = ["-n", "0", "-o", "timeout=120", "-m", "not timing and not nightly and not paper"]
        run = run_tests([*options, f"@{listed.name}"], mutation)
    if run.returncode in (0, 5):  # 5: all of them are `timing` tests
        return None
    output = (run.stdout + run.stderr).strip().splitlines()
    functions = list(dict.fromkeys(test.partition("[")[0] for test in tests))
    if any(line.startswith("ERROR: not found") for line in output) and functions != tests:
        return first_failure(mutation, functions)  # the names of parameters hold what was changed
    failed = next((line for line in output if line.startswith(("FAILED", "ERROR"))), output[-1])
    named = [test for test in tests if failed.partition(" ")[2].startswith(test)]
    if not named or len(tests) == 1:
        return max(named, key=len, default=failed)
    test = max(named, key=len)  # fails on its own too, unless it fails by chance, on a busy machine
    return first_failure(mutation, [test]) or first_failure(mutation, tests[tests.index(test) + 1 :])


def find(mutation: Mutation) -> Mutation | None:
    """The mutation where its text is now, in its file or in another; None if no file has it once."""
    files = [SOURCE / mutation.file, *sorted(SOURCE.rglob("*.py"))]
    now = (file for file in files if file.exists() and file.read_text("utf-8").count(mutation.text) == 1)
    return next((mutation._replace(file=file.relative_to(SOURCE).as_posix()) for file in now), None)


def main(arguments: list[str] | None = None) -> int:
    """Breaks one place after the other and writes a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_mutants")
    parser.add_argument("count", type=int, nargs="?", default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, help="the file of an earlier commit")
    parser.add_argument("--coverage", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args(arguments)
    coverage = read_coverage(options.coverage)
    earlier = [json.loads(line) for line in options.again.read_text().splitlines()] if options.again else []
    chosen = [Mutation(*r["mutation"]) for r in earlier] or draw(options.count, options.seed, coverage)
    killers = [r["killed_by"] for r in earlier] or [None] * len(chosen)
    done = len(options.to.read_text().splitlines()) if options.to.exists() else 0
    functions = {test.partition("[")[0] for tests in coverage.values() for test in tests if test}
    if run_tests(["--collect-only", *sorted(functions)], None).returncode:
        raise RuntimeError(f"{options.coverage} is of another commit: a test in it cannot be collected")
    for mutation, killer in list(zip(chosen, killers, strict=True))[done:]:
        began, there = time.monotonic(), find(mutation)
        tests = select(there, coverage) if there else []
        parts = [[killer] if killer in tests else [], tests[:FIRST], tests[FIRST:MOST]]
        failures = (first_failure(there, part) for part in parts if there)
        failed = next((failure for failure in failures if failure), None)
        record = {"mutation": mutation, "gone": not there, "killed_by": failed, "before": killer}
        record |= {"tests": len(tests), "seconds": round(time.monotonic() - began, 1)}
        with options.to.open("a") as out:
            print(json.dumps(record), file=out)
        print(mutation.file, failed or ("survives" if there else "is another now"), flush=True)
    records = [json.loads(line) for line in options.to.read_text().splitlines()]
    survivors = [r for r in records if not r["killed_by"]]
    for r in survivors:
        file, text, broken, _ = r["mutation"]
        print(f"{file} {'is another now' if r['gone'] else 'survives'}:\n{text}->\n{broken}")
    print(f"{len(records) - len(survivors)} of {len(records)} random mutants were killed")
    return int(any(r["before"] for r in survivors))


if __name__ == "__main__":
    raise SystemExit(main())
