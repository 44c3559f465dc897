"""Shows the progress of a run: a line per round, and a progress bar on a terminal.

Without a terminal, a line is printed after 15 s of silence too. A terminal gets the lines of about `_TERMINAL_LINES`
rounds at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlens.base.format import (
    POOLED,
    count,
    duration,
    finite,
    label,
    many,
    metric_value,
    number,
    rounds_of,
    size,
    split_of,
)
from fedlens.cli.display.client_table import client_lines, worst_text
from fedlens.cli.display.forecast import Forecast
from fedlens.cli.display.live_display import LiveDisplay
from fedlens.pages.cost.measures import measure
from fedlens.run.progress import ProgressBase

if TYPE_CHECKING:
    from rich.console import Console

    from fedlens.core.step_counts import Work

_TERMINAL_LINES = 200  # rounds of a run that stay on a terminal
SILENCE = 15.0  # seconds after which a line is printed, without a terminal


class RunDisplay(LiveDisplay, ProgressBase):
    """The progress of a run, for `Experiment.run`; keeps the run directory for the messages at the end."""

    def __init__(self, console: Console, quiet: bool = False, **how: Any) -> None:
        super().__init__(console, quiet, **how)
        self.directory: Path | None = None
        self._rounds: int | None = None
        self._forecast = Forecast()
        self._last: list[str] = []  # metrics and speed of the last rounds, on a terminal
        self._shown = 0  # the last round with a line on a terminal
        self._done = 0  # the last round that is done
        self._due = 0.0  # when silence has lasted too long

    def started(self, plan: dict[str, Any]) -> None:
        """Called before the first round."""
        self.directory = Path(plan["directory"])
        self._rounds = self._forecast.rounds = plan.get("rounds")
        if self._quiet:
            return
        for line in opening_lines(plan):
            self._print(line, soft_wrap=not self._console.is_terminal)
        self.begin(self._forecast.short(0), self._rounds)

    def working(self, work: Work) -> None:
        """Called when clients are asked, and after each answer."""
        if self._quiet:
            return
        self._forecast.follow(work, self._clock())
        if self._bar is None:
            self.tick()

    def _update(self, now: float) -> None:
        work, forecast = self._forecast.work, self._forecast
        if self._bar is not None:
            training = work is not None and work.phase == "training"
            done = work.round - 1 + work.fraction if work is not None and training else self._done
            self._move(forecast.short(self._done), done, self._rounds, [forecast.left(now), *self._last])
        elif line := forecast.first_estimate(now) or (forecast.text(now) if now >= self._due else None):
            self._print(line, soft_wrap=True)

    def round_done(self, metrics: dict[str, Any]) -> None:
        """Called after each round; `metrics` is its line of metrics.jsonl."""
        if self._quiet:
            return
        now, self._done = self._clock(), int(metrics["round"])
        elapsed, seconds = (finite(metrics.get(key)) for key in ("elapsed", "seconds"))
        self._forecast.round_done(self._done, elapsed, seconds, now)
        if self._bar is None:
            self._print(round_line(metrics, self._rounds), soft_wrap=True)
            if better := self._forecast.better_estimate(now):
                self._print(better, soft_wrap=True)
            return
        if values := [f"{metric} {metric_value(metric, value)}" for metric, value in tested(metrics)]:
            values[0] += f" after round {self._done}"
        self._last = [*(values or self._last[:-1]), speed(metrics)]
        if self._stays(bool(values)):
            self._shown = self._done
            line = round_line(metrics, self._rounds, self._console.width)
            self._print(line, no_wrap=True, overflow="ellipsis")
        self.tick()

    def _stays(self, evaluated: bool) -> bool:
        """Whether the round that is done keeps a line above the bar: in a long run only some evaluated rounds."""
        if self._rounds is None or self._rounds <= _TERMINAL_LINES or self._done in (0, self._rounds):
            return True
        return evaluated and self._done - self._shown >= self._rounds / _TERMINAL_LINES

    def result(
        self, summary: dict[str, Any], directory: Path, files: Mapping[str, Path] | None = None
    ) -> None:
        """Prints the outcome, the result page and `files`; with --quiet only the path, or the first file."""
        from fedlens.run.rundir import RunDir

        page = RunDir(directory).report_path
        result = page if page.is_file() else directory
        if self._quiet:
            if not self._console.stderr:
                self._print(str(next(iter((files or {}).values()), result)), soft_wrap=True)
            return
        clients = client_lines(directory) if summary.get("clients") else ()
        for line in [*closing_lines(summary), *clients]:
            self._print(line, soft_wrap=True)
        for line in warning_lines(summary):
            self._print(line, style="yellow", soft_wrap=True)
        label = "result page" if result == page else "run directory"
        for name, path in {label: result, **(files or {})}.items():
            self._print(f"{name}: {path}", style="bold", soft_wrap=True)

    def _print(self, text: str, **how: Any) -> None:
        self._due = self._clock() + SILENCE
        super()._print(text, **how)


def tested(metrics: dict[str, Any]) -> list[tuple[str, float | None]]:
    """The first test metric of a round and the loss; empty for a round without evaluation.

    The k-NN accuracy comes beside the first metric of the task, which shows whether embeddings collapse.

    Without a single global model, these are the metrics of the clients' models on the data that they hold out. A line
    has no room for the other metrics, which are in metrics.jsonl and on the result page.

    >>> tested({"round": 1, "test_loss": 0.5, "test_accuracy": 0.9, "test_accuracy_top5": 1.0})
    [('accuracy', 0.9), ('loss', 0.5)]
    >>> tested({"round": 1, "test_knn_accuracy": 0.3, "test_embedding_deviation": 0.9})
    [('knn_accuracy', 0.3), ('embedding_deviation', 0.9)]
    """
    pairs = [(pair, finite(value)) for key, value in metrics.items() if (pair := split_of(key))]
    split = "test" if any(pair[0] == "test" for pair, _ in pairs) else "validation"
    metrics_of_split = [(pair[1], value) for pair, value in pairs if pair[0] == split]
    scores = [pair for pair in metrics_of_split if pair[0] != "loss"]
    shown = 2 if scores and scores[0][0] == "knn_accuracy" else 1
    return scores[:shown] + [pair for pair in metrics_of_split if pair[0] == "loss"]


def speed(metrics: dict[str, Any]) -> str:
    """Images per second in this round; empty for a round without training."""
    examples, seconds = finite(metrics.get("examples")), finite(metrics.get("seconds"))
    return f"{count(examples / seconds)} images/s" if examples and seconds else ""


def round_line(metrics: dict[str, Any], rounds: int | None, width: int | None = None) -> str:
    """One round as one line; without the speed if it is longer than `width`.

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
    if "skipped" in metrics:
        parts.append("skipped")
    line = "  ".join(filter(None, parts))
    if width is not None and len(line) > width:
        line = "  ".join(part for part in parts if part and part != speed(metrics))
    return line


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
        on = "" if chosen_on == "test" or where == POOLED else f" on {chosen_on}"
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
    if peer := finite(totals.get("bytes_peer")):
        cost[-1] += f", {size(peer)} between clients"
    if totals.get("failed"):
        cost.append(f"{many(totals['failed'], 'reply', 'replies')} lost or rejected")
    if totals.get("skipped"):
        cost.append(f"{many(totals['skipped'], 'round')} skipped")
    if finite(totals.get("seconds")) is None and summary.get("privacy"):
        cost = ["who took part, with bytes and seconds, is in private.jsonl"]
    ends = [", ".join(cost), *filter(None, [(summary.get("privacy") or {}).get("sentence")])]
    values = tested(final)
    if not values:
        return [f"{summary.get('status')} after {summary.get('rounds_done')} rounds", *ends]
    best_of = split_of(str((summary.get("best") or {}).get("metric")))
    split = "test" if any(name.startswith("test_") for name in final) else "validation"
    metric, value = values[0]
    if best_of and f"{split}_{best_of[1]}" in final:  # the score of the task
        metric, value = best_of[1], finite(final[f"{split}_{best_of[1]}"])
    name, status, round = label(metric), summary.get("status"), final.get("round")
    where = "on test" if f"test_{metric}" in final else POOLED
    outcome = f"{name} {metric_value(metric, value)} {where} after round {round}"
    best = _best_text(summary.get("best") or {}, metric, where)
    mean, worst = (finite(final.get(f"clients_{metric}_{of}")) for of in ("mean", "worst_decile"))
    at_worst = worst_text(summary, metric, worst)
    if f"clients_{metric}_mean_before" not in final:
        return [f"{status}: {outcome}{at_worst}{best}", *ends]
    # Clients use the tuned models; all other metrics are of the global model.
    return [
        f"{status}: {measure(metric, 'clients')} {metric_value(metric, mean)}, each after tuning, "
        f"in round {round}{at_worst}",
        f"global model, not tuned: {outcome}{best}",
        *ends,
    ]
