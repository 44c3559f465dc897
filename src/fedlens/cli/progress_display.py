"""Shows the progress of a run: a progress bar on a terminal, one line per round elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.cli.client_table import client_lines, worst_text
from fedlens.report.format import (
    count,
    duration,
    finite,
    metric_value,
    number,
    rounds_of,
    size,
    split_of,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


class ProgressDisplay:
    """The progress of a run, for `Experiment.run`; keeps the run directory for the messages at the end.

    With `quiet`, only the path of the result is printed.
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.directory: Path | None = None
        self._console = console
        self._quiet = quiet
        self._rounds: int | None = None
        self._bar: Progress | None = None
        self._pace = Pace()
        self._tested = ""

    def started(self, plan: dict[str, Any]) -> None:
        """Called before the first round."""
        self.directory = Path(plan["directory"])
        self._rounds = plan.get("rounds")
        if self._quiet:
            return
        for line in opening_lines(plan):
            self._console.print(line, soft_wrap=not self._console.is_terminal)
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("round {task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
            )
            self._bar.add_task("evaluating the untrained model", total=self._rounds)
            self._bar.start()

    def round_done(self, metrics: dict[str, Any]) -> None:
        """Called after each round; `metrics` is its line of metrics.jsonl."""
        if self._quiet:
            return
        if self._bar is None:
            self._console.print(round_line(metrics, self._rounds), soft_wrap=True)
            return
        if values := tested(metrics):
            self._tested = "  ".join(f"{metric} {metric_value(metric, value)}" for metric, value in values)
        left = self._pace.left(metrics, self._rounds)
        parts = [self._tested, speed(metrics), f"{duration(left)} left" if left is not None else ""]
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=metrics["round"], description="  ".join(filter(None, parts)))

    def note(self, text: str) -> None:
        """Prints a sentence that the user should read, for example that a damaged checkpoint was skipped."""
        if not self._quiet:
            kind = "" if text.startswith("warning: ") else "note: "
            self._console.print(f"{kind}{text}", style="yellow", soft_wrap=True)

    def finished(self, summary: dict[str, Any]) -> None:
        """Called after the last round; `result` prints the outcome."""

    def close(self) -> None:
        """Removes the progress bar; may be called twice."""
        if self._bar is not None:
            self._bar.stop()

    def result(self, summary: dict[str, Any], directory: Path) -> None:
        """Prints the outcome and the path of the result page; with --quiet only the path."""
        from fedlens.experiment.rundir import RunDir

        page = RunDir(directory).report_path
        page = page if page.exists() else directory
        if not self._quiet:
            for line in [
                *closing_lines(summary),
                *(client_lines(directory) if summary.get("clients") else ()),
            ]:
                self._console.print(line, soft_wrap=True)
            for line in warning_lines(summary):
                self._console.print(line, style="yellow", soft_wrap=True)
            self._console.print(f"result page: {page}", style="bold", soft_wrap=True)
        elif not self._console.stderr:
            for line in warning_lines(summary):
                print(line, file=sys.stderr)
            print(page)


def make_display(*, quiet: bool, stderr: bool) -> ProgressDisplay:
    """The display of a run, on standard output or standard error."""
    from rich.console import Console

    return ProgressDisplay(Console(stderr=stderr, highlight=False, markup=False, emoji=False), quiet)


class Pace:
    """Estimates the remaining time from the rounds seen so far (a resumed run starts at a later round)."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def left(self, metrics: dict[str, Any], rounds: int | None) -> float | None:
        """Seconds until `rounds` are done, or None before two rounds are seen.

        >>> pace = Pace()
        >>> pace.left({"round": 0, "elapsed": 0.0}, 10), pace.left({"round": 2, "elapsed": 3.0}, 10)
        (None, 12.0)
        """
        at, elapsed = int(metrics["round"]), finite(metrics.get("elapsed"))
        if elapsed is None or rounds is None:
            return None
        if self._first is None:
            self._first = (at, elapsed)
        done, since = at - self._first[0], elapsed - self._first[1]
        return since / done * (rounds - at) if done > 0 else None


def tested(metrics: dict[str, Any]) -> list[tuple[str, float | None]]:
    """The test metrics of a round, the loss last; empty for a round without evaluation.

    Without a single global model, these are the metrics of the clients' models on the data that they hold out.

    >>> tested({"round": 1, "test_loss": 0.5, "test_accuracy": 0.9})
    [('accuracy', 0.9), ('loss', 0.5)]
    """
    pairs = [(pair, finite(value)) for key, value in metrics.items() if (pair := split_of(key))]
    split = "test" if any(pair[0] == "test" for pair, _ in pairs) else "validation"
    metrics_of_split = [(pair[1], value) for pair, value in pairs if pair[0] == split]
    return sorted(metrics_of_split, key=lambda pair: pair[0] == "loss")


def speed(metrics: dict[str, Any]) -> str:
    """Images per second in this round; empty for a round without training."""
    examples, seconds = finite(metrics.get("examples")), finite(metrics.get("seconds"))
    return f"{count(examples / seconds)} images/s" if examples and seconds else ""


def round_line(metrics: dict[str, Any], rounds: int | None) -> str:
    """One round as one line.

    >>> round_line({"round": 3, "test_accuracy": 0.8123, "test_loss": 0.61, "local_loss": 0.5512,
    ...             "examples": 1532, "seconds": 1.0}, 80)
    'round 3/80  accuracy 0.812  loss 0.61  local 0.551  1,532 images/s  1.0 s'
    """
    total = "" if rounds is None else f"/{rounds}"
    parts = [f"round {metrics['round']}{total}"]
    parts += [f"{metric} {_short(value)}" for metric, value in tested(metrics)]
    if "local_loss" in metrics and metrics.get("clients", 1):
        parts.append(f"local {_short(finite(metrics['local_loss']))}")
    parts.append(speed(metrics))
    if seconds := finite(metrics.get("seconds")):
        parts.append(duration(seconds))
    if metrics.get("failed"):
        parts.append(f"{metrics['failed']} failed")
    return "  ".join(filter(None, parts))


def _short(value: float | None) -> str:
    return "not finite" if value is None else number(float(f"{value:.3g}"))


def opening_lines(plan: dict[str, Any]) -> list[str]:
    """What is trained, on which data, and the run directory."""
    parameters = finite(plan.get("parameters"))
    model = f"{plan.get('model')} ({count(parameters)} parameters)" if parameters else f"{plan.get('model')}"
    clients, cohort, rounds = (count(finite(plan.get(k))) for k in ("clients", "clients_per_round", "rounds"))
    return [
        f"{plan.get('name')}: {plan.get('algorithm')} on {plan.get('dataset')} with {model}",
        f"{clients} clients, {cohort} per round, {rounds} rounds, engine {plan.get('engine')}",
        *(f"beyond model updates: {sentence}" for sentence in plan.get("disclosures", ())),
        f"run directory: {plan.get('directory')}",
    ]


def warning_lines(summary: dict[str, Any]) -> list[str]:
    """One line for each warning of a run, with the affected rounds.

    >>> warning_lines({"warnings": [{"since": 3, "until": 9, "sentence": "The loss jumped.", "try": "Try less."}]})
    ['warning, rounds 3 to 9: The loss jumped. Try less.']
    """
    return [
        f"warning, {rounds_of(warning)}: {warning['sentence']} {warning['try']}"
        for warning in summary.get("warnings") or ()
    ]


def _best_text(best: dict[str, Any], metric: str, where: str) -> str:
    """The best round: its test value if it is known, and the split on which it was chosen."""
    if not best:
        return ""
    chosen_on, chosen_metric = best.get("chosen_on"), (split_of(str(best.get("metric"))) or ("", metric))[1]
    value, on = finite(best.get("test_value")), " on test"
    if chosen_on == "test" or value is None:
        value = finite(best.get("value"))
        on = "" if chosen_on == "test" or where == "at the clients" else f" on {chosen_on}"
    return (
        f"; best {metric_value(chosen_metric, value)}{on} in round {best.get('round')}, chosen on {chosen_on}"
    )


def closing_lines(summary: dict[str, Any]) -> list[str]:
    """The outcome of a run, and its cost."""
    final, totals = (summary.get(key) or {} for key in ("final", "totals"))
    cost = [
        duration(finite(totals.get("seconds"))),
        f"{count(finite(totals.get('examples')))} examples",
        f"{size(finite(totals.get('bytes_down')))} down, {size(finite(totals.get('bytes_up')))} up",
    ]
    if totals.get("failed"):
        cost.append(f"{count(totals['failed'])} replies lost or rejected")
    values = tested(final)
    if not values:
        return [f"{summary.get('status')} after {summary.get('rounds_done')} rounds", ", ".join(cost)]
    metric, value = values[0]
    label, status, round = metric.replace("_", " "), summary.get("status"), final.get("round")
    where = "on test" if f"test_{metric}" in final else "at the clients"
    outcome = f"{label} {metric_value(metric, value)} {where} after round {round}"
    best = _best_text(summary.get("best") or {}, metric, where)
    mean, worst = (finite(final.get(f"clients_{metric}_{of}")) for of in ("mean", "worst_decile"))
    at_worst = worst_text(summary, metric, worst)
    if f"clients_{metric}_mean_before" not in final:
        return [f"{status}: {outcome}{at_worst}{best}", ", ".join(cost)]
    # Clients use the tuned models; all other metrics are of the global model.
    return [
        f"{status}: {label} {metric_value(metric, mean)} at the clients, each after tuning, "
        f"in round {round}{at_worst}",
        f"global model, not tuned: {outcome}{best}",
        ", ".join(cost),
    ]
