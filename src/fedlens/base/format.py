"""Formats numbers for people: 82.3 %, 1.6 MB, 2 min 10 s.

Every function takes None for "unknown" and returns `MISSING` for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MISSING = "–"

# By the prefix of a metric in metrics.jsonl, how a figure names the data.
_COMPUTED = ("test_", "validation_", "train_", "clients_")
_COLUMNS = frozenset({
    "round", "client", "clients", "failed", "failure", "times", "exchange", "loss", "local_loss", "examples", "batches",
    "batches_max", "bytes_up", "bytes_down", "bytes_peer", "letters_dropped", "seconds", "elapsed", "skipped",
})  # fmt: skip
SPLITS = {"test": "test", "validation": "validation", "train": "training", "local": "seen by clients"}
# How the value of clients' own models is measured that a run records as `validation_*`.
POOLED = "on all held-out images of the clients"
_LABELS = {
    "accuracy_balanced": "balanced accuracy",
    "accuracy_top5": "top-5 accuracy",
    "knn_accuracy": "k-NN accuracy",
    "f1_micro": "micro F1",
    "f1_macro": "macro F1",
    "mean_iou": "mean IoU",
    "frequency_iou": "frequency-weighted IoU",
    "map": "mAP",
    "map50": "mAP at IoU 0.5",
    "f1": "F1",
}
_OF_CLIENTS = {
    "mean": "mean {} of the clients",
    "std": "standard deviation of the {} of the clients",
    "worst_decile": "{} of the worst tenth of the clients",
}
_SHARES = {
    "miou",
    "mean_iou",
    "frequency_iou",
    "iou",
    "map",
    "map50",
    "f1",
    "dice",
    "auc",
    "precision",
    "recall",
    "error",
} | {
    "average_precision",
    "calibration_error",
    "f1_micro",
    "f1_macro",
}
_OF_IMAGES = {"accuracy", "accuracy_top5"}


def percent(value: float | None) -> str:
    """A share as per cent, with one digit.

    >>> percent(0.8234), percent(1), percent(None)
    ('82.3 %', '100.0 %', '–')
    """
    return MISSING if _unknown(value) else f"{value:.1%}".replace("%", " %")


def number(value: float | None) -> str:
    """A real number with four significant digits; very large or small ones as powers of ten.

    >>> number(0.612345), number(12.5), number(0), number(3.2e-7), number(float("nan"))
    ('0.6123', '12.5', '0', '3.2e-07', '–')
    """
    if value is None or _unknown(value):
        return MISSING
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def client_name(client: str, begins: bool = False) -> str:
    """The name of a client in a sentence, which it may begin; a number alone is no name.

    >>> client_name("Bonn"), client_name("7"), client_name("7", begins=True)
    ('Bonn', 'client 7', 'Client 7')
    """
    return f"{'C' if begins else 'c'}lient {client}" if client.isdigit() else client


def count(value: float | None) -> str:
    """A whole number with its thousands set apart.

    >>> count(1663370)
    '1,663,370'
    """
    return MISSING if _unknown(value) else f"{value:,.0f}"


def many(number: int, thing: str, things: str | None = None) -> str:
    """A number of things; `things` is the plural if it is not `thing` with an s.

    >>> many(1, "client"), many(9275, "client"), many(2, "reply", "replies")
    ('1 client', '9,275 clients', '2 replies')
    """
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def millions(value: float | None) -> str:
    """A number in millions, with four digits.

    >>> millions(40_551_424), millions(16_067_400_000), millions(650), millions(None)
    ('40.55 million', '16,067 million', '0.00065 million', '–')
    """
    if value is None:
        return MISSING
    scaled = value / 1e6
    return f"{scaled:,.4g} million" if scaled < 1e4 else f"{scaled:,.0f} million"


def size(value: float | None) -> str:
    """Bytes in units of 1000.

    >>> size(0), size(999), size(1_600_000), size(23.4e9)
    ('0 B', '999 B', '1.6 MB', '23.4 GB')
    """
    if value is None or _unknown(value):
        return MISSING
    left, units = float(value), ["B", "kB", "MB", "GB", "TB", "PB"]
    while abs(left) >= 999.5 and len(units) > 1:
        left, units = left / 1000, units[1:]
    return f"{left:.0f} {units[0]}" if units[0] == "B" or left >= 99.95 else f"{left:.1f} {units[0]}"


def duration(seconds: float | None) -> str:
    """A time in its two largest units.

    >>> duration(0.0042), duration(1.23), duration(130), duration(3900), duration(200_000)
    ('4 ms', '1.2 s', '2 min 10 s', '1 h 5 min', '2 d 7 h')
    """
    if seconds is None or _unknown(seconds):
        return MISSING
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = round(seconds)
    for large, small, unit, below in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {unit}" + (f" {rest} {below}" if rest else "")
    raise AssertionError("whole is at least 60")


def computed(column: str) -> bool:
    """Whether every run computes this column of metrics.jsonl or clients.jsonl itself; others are of its components.

    >>> computed("test_accuracy"), computed("examples"), computed("eta_g")
    (True, True, False)
    """
    return column in _COLUMNS or column.startswith(_COMPUTED)


def split_of(key: str) -> tuple[str, str] | None:
    """The split and the metric in a key of metrics.jsonl, or None if it is not a metric.

    >>> split_of("test_accuracy"), split_of("seconds")
    (('test', 'accuracy'), None)
    """
    split, _, metric = key.partition("_")
    return (split, metric) if split in SPLITS and metric else None


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1 and is shown in per cent.

    >>> is_share("accuracy"), is_share("loss")
    (True, False)
    """
    return "accuracy" in metric or metric in _SHARES


def is_share_of_images(metric: str) -> bool:
    """Whether a metric is the share of images that are right, so that its sampling error is binomial.

    >>> is_share_of_images("accuracy"), is_share_of_images("average_precision")
    (True, False)
    """
    return metric in _OF_IMAGES


def smaller_is_better(metric: str) -> bool:
    """Whether a smaller value is better, by the name of the metric: true for losses, errors and perplexity.

    As `Task.errors`, without a task.

    >>> smaller_is_better("loss"), smaller_is_better("calibration_error"), smaller_is_better("accuracy")
    (True, True, False)
    """
    return metric.endswith(("loss", "error", "perplexity"))


def metric_value(metric: str, value: float | None, deviation: float | None = None) -> str:
    """A metric's value in its usual unit, and its deviation where there is one.

    >>> metric_value("accuracy", 0.5), metric_value("loss", 0.5), metric_value("accuracy", 0.5, 0.013)
    ('50.0 %', '0.5', '50.0 % ± 1.3')
    """
    text = percent(value) if is_share(metric) else number(value)
    if deviation is None:
        return text
    return f"{text} ± {100 * deviation:.1f}" if is_share(metric) else f"{text} ± {number(deviation)}"


def points(metric: str, value: float) -> str:
    """The size of a difference, in points for a metric in per cent.

    >>> points("accuracy", -0.041), points("loss", 0.25)
    ('4.1 points', '0.25')
    """
    return f"{100 * abs(value):.1f} points" if is_share(metric) else number(abs(value))


def signed(metric: str, value: float) -> str:
    """A difference with its sign and without its unit: points for a metric in per cent.

    >>> signed("accuracy", 0.041), signed("accuracy", -0.0001), signed("loss", -0.25)
    ('+4.1', '0.0', '-0.25')
    """
    text = f"{100 * value:+.1f}" if is_share(metric) else f"{value:+.4g}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def metric_gap(metric: str, gap: float | None) -> str:
    """The difference of two values of a metric, with its sign; of shares in percentage points.

    >>> metric_gap("accuracy", -0.183), metric_gap("loss", 0.25), metric_gap("accuracy", None)
    ('-18.3 points', '+0.25', '–')
    """
    if gap is None or _unknown(gap):
        return MISSING
    return f"{100 * gap:+.1f} points" if is_share(metric) else f"{'+' if gap >= 0 else '-'}{number(abs(gap))}"


def label(metric: str) -> str:
    """A metric's name in a text.

    >>> label("worst_class"), label("accuracy_balanced"), label("clients_accuracy_mean")
    ('worst class', 'balanced accuracy', 'mean accuracy of the clients')
    """
    for statistic, words in _OF_CLIENTS.items():
        if metric.startswith("clients_") and metric.endswith(f"_{statistic}"):
            return words.format(label(metric.removeprefix("clients_").removesuffix(f"_{statistic}")))
    return _LABELS.get(metric) or metric.replace("_", " ")


def heading(metric: str) -> str:
    """A metric's name at the start of a title: the first letter is large, and no other letter changes.

    >>> heading("accuracy_balanced"), heading("mean_iou"), heading("map")
    ('Balanced accuracy', 'Mean IoU', 'mAP')
    """
    return capitalized(label(metric))


def capitalized(text: str) -> str:
    """A text with a large first letter, but for words such as "mAP"."""
    return text if text[1:2].isupper() else text[:1].upper() + text[1:]


def setting(value: Any, most: int | None = None) -> str:
    """The value of a setting, as a person writes it; of a list no more than `most` items.

    >>> setting({"name": "iid", "clients": 3}), setting(None), setting([1, 2.5]), setting(False)
    ('(name iid, clients 3)', 'not set', '1, 2.5', 'no')
    >>> setting([3, 4, 5], most=2), setting(0.12345678)
    ('3, 4, ... (3 in all)', '0.12345678')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {setting(item, most)}" for key, item in value.items()) + ")"
    if isinstance(value, list | tuple):
        shown = ", ".join(setting(item, most) for item in value[:most]) or "none"
        return shown if most is None or len(value) <= most else f"{shown}, ... ({len(value)} in all)"
    return "not set" if value is None else str(value)


def with_own_parts(algorithm: str, *tables: Any) -> str:
    """The name of an algorithm, and of each component of the user's own in these tables of the settings.

    >>> with_own_parts("fedavg", [{"name": "proximal"}, {"name": "memory.py:kept"}], None, "mine.py:Trimmed")
    'fedavg + kept + Trimmed'
    """
    every = [each for table in tables for each in (table if isinstance(table, list) else [table]) if each]
    names = [str(each.get("name") if isinstance(each, Mapping) else each) for each in every]
    return " + ".join([algorithm, *(name.rpartition(":")[2] for name in names if ":" in name)])


def finite(value: Any) -> float | None:
    """`value` if it is a finite number, else None (null, text, NaN).

    >>> finite(2), finite(None), finite("2"), finite(float("inf"))
    (2, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def rounds_of(warning: Mapping[str, Any]) -> str:
    """The rounds that a warning of summary.json is about.

    >>> rounds_of({"since": 3, "until": 9}), rounds_of({"since": 3, "until": 3})
    ('rounds 3 to 9', 'round 3')
    """
    since, until = warning.get("since"), warning.get("until")
    return f"round {since}" if since == until else f"rounds {since} to {until}"


def _unknown(value: float | None) -> bool:
    return value is None or not math.isfinite(value)
