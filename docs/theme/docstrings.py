"""Prepares docstrings for the API pages: an example in running text becomes a block of code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class FencedExamples(griffe.Extension):
    """Puts fences around the lines of a doctest, up to the next empty line; Markdown would quote them."""

    def on_object(self, *, obj: griffe.Object, **arguments: Any) -> None:
        """Changes the docstring of every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    r"""The text with fences around its doctests.

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
