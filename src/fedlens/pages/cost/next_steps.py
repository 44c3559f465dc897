"""What to try next after `fedlens cost`: suggestions with their commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from fedlens.base.format import client_name, label, many, metric_value, points
from fedlens.base.shell_command import shell_command
from fedlens.pages.cost.sentences import alike, hold_out_more
from fedlens.results.statistics import LEAST_SEEDS

MOST = 3
_FEW = 50  # held-out images of a client
_WIDE = 0.02  # half the width of an interval that more seeds should narrow
_COST = 0.02  # a difference that another algorithm may reduce
_SKEWED, _EVEN = 0.3, 0.1  # earth mover's distance of the clients' classes to the population
_SEEDS = 5
DEFAULT_SEEDS = 3  # of `fedlens cost`


class _Step(NamedTuple):
    """A reason to run the command again: with other settings beside `--out` with a suffix, or with more seeds."""

    why: str
    suffix: str = ""
    changes: tuple[str, ...] = ()
    seeds: int | None = None


def next_steps(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Up to three suggestions, the most important first: `why`, and the `command`."""
    return [{"why": step.why, "command": _command(answer, step)} for step in islice(_steps(answer), MOST)]


def _steps(answer: Mapping[str, Any]) -> Iterator[_Step]:
    work, low = answer["work"], answer["low_clients"]
    if low and not work.get("keeps_images"):  # else this page has the images
        name = client_name(low[0]["client"], begins=True)
        why = f"{name} is clearly lower with every model: look at its images. The page of this command has them."
        yield _Step(why, "images", ("record.images=true",))
    warned, rounds, lr = " ".join(answer["warnings"]), work.get("rounds"), work.get("lr")
    if rounds and lr and "noise" in warned:
        why = "The curves are not at rest at their end, so halve the learning rate."
        yield _Step(why, "lr", (f"local.lr={lr / 2:g}",))
    elif rounds and "more rounds" in warned:
        moving = "final value is" in warned
        reason = (
            "The curves are not at rest at their end" if moving else "The centralized reference ends too low"
        )
        yield _Step(f"{reason}, so train longer.", "rounds", (f"rounds={2 * rounds}",))
    share, clients = hold_out_more(answer), answer["clients"]
    few = sum(row["held_out"] < _FEW for row in clients)
    if few and share is not None and alike(answer):
        why = f"{few} of {many(len(clients), 'client')} hold out fewer than {_FEW} images"
        why += ", so chance decides who is last: hold out more."
        yield _Step(why, "validation", (f"data.validation={share:g}",))
    row = answer["differences"]["partition"] or answer["differences"]["federation"]
    if row is not None:
        yield from _for_cost(answer, row)


def _for_cost(answer: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[_Step]:
    """Suggestions after the difference `row` of the federated run."""
    work, emd, metric = answer["work"], answer.get("emd"), answer["metric"]
    if row["mean"] <= -_COST and row["sign"] != 0 and work.get("algorithm") == "fedavg" and emd is not None:
        cost = f"The federated run is {points(metric, row['mean'])} lower, and the clients have"
        if emd >= _SKEWED:
            why = f"{cost} different classes: try FedDyn or SCAFFOLD (docs/which-algorithm.md)."
            yield _Step(why, "feddyn", ("algorithm.name=feddyn", "algorithm.alpha=0.5"))
        elif emd <= _EVEN and work.get("norm") is not None:
            why = f"{cost} the same classes, so their images may differ: try FedBN."
            yield _Step(why, "fedbn", ("algorithm.name=fedbn", "model.norm=batch"))
    if metric == "loss":
        return
    if row["low"] is None:
        why = f"{many(row['seeds'], 'seed')} cannot say what is chance: run {LEAST_SEEDS} or more."
        yield _Step(why, seeds=LEAST_SEEDS)
    elif (width := row["high"] - row["low"]) >= 2 * _WIDE and row["sign"] == 0:
        wide = metric_value(metric, width).replace(" %", " points")
        why = f"The interval of the difference in {label(metric)} is {wide} wide: run more seeds."
        yield _Step(why, seeds=max(_SEEDS, 2 * len(answer["seeds"])))


def _command(answer: Mapping[str, Any], step: _Step) -> str:
    given = answer.get("command") or {}
    out, before = given.get("out") or f"runs/{answer['name']}-cost", list(given.get("changes", ()))
    directory = f"{out}-{step.suffix}" if step.changes else out
    seeds = step.seeds or len(answer["seeds"])
    if given.get("recipe") is None:
        changes = [*before, *step.changes]
        arguments = [
            "experiment",
            *([repr(changes)] if changes else []),
            f"seeds={seeds}",
            f"out={directory!r}",
        ]
        return f"fedlens.cost({', '.join(arguments)})"
    keys = {change.partition("=")[0] for change in step.changes}
    kept = [change for change in before if change.partition("=")[0].strip() not in keys]
    return shell_command(
        "cost",
        given["recipe"],
        changes=(*kept, *step.changes),
        seeds=None if seeds == DEFAULT_SEEDS else seeds,
        data_dir=given.get("data_dir"),
        out=directory if step.changes or given.get("out") else None,
    )
