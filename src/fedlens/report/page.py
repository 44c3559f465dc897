"""report.html: one run as a page that opens offline."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlens.experiment.rundir import RunDir
from fedlens.report import figures
from fedlens.report.format import MISSING, count, duration, finite, metric_value, size, split_of
from fedlens.report.partition_page import partition_section
from fedlens.report.read import Run, read_run, subtable
from fedlens.report.render import Plot, write_page

_FAILURES_AT_MOST = 50


def write_report(run_dir: Path) -> Path:
    """Writes report.html into a run directory and returns its path.

    Works on runs of any status; parts without data are left out.

    Raises `RunDirectoryError` where `run_dir` is no run directory.
    """
    run = read_run(run_dir)
    started = _start_time(run.environment)
    context = {
        "title": f"{run.name} · {run.status} · fedlens",
        "aside": " · ".join(filter(None, [run.run_id, started])),
        **_header(run),
        "banner": _banner(run),
        "kpis": _kpis(run),
        "curves": _curves(run),
        "spread": _spread(run),
        "partition": partition_section(run.partition),
        "disclosures": _disclosures(run),
        "failures": _failures(run),
        "settings": _settings(run),
        "totals": _totals(run),
        **_reproduce(run),
        "environment": list(_flat(run.environment)),
    }
    return write_page(RunDir(run.directory).report_path, "run.html.j2", context)


def _start_time(environment: Mapping[str, Any]) -> str:
    """When the run started: 2026-11-20 10:15 UTC."""
    started = next(
        (v for key, v in environment.items() if key.startswith("start") and isinstance(v, str)), ""
    )
    try:
        return datetime.fromisoformat(started).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return started


def _header(run: Run) -> dict[str, Any]:
    parameters = subtable(run.summary, "model").get("parameters")
    return {
        "name": run.name,
        "status": run.status,
        "kind": run.status if run.status in ("finished", "failed", "interrupted") else "running",
        "algorithm": run.part("algorithm") or "an algorithm",
        "dataset": run.part("data", "dataset") or "a dataset",
        "model": run.part("model"),
        "parameters": None if parameters is None else count(finite(parameters)),
        "recipe": run.part("data", "partition"),
    }


def _banner(run: Run) -> dict[str, Any] | None:
    """The reason why there is no final result, and how to continue."""
    if run.status == "finished":
        return None
    reached = f"The last completed round is {run.rounds_done} of {count(run.rounds)}."
    resume = f"fedlens resume {shlex.quote(_directory(run))}"
    error = str(run.summary.get("error") or "")
    if run.status == "failed":
        reason = error[:1].upper() + error[1:] if error else "The reason was not recorded."
        return {"title": "The run failed", "texts": [reason, reached], "code": ""}
    if run.status == "interrupted":
        texts = [*([error] if error else []), f"{reached} Continue with:"]
        return {"title": "The run was interrupted", "texts": texts, "code": resume}
    texts = [
        "The run is in progress, or it was killed. This page shows its state when the page was written.",
        "Continue a killed run with:",
    ]
    return {"title": "No result yet", "texts": texts, "code": resume}


def _kpi(label: str, value: str, sub: str = "", of: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "sub": sub, "of": of}


def _kpis(run: Run) -> list[dict[str, str]]:
    """The main numbers; the first one is highlighted."""
    metric = run.metric()
    at, final = run.final(metric)
    best_at, best, chosen = run.best(metric)
    label = _label(metric)
    cohort, population = _cohort(run)
    seconds, down, up = run.seconds(), run.total("bytes_down"), run.total("bytes_up")
    per_round = seconds / run.rounds_done if seconds is not None and run.rounds_done else None
    best_sub = f"round {best_at}, chosen on {chosen}" if chosen and best_at is not None else "not known yet"
    kpis = []
    tuned = run.spread().get(metric, {})
    if "mean_before" in tuned:  # clients use the tuned models; the test set measures the global one
        mean, before = metric_value(metric, tuned.get("mean")), metric_value(metric, tuned["mean_before"])
        kpis.append(_kpi(f"{label} after tuning", mean, f"mean of the clients; {before} before"))
    return [
        *kpis,
        _kpi(f"Final {label}", metric_value(metric, final), _at(at, run.split())),
        _kpi(f"Best {label}", metric_value(metric, best), best_sub),
        _kpi("Rounds", count(run.rounds_done), "done", f"of {count(run.rounds)}" if run.rounds else ""),
        _kpi("Clients per round", cohort, f"of {count(population)}" if population else ""),
        _kpi("Time", duration(seconds), f"{duration(per_round)} per round" if per_round is not None else ""),
        _kpi("Data sent down", size(down), f"{size(up)} sent up"),
    ]


def _at(at: int | None, split: str) -> str:
    if at is None:
        return "not evaluated yet"
    where = "on test" if split == "test" else "at the clients"
    return f"{where}, after round {at}" if at else f"{where}, untrained"


def _spread(run: Run) -> dict[str, Any] | None:
    """The metrics over clients, each on the data that it holds out."""
    spread = run.spread()
    if not spread:
        return None
    columns = {"mean": "mean", "mean_before": "mean before tuning", "std": "standard deviation"}
    columns["worst_decile"] = "worst tenth of the clients"
    shown = {key: title for key, title in columns.items() if any(key in row for row in spread.values())}
    rows = [
        [_label(metric), *(metric_value(metric, row.get(key)) for key in shown)]
        for metric, row in sorted(spread.items())
    ]
    return {"head": ["", *shown.values()], "rows": rows}


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


def _curves(run: Run) -> list[Plot]:
    """The main metric, the loss, and every other metric."""
    metrics = {pair[1] for line in run.metrics for key in line if (pair := split_of(key))}
    main = run.metric()
    ordered = sorted(metrics, key=lambda metric: (metric != main, metric != "loss", metric))
    return [plot for metric in ordered if (plot := _curve(run, metric))]


def _curve(run: Run, metric: str) -> Plot | None:
    lines = []
    for split in ("test", "validation", "train", "local"):
        rounds, values = run.series(f"{split}_{metric}")
        if any(value is not None for value in values):
            width = 1.5 if split == "local" else 2.25
            label = figures.SPLIT_LABELS[split]
            lines.append(figures.Curve(label, rounds, values, f"var(--{split})", width=width))
    if not lines:
        return None
    figure = figures.curves(lines, metric)
    at, best, chosen = run.best(metric) if metric == run.metric() else (None, None, None)
    if at is not None and best is not None and len(run.metrics) > 1:
        figure["data"].append(figures.star(at, best, f"best, chosen on {chosen}"))
    title = _label(metric).capitalize()
    ends = [f"{line.label} {metric_value(metric, line.y[-1])} after round {line.x[-1]}" for line in lines]
    return Plot(figure, title, f"{title} over rounds: {'; '.join(ends)}.")


def _label(metric: str) -> str:
    return metric.replace("_", " ")


def _disclosures(run: Run) -> list[str]:
    sentences = run.summary.get("disclosures")
    return [str(sentence) for sentence in sentences] if isinstance(sentences, list) else []


def _failures(run: Run) -> dict[str, Any] | None:
    table = subtable(run.summary, "failures")
    rows = [
        (str(client), str(reason), int(finite(times) or 0))
        for client, reasons in table.items()
        if isinstance(reasons, Mapping)
        for reason, times in reasons.items()
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: (-row[2], row[0], row[1]))
    total = sum(row[2] for row in rows)
    clients = len({row[0] for row in rows})
    lead = (
        f"{count(total)} {'reply was' if total == 1 else 'replies were'} lost or rejected, "
        f"from {count(clients)} {'client' if clients == 1 else 'clients'}. "
        "The model contains none of them."
    )
    cells = [(client, reason, count(times)) for client, reason, times in rows[:_FAILURES_AT_MOST]]
    more = len(rows) - len(cells)
    return {"lead": lead, "rows": cells, "more": count(more) if more else ""}


def _settings(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each table of config.toml with its settings; those outside of tables come first."""
    tables = {key: value for key, value in run.config.items() if isinstance(value, Mapping)}
    scalars = {key: value for key, value in run.config.items() if not isinstance(value, Mapping)}
    groups = [("run", list(_flat(scalars)))] if scalars else []
    return groups + [(key, list(_flat(value)) or [("defaults", "")]) for key, value in tables.items()]


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
            yield f"{prefix}{key}", _format_setting(value)


def _format_setting(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if value != round(value, 6) or abs(value) >= 1e6 else repr(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_format_setting, value)) or "none"
    return "not set" if value is None else str(value)


def _totals(run: Run) -> list[tuple[str, str]]:
    training, examples = run.sum("seconds"), run.total("examples")
    speed = examples / training if examples is not None and training else None
    return [
        ("Total time", duration(run.seconds())),
        ("Training time", duration(training)),
        ("Examples trained on", count(examples)),
        ("Examples per second of training", count(speed)),
        ("Replies aggregated", count(run.total("clients"))),
        ("Replies lost or rejected", count(run.total("failed"))),
        ("Sent down to clients", size(run.total("bytes_down"))),
        ("Sent up by clients", size(run.total("bytes_up"))),
        ("Engine", run.part("engine") or MISSING),
    ]


def _reproduce(run: Run) -> dict[str, str]:
    command = run.environment.get("command")
    version = run.environment.get("fedlens")
    config = shlex.quote(str(Path(_directory(run)) / "config.toml"))
    return {
        "reproduce": f"fedlens run {config}",
        "command": shlex.join(map(str, command)) if isinstance(command, list) else str(command or ""),
        "digest": str(subtable(run.summary, "partition").get("digest") or "")[:16],
        "maker": f"fedlens {version}" if version else "fedlens",
    }


def _directory(run: Run) -> str:
    return str(run.summary.get("directory") or run.directory)
