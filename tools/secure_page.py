"""The tables of docs/who-may-know-what.md that say what secure sums cost, and their drawing.

`python -m tools.secure_page` writes both anew from the file that `benchmarks/secure.py` writes. The page includes the
drawing as it is, so that its colours follow the page's scheme. Opened alone, it is dark on light.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
PAGE = FOLDER.parent / "who-may-know-what.md"
RECORD, FIGURE = FOLDER / "secure-sums.jsonl", FOLDER / "secure-sums.svg"
TABLE = re.compile(r"(<!-- table: secure (\w+) -->\n)(?:\|.*\n)*")
COLOURS = {
    "quantized": "#77828f",
    "secagg": "#4e79a7",
    "secagg-plus": "#59a14f",
    "lightsecagg": "#f28e2b",
    "turbo-aggregate": "#e15759",
}
WIDTH, HEIGHT, PLOT = 760, 500, (300, 170)  # pixels: of the drawing, and of a plot in it
COHORTS = (10, 20, 50, 100, 200)
PANELS = (
    ("MB up, a client", "up", 1e-6, (-1, 2)),
    ("MB down, a client", "down", 1e-6, (-1, 2)),
    ("s of a client", "client_seconds", 1, (-3, 1)),
    ("s of the server; dashed, open: 45 % lost", "server_seconds", 1, (-3, 1)),
)
STYLE = """
.sums { max-width: 100%; min-width: 600px; height: auto; }
.sums text { fill: var(--md-default-fg-color, #1b2733); font: 13px system-ui, sans-serif; }
.sums .tick { fill: var(--md-default-fg-color--light, #5d6975); font-size: 12px; text-anchor: middle; }
.sums .side { text-anchor: end; }
.sums .grid { stroke: var(--md-default-fg-color--lighter, #c3c9cf); }
.sums polyline { fill: none; stroke-width: 2; }
.sums .lost { stroke-dasharray: 5 4; }
"""
Row = Mapping[str, Any]


def rows() -> list[Row]:
    """The measurements."""
    return [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def rendered(page: str, measured: Sequence[Row]) -> str:
    """The page with its tables written anew."""
    tables: Mapping[str, Callable[[Sequence[Row]], Iterable[str]]] = {"bytes": _bytes, "seconds": _seconds}
    return TABLE.sub(lambda match: match[1] + "".join(tables[match[2]](measured)), page)


def _bytes(measured: Sequence[Row]) -> Iterable[str]:
    cohorts = [clients for clients in COHORTS if clients != 50]
    yield f"| aggregate | {' | '.join(map(str, cohorts))} |\n" + "|---" * 5 + "|\n"
    cells = {(row["aggregate"], row["clients"]): row for row in measured if row["lost"] == 0}
    for name in COLOURS:
        found = [cells.get((name, clients)) for clients in cohorts]
        shown = [f"{row['up'] / 1e6:.3f}, {row['down'] / 1e6:.3f}" if row else "–" for row in found]
        yield f"| `{name}` | {' | '.join(shown)} |\n"


def _seconds(measured: Sequence[Row]) -> Iterable[str]:
    yield f"| clients | lost | {' | '.join(f'`{name}`' for name in COLOURS)} |\n|---|---|---|---|---|---|---|\n"
    cells = {(row["clients"], row["lost"], row["aggregate"]): row for row in measured}
    shown = {(n, lost) for n, lost, _ in cells if n != 50 and (n, lost) != (20, 0) and lost / n != 0.3}
    for clients, lost in sorted(shown):
        found = [_cell(cells.get((clients, lost, name))) for name in COLOURS]
        yield f"| {clients:,} | {lost / clients:.0%} | {' | '.join(found)} |\n".replace("%", " %")


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    return "no sum" if "refused" in row else f"{row['client_seconds']:.3f}, {row['server_seconds']:.2f}"


def drawing(measured: Sequence[Row]) -> str:
    """The drawing as SVG: bytes and seconds over clients, both logarithmic."""
    parts = []
    for k, (name, color) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{40 + 146 * k}" y="8" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{58 + 146 * k}" y="19">{name}</text>')
    for k, panel in enumerate(PANELS):
        parts += _panel(measured, 60 + 380 * (k % 2), 62 + 240 * (k // 2), *panel)
    about = "Bytes and seconds of secure sums over the number of clients, on logarithmic axes."
    return (
        f'<svg class="sums" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{about}">\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(
    measured: Sequence[Row], left: int, top: int, title: str, key: str, unit: float, powers: tuple[int, int]
) -> Iterable[str]:
    wide, high = PLOT
    low, most = powers

    def x(clients: int) -> float:
        return left + wide * log10(clients / COHORTS[0]) / log10(COHORTS[-1] / COHORTS[0])

    def y(value: float) -> float:
        return top + high * (most - log10(value)) / (most - low)

    yield f'<text x="{left - 34}" y="{top - 12}">{title}</text>'
    for power in range(low, most + 1):
        at = y(10.0**power)
        yield f'<line class="grid" x1="{left}" y1="{at:.1f}" x2="{left + wide}" y2="{at:.1f}"/>'
        yield f'<text class="tick side" x="{left - 6}" y="{at + 4:.1f}">{10.0**power:g}</text>'
    for clients in COHORTS:
        yield f'<text class="tick" x="{x(clients):.1f}" y="{top + high + 18}">{clients}</text>'
    for name, color in COLOURS.items():
        for kind, share in (("", 0.0), ("lost", 0.45)):
            points = sorted(
                (x(row["clients"]), y(row[key] * unit))
                for row in measured
                if row["aggregate"] == name and row["clients"] <= COHORTS[-1] and key in row
                if row["lost"] == int(share * row["clients"])
            )
            if kind and key != "server_seconds":
                continue
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            yield f'<polyline class="{kind}" stroke="{color}" points="{line}"/>'
            look = f'fill="none" stroke="{color}"' if kind else f'fill="{color}"'
            yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" {look}/>' for a, b in points)


def main() -> None:
    """Writes the tables and the drawing."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), rows()), encoding="utf-8")
    FIGURE.write_text(drawing(rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
