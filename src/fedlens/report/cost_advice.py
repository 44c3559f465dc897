"""What to try after `fedlens cost`: suggestions made from its numbers, each with the command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.base.format import client_name, label, many, metric_value, points
from fedlens.base.shell_command import shell_command
from fedlens.report.cost_sentences import alike, hold_out_more
from fedlens.results.statistics import LEAST_SEEDS

MOST = 3
_FEW = 50  # held-out images of a client
_WIDE = 0.02  # half the width of an interval that more seeds should narrow
_COST = 0.02  # a difference that another algorithm may reduce
_SKEWED, _EVEN = 0.3, 0.1  # earth mover's distance of the clients' classes to the population
_SEEDS = 5
DEFAULT_SEEDS = 3  # of `fedlens cost`


def next_steps(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Up to three suggestions, the most important first: `why`, and the `command`."""
    made = (_look_at_images, _settle, _hold_out, _algorithm, _more_seeds)
    return [step for make in made if (step := make(answer)) is not None][:MOST]


def _step(answer: Mapping[str, Any], why: str, suffix: str, *changes: str, seeds: int = 0) -> dict[str, str]:
    """A suggestion to run the command again with other settings or more seeds."""
    given = answer.get("command") or {}
    out = given.get("out") or f"runs/{answer['name']}-cost"
    directory = f"{out}-{suffix}" if changes else out
    if given.get("recipe") is None:
        arguments = [
            "experiment",
            *([repr([*given.get("changes", ()), *changes])] if changes or given.get("changes") else []),
            f"seeds={seeds or len(answer['seeds'])}",
            f"out={directory!r}",
        ]
        return {"why": why, "command": f"fedlens.cost({', '.join(arguments)})"}
    number = seeds or len(answer["seeds"])
    keys = {change.partition("=")[0] for change in changes}
    kept = [change for change in given.get("changes", ()) if change.partition("=")[0].strip() not in keys]
    command = shell_command(
        "cost",
        given["recipe"],
        changes=(*kept, *changes),
        seeds=None if number == DEFAULT_SEEDS else number,
        data_dir=given.get("data_dir"),
        out=directory if changes or given.get("out") else None,
    )
    return {"why": why, "command": command}


def _settle(answer: Mapping[str, Any]) -> dict[str, str] | None:
    rounds = answer["work"].get("rounds")
    if not answer["warnings"] or not rounds:
        return None
    lr = answer["work"].get("lr")
    if lr and any("noise" in sentence for sentence in answer["warnings"]):
        why = "The curves are not at rest at their end, so halve the learning rate."
        return _step(answer, why, "lr", f"local.lr={lr / 2:g}")
    if any("more rounds" in sentence for sentence in answer["warnings"]):
        moving = any("final value is" in sentence for sentence in answer["warnings"])
        reason = (
            "The curves are not at rest at their end" if moving else "The centralized reference ends too low"
        )
        why = f"{reason}, so train longer."
        return _step(answer, why, "rounds", f"rounds={2 * rounds}")
    return None


def _hold_out(answer: Mapping[str, Any]) -> dict[str, str] | None:
    share, clients = hold_out_more(answer), answer["clients"]
    if not clients or share is None or not alike(answer):
        return None
    few = [row for row in clients if row["held_out"] < _FEW]
    if not few:
        return None
    count = "Its client holds" if len(clients) == 1 else f"{len(few)} of {many(len(clients), 'client')} hold"
    why = f"{count} out fewer than {_FEW} images, so chance decides who is last: hold out more."
    return _step(answer, why, "validation", f"data.validation={share:g}")


def _look_at_images(answer: Mapping[str, Any]) -> dict[str, str] | None:
    """For a client that is clearly below the others with every model."""
    low = answer["low_clients"]
    if not low or answer["work"].get("keeps_images"):  # this page has the images
        return None
    name = client_name(low[0]["client"], begins=True)
    why = f"{name} is clearly lower with every model: look at its images. The page of this command has them."
    return _step(answer, why, "images", "record.images=true")


def _algorithm(answer: Mapping[str, Any]) -> dict[str, str] | None:
    work, emd = answer["work"], answer.get("emd")
    row = answer["differences"]["partition"] or answer["differences"]["federation"]
    if row is None or row["mean"] > -_COST or row["sign"] == 0 or work.get("algorithm") != "fedavg":
        return None
    cost = f"The federated run is {points(answer['metric'], row['mean'])} lower"
    if emd is not None and emd >= _SKEWED:
        why = f"{cost}, and the clients have different classes: try FedDyn or SCAFFOLD (docs/which-algorithm.md)."
        return _step(answer, why, "feddyn", "algorithm.name=feddyn", "algorithm.alpha=0.5")
    if emd is not None and emd <= _EVEN and work.get("norm") is not None:
        why = f"{cost}, and the clients have the same classes, so their images may differ: try FedBN."
        return _step(answer, why, "fedbn", "algorithm.name=fedbn", "model.norm=batch")
    return None


def _more_seeds(answer: Mapping[str, Any]) -> dict[str, str] | None:
    seeds = len(answer["seeds"])
    row = answer["differences"]["partition"] or answer["differences"]["federation"]
    if row is None or answer["metric"] == "loss":
        return None
    if row["low"] is None:
        why = f"{many(row['seeds'], 'seed')} cannot say what is chance: run {LEAST_SEEDS} or more."
        return _step(answer, why, "", seeds=LEAST_SEEDS)
    half = (row["high"] - row["low"]) / 2
    if half < _WIDE or row["sign"] != 0:
        return None
    why = (
        f"The interval of the difference in {label(answer['metric'])} is {metric_value(answer['metric'], 2 * half)} "
        "wide: run more seeds."
    ).replace(" %", " points")
    return _step(answer, why, "", seeds=max(_SEEDS, 2 * seeds))
