"""cost.html: what federation costs, as one page that opens offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlens.base.format import MISSING, duration, is_share, many, metric_value, signed
from fedlens.pages.compare import seed_curve
from fedlens.pages.cost.labels import cost_label_card, labels_method, low_client_sentences
from fedlens.pages.cost.measures import (
    MEASURES,
    WORDS,
    byte_rows,
    bytes_note,
    cards,
    measure,
    measure_heading,
    measure_notes,
    side_by_side,
)
from fedlens.pages.cost.sentences import below_largest, interval_text, wide_note
from fedlens.pages.data_notes import notes_card
from fedlens.pages.render import write_page
from fedlens.results.figures import chart as figures
from fedlens.results.figures.chart import TEN
from fedlens.results.run import Run, read_run
from fedlens.results.statistics import LEAST_SEEDS, UNSURE

CLIENTS_SHOWN = 100  # rows of the table of clients on the page
LARGEST = "always its largest class"
_NAMED = 30  # clients whose names stand on the axis of the figure
_STYLES = {
    "federated": (TEN[0], "solid"),
    "iid": (TEN[1], "solid"),
    "centralized": (TEN[2], "dash"),
    "local-only": (TEN[4], "dot"),
}


def write_cost_page(directory: Path, answer: Mapping[str, Any]) -> Path:
    """Writes cost.html into a cost directory from `cost_answer`, and returns its path."""
    runs = {
        row["name"]: read_run(directory / row["name"])
        for row in answer["runs"]
        if row["status"] == "finished"
    }
    metric = answer["metric"]
    finished = {
        (row["role"], row["seed"]): runs[row["name"]] for row in answer["runs"] if row["name"] in runs
    }
    # A client without held-out images is in no row, but may be named in a note.
    held = next((run.partition.ids for run in finished.values() if run.partition), ())
    clients = list(dict.fromkeys([*(str(row["client"]) for row in answer["clients"]), *held]))
    context = {
        "title": f"What federation costs: {answer['name']} · fedlens",
        "aside": str(directory),
        "answer": answer,
        "metric": metric,
        "cards": cards(answer),
        "measures": [measure_heading(metric, on) for on in MEASURES],
        "measure_notes": measure_notes(answer),
        "models": side_by_side(answer)[0],
        "bytes": byte_rows(answer),
        "bytes_note": bytes_note(answer),
        "wide": wide_note(answer),
        "charts": [chart for on in MEASURES if (chart := _curves(answer, runs, on))],
        "differences": difference_rows(answer),
        "intervals": any(
            row["vs_local_only"] and row["vs_local_only"]["low"] is not None for row in answer["clients"]
        ),
        "joining": _joining_figure(answer),
        "client_head": client_head(answer),
        "client_rows": [
            [row[0], *map(_broken_before_bracket, row[1:-1]), row[-1]]
            for row in client_texts(answer)[:CLIENTS_SHOWN]
        ],
        "hidden": max(0, len(answer["clients"]) - CLIENTS_SHOWN),
        "run_rows": _run_rows(answer),
        "failed": [row for row in answer["runs"] if row["status"] != "finished"],
        "method": method(answer),
        "below": below_note(answer),
        "images": images_note(answer),
        "client_names": clients,
        "notes": notes_card(answer["data_notes"], clients),
        "labels": cost_label_card(finished, answer),
        "alarms": low_client_sentences(answer),
    }
    return write_page(directory / "cost.html", "cost.html.j2", context)


def _broken_before_bracket(cell: str) -> str:
    """The cell with spaces that break no line, but for the one before its interval."""
    return cell.replace(" ", "\u00a0").replace("\u00a0(", " (")


def _curves(answer: Mapping[str, Any], runs: Mapping[str, Run], on: str) -> figures.Panel | None:
    """The mean curve of each role over seeds, with a band of one deviation."""
    metric, series = answer["metric"], []
    key = f"test_{metric}" if on == "test" else f"clients_{metric}_mean"
    for role, (color, dash) in _STYLES.items():
        named = [runs[row["name"]] for row in answer["runs"] if row["role"] == role and row["name"] in runs]
        series += seed_curve(named, key, WORDS[role], color, dash)
    if not any(line.kind == "line" for line in series):
        return None
    title = measure_heading(metric, on)
    about = f"{title}: " + "; ".join(
        f"{line.name} {metric_value(metric, line.y[-1])}" for line in series if line.kind == "line"
    )
    return replace(figures.curves(series, metric, title, about), shape="tall" if on == "test" else "")


def difference_rows(answer: Mapping[str, Any]) -> list[list[str]]:
    """The overall differences as a table: what is compared, the difference, its interval, what it says."""
    metric, rows = answer["metric"], []
    names = {
        "partition": "federated - IID clients",
        "federation": "federated - centralized",
        "joining": "federated - local-only",
    }
    for name, words in names.items():
        row = answer["differences"][name]
        if row is not None:
            says = {None: f"{many(row['seeds'], 'seed')} cannot say", 0: UNSURE, 1: "higher", -1: "lower"}[
                row["sign"]
            ]
            of = measure(metric, row["on"])
            rows.append([words, of, signed(metric, row["mean"]), interval_text(metric, row) or MISSING, says])
    return rows


def below_note(answer: Mapping[str, Any]) -> str:
    """What the mark in the table of clients means; empty if no client has it."""
    if not any(below_largest(row) for row in answer["clients"]):
        return ""
    return "! The federated model is right less often than always naming the client's largest class."


def images_note(answer: Mapping[str, Any]) -> str:
    """What the numbers of images count."""
    tested = answer["work"].get("test_images")
    more = f" The {tested:,} test images belong to no client." if tested else ""
    return f"Training images do not include the held-out images.{more}"


def client_head(answer: Mapping[str, Any]) -> list[str]:
    """The columns of `client_texts`."""
    roles = [role for role in ("federated", "centralized", "local-only") if role in answer["overall"]]
    largest = [LARGEST] if any(row["largest"] is not None for row in answer["clients"]) else []
    return [
        "client",
        "training images",
        "held out",
        "classes",
        *roles,
        *largest,
        "vs centralized",
        "vs local-only",
        "by joining",
    ]


def client_texts(answer: Mapping[str, Any]) -> list[list[str]]:
    """One row of texts a client, the worst first."""
    metric, rows = answer["metric"], []
    head = client_head(answer)
    roles = [name for name in head[4:-3] if name != LARGEST]
    for row in answer["clients"]:
        compared = []
        for key in ("vs_centralized", "vs_local_only"):
            each = row[key]
            bounds = interval_text(metric, each)
            compared.append(
                MISSING if each is None else signed(metric, each["mean"]) + (f" ({bounds})" if bounds else "")
            )
        values = [metric_value(metric, row.get(role)) for role in roles]
        if below_largest(row):
            values[0] = f"! {values[0]}"
        rows.append(
            [
                str(row["client"]),
                f"{row['examples']:,}",
                f"{row['held_out']:,}",
                str(len(row["classes"])) if row["classes"] else MISSING,
                *values,
                *([metric_value(metric, row["largest"])] if LARGEST in head else []),
                *compared,
                row["verdict"] or MISSING,
            ]
        )
    return rows


def _joining_figure(answer: Mapping[str, Any]) -> figures.Panel | None:
    """Each client's gain by joining: a dot, and its interval as a line."""
    metric = answer["metric"]
    rows = [row for row in answer["clients"] if row["vs_local_only"] is not None]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: row["vs_local_only"]["mean"])
    series: list[figures.Series] = []
    limits = (0.3, len(rows) + 0.7)
    colors = {"gains": "var(--good)", "loses": "var(--bad)", UNSURE: "var(--local)", None: "var(--accent)"}
    for kind, color in colors.items():
        here = [(k, row) for k, row in enumerate(rows, 1) if row["verdict"] == kind]
        gains = [row["vs_local_only"] for _, row in here]
        texts = [
            f"{row['client']}: {signed(metric, gain['mean'])}"
            + (f" ({bounds})" if (bounds := interval_text(metric, gain)) else "")
            for (_, row), gain in zip(here, gains, strict=True)
        ]
        if here:
            at, mean = [k for k, _ in here], [gain["mean"] for gain in gains]
            low, high = ([gain[end] for gain in gains] for end in ("low", "high"))
            series.append(figures.Series(at, mean, "", "points", color, texts=texts, low=low, high=high))
    title = "Gain by joining, client by client"
    x = figures.Axis("client, by gain", "hidden", limits=limits)
    if len(rows) <= _NAMED:
        names = [str(row["client"]) for row in rows]
        x = replace(x, values="number", ticks=range(1, len(rows) + 1), names=names)
    y = figures.Axis("federated - local-only", "share" if is_share(metric) else "number")
    about = f"{title}: from {rows[0]['client']} to {rows[-1]['client']}."
    zero = figures.level(0.0, limits, "", "solid", color="var(--muted)")
    return figures.Panel(title, about, x, y, [zero, *series])


def _run_rows(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for row in answer["runs"]:
        passes = row.get("passes")
        rows.append(
            {
                "name": row["name"],
                "status": row["status"],
                "rounds": f"{row['rounds']:,}",
                "passes": MISSING if passes is None else f"{passes:.3g}",
                "values": [metric_value(answer["metric"], row[on]) for on in MEASURES],
                "seconds": duration(row["seconds"]),
                "error": row["error"] or "",
                "warnings": row.get("warnings", 0),
            }
        )
    return rows


def method(answer: Mapping[str, Any]) -> list[str]:
    """How the runs were made comparable, as sentences."""
    work, seeds = answer["work"], len(answer["seeds"])
    passes = f"{work['passes']:.3g} passes over the {work['images']:,} training images"
    sentences = [
        f"The federated run has {work['rounds']:,} rounds with {work['cohort']:,} of {work['clients']:,} clients, "
        f"{passes} in all.",
        "IID clients: the same run, with all images reassigned to the clients at random; each client keeps its number "
        "of images.",
        f"Centralized: the same model and [local] settings on all images together. Each of its {work['rounds']:,} "
        f"rounds has {work['steps']:,} steps of {work['batch']:,} images, as many images as the clients of a federated "
        "round train on together.",
        "Local-only: each client trains a model of its own from the same first weights, in the same rounds and with "
        "the same [local] settings as in the federated run.",
        "Where each client has a model of its own, each of these models is tested on the test images when the run "
        "ends: one forward pass a model and image, left out if that takes longer than the run's training.",
        "No setting is tuned for a baseline: the learning rate is that of the federated run everywhere.",
        *answer["notes"],
        "Federated, centralized and local-only runs share training images and held-out images. A model of a client's "
        "own only has to know the classes of that client.",
    ]
    sentences.append(labels_method(answer))
    if seeds < LEAST_SEEDS:
        few = f"With {many(seeds, 'seed')} there is no interval. Run it with --seeds {LEAST_SEEDS} or more."
        return [*sentences, few]
    tests = sum(row["vs_local_only"] is not None for row in answer["clients"])
    wrong = round(0.05 * tests)
    number = f"about {wrong}" if 0.05 * tests >= 1 else "fewer than one"
    chance = f" Of {tests} such verdicts, expect {number} to be wrong by chance."
    return [
        *sentences,
        f"Overall intervals: mean ± t(0.975, {seeds - 1}) s / √{seeds} over {seeds} seeds, paired by seed. The seeds "
        "change first weights, sampled clients and batches. Partition, test images and held-out images stay, so these "
        "intervals do not cover which images are tested. Values are those of the last evaluated round.",
        "Intervals of a client's differences add the sampling error of its m held-out images, which are the same in "
        "every seed: half the width is √((t s / √n)² + 1.96² (p(1 - p) + q(1 - q)) / (m + 2)), with p and q the shares "
        "of the two models after one right and one wrong image are added (Agresti and Caffo 2000). Models that fail on "
        "the same images differ less, so the interval is a safe bound." + (chance if tests > 1 else ""),
        "The interval of a client's value is Wilson's on its held-out images, counted once for all seeds. It covers "
        "which images are held out, not the seeds.",
    ]
