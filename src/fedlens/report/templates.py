"""The pieces of a page: HTML text with everything from outside escaped, and the page around them.

A page loads nothing: style, script and figures are in it, and its content security policy forbids the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

# The border style that looks like a dash of plotly.
BORDERS = {"dash": "dashed", "dot": "dotted", "dashdot": "dashed"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class View:
    """One way to look at a figure: a button, and what it changes in the traces and in the layout."""

    label: str
    data: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)


def document(title: str, brand: str, aside: str, body: str) -> str:
    """The whole page. `title`, `brand` and `aside` are text; `body` is HTML."""
    from plotly.offline import get_plotlyjs

    drawn = "data-plot" in body
    script = f"<script>{get_plotlyjs()}</script>\n<script>{_asset('page.js')}</script>" if drawn else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="fedlens">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_asset("style.css")}</style>
</head>
<body>
<div class="top"><span class="brand"><i></i>{escape(brand)}</span><span>{escape(aside)}</span></div>
<main>
{body}
<noscript><p class="lead">The figures need JavaScript; the numbers do not.</p></noscript>
</main>
{script}
</body>
</html>
"""


def plot(
    figure: go.Figure,
    title: str,
    about: str,
    *,
    level: int = 2,
    shape: str = "",
    keys: bool = True,
    views: Sequence[View] = (),
) -> str:
    """A figure with its title, its legend and its views.

    Args:
        about: what a person who cannot see the figure is told.
        shape: "tall", "low", or as high as usual.
        keys: whether the legend is shown; a click on a name hides its trace.
        views: the first one is shown at the start.
    """
    buttons = "".join(_view(view, pressed=k == 0) for k, view in enumerate(views))
    toggle = f'<span class="toggle" role="group">{buttons}</span>' if len(views) > 1 else ""
    named = [
        _key(k, trace) for k, trace in enumerate(figure.data) if trace.showlegend is not False and trace.name
    ]
    legend = f'<div class="keys">{"".join(named)}</div>' if keys and named else ""
    return (
        f"<figure data-plot><figcaption><h{level}>{escape(title)}</h{level}>{toggle}</figcaption>{legend}"
        f'<div class="plot {shape}" role="img" aria-label="{escape(about)}"></div>'
        f'<script type="application/json">{script_json(figure.to_json())}</script></figure>'
    )


def _view(view: View, pressed: bool) -> str:
    data, layout = escape(json.dumps(view.data)), escape(json.dumps(view.layout))
    return (
        f'<button type="button" aria-pressed="{str(pressed).lower()}" data-data="{data}"'
        f' data-layout="{layout}">'
        f"{escape(view.label)}</button>"
    )


def _key(position: int, trace: Any) -> str:
    # The trace's name is escaped already: plotly reads markup in it.
    if trace.type == "bar":
        mark = f'<i class="box" style="background:{trace.marker.color}"></i>'
    else:
        style = BORDERS.get(trace.line.dash or "", "solid")
        mark = f'<i style="border-top-color:{trace.line.color};border-top-style:{style}"></i>'
    opening = f'<button type="button" class="key" aria-pressed="true" data-trace="{position}">'
    return f"{opening}{mark}{trace.name}</button>"


def script_json(text: str) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element."""
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def card(body: str, title: str = "", lead: str = "") -> str:
    """A section; `lead` and `title` are text, `body` is HTML."""
    head = f"<h2>{escape(title)}</h2>" if title else ""
    head += f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'<section class="card">{head}{body}</section>'


def kpi(label: str, value: str, sub: str = "", *, of: str = "", main: bool = False) -> str:
    """One number with what it is, and one line below it."""
    small = f" <small>{escape(of)}</small>" if of else ""
    return (
        f'<div class="kpi{" main" if main else ""}"><dt>{escape(label)}</dt>'
        f'<dd class="value">{escape(value)}{small}</dd><dd class="sub">{escape(sub)}</dd></div>'
    )


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A few numbers in a row."""
    return f'<dl class="facts">{_pairs(pairs)}</dl>'


def lines(pairs: Iterable[tuple[str, str]]) -> str:
    """One name and value a line."""
    return f'<dl class="lines">{_pairs(pairs)}</dl>'


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """A table that scrolls sideways where it must; `head` is text, cells are HTML."""

    def attribute(column: int) -> str:
        return ' class="num"' if column in numeric else ""

    top = "".join(f"<th{attribute(k)}>{escape(name)}</th>" for k, name in enumerate(head))
    cells = ("".join(f"<td{attribute(k)}>{cell}</td>" for k, cell in enumerate(row)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def settings(groups: Iterable[tuple[str, Iterable[tuple[str, str]]]]) -> str:
    """Groups of settings, in columns."""
    blocks = [
        f'<div class="group"><h3>{escape(name)}</h3><dl>{_pairs(pairs)}</dl></div>' for name, pairs in groups
    ]
    return f'<div class="groups">{"".join(blocks)}</div>'


def banner(kind: str, title: str, paragraphs: Sequence[str], code: str = "") -> str:
    """What a person must not overlook."""
    body = "".join(f"<p>{escape(text)}</p>" for text in paragraphs)
    body += f"<pre>{escape(code)}</pre>" if code else ""
    return f'<div class="banner {kind}" role="status"><b>{escape(title)}</b>{body}</div>'


def folded(title: str, body: str) -> str:
    """A section that is closed until a person opens it."""
    return f'<details class="card"><summary>{escape(title)}</summary>{body}</details>'


def _asset(name: str) -> str:
    return files("fedlens.report").joinpath(name).read_text(encoding="utf-8")
