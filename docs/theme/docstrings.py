"""Prepares what the API pages show: examples in running text, and the descriptions of settings."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Readable(griffe.Extension):
    """Makes examples blocks of code, and `Field(default, description=...)` a default and a docstring."""

    def on_object(self, *, obj: griffe.Object, **arguments: Any) -> None:
        """Changes a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **arguments: Any) -> None:
        """Changes an attribute."""
        value = attr.value
        if not (isinstance(value, griffe.ExprCall) and str(value.function) == "Field"):
            return
        named = {part.name: part.value for part in value.arguments if isinstance(part, griffe.ExprKeyword)}
        if "description" in named and not attr.docstring:
            text = str(named["description"]).strip("'\"")
            attr.docstring = griffe.Docstring(f"{text[:1].upper()}{text[1:]}.", parent=attr)
        positional = [part for part in value.arguments if not isinstance(part, griffe.ExprKeyword)]
        attr.value = positional[0] if positional else None


def fenced(text: str) -> str:
    r"""The text with fences around its doctests; Markdown would take them for quotations.

    >>> fenced("Adds.\n\n>>> 1 + 1  # doctest: +SKIP\n2\n\nNo more.")
    'Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nNo more.'
    """
    lines: list[str] = []
    margin: str | None = None  # of the example that is open
    for line in text.splitlines():
        if margin is None and line.lstrip().startswith(">>> "):
            margin = line[: len(line) - len(line.lstrip())]
            lines += [*([""] if lines and lines[-1].strip() else []), f"{margin}```pycon"]
        elif margin is not None and not line.strip():
            lines.append(f"{margin}```")
            margin = None
        lines.append(re.sub(r"\s+# doctest:.*", "", line))
    return "\n".join([*lines, f"{margin}```"] if margin is not None else lines)
