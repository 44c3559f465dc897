"""The table of docs/models.md, from what `fedlens list models --json` prints.

`python -m tools.model_table` writes it anew; tests/unit/cli/test_list_models.py says when that is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.cli.list import model_rows

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = (
    "| name | parameters | multiply-adds, M | counted at, classes | normalization | source |",
    "|---|---|---|---|---|---|",
)
TABLE = re.compile(r"(<!-- table: models -->\n)(?:\|.*\n)*")


def rendered(page: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """The page with its table written anew."""
    lines, task, source = list(HEAD), "classification", ""
    for row in rows:
        if row["task"] != task:
            lines.append(f"| **{row['task']}** | | | | | |")
        lines.append(_line(row, "same" if row["source"] == source else row["source"]))
        task, source = row["task"], row["source"]
    table = "".join(f"{line}\n" for line in lines)
    return TABLE.sub(lambda match: match[1] + table, page)


def _line(row: Mapping[str, Any], source: str) -> str:
    cells = (
        f"`{row['name']}`",
        f"{row['parameters']:,}",
        _millions(row["multiply_adds"]),
        f"{_input(row['input_shape'], row['vocabulary'])}, {row['classes']:,}",
        ", ".join(row["norm_layers"]) or "none",
        source if row["licence"] == "Apache-2.0" else f"{source} ({row['licence']})",
    )
    return f"| {' | '.join(cells)} |"


def _input(shape: Sequence[int], vocabulary: int | None) -> str:
    """
    >>> _input((3, 8, 9), None), _input((80,), None), _input((80,), 1002)
    ('8x9x3', '80 tokens', '80 tokens of 1,002')
    """
    if len(shape) == 1:
        return f"{shape[0]} tokens" + (f" of {vocabulary:,}" if vocabulary is not None else "")
    channels, height, width = shape
    return f"{height}x{width}x{channels}"


def _millions(count: int | None) -> str:
    """Three digits and more of a number, in millions; None depends on what a detector detects.

    >>> _millions(4_089_184_256), _millions(7_840)
    ('4,089', '0.00784')
    """
    if count is None:
        return "by the boxes"
    return f"{count / 1e6:,.0f}" if count >= 1e9 else f"{count / 1e6:.3g}"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), model_rows()), encoding="utf-8")
