"""The section "What left the clients" in the page of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.base.format import MISSING, count, finite, many, size
from fedlens.results.run import Run, subtable

HEAD = ("exchange", "rounds", "each client received", "each client sent", "messages", "down", "up")
_LEAD = "Each exchange with the clients, with the number of values of each field."
_PLAIN = ("Nothing was encrypted, summed securely or made private.",)
_AT_SITES = (
    "Messages were signed, and encrypted on the way.",
    "The server read each of them: nothing was summed securely or made private, and part of an image can be computed "
    "back from a plain update.",
)
_HIDDEN = "The messages are left out: they tell how many clients took part, which the promise of privacy keeps secret."

_HELD = {
    "@test": "the test data",
    "@validation": "the training examples that are held out, of all clients together",
    "@train": "the training examples of all clients together",
}


def left_clients(run: Run) -> dict[str, Any] | None:
    """The messages of a run, and what it took from all clients together; None if the run recorded neither.

    The rows come from the messages that the run counted (`fedlens.core.traffic`), not from a list of algorithms.
    """
    told, traffic = run.sentences("disclosures"), run.summary.get("traffic")
    traffic = traffic if isinstance(traffic, Mapping) else {}
    rows = [_row(op, row) for op, row in subtable(traffic, "clients").items()]
    pooled = [
        *_at_the_server(subtable(traffic, "server")),
        *run.sentences("pooled"),
        *_held_out_images(run),
    ]
    if not (rows or pooled or told):
        return None
    return {
        "head": HEAD,
        "rows": rows,
        "pooled": pooled,
        "told": told,
        "lead": _lead(run, bool(rows), bool(pooled)),
    }


# Aggregates that show the server no single update.
_SUMMED = ("secagg", "secagg-plus", "lightsecagg", "turbo-aggregate")


def _lead(run: Run, rows: bool, pooled: bool) -> list[str]:
    private = bool(subtable(run.summary, "privacy"))
    if not rows:
        return [_HIDDEN if private else "The server asked the clients nothing." * pooled]
    plain = not private and subtable(run.config, "aggregate").get("name") not in _SUMMED
    return [_LEAD, *(_AT_SITES if run.at_sites else _PLAIN) * plain]


def _at_the_server(ran: Mapping[str, Any]) -> list[str]:
    """Which operations ran on which examples at the server."""
    return [
        f"The server ran {op} on {' and on '.join(_HELD.get(name, name) for name in map(str, names))}."
        for op, names in ran.items()
        if isinstance(names, list)
    ]


def _held_out_images(run: Run) -> list[str]:
    """What `held_out.npz` holds of the clients' images beside the predictions that they sent."""
    try:
        kept = run.held_out
    except RunDirectoryError:
        return []  # "Labels to check" says that the file is corrupt
    if kept is None:
        return []
    said = [f"The names of {many(len(kept.files), 'held-out image')} (held_out.npz)."] if kept.files else []
    if kept.images is not None:
        said.append(
            f"{many(len(kept.images), 'held-out image')}, with their pixels (held_out.npz, record.images)."
        )
    return said


def _row(op: str, row: Any) -> list[str]:
    if not isinstance(row, Mapping):
        return [op, *[MISSING] * (len(HEAD) - 1)]
    peer = finite(row.get("bytes_peer"))
    return [
        op,
        _rounds(row.get("rounds")),
        *carried(row),
        count(finite(row.get("replies"))),
        size(finite(row.get("bytes_down"))),
        size(finite(row.get("bytes_up"))) + (f", {size(peer)} to clients" if peer else ""),
    ]


def carried(row: Mapping[str, Any]) -> tuple[str, str]:
    """The fields that each client received and sent, from a row of `fedlens.core.traffic`."""
    measured = row.get("measured") or []
    metrics = [f"metrics: {', '.join(map(str, measured))}"] if measured else []
    sent = "; ".join(filter(None, [_fields(row.get("up")), *metrics]))
    return _fields(row.get("down")) or "nothing", sent or "nothing"


def _rounds(rounds: Any) -> str:
    if not (isinstance(rounds, list) and len(rounds) == 2):
        return MISSING
    first, last = rounds
    return str(first) if first == last else f"{first}–{last}"


def _fields(fields: Any) -> str:
    """The fields with their number of values: "update (650), weight".

    >>> _fields({"update": 650, "weight": 1, "buffers": 0})
    'update (650 values), weight'
    """
    known = fields.items() if isinstance(fields, Mapping) else ()
    return ", ".join(
        name if values == 1 else f"{name} ({many(values, 'value')})" for name, values in known if values
    )
