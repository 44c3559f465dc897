"""What `repr` and a notebook show of an object: a title and rows of a name and a value, as text and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Rows = Sequence[tuple[str, str]]


def as_text(title: str, rows: Rows) -> str:
    """The title, and a line for each row.

    >>> print(as_text("Partition of 'digits'", [("clients", "20"), ("examples", "1,437")]))
    Partition of 'digits'
      clients   20
      examples  1,437
    """
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def as_html(title: str, rows: Rows) -> str:
    """The same as a table; names and values are escaped.

    >>> as_html("Result", [("status", "<finished>")])
    '<table><caption>Result</caption><tr><th>status</th><td>&lt;finished&gt;</td></tr></table>'
    """
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(title)}</caption>{''.join(cells)}</table>"


def listed(names: Sequence[str], most: int = 3, count: int | None = None) -> str:
    """The first names, and how many follow; `count` is the number of all, if `names` is not all.

    >>> listed(["a", "b", "c", "d", "e"]), listed(["a", "b"]), listed(["0", "1", "2"], count=2000)
    ('a, b, c and 2 more', 'a, b', '0, 1, 2 and 1,997 more')
    """
    more = (len(names) if count is None else count) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def conjoined(names: Sequence[str]) -> str:
    """All names in a sentence; empty for none.

    >>> conjoined(["A", "B", "C"]), conjoined(["A"]), conjoined([])
    ('A, B and C', 'A', '')
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def as_call(table: Any) -> str:
    """A table of settings in one line; several tables one after the other.

    >>> as_call({"name": "iid", "clients": 4}), as_call({"lr": 0.1}), as_call({"name": "linear"})
    ('iid(clients=4)', 'lr=0.1', 'linear')
    """
    if isinstance(table, list):
        return " + ".join(map(as_call, table))
    if not isinstance(table, Mapping):
        return str(table)
    settings = ", ".join(f"{name}={value}" for name, value in table.items() if name != "name")
    return (
        (f"{table['name']}({settings})" if settings else str(table["name"])) if "name" in table else settings
    )
