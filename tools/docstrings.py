"""Reads the docstring of an algorithm's factory: a title, a sentence, and sections that begin with a heading.

    FedProx: clients are held near the global model by a proximal term.

    Fixes: Under FedAvg a client with many local steps walks off to its own optimum.

    Equation:
        client k:  min_w F_k(w) + mu/2 ||w - w^t||^2

Every line of a section but its first is indented. `algorithm_pages.py` makes a page of it.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
NEEDED = (
    "Fixes", "Equation", "Source", "Weighting", "State", "Sent", "Composes", "Not when", "Tests", "Example",
)  # fmt: skip
HEADINGS = (*NEEDED, "Ranges", "Try")
WEIGHTINGS = ("By examples", "Uniform", "None")

_TITLE = re.compile(r"([^:`]{2,40}): (.+)\.", flags=re.DOTALL)
_HEADING = re.compile(r"([A-Z][a-z]+(?: [a-z]+)?):(?:\s+(.*))?")
_RANGE = re.compile(r"([a-z0-9_.]+): (\S.*)")
_WIDEST_EQUATION = 110


@dataclass(frozen=True)
class Docstring:
    """The parts of a docstring, and in `faults` a sentence for everything that a page could not be made from."""

    title: str
    summary: str
    prose: str
    sections: Mapping[str, str]
    faults: tuple[str, ...]

    def __getitem__(self, heading: str) -> str:
        return self.sections[heading]


def read(text: str | None) -> Docstring:
    """The docstring in its parts. Whatever is wrong with it stands in `faults`."""
    first, _, rest = cleandoc(text or "").partition("\n\n")
    title = _TITLE.fullmatch(first)
    faults = [] if title else ["the first paragraph is not 'Title: one sentence.'"]
    prose, sections, wrong = _split(rest.splitlines())
    faults += wrong
    faults += [f"there is no section '{heading}:'" for heading in NEEDED if heading not in sections]
    faults += [f"the section '{heading}:' is empty" for heading, body in sections.items() if not body]
    faults += _content(sections)
    name, summary = title.groups() if title else ("", first)
    return Docstring(name, " ".join(f"{summary}.".split()), prose, sections, tuple(faults))


def _split(lines: list[str]) -> tuple[str, dict[str, str], list[str]]:
    prose: list[str] = []
    bodies: dict[str, list[str]] = {}
    opening: dict[str, str] = {}
    faults: list[str] = []
    current: list[str] = prose
    for line in lines:
        found = _HEADING.match(line)
        if found:
            heading = found[1]
            if heading not in HEADINGS:
                faults.append(f"'{heading}:' is no heading; there are {', '.join(HEADINGS)}")
            if heading in bodies:
                faults.append(f"the section '{heading}:' is set twice")
            current = bodies[heading] = []
            opening[heading] = found[2] or ""
        elif bodies and line and not line.startswith(" "):
            faults.append(f"this line is in a section, so it has to be indented: {line!r}")
        else:
            current.append(line)
    sections = {
        heading: "\n".join([opening[heading], dedent("\n".join(body))]).strip()
        for heading, body in bodies.items()
    }
    return "\n".join(prose).strip(), sections, faults


def _content(sections: Mapping[str, str]) -> list[str]:
    """What is wrong inside the sections that have a form of their own."""
    faults = []
    for line in sections.get("Equation", "").splitlines():
        if len(line) > _WIDEST_EQUATION:
            faults.append(f"a line of the equation has more than {_WIDEST_EQUATION} characters: {line!r}")
    if not sections.get("Weighting", WEIGHTINGS[0]).startswith(WEIGHTINGS):
        faults.append(f"'Weighting:' does not begin with one of {', '.join(WEIGHTINGS)}")
    if "Example" in sections and not doctest.DocTestParser().get_examples(sections["Example"]):
        faults.append("'Example:' has no line that begins with '>>>'")
    for word in sections.get("Try", "").split():
        if "=" not in word:
            faults.append(f"'Try:' has {word!r}, which is not key=value")
    return faults + ranges(sections.get("Ranges", ""))[1] + proofs(sections.get("Tests", ""))[1]


def ranges(section: str) -> tuple[dict[str, str], list[str]]:
    """The sensible range of each setting, by its name, and what is wrong.

    >>> ranges("mu: 0.001 to 1;\\n    larger where clients differ.\\nbeta_1: 0.9.")[0]
    {'mu': '0.001 to 1; larger where clients differ.', 'beta_1': '0.9.'}
    """
    found: dict[str, str] = {}
    faults = []
    for line in filter(None, section.splitlines()):
        entry = _RANGE.fullmatch(line)
        if entry and entry[1] in found:
            faults.append(f"'Ranges:' has '{entry[1]}' twice")
        elif entry:
            found[entry[1]] = entry[2]
        elif found and line.startswith(" "):
            found[list(found)[-1]] += f" {line.strip()}"
        else:
            faults.append(f"'Ranges:' has a line that is not 'setting: range': {line!r}")
    return found, faults


@dataclass(frozen=True)
class Proof:
    """Tests in one file: their names, and the word in them that they were chosen by, if any."""

    path: str
    word: str
    tests: tuple[str, ...]


def proofs(section: str) -> tuple[list[Proof], list[str]]:
    """The tests that `path` or `path::word` name, and what is wrong."""
    found, faults = [], []
    for entry in section.replace(",", " ").split():
        path, _, word = entry.partition("::")
        if not (path.endswith(".py") and (ROOT / path).is_file()):
            faults.append(f"'Tests:' names {path}, which is not there")
            continue
        tests = tuple(name for name in _tests(ROOT / path) if word in name)
        if tests:
            found.append(Proof(path, word, tests))
        else:
            faults.append(f"'Tests:' names {entry}, and no test there has that name")
    return found, faults


@cache
def _tests(path: Path) -> list[str]:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return [
        node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
