"""What federation costs, in sentences, and what to try next: suggestions with their commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.base.format import client_name, is_share, label, many, metric_value, points, signed
from fedlens.base.shell_command import shell_command
from fedlens.pages.cost.labels import low_client_sentences
from fedlens.pages.cost.measures import listed, measure
from fedlens.results.statistics import LEAST_SEEDS, UNSURE

_NAMES = 3  # clients named in a sentence
WIDE = 0.3  # the width from which on an interval of shares needs a word


def interval_text(metric: str, row: Mapping[str, Any] | None) -> str:
    """The interval of a difference: "-5.2 to -3.0"; empty without one."""
    if row is None or row["low"] is None:
        return ""
    return f"{signed(metric, row['low'])} to {signed(metric, row['high'])}"


def sentences(answer: Mapping[str, Any]) -> list[str]:
    """The answer in words: the cost of the partition, the worst client, who gains by joining."""
    said = [_partition_sentence(answer), _federation_sentence(answer)]
    # A client that is low with every model is the answer; of the others, chance often decides who is last.
    said += low_client_sentences(answer) or [_worst_sentence(answer)]
    return [sentence for sentence in (*said, _joining_sentence(answer)) if sentence]


def _value_of(answer: Mapping[str, Any], role: str, on: str) -> str | None:
    spread = (answer["overall"].get(role) or {}).get(on)
    return None if spread is None else metric_value(answer["metric"], spread["mean"])


def _difference_words(answer: Mapping[str, Any], row: Mapping[str, Any], cause: str, than: str) -> str:
    """A difference with its interval; minus is lower, in words and in numbers."""
    metric, of = answer["metric"], measure(answer["metric"], row["on"])
    about = f"{many(row['seeds'], 'seed')}, no interval"
    if row["low"] is not None:
        about = f"95 % interval {interval_text(metric, row)}, {many(row['seeds'], 'seed')}"
    begin = f"{cause[:1].upper()}{cause[1:]}"
    if row["sign"] == 0:
        unit = " points" if is_share(metric) else ""
        return f"{begin} makes {UNSURE} to {of}: {signed(metric, row['mean'])}{unit} ({about})"
    lower = "lower" if row["mean"] < 0 else "higher"
    return f"{begin} makes {of} {points(metric, row['mean'])} {lower} than {than} ({about})"


def _partition_sentence(answer: Mapping[str, Any]) -> str:
    row = answer["differences"]["partition"]
    if row is None:
        return ""
    on = row["on"]
    centralized = _value_of(answer, "centralized", on)
    more = f" and {centralized} centralized" if centralized else ""
    return (
        f"{_difference_words(answer, row, 'the partition', 'with IID clients')}: "
        f"{_value_of(answer, 'federated', on)} instead of {_value_of(answer, 'iid', on)} with IID clients{more}."
    )


def _federation_sentence(answer: Mapping[str, Any]) -> str:
    row = answer["differences"]["federation"]
    if row is None:
        return ""
    words = _difference_words(answer, row, "federation as a whole", "centralized training")
    return f"{words}{', against centralized training' if row['sign'] == 0 else ''}."


def alike(answer: Mapping[str, Any]) -> list[str]:
    """The clients whose interval overlaps that of the worst client, so that chance may have put it last."""
    worst, *others = answer["clients"] or [{"interval": None}]
    if worst["interval"] is None:
        return []
    return [row["client"] for row in others if row["interval"] and row["interval"][0] <= worst["interval"][1]]


def _worst_sentence(answer: Mapping[str, Any]) -> str:
    if not answer["clients"]:
        return ""
    worst, metric = answer["clients"][0], answer["metric"]
    facts = [
        f"{metric_value(metric, worst[role])} {words}"
        for role, words in (
            ("centralized", "with the centralized model"),
            ("local-only", "with a model of its own"),
        )
        if worst.get(role) is not None
    ]
    known = [", ".join(facts)] if facts else []
    if worst["interval"] is not None:
        low, high = (f"{100 * bound:.0f}" for bound in worst["interval"])
        known.insert(0, f"95 % interval {low} to {high}")
    measured = (
        f"{metric_value(metric, worst['federated'])} on its {many(worst['held_out'], 'held-out image')}"
        f"{' (' + '; '.join(known) + ')' if known else ''}"
    )
    others, name = alike(answer), client_name(worst["client"], begins=True)
    below = below_largest(worst)
    trivial = (
        f" Always its largest class would be right for {metric_value(metric, worst['largest'])}."
        if below
        else ""
    )
    if not others:
        return f"{name} does worst: {measured}.{trivial}"
    named = ", ".join(map(client_name, others[:_NAMES]))
    more = f" and {many(len(others) - _NAMES, 'other')}" if len(others) > _NAMES else ""
    hint = hold_out_more(answer)
    return (
        f"{name} has the lowest value: {measured}. That cannot be told apart from {named}{more}; "
        f"{f'hold out more images (data.validation = {hint:g})' if hint else 'it needs more images'}.{trivial}"
    )


def below_largest(row: Mapping[str, Any]) -> bool:
    """Whether the federated model is right less often than always naming the client's most frequent class."""
    return row["largest"] is not None and row["federated"] < row["largest"] - 1e-9


def hold_out_more(answer: Mapping[str, Any]) -> float | None:
    """A larger share of images to hold out; None if the share is 0.4 or more already."""
    share = answer["work"].get("validation") or 0.2
    return 0.4 if share < 0.4 else None


def wide_note(answer: Mapping[str, Any]) -> str:
    """A sentence if intervals are so wide that they say nothing about the size of a difference; empty otherwise."""
    if not is_share(answer["metric"]):
        return ""
    keys = ("vs_centralized", "vs_local_only")
    clients = [
        client_name(row["client"]) for row in answer["clients"] if any(_is_wide(row[key]) for key in keys)
    ]
    overall = ["overall"] if any(map(_is_wide, answer["differences"].values())) else []
    if not clients and not overall:
        return ""
    named = [*overall, *clients[:_NAMES]]
    named += [many(len(clients) - _NAMES, "other client")] if len(clients) > _NAMES else []
    return (
        f"Intervals wider than {100 * WIDE:.0f} points ({listed(named)}) do not say how large a difference is: "
        "a client's held-out images or the seeds are too few. Hold out more images, or run more seeds."
    )


def _is_wide(row: Mapping[str, Any] | None) -> bool:
    return row is not None and row["low"] is not None and row["high"] - row["low"] > WIDE


def _joining_sentence(answer: Mapping[str, Any]) -> str:
    joining = [row for row in answer["clients"] if row["vs_local_only"] is not None]
    if not joining:
        return ""
    if joining[0]["verdict"] is None:
        better = sum(row["vs_local_only"]["mean"] > 0 for row in joining)
        do = "does" if better == 1 else "do"
        return (
            f"{better} of {len(joining)} clients {do} better in the federation than with a model of their own; "
            f"{many(joining[0]['vs_local_only']['seeds'], 'seed')} cannot say how certain that is "
            f"(--seeds {LEAST_SEEDS})."
        )
    counts = {word: sum(row["verdict"] == word for row in joining) for word in ("gains", "loses", UNSURE)}
    gain, lose = (f"{counts[word]} {word if counts[word] == 1 else word[:-1]}" for word in ("gains", "loses"))
    shows = "shows" if counts[UNSURE] == 1 else "show"
    said = f"Of {many(len(joining), 'client')}, {gain} by joining, {lose}, and {counts[UNSURE]} {shows} {UNSURE}."
    return said + _clear_on_average(answer, counts)


def _clear_on_average(answer: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """Why the mean over the clients can be clear where no client is; empty unless it is so."""
    row, metric = answer["differences"]["joining"], answer["metric"]
    if row is None or not row["sign"] or counts["gains" if row["sign"] > 0 else "loses"]:
        return ""
    unit = " points" if is_share(metric) else ""
    return (
        f" Their mean is clearly {'higher' if row['mean'] > 0 else 'lower'} all the same, "
        f"{signed(metric, row['mean'])}{unit} (95 % interval {interval_text(metric, row)}): this interval covers the "
        "seeds only, and that of one client also the chance of its few held-out images."
    )


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
