"""Settings by dotted key, how two of them differ, and which keys change no result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

Column = Literal["bits", "experiment", "readers"]
_NONE, _SHOWN = "", "readers"

CHANGES: Mapping[str, str] = {
    "name": _NONE,
    "seed": "bits experiment",
    "seeds": "bits experiment",
    "data.cache": _SHOWN,
    "data.prefetch": _SHOWN,
    "evaluation": "bits experiment",
    "evaluation.overlap": _NONE,
    "checkpoint": "bits readers",
    "checkpoint.seconds": _SHOWN,
    "divergence": "bits readers",
    "divergence.patience": _SHOWN,
    "record": "bits",
    "record.images": _NONE,
    "record.local_models.every": _NONE,
    "record.local_models.rounds": _NONE,
    "record.updates.every": _NONE,
    "record.updates.rounds": _NONE,
    "observe": _SHOWN,
    "max_skipped": _SHOWN,
    "engine": _NONE,
    "engine.name": "bits",
    "engine.threads": "bits",
    "engine.device": "bits",
    "engine.precision": "bits",
    "engine.channels_last": "bits",
    "engine.group": "bits",
    "engine.gpus": "bits",
}
"""What a setting, or a table without the keys named here, changes. All other settings change all three.

- bits: a number of the results, be it in its last bit. `resume` refuses another value of such a setting.
- experiment: what is measured. `cost` and studies refuse a folder with another value, and `compare` keeps runs with
  different values apart. An engine changes bits and no experiment.
- readers: what a table of the settings that differ from the paper shows. Seeds and evaluations change bits, and are
  told by their number or not at all.
"""


def changes(key: str, column: Column) -> bool:
    """Whether the setting with this dotted key changes the bits, the experiment, or what readers are shown.

    >>> changes("engine.threads", "bits"), changes("engine.threads", "experiment"), changes("engine.workers", "bits")
    (True, False, False)
    """
    while key and key not in CHANGES:
        key = key.rpartition(".")[0]
    return not key or column in CHANGES[key].split()


def changing(table: Mapping[str, Any], column: Column) -> dict[str, Any]:
    """The settings by dotted key, as `flat`, without those that change nothing in a column.

    >>> changing({"name": "first", "local": {"lr": 0.1}, "data": {"cache": False}}, "bits")
    {'local.lr': 0.1}
    """
    return {key: value for key, value in flat(table).items() if changes(key, column)}


def flat(
    table: Mapping[str, Any],
    whole: Callable[[Mapping[str, Any]], bool] = lambda table: False,
    numbered: bool = False,
) -> dict[str, Any]:
    """Settings by dotted key, in their order; an empty table has none.

    Args:
        whole: whether a table below stays one value.
        numbered: whether the tables of a list have keys of their own: `client.0.name`.

    >>> flat({"rounds": 3, "data": {"partition": {"name": "iid"}}})
    {'rounds': 3, 'data.partition.name': 'iid'}
    """
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if (
            numbered
            and isinstance(value, list)
            and value
            and all(isinstance(item, Mapping) for item in value)
        ):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and not whole(value):
            settings |= {f"{key}.{below}": item for below, item in flat(value, whole, numbered).items()}
        else:
            settings[str(key)] = value
    return settings


def diff(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The settings that differ: dotted key, value in `one` and value in `other`, None where it is not set.

    They come in the order of `one`, then of `other`. `true` is not 1.

    >>> diff({"rounds": 3, "local": {"lr": 0.1}}, {"rounds": 3, "local": {"lr": 0.2, "epochs": 1}})
    [('local.lr', 0.1, 0.2), ('local.epochs', None, 1)]
    """
    one, other = flat(one), flat(other)
    pairs = ((key, one.get(key), other.get(key)) for key in {**one, **other})
    return [(key, a, b) for key, a, b in pairs if a != b or isinstance(a, bool) != isinstance(b, bool)]
