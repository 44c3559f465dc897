"""What federation costs, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.base.format import client_name, is_share, many, metric_value, points, signed
from fedlens.pages.cost.labels import low_client_sentences
from fedlens.pages.cost.measures import interval_text, listed, measure
from fedlens.results.statistics import LEAST_SEEDS, UNSURE

_NAMES = 3  # clients named in a sentence
WIDE = 0.3  # the width from which on an interval of shares needs a word
_CAUSES = {
    "federation": ("Federation as a whole", "centralized training"),
    "partition": ("The partition", "with IID clients"),
}


def sentences(answer: Mapping[str, Any]) -> list[str]:
    """The answer in words: the cost of federation, that of the partition, the worst client, who gains by joining."""
    said = [_difference_sentence(answer, name) for name in _CAUSES]
    # A client that is low with every model is the answer; of the others, chance often decides who is last.
    said += low_client_sentences(answer) or [_worst_sentence(answer)]
    return [sentence for sentence in (*said, _joining_sentence(answer)) if sentence]


def _difference_sentence(answer: Mapping[str, Any], name: str) -> str:
    """A difference with its interval; minus is lower, in words and in numbers."""
    row, metric, overall = answer["differences"][name], answer["metric"], answer["overall"]
    if row is None:
        return ""
    (cause, than), of = _CAUSES[name], measure(metric, row["on"])
    bounds, seeds = interval_text(metric, row), many(row["seeds"], "seed")
    about = f"95 % interval {bounds}, {seeds}" if bounds else f"{seeds}, no interval"
    if row["sign"] == 0:
        said = f"{cause} makes {UNSURE} to {of}: {_change(metric, row)} ({about})"
    else:
        lower = "lower" if row["mean"] < 0 else "higher"
        said = f"{cause} makes {of} {points(metric, row['mean'])} {lower} than {than} ({about})"
    if name == "federation":
        return said + (", against centralized training." if row["sign"] == 0 else ".")
    means = {role: each[row["on"]]["mean"] for role, each in overall.items() if each[row["on"]]}
    values = {role: metric_value(metric, mean) for role, mean in means.items()}
    more = f" and {values['centralized']} centralized" if "centralized" in values else ""
    return f"{said}: {values['federated']} instead of {values['iid']} with IID clients{more}."


def _change(metric: str, row: Mapping[str, Any]) -> str:
    return signed(metric, row["mean"]) + (" points" if is_share(metric) else "")


def alike(answer: Mapping[str, Any]) -> list[str]:
    """The clients whose interval overlaps that of the worst client, so that chance may have put it last."""
    worst, *others = answer["clients"] or [{"interval": None}]
    if worst["interval"] is None:
        return []
    return [row["client"] for row in others if row["interval"] and row["interval"][0] <= worst["interval"][1]]


def _worst_sentence(answer: Mapping[str, Any]) -> str:
    if not answer["clients"]:
        return ""
    worst, metric, others = answer["clients"][0], answer["metric"], alike(answer)
    models = {"centralized": "with the centralized model", "local-only": "with a model of its own"}
    known = [
        ", ".join(
            f"{metric_value(metric, worst[r])} {of}" for r, of in models.items() if worst.get(r) is not None
        )
    ]
    if worst["interval"] is not None:
        low, high = (f"{100 * bound:.0f}" for bound in worst["interval"])
        known.insert(0, f"95 % interval {low} to {high}")
    about = "; ".join(filter(None, known))
    measured = (
        f"{metric_value(metric, worst['federated'])} on its {many(worst['held_out'], 'held-out image')}"
    )
    measured += f" ({about})" if about else ""
    name, trivial = client_name(worst["client"], begins=True), ""
    if below_largest(worst):
        trivial = f" Always its largest class would be right for {metric_value(metric, worst['largest'])}."
    if not others:
        return f"{name} does worst: {measured}.{trivial}"
    named = ", ".join(map(client_name, others[:_NAMES]))
    more = f" and {many(len(others) - _NAMES, 'other')}" if len(others) > _NAMES else ""
    share = hold_out_more(answer)
    hint = f"hold out more images (data.validation = {share:g})" if share else "it needs more images"
    return f"{name} has the lowest value: {measured}. That cannot be told apart from {named}{more}; {hint}.{trivial}"


def below_largest(row: Mapping[str, Any]) -> bool:
    """Whether the federated model is right less often than always naming the client's most frequent class."""
    return row["largest"] is not None and row["federated"] < row["largest"] - 1e-9


def hold_out_more(answer: Mapping[str, Any]) -> float | None:
    """A larger share of images to hold out; None if the share is 0.4 or more already."""
    share = answer["work"].get("validation") or 0.2
    return 0.4 if share < 0.4 else None


def wide_note(answer: Mapping[str, Any]) -> str:
    """A sentence if intervals are so wide that they say nothing about the size of a difference; empty otherwise."""
    rows = [
        (client_name(row["client"]), row["vs_centralized"], row["vs_local_only"]) for row in answer["clients"]
    ]
    clients = [name for name, *compared in rows if any(map(_is_wide, compared))]
    named = ["overall"] if any(map(_is_wide, answer["differences"].values())) else []
    named += clients[:_NAMES]
    if not named or not is_share(answer["metric"]):
        return ""
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
        do, seeds = "does" if better == 1 else "do", many(joining[0]["vs_local_only"]["seeds"], "seed")
        return (
            f"{better} of {len(joining)} clients {do} better in the federation than with a model of their own; "
            f"{seeds} cannot say how certain that is (--seeds {LEAST_SEEDS})."
        )
    gain, lose, unsure = (
        sum(row["verdict"] == word for row in joining) for word in ("gains", "loses", UNSURE)
    )
    said = (
        f"Of {many(len(joining), 'client')}, {gain} {'gains' if gain == 1 else 'gain'} by joining, "
        f"{lose} {'loses' if lose == 1 else 'lose'}, and {unsure} {'shows' if unsure == 1 else 'show'} {UNSURE}."
    )
    row, metric = answer["differences"]["joining"], answer["metric"]
    if row is None or not row["sign"] or (gain if row["sign"] > 0 else lose):
        return said
    # The mean over the clients is clear where no client is.
    higher, bounds = "higher" if row["mean"] > 0 else "lower", interval_text(metric, row)
    return (
        f"{said} Their mean is clearly {higher} all the same, {_change(metric, row)} (95 % interval {bounds}): "
        "this interval covers the seeds only, and that of one client also the chance of its few held-out images."
    )
