"""The measures of `fedlens cost`: one name each on the page, in the log, in tables and in cost.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.base.format import MISSING, capitalized, is_share, label, many, metric_value, number, size

MEASURES = ("test", "clients")
WORDS = {
    "federated": "federated",
    "iid": "IID clients",
    "centralized": "centralized",
    "local-only": "local-only",
}
NOT_MEASURED = "not measured"
_BYTES = {
    "down_round": "sent to a client, per round",
    "up_round": "sent by a client, per round",
    "down": "sent to a client, in all rounds",
    "up": "sent by a client, in all rounds",
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
    ('95.0 % ± 0.4', '–')
    """
    if spread is None:
        return MISSING
    value = metric_value(metric, spread["mean"])
    if spread["std"] is None:
        return value
    return (
        f"{value} ± {100 * spread['std']:.1f}" if is_share(metric) else f"{value} ± {number(spread['std'])}"
    )


def shown_measures(answer: Mapping[str, Any]) -> list[str]:
    """The measures that some model has a value of."""
    return [on for on in MEASURES if any(each[on] for each in answer["overall"].values())]


def cards(answer: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """A row for each measure: its name, and for each model its name, its value and what was measured."""
    rows = []
    for on in shown_measures(answer):
        row = []
        for role, each in answer["overall"].items():
            name = capitalized(WORDS[role])
            value = NOT_MEASURED if each[on] is None else spread_text(answer["metric"], each[on])
            row.append((name, value, _what(answer, role, on)))
        rows.append((measure_heading(answer["metric"], on), row))
    return rows


def _what(answer: Mapping[str, Any], role: str, on: str) -> str:
    """Which models and images a value is of; why there is none, if there is none."""
    each = answer["overall"][role]
    if each[on] is None:
        return str(each["missing"].get(on, ""))
    if on == "test":
        several = "mean of the clients' own models"
        return {"own": several, "tuned": "global model, not tuned"}.get(each["models"], "one model")
    models = {"own": "each client's own model", "tuned": "the model, tuned at each client"}.get(
        each["models"], "one model"
    )
    return f"{models}; other images" if role == "iid" else models


def side_by_side(answer: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table: in each row one measure of all models; bytes are in `byte_rows`."""
    metric, overall = answer["metric"], answer["overall"]
    head = ["", *(WORDS[role] for role in overall)]
    rows = [
        [
            measure(metric, on),
            *(
                NOT_MEASURED if each[on] is None else spread_text(metric, each[on])
                for each in overall.values()
            ),
        ]
        for on in shown_measures(answer)
    ]
    return head, rows


def byte_rows(answer: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the same table with what training sends to and by a client; empty if no run counted it."""
    counted = {role: answer["bytes_per_client"].get(role) for role in answer["overall"]}
    if not any(counted.values()):
        return []
    return [
        [words, *(MISSING if each is None else size(each[key]) for each in counted.values())]
        for key, words in _BYTES.items()
    ]


def bytes_note(answer: Mapping[str, Any]) -> str:
    """What the bytes are of; empty if no run counted them."""
    counted = [each for each in answer["bytes_per_client"].values() if each]
    if not counted:
        return ""
    down, up = (max(each[key] for each in counted) for key in ("measuring_down", "measuring_up"))
    measuring = (
        f" Each evaluation at the clients sends up to {size(down)} more to a client and {size(up)} back; this is not "
        "included."
        if down or up
        else ""
    )
    pooled = (
        " Centralized training sends the images themselves." if "centralized" in answer["overall"] else ""
    )
    return (
        "Bytes are those of training. Per round: of a client that takes part. In all rounds: the mean of all clients."
        f"{measuring}{pooled}"
    )


def measure_notes(answer: Mapping[str, Any]) -> list[str]:
    """What the values of each measure are of, as sentences, and why a value is missing."""
    metric, overall, notes = answer["metric"], answer["overall"], []
    tested = answer["work"].get("test_images")
    shown = shown_measures(answer)
    if "test" in shown:
        name = measure_heading(metric, "test")
        own, tuned = (_of_kind(overall, kind, "test") for kind in ("own", "tuned"))
        of = f"on {many(tested, 'image')} that belong to no client" if tested else "on images of no client"
        several = (
            f" Of {own} it is the mean over the clients' own models, after the last round." if own else ""
        )
        before = f" Of {tuned} it is that of the global model, before tuning." if tuned else ""
        notes.append(f"{name}: {of}.{several}{before}")
    if "clients" in shown:
        twin = (
            " IID clients hold out other images, because all images are reassigned."
            if "iid" in overall
            else ""
        )
        tuned = _of_kind(overall, "tuned", "clients")
        after = f" Of {tuned} each client tunes the global model first." if tuned else ""
        notes.append(
            f"{measure_heading(metric, 'clients')}: each client's model on the images that this client holds out; "
            f"every client counts the same, whatever its number of images.{twin}{after}"
        )
    for on in MEASURES:
        missing: dict[str, list[str]] = {}
        for role, each in overall.items():
            if each[on] is None and each["missing"].get(on):
                missing.setdefault(each["missing"][on], []).append(WORDS[role])
        of = measure(metric, on)
        notes += [f"Not measured: {of} of {listed(roles)}: {why}." for why, roles in missing.items()]
    return notes


def _of_kind(overall: Mapping[str, Any], kind: str, on: str) -> str:
    """The names of the runs with models of this kind and a value of this measure; empty without any."""
    return listed([WORDS[role] for role, each in overall.items() if each["models"] == kind and each[on]])


def listed(names: Sequence[str]) -> str:
    """Names as part of a sentence; empty for none.

    >>> listed(["a", "b", "c"]), listed(["a"]), listed([])
    ('a, b and c', 'a', '')
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
