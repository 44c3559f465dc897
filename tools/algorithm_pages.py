"""The pages below docs/algorithms/, made from the docstrings of the algorithms' factories, and their place in the menu.

`python -m tools.algorithm_pages` writes them anew, and says of each docstring that is not fit for a page
why; with names behind it, it prints those pages instead. test_algorithm_pages.py says when that is needed.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedlens.algorithms.registry import SLOTS
from fedlens.base.registry import Entry, Factory, settings_model
from fedlens.settings.config import Config
from tools.docstrings import ROOT, Docstring, proofs, ranges, read
from tools.settings_tables import REGISTRIES
from tools.settings_tables import _default as default_of

DOCS = ROOT / "docs"
PAGES = DOCS / "algorithms"
INDEX = PAGES / "index.md"
EVIDENCE = DOCS / "evidence"
EQUATIONS = tomllib.loads((PAGES / "equations.toml").read_text(encoding="utf-8"))
MENU = ROOT / "mkdocs.yml"
COMMAND = "python -m tools.algorithm_pages"
BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
KINDS = {"integer": "integer", "boolean": "", "string": "text", "object": "a table"}

_LIST = re.compile(r"(<!-- list: algorithms -->\n)(?:- .*\n)*")
_MENU = re.compile(r"( +- )(algorithms/index\.md\n)(?: +- .+: algorithms/.+\.md\n)*")
_ARXIV = re.compile(r"\barXiv[: ](\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Row:
    """A row of a registry that has a page: an algorithm, or a part for a slot that is a paper's method by itself."""

    key: str
    name: str
    entry: Entry
    factory: Factory

    @cached_property
    def docstring(self) -> Docstring:
        """What its docstring says."""
        return read(self.factory.__doc__)

    @cached_property
    def model(self) -> type[BaseModel]:
        """Its settings."""
        return settings_model(self.factory)

    @property
    def words(self) -> list[str]:
        """The settings of the page's command, the name first."""
        return [f"{self.key}.name={self.name}", *shlex.split(self.docstring.sections.get("Try", ""))]

    @property
    def file(self) -> Path:
        """Where its page is."""
        return PAGES / f"{self.name}.md"


@cache
def rows() -> tuple[Row, ...]:
    """Every algorithm, and every part for a slot whose docstring says what it fixes, in the registries' order."""
    found: dict[str, Row] = {}
    for key in ("algorithm", *SLOTS):
        for name, entry in REGISTRIES[key].entries.items():
            factory = REGISTRIES[key].find(name)
            if key == "algorithm" or (name not in found and "\n    Fixes:" in (factory.__doc__ or "")):
                found[name] = Row(key, name, entry, factory)
    return tuple(found.values())


def faults(row: Row) -> list[str]:
    """A sentence for everything in the row's docstring, settings and evidence that a page could not be made from."""
    said, _ = ranges(row.docstring.sections.get("Ranges", ""))
    found = list(row.docstring.faults)
    for name, field in row.model.model_fields.items():
        if name not in said:
            found.append(f"'Ranges:' says nothing of the setting '{name}'")
        if not field.description:
            found.append(f"the setting '{name}' has no Field(description=...)")
    for name in said:
        if name not in row.model.model_fields and not is_setting(name):
            found.append(f"'Ranges:' has '{name}', and there is no such setting")
    if (EVIDENCE / "curves" / f"{row.name}.svg").is_file():
        missing = {"command", "caption", "cpu_seconds"} - set(_evidence().get(row.name, {}))
        found += [f"docs/evidence/index.json has no '{what}' of the curve" for what in sorted(missing)]
    target = row.entry.target
    return [f"{target}: {fault}" for fault in found]


@cache
def fit() -> tuple[Row, ...]:
    """The rows that have nothing wrong with them; the others are left out of the pages, and a test says so."""
    return tuple(row for row in rows() if not faults(row))


def is_setting(key: str) -> bool:
    """Whether a TOML file can say it: a field of the schema, or a setting of any row of a registry.

    >>> is_setting("local.epochs"), is_setting("data.partition.alpha"), is_setting("local.epoch")
    (True, True, False)
    """
    table, _, name = key.rpartition(".")
    if table in REGISTRIES:
        registry = REGISTRIES[table]
        return name == "name" or any(
            name in settings_model(registry.find(row)).model_fields for row in registry.entries
        )
    model: Any = Config
    for part in key.split("."):
        fields = getattr(model, "model_fields", {})
        if part not in fields:
            return False
        model = fields[part].annotation
    return True


def page(row: Row) -> str:
    """The page of one algorithm."""
    docs = row.docstring
    parts = [
        "---\nhide: [toc]\n---",  # leaves room for the equations
        f"<!-- tools/algorithm_pages.py: {row.entry.target} -->",
        f"# {docs.title}",
        _capital(docs.summary),
        *([docs.prose] if docs.prose else []),
        _console(f"fedlens run digits {' '.join(f'--set {shlex.quote(word)}' for word in row.words)}"),
        f"## Purpose\n\n{docs['Fixes']}",
        f"## Equation\n\n{_equations(row)}\n\nSource: {_linked(docs['Source'])}",
        f"Tests: {_proofs(docs['Tests'])}.",
        f"## Settings\n\n{_settings(row)}",
        "## Cost",
        "\n".join(
            f"- **{title}.** {_inside(docs[heading])}"
            for title, heading in (("Weights", "Weighting"), ("Kept", "State"), ("Sent", "Sent"))
        ),
        f"## Combines with\n\n{docs['Composes']}",
        f"## Avoid when\n\n{docs['Not when']}",
        *_curve(row.name),
    ]
    return "\n\n".join(parts) + "\n"


def _equations(row: Row) -> str:
    """The main equations as mathematics, or those of the docstring as text."""
    equations = EQUATIONS.get(row.name, {})
    main = [f"{who}:\n\n$$\n{latex}\n$$" for who, latex in equations.items()]
    if not main:
        return f"```text\n{row.docstring['Equation']}\n```"
    main += [line for line in [notation(" ".join(equations.values()))] if line]
    return "\n\n".join(main)


def notation(latex: str) -> str:
    r"""A line that defines the usual symbols of a page's equations; empty where they have none of them.

    >>> notation(r"\\nabla F_k(w) + n_k")
    '$F_k$: mean training loss of client $k$; $n_k$: its examples.'
    """
    texts = [r"$w^t$: global model of round $t$"] if "w^t" in latex else []
    cohort = re.search(r"\\in S\b(?!')", latex)
    if loss := re.search(r"\b([Ff])_([ki])\b", latex):
        name, client = loss.groups()
        texts.append(f"${name}_{client}$: mean training loss of client ${client}$")
    if "n_k" in latex:
        texts.append("$n_k$: its examples" if loss else "$n_k$: examples of client $k$")
    if r"\frac{n_k}{n}" in latex:
        texts.append(f"$n$: examples {'in the cohort $S$' if cohort else 'of all clients'}")
    elif cohort:
        texts.append("$S$: cohort")
    if r"\eta" in latex:
        texts.append(r"$\eta$: local learning rate")
    if re.search(r"w(\^t)? - \\(frac\{)?\\?gamma|- \\gamma \\sum|- \\frac\{\\gamma\}\{\|S\|\}", latex):
        texts.append(r"$\gamma$: server learning rate")
    return f"{'; '.join(texts)}." if texts else ""


def _inside(text: str) -> str:
    """A section's text as the inside of a list's item."""
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines()).strip()


def _linked(text: str) -> str:
    return _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _console(command: str) -> str:
    return f"```console\n$ {_wrapped(command)}\n```"


def _wrapped(command: str, width: int = 96) -> str:
    """A command over several lines, broken before `--set`."""
    lines = [""]
    for word in re.split(r" (?=--set )", command):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n      ".join(lines)


def _settings(row: Row) -> str:
    said, _ = ranges(row.docstring.sections.get("Ranges", ""))
    shapes = row.model.model_json_schema()["properties"] if row.model.model_fields else {}
    lines = []
    for name, field in row.model.model_fields.items():
        default, values = default_of(field) or "not set", allowed(shapes[name])
        values = re.sub(rf"{re.escape(default)}(,| (?=or ))|, {re.escape(default)}", "", values).strip()
        values = ", ".join(filter(None, [default, values]))
        about = f"{field.description}. *Sensible:* {said[name]}"
        lines.append(f"- `{row.key}.{name}` ({values}): {about}")
    lines += [f"- `{name}`: {text}" for name, text in said.items() if name not in row.model.model_fields]
    return "\n".join(lines) or "None of its own."


def allowed(shape: Mapping[str, Any]) -> str:
    """What a setting can be, in words, from its JSON schema; empty where its default or description shows it.

    >>> allowed({"type": "number", "minimum": 0, "exclusiveMaximum": 1})
    'at least 0, below 1'
    >>> allowed({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})
    'integer, at least 1'
    """
    if "discriminator" in shape:
        return ""
    if "anyOf" in shape:
        kinds = [allowed(kind) for kind in shape["anyOf"] if kind.get("type") != "null"]
        return " or ".join(filter(None, kinds))
    if "const" in shape or "enum" in shape:
        return ", ".join(f"`{json.dumps(value)}`" for value in shape.get("enum", [shape.get("const")]))
    kind = shape.get("type", "")
    if kind == "array":
        items = allowed(shape.get("items", {}))
        return f"a list of: {items}" if items else "a list"
    bounds = [f"{word} {shape[bound]}" for bound, word in BOUNDS.items() if bound in shape]
    if kind == "number":
        return ", ".join(bounds) or "any number"
    return ", ".join([KINDS.get(kind, kind), *bounds])


def _proofs(section: str) -> str:
    found, _ = proofs(section)
    return ", ".join(f"`{p.path}{f' -k {p.word}' if p.word else ''}`" for p in found)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _curve(name: str) -> Iterator[str]:
    if (EVIDENCE / "curves" / f"{name}.svg").is_file():
        shown = _evidence()[name]
        yield f"## Curve\n\n![Accuracy](../evidence/curves/{name}.svg)"
        yield f"{shown['caption']}. `{shown['command']}`: [Evidence](../evidence.md)."


def _evidence() -> Mapping[str, Any]:
    """What made each curve: its command, caption and cost."""
    written = EVIDENCE / "index.json"
    return dict(json.loads(written.read_text(encoding="utf-8"))["curves"]) if written.is_file() else {}


def index(text: str) -> str:
    """The index page with its list written anew."""
    return _LIST.sub(lambda match: match[1] + "".join(_algorithms()), text)


def _algorithms() -> Iterator[str]:
    for row in fit():
        where = "" if row.key == "algorithm" else f" in `[{row.key}]`"
        yield f"- [`{row.name}`]({row.name}.md){where}: {row.docstring.summary}\n"


def menu(text: str) -> str:
    """mkdocs.yml with the algorithms' lines below that of algorithms/index.md written anew."""
    lines = [f"{row.docstring.title}: algorithms/{row.name}.md\n" for row in fit()]
    return _MENU.sub(lambda match: match[1] + match[1].join([match[2], *lines]), text)


def write() -> int:
    """Writes every page, the index and the menu, and says what is wrong with the docstrings; 0 where nothing is."""
    made = {row.file: page(row) for row in fit()}
    for file in set(PAGES.glob("*.md")) - set(made) - {INDEX}:
        file.unlink()
    made |= {INDEX: index(INDEX.read_text(encoding="utf-8")), MENU: menu(MENU.read_text(encoding="utf-8"))}
    for file, text in made.items():
        file.write_text(text, encoding="utf-8")
    wrong = [fault for row in rows() for fault in faults(row)]
    return _say(wrong, f"{len(fit())} of {len(rows())} pages are written")


def show(names: Sequence[str]) -> int:
    """Prints the pages of these algorithms, or what is wrong with their docstrings; 0 where nothing is."""
    chosen = [row for row in rows() if row.name in names]
    wrong = [fault for row in chosen for fault in faults(row)]
    wrong += [f"no algorithm is called {name}" for name in set(names) - {row.name for row in chosen}]
    return _say(wrong, "\n".join(page(row) for row in chosen if not faults(row)))


def _say(wrong: Sequence[str], text: str) -> int:
    sys.stdout.write("".join(f"{line}\n" for line in [*wrong, text]))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(show(sys.argv[1:]) if sys.argv[1:] else write())
