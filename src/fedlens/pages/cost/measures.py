"""The measures of `fedlens cost`: one name each on the page, in the log, in tables and in cost.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.base.format import MISSING, capitalized, label, many, metric_value, signed, size
from fedlens.results.statistics import UNSURE

MEASURES = ("test", "clients")
WORDS = {
    "federated": "federated",
    "iid": "IID clients",
    "centralized": "centralized",
    "local-only": "local-only",
}
REFERENCES = {"partition": "iid", "federation": "centralized", "joining": "local-only"}
"""Each difference, and the role that the federated runs are compared with."""
SIGNS = {0: UNSURE, 1: "higher", -1: "lower"}
NOT_MEASURED = "not measured"
_BYTES = {
    "down_round": "sent to a client, per round",
    "up_round": "sent by a client, per round",
    "down": "sent to a client, in all rounds",
    "up": "sent by a client, in all rounds",
}
# By measure, and by whose models a run measures: what a value is of, and a sentence about it.
_MODELS = {
    "test": {
        "one": "one model",
        "own": "mean of the clients' own models",
        "tuned": "global model, not tuned",
    },
    "clients": {
        "one": "one model",
        "own": "each client's own model",
        "tuned": "the model, tuned at each client",
    },
}
_OF_MODELS = {
    "test": {
        "own": " Of {} it is the mean over the clients' own models, after the last round.",
        "tuned": " Of {} it is that of the global model, before tuning.",
    },
    "clients": {"tuned": " Of {} each client tunes the global model first."},
}


def measure(metric: str, on: str) -> str:
    """What is measured, in words.

    >>> measure("accuracy", "test"), measure("accuracy", "clients")
    ('test accuracy', "the clients' mean accuracy on held-out images")
    >>> measure("mean_iou", "clients")
    "the clients' average mean IoU on held-out images"
    """
    name = label(metric)
    mean = "average" if name.startswith("mean ") else "mean"
    return f"test {name}" if on == "test" else f"the clients' {mean} {name} on held-out images"


def measure_heading(metric: str, on: str) -> str:
    """The name of a measure at the start of a line.

    >>> measure_heading("map", "test")
    'Test mAP'
    """
    return capitalized(measure(metric, on))


def spread_text(metric: str, spread: Mapping[str, Any] | None) -> str:
    """A mean with its deviation over seeds.

    >>> spread_text("accuracy", {"mean": 0.95, "std": 0.004, "n": 3}), spread_text("loss", None)
    ('95.0 % ± 0.4', 'not measured')
    """
    return NOT_MEASURED if spread is None else metric_value(metric, spread["mean"], spread["std"])


def interval_text(metric: str, row: Mapping[str, Any] | None) -> str:
    """The interval of a difference: "-5.2 to -3.0"; empty without one."""
    if row is None or row["low"] is None:
        return ""
    return f"{signed(metric, row['low'])} to {signed(metric, row['high'])}"


def difference_text(metric: str, row: Mapping[str, Any] | None) -> str:
    """A difference with its interval: "-4.1 (-5.2 to -3.0)".

    >>> difference_text("accuracy", {"mean": -0.041, "low": None, "high": None}), difference_text("accuracy", None)
    ('-4.1', '–')
    """
    bounds = interval_text(metric, row)
    return MISSING if row is None else signed(metric, row["mean"]) + (f" ({bounds})" if bounds else "")


def shown_measures(answer: Mapping[str, Any]) -> list[str]:
    """The measures that some model has a value of."""
    return [on for on in MEASURES if any(each[on] for each in answer["overall"].values())]


def cards(answer: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """A row for each measure: its name, and for each model its name, its value and what was measured."""
    metric, overall = answer["metric"], answer["overall"]
    return [
        (
            measure_heading(metric, on),
            [
                (capitalized(WORDS[role]), spread_text(metric, each[on]), _what(role, each, on))
                for role, each in overall.items()
            ],
        )
        for on in shown_measures(answer)
    ]


def _what(role: str, each: Mapping[str, Any], on: str) -> str:
    """Which models and images a value is of; why there is none, if there is none."""
    if each[on] is None:
        return str(each["missing"].get(on, ""))
    return _MODELS[on][each["models"]] + ("; other images" if (role, on) == ("iid", "clients") else "")


def side_by_side(answer: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table: in each row one measure of all models; bytes are in `byte_rows`."""
    metric, overall = answer["metric"], answer["overall"]
    rows = [
        [measure(metric, on), *(spread_text(metric, each[on]) for each in overall.values())]
        for on in shown_measures(answer)
    ]
    return ["", *(WORDS[role] for role in overall)], rows


def byte_rows(answer: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the same table with what training sends to and by a client; empty if no run counted it."""
    counted = [answer["bytes_per_client"].get(role) for role in answer["overall"]]
    if not any(counted):
        return []
    return [
        [words, *(MISSING if each is None else size(each[key]) for each in counted)]
        for key, words in _BYTES.items()
    ]


def bytes_notes(answer: Mapping[str, Any]) -> list[str]:
    """Sentences on what the bytes are of; none if no run counted them."""
    counted = [each for each in answer["bytes_per_client"].values() if each]
    if not counted:
        return []
    down, up = (max(each[key] for each in counted) for key in ("measuring_down", "measuring_up"))
    notes = [
        "Bytes of training, per round of a client that takes part, and in all rounds of the mean client.",
    ]
    if down or up:
        sent = f"sends up to {size(down)} more to a client and {size(up)} back"
        notes.append(f"Each evaluation at the clients {sent}; this is not included.")
    if "centralized" in answer["overall"]:
        notes.append("Centralized training sends the images themselves.")
    return notes


def measure_notes(answer: Mapping[str, Any]) -> list[str]:
    """What the values of each measure are of, as sentences, and why a value is missing."""
    metric, overall, notes = answer["metric"], answer["overall"], []
    tested = answer["work"].get("test_images")
    twin = (
        " IID clients hold out other images, because all images are reassigned." if "iid" in overall else ""
    )
    images = {
        "test": f"on {many(tested, 'image')} that belong to no client."
        if tested
        else "on images of no client.",
        "clients": "each client's model on the images that this client holds out; every client counts the same, "
        f"whatever its number of images.{twin}",
    }
    for on in shown_measures(answer):
        note = f"{measure_heading(metric, on)}: {images[on]}"
        for kind, words in _OF_MODELS[on].items():
            named = [WORDS[role] for role, each in overall.items() if each["models"] == kind and each[on]]
            note += words.format(listed(named)) if named else ""
        notes.append(note)
    for on in MEASURES:
        missing: dict[str, list[str]] = {}
        for role, each in overall.items():
            if each[on] is None and (why := each["missing"].get(on)):
                missing.setdefault(why, []).append(WORDS[role])
        of = measure(metric, on)
        notes += [f"Not measured: {of} of {listed(roles)}: {why}." for why, roles in missing.items()]
    return notes


def listed(names: Sequence[str]) -> str:
    """Names as part of a sentence; empty for none.

    >>> listed(["a", "b", "c"]), listed(["a"]), listed([])
    ('a, b and c', 'a', '')
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
