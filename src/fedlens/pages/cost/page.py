"""cost.html: what federation costs, as one page that opens offline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.base.format import MISSING, count, is_share, many, metric_value, signed
from fedlens.pages.compare import seed_curve
from fedlens.pages.cost.answer import by_role, cost_runs
from fedlens.pages.cost.labels import cost_label_card, low_client_sentences
from fedlens.pages.cost.measures import (
    MEASURES,
    REFERENCES,
    SIGNS,
    WORDS,
    byte_rows,
    bytes_notes,
    cards,
    difference_text,
    interval_text,
    measure,
    measure_heading,
    measure_notes,
    side_by_side,
)
from fedlens.pages.cost.sentences import below_largest, wide_note
from fedlens.pages.data_notes import notes_card
from fedlens.pages.low_clients import GAP, LEVEL
from fedlens.pages.render import write_page
from fedlens.results.figures import chart as figures
from fedlens.results.figures.chart import TEN
from fedlens.results.run import Run
from fedlens.results.statistics import LEAST_SEEDS, UNSURE

CLIENTS_SHOWN = 100  # rows of the table of clients on the page
LARGEST = "always its largest class"
_STYLES = {
    "federated": (TEN[0], "solid"),
    "iid": (TEN[1], "solid"),
    "centralized": (TEN[2], "dash"),
    "local-only": (TEN[4], "dot"),
}
_COLORS = {"gains": "var(--good)", "loses": "var(--bad)", UNSURE: "var(--local)", None: "var(--accent)"}
_NAMED = 30  # clients whose names stand on the axis of the figure


def write_cost_page(directory: Path, answer: Mapping[str, Any]) -> Path:
    """Writes cost.html into a cost directory from `cost_answer`, and returns its path."""
    rows, metric = answer["runs"], answer["metric"]
    finished = by_role(rows, cost_runs(directory, answer)[0])
    # A client without held-out images is in no row, but may be named in a note.
    partitions = (run.partition for of in finished.values() for run in of.values())
    held = next((partition.ids for partition in partitions if partition), ())
    clients = list(dict.fromkeys([*(str(row["client"]) for row in answer["clients"]), *held]))
    compared = [row["vs_local_only"] for row in answer["clients"] if row["vs_local_only"]]
    head, texts = client_table(answer)
    context = {
        "title": f"What federation costs: {answer['name']} · fedlens",
        "aside": str(directory),
        "answer": answer,
        "cards": cards(answer),
        "measures": [measure_heading(metric, on) for on in MEASURES],
        "measure_notes": measure_notes(answer),
        "models": side_by_side(answer)[0],
        "bytes": byte_rows(answer),
        "bytes_notes": bytes_notes(answer),
        "charts": [chart for on in MEASURES if (chart := _curves(metric, finished, on))],
        "differences": _difference_rows(answer),
        "in_points": is_share(metric),
        "joining": _joining_figure(answer),
        "client_head": head,
        "client_rows": [
            [row[0], *map(_broken_before_bracket, row[1:-1]), row[-1]] for row in texts[:CLIENTS_SHOWN]
        ],
        "failed": [row for row in rows if row["status"] != "finished"],
        "least_seeds": LEAST_SEEDS,
        "verdicts": len(compared),
        "gap": GAP,
        "level": LEVEL,
        "client_notes": client_notes(answer),
        "client_names": clients,
        "notes": notes_card(answer["data_notes"], clients),
        "labels": cost_label_card(finished, answer),
        "alarms": low_client_sentences(answer),
    }
    return write_page(directory / "cost.html", "cost.html.j2", context)


def _broken_before_bracket(cell: str) -> str:
    """The cell with spaces that break no line, but for the one before its interval."""
    return cell.replace(" ", "\u00a0").replace("\u00a0(", " (")


def _curves(metric: str, finished: Mapping[str, Mapping[int, Run]], on: str) -> figures.Panel | None:
    """The mean curve of each role over seeds, with a band of one deviation."""
    key, series = f"test_{metric}" if on == "test" else f"clients_{metric}_mean", []
    for role, style in _STYLES.items():
        series += seed_curve(list(finished[role].values()), key, WORDS[role], *style)
    ends = [f"{line.name} {metric_value(metric, line.y[-1])}" for line in series if line.kind == "line"]
    if not ends:
        return None
    title = measure_heading(metric, on)
    panel = figures.curves(series, metric, title, f"{title}: {'; '.join(ends)}")
    return replace(panel, shape="tall" if on == "test" else "")


def _difference_rows(answer: Mapping[str, Any]) -> list[list[str]]:
    """The overall differences as a table: what is compared, the difference, its interval, what it says."""
    metric, rows = answer["metric"], []
    for name, role in REFERENCES.items():
        row = answer["differences"][name]
        if row is not None:
            says = SIGNS.get(row["sign"], f"{many(row['seeds'], 'seed')} cannot say")
            bounds = interval_text(metric, row) or MISSING
            of = measure(metric, row["on"])
            rows.append([f"federated - {WORDS[role]}", of, signed(metric, row["mean"]), bounds, says])
    return rows


def client_notes(answer: Mapping[str, Any]) -> list[str]:
    """What the mark, wide intervals and the numbers of images in the table of clients mean."""
    notes, tested = list[str](), answer["work"].get("test_images")
    compared = [
        row[key] for row in answer["clients"] for key in ("vs_centralized", "vs_local_only") if row[key]
    ]
    if compared:
        brackets = (
            "; its 95 % interval is in brackets" if any(row["low"] is not None for row in compared) else ""
        )
        notes.append(f"A difference above 0 is in favour of the federated model{brackets}.")
    if any(map(below_largest, answer["clients"])):
        notes.append(
            "! The federated model is right less often than always naming the client's largest class."
        )
    if wide := wide_note(answer):
        notes.append(wide)
    notes.append("Training images do not include the held-out images.")
    if tested:
        notes.append(f"The {tested:,} test images belong to no client.")
    if (hidden := len(answer["clients"]) - CLIENTS_SHOWN) > 0:
        notes.append(f"{many(hidden, 'more client')} in cost.json.")
    return notes


def client_table(answer: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The head, and one row of texts a client, the worst first."""
    metric, clients = answer["metric"], answer["clients"]

    def value(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: metric_value(metric, row.get(key))

    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "client": lambda row: str(row["client"]),
        "training images": lambda row: count(row["examples"]),
        "held out": lambda row: count(row["held_out"]),
        "classes": lambda row: str(len(row["classes"]) or MISSING),
        "federated": lambda row: (
            ("! " if below_largest(row) else "") + metric_value(metric, row["federated"])
        ),
        "centralized": value("centralized"),
        "local-only": value("local-only"),
        LARGEST: value("largest"),
        "vs centralized": lambda row: difference_text(metric, row["vs_centralized"]),
        "vs local-only": lambda row: difference_text(metric, row["vs_local_only"]),
        "by joining": lambda row: row["verdict"] or MISSING,
    }
    absent = {role for role in WORDS if role not in answer["overall"]}
    if all(row["largest"] is None for row in clients):
        absent.add(LARGEST)
    shown = {name: text for name, text in columns.items() if name not in absent}
    return list(shown), [[text(row) for text in shown.values()] for row in clients]


def _joining_figure(answer: Mapping[str, Any]) -> figures.Panel | None:
    """Each client's gain by joining: a dot, and its interval as a line."""
    metric = answer["metric"]
    rows = [row for row in answer["clients"] if row["vs_local_only"] is not None]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: row["vs_local_only"]["mean"])
    names, limits = [str(row["client"]) for row in rows], (0.3, len(rows) + 0.7)
    series = [figures.level(0.0, limits, "", "solid", color="var(--muted)")]
    for kind, color in _COLORS.items():
        at = [k for k, row in enumerate(rows) if row["verdict"] == kind]
        gains = [rows[k]["vs_local_only"] for k in at]
        texts = [f"{names[k]}: {difference_text(metric, gain)}" for k, gain in zip(at, gains, strict=True)]
        mean, low, high = ([gain[key] for gain in gains] for key in ("mean", "low", "high"))
        x = [k + 1 for k in at]
        if at:
            series.append(figures.Series(x, mean, "", "points", color, texts=texts, low=low, high=high))
    axis = figures.Axis("client, by gain", "hidden", limits=limits)
    if len(rows) <= _NAMED:
        axis = replace(axis, values="number", ticks=range(1, len(rows) + 1), names=names)
    y = figures.Axis("federated - local-only", "share" if is_share(metric) else "number")
    title = "Gain by joining, client by client"
    return figures.Panel(title, f"{title}: from {names[0]} to {names[-1]}.", axis, y, series)
