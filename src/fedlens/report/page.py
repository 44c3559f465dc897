"""report.html: one run as a page that opens offline."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from fedlens.experiment.atomic_files import write_atomically
from fedlens.experiment.rundir import RunDir
from fedlens.report import figures
from fedlens.report import templates as parts
from fedlens.report.format import MISSING, count, duration, finite, metric_value, size, split_of
from fedlens.report.partition import partition_section
from fedlens.report.read import Run, read_run, subtable

_FAILURES_AT_MOST = 50


def write_report(run_dir: Path) -> Path:
    """Writes report.html into a run directory and returns its path.

    Works on runs of any status: what a directory does not say yet is left out.

    Raises `RunDirectoryError` where `run_dir` is no run directory.
    """
    run = read_run(run_dir)
    path = RunDir(run.directory).report_path
    write_atomically(path, render(run).encode())
    return path


def render(run: Run) -> str:
    """The page of a run, as text."""
    sections = (
        _header(run),
        _banner(run),
        _kpis(run),
        _curves(run),
        _spread(run),
        partition_section(run.partition),
        _disclosures(run),
        _failures(run),
        _settings(run),
        _foot(run),
    )
    started = _moment(run.environment)
    title = f"{run.name} · {run.status} · fedlens"
    return parts.document(
        title, "fedlens", " · ".join(filter(None, [run.run_id, started])), "\n".join(sections)
    )


def _moment(environment: Mapping[str, Any]) -> str:
    """When the run started: 2026-11-20 10:15 UTC."""
    known = next((v for key, v in environment.items() if key.startswith("start") and isinstance(v, str)), "")
    try:
        return datetime.fromisoformat(known).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return known


def _header(run: Run) -> str:
    parameters = subtable(run.summary, "model").get("parameters")
    model = escape(run.part("model") or "")
    if model and parameters is not None:
        model = f"<b>{model}</b> ({count(finite(parameters))} parameters)"
    elif model:
        model = f"<b>{model}</b>"
    said = [
        f"<b>{escape(run.part('algorithm') or 'an algorithm')}</b>",
        f"on <b>{escape(run.part('data', 'dataset') or 'a dataset')}</b>",
        f"with {model}" if model else "",
    ]
    if scatter := run.part("data", "partition"):
        said[-1] += f", scattered by <b>{escape(scatter)}</b>"
    badge = f'<span class="badge {_kind(run)}">{escape(run.status)}</span>'
    return f"<header><h1>{escape(run.name)}{badge}</h1><p>{' '.join(filter(None, said))}</p></header>"


def _kind(run: Run) -> str:
    return run.status if run.status in ("finished", "failed", "interrupted") else "running"


def _banner(run: Run) -> str:
    reached = f"Round {run.rounds_done} of {count(run.rounds)} was the last one done."
    resume = f"fedlens resume {shlex.quote(_directory(run))}"
    error = str(run.summary.get("error") or "")
    if run.status == "failed":
        reason = error[:1].upper() + error[1:] if error else "The reason was not recorded."
        return parts.banner("failed", "The run failed", [reason, reached])
    if run.status == "interrupted":
        said = [*([error] if error else []), f"{reached} Continue it with:"]
        return parts.banner("interrupted", "The run was interrupted", said, resume)
    if run.status != "finished":
        said = ["It is still going, or it was killed. This page shows what was there when it was written."]
        return parts.banner("running", "No result yet", [*said, "A killed run continues with:"], resume)
    return ""


def _kpis(run: Run) -> str:
    metric = run.metric()
    at, final = run.final(metric)
    best_at, best, chosen = run.best(metric)
    label = _label(metric)
    cohort, population = _cohort(run)
    seconds, down, up = run.seconds(), run.total("bytes_down"), run.total("bytes_up")
    per_round = seconds / run.rounds_done if seconds is not None and run.rounds_done else None
    best_sub = f"round {best_at}, chosen on {chosen}" if chosen and best_at is not None else "not known yet"
    tuned = run.spread().get(metric, {})
    at_clients: list[str] = []
    if "mean_before" in tuned:  # what the clients use; the global model that is tested is not
        mean, before = metric_value(metric, tuned.get("mean")), metric_value(metric, tuned["mean_before"])
        at_clients = [
            parts.kpi(f"{label} after tuning", mean, f"mean of the clients; {before} before", main=True)
        ]
    cards = (
        *at_clients,
        parts.kpi(f"Final {label}", metric_value(metric, final), _at(at, run.split()), main=not at_clients),
        parts.kpi(f"Best {label}", metric_value(metric, best), best_sub),
        parts.kpi(
            "Rounds", count(run.rounds_done), "done", of=f"of {count(run.rounds)}" if run.rounds else ""
        ),
        parts.kpi("Clients a round", cohort, f"of {count(population)}" if population else ""),
        parts.kpi(
            "Time", duration(seconds), f"{duration(per_round)} a round" if per_round is not None else ""
        ),
        parts.kpi("Data sent down", size(down), f"{size(up)} sent up"),
    )
    return f'<dl class="kpis">{"".join(cards)}</dl>'


def _at(at: int | None, split: str) -> str:
    if at is None:
        return "not evaluated yet"
    where = "on test" if split == "test" else "at the clients"
    return f"{where}, after round {at}" if at else f"{where}, untrained"


def _spread(run: Run) -> str:
    """How the model does at the clients, each on what it holds out of its own data."""
    found = run.spread()
    if not found:
        return ""
    columns = {"mean": "mean", "mean_before": "mean before tuning", "std": "standard deviation"}
    columns["worst_decile"] = "worst tenth of the clients"
    shown = {key: title for key, title in columns.items() if any(key in row for row in found.values())}
    rows = [
        [escape(_label(metric)), *(metric_value(metric, row.get(key)) for key in shown)]
        for metric, row in sorted(found.items())
    ]
    table = parts.table(["", *shown.values()], rows, numeric=range(1, len(shown) + 1))
    said = (
        "Each client's model on what that client holds out of its own data, every client counting the same."
    )
    return parts.card(table, "At the clients", said)


def _cohort(run: Run) -> tuple[str, float | None]:
    """How many clients replied in a round, as a range where it varies, and the population."""
    replied = sorted(
        {int(v) for line in run.metrics if (v := finite(line.get("clients"))) and line["round"] > 0}
    )
    population = finite(subtable(run.summary, "partition").get("clients"))
    if population is None and run.partition is not None:
        population = len(run.partition)
    if not replied:
        return MISSING, population
    return (count(replied[0]) if len(replied) == 1 else f"{replied[0]:,}–{replied[-1]:,}"), population


def _curves(run: Run) -> str:
    """The main metric and the loss side by side, and every other metric below."""
    keys = [key for line in run.metrics for key in line]
    found = [pair[1] for key in keys if (pair := split_of(key))]
    main = run.metric()
    metrics = sorted(set(found), key=lambda metric: (metric != main, metric != "loss", metric))
    drawn = [plot for metric in metrics if (plot := _curve(run, metric))]
    if not drawn:
        return parts.card("", "Curves", "No round has been evaluated yet.")
    cards = "".join(f'<section class="card">{plot}</section>' for plot in drawn)
    return f'<div class="pair">{cards}</div>' if len(drawn) > 1 else cards


def _curve(run: Run, metric: str) -> str:
    lines = []
    for split in ("test", "validation", "train", "local"):
        rounds, values = run.series(f"{split}_{metric}")
        if any(value is not None for value in values):
            width = 1.5 if split == "local" else 2.25
            label = figures.SPLIT_LABELS[split]
            lines.append(figures.Curve(label, rounds, values, f"var(--{split})", width=width))
    if not lines:
        return ""
    figure = figures.curves(lines, metric)
    at, best, chosen = run.best(metric) if metric == run.metric() else (None, None, None)
    if at is not None and best is not None and len(run.metrics) > 1:
        figures.star(figure, at, best, f"best, chosen on {chosen}")
    title = _label(metric).capitalize()
    ends = [f"{line.label} {metric_value(metric, line.y[-1])} after round {line.x[-1]}" for line in lines]
    return parts.plot(figure, title, f"{title} over rounds: {'; '.join(ends)}.")


def _label(metric: str) -> str:
    return metric.replace("_", " ")


def _disclosures(run: Run) -> str:
    told = run.summary.get("disclosures")
    sentences = [str(sentence) for sentence in told] if isinstance(told, list) else []
    if not sentences:
        return ""
    body = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return parts.card(body, "What left the clients beyond model updates")


def _failures(run: Run) -> str:
    table = subtable(run.summary, "failures")
    rows = [
        (str(client), str(reason), int(finite(times) or 0))
        for client, reasons in table.items()
        if isinstance(reasons, Mapping)
        for reason, times in reasons.items()
    ]
    if not rows:
        return ""
    rows.sort(key=lambda row: (-row[2], row[0], row[1]))
    total = sum(row[2] for row in rows)
    clients = len({row[0] for row in rows})
    lead = (
        f"{count(total)} {'reply was' if total == 1 else 'replies were'} lost or refused, "
        f"from {count(clients)} {'client' if clients == 1 else 'clients'}. "
        "None of them was folded into the model."
    )
    cells = [
        (escape(client), escape(reason), count(times)) for client, reason, times in rows[:_FAILURES_AT_MOST]
    ]
    more = len(rows) - len(cells)
    body = parts.table(("client", "reason", "times"), cells, numeric=(2,))
    return parts.card(
        body + (f"<p>And {count(more)} more lines in summary.json.</p>" if more else ""), "Failures", lead
    )


def _settings(run: Run) -> str:
    tables = {key: value for key, value in run.config.items() if isinstance(value, Mapping)}
    scalars = {key: value for key, value in run.config.items() if not isinstance(value, Mapping)}
    groups = [("run", list(_flat(scalars)))] if scalars else []
    groups += [(key, list(_flat(value)) or [("defaults", "")]) for key, value in tables.items()]
    return parts.card(
        parts.settings(groups), "Settings", "All of them, as the run resolved them (config.toml)."
    )


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and value of every setting, the names of inner tables joined by dots."""
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif key == "memory" and isinstance(value, int):
            yield f"{prefix}{key}", size(value)
        else:
            yield f"{prefix}{key}", _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if value != round(value, 6) or abs(value) >= 1e6 else repr(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    return "not set" if value is None else str(value)


def _foot(run: Run) -> str:
    training, examples = run.sum("seconds"), run.total("examples")
    speed = examples / training if examples is not None and training else None
    totals = [
        ("Time in all", duration(run.seconds())),
        ("of it, training", duration(training)),
        ("Examples trained on", count(examples)),
        ("Examples a second of training", count(speed)),
        ("Replies folded", count(run.total("clients"))),
        ("Replies lost or refused", count(run.total("failed"))),
        ("Sent down to clients", size(run.total("bytes_down"))),
        ("Sent up by clients", size(run.total("bytes_up"))),
        ("Engine", run.part("engine") or MISSING),
    ]
    pair = parts.card(parts.lines(totals), "Totals") + _reproduce(run)
    environment = list(_flat(run.environment))
    folded = parts.folded("Environment", parts.lines(environment)) if environment else ""
    version = run.environment.get("fedlens")
    maker = f"fedlens {escape(str(version))}" if version else "fedlens"
    made = f"Made by {maker} from the run directory; opens offline."
    return f'<div class="pair">{pair}</div>{folded}<footer>{made}</footer>'


def _reproduce(run: Run) -> str:
    command = run.environment.get("command")
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    config = shlex.quote(str(Path(_directory(run)) / "config.toml"))
    body = (
        '<p class="lead">From the settings of this run, seed included:</p>'
        + f"<pre>fedlens run {escape(config)}</pre>"
    )
    if command:
        body += '<p class="lead next">It was started with:</p>' + f"<pre>{escape(str(command))}</pre>"
    digest = subtable(run.summary, "partition").get("digest")
    if digest:
        body += (
            '<p class="lead next">A run on the same partition shows this digest: '
            f"<code>{escape(str(digest)[:16])}</code></p>"
        )
    return parts.card(body, "Do it again")


def _directory(run: Run) -> str:
    return str(run.summary.get("directory") or run.directory)
