"""The log of a site for people: its lines as a table, a CSV file and a page, and one kept body in numbers."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.format import count, many, size
from fedlens.core.wire.message import Caps, read_payload
from fedlens.core.wire.sent_fields import fields_of
from fedlens.files.atomic_files import read_regular, write_atomically
from fedlens.files.chained_log import NONE, read_chained
from fedlens.identity.authority import day
from fedlens.pages.render import page_text
from fedlens.site.answers_log import NAME, SENT

HEAD = ("when", "run", "round", "operation", "client", "decision", "reason", "bytes", "fields", "approved by")
_COLUMNS = (*HEAD, "attempt", "exchange", "slot", "ask", "answer", "payload", "server_head", "line", "head")
_ORDER = ("run", "attempt", "round", "exchange", "slot")  # in which the server makes asks
_SHOWN = 5_000  # lines of a page
_WIDEST = 47  # characters of what a line of another kind tells, in a table
_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class AskedLog:
    """The log of a site, read and verified.

    Attributes:
        site: whose it is, by its first certificate.
        lines: how many it has, of all kinds, and `head` the last head in hexadecimal.
        told: all lines but names and shapes, in their order, with `line`, their number, and `head`; a census has
            `approved` and `listed` as an ask has.
        asks: those of asks, with `approved` (who, as text) and `listed` (names and shapes of what left).
        fields: names and shapes by the `id` of their line.
    """

    site: str = ""
    lines: int = 0
    head: str = NONE.hex()
    told: list[dict[str, Any]] = field(default_factory=list)
    asks: list[dict[str, Any]] = field(default_factory=list)
    fields: dict[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> AskedLog:
        """The log in the folder of a site. Raises `DataError` with the number of the first line that is not genuine."""
        log, approved, path = cls(), dict[str, str](), folder / "log" / NAME
        for values, head, _ in read_chained(path) if path.exists() else ():
            log.lines, log.head = log.lines + 1, head.hex()
            place = {"line": log.lines, "head": log.head}
            kind = values.get("kind")
            if kind == "fields":
                log.fields[values["id"]] = values["fields"]
            elif kind == "experiment":
                approved[values["run"]] = values["approved"] = ", ".join(values.pop("approved_by"))
            elif kind == "certificate" and values["of"] != "server":
                log.site = log.site or values["of"]
            who = approved.get(values.get("run", ""), "")
            if kind == "census" and "fields" in values:  # an earlier version wrote counts alone
                values |= {"approved": who, "listed": values.pop("fields")}
            if kind is not None:
                log.told += [values | place] if kind != "fields" else []
                continue
            listed = log.fields.get(values.get("fields") or "", ())
            # Lines of an earlier version have the outcome alone.
            decision = "answered" if values.get("outcome") == "reply" else "failed"
            about = {**place, "approved": who, "listed": listed}
            log.asks.append({"decision": decision, **values, **about})
            log.told.append(log.asks[-1])
        return log

    def server_went_back(self) -> list[str]:
        """The runs whose server has asked with an older state of its log than before, as sentences."""
        found, last = dict[str, str](), dict[str, tuple[int, str]]()
        for line in sorted(self.asks, key=lambda each: tuple(each[name] for name in _ORDER)):
            if (lines := line.get("server_lines")) is None:
                continue
            now = lines, line["server_head"]
            before = last.get(line["run"], now)
            if lines < before[0] or (lines == before[0] and now != before):
                what = f"has {lines:,} lines, and had {before[0]:,}" if lines < before[0] else "was changed"
                found.setdefault(line["run"], f"in the ask {line['ask'][:12]} the server's log {what}")
            last[line["run"]] = now
        return [f"run {run}: {what}" for run, what in found.items()]

    def rows(self, last: int | None = None) -> list[list[str]]:
        """The last lines, or all of them, as texts under `HEAD`; of a line of another kind its kind and values."""
        return [_row(line) for line in (self.told if last is None else self.told[-last:])]

    def as_csv(self) -> str:
        """All lines as CSV, with every digest."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for line in self.told:
            own = dict(zip(HEAD, _row(line), strict=True))
            if "kind" in line:
                own["reason"] = _about(line)
            if "listed" in line:
                own |= {"bytes": line["bytes"], "fields": "; ".join(line["listed"])}
            writer.writerow([_plain({**line, **own}.get(name)) for name in _COLUMNS])
        return text.getvalue()

    def as_page(self, site: str, federation: str) -> str:
        """The last asks as a page, with what the chain shows and what it cannot."""
        asks = self.asks[-_SHOWN:]
        runs: dict[str, dict[str, Any]] = {}
        for line in asks:
            run = runs.setdefault(line["run"], {"rows": [], "bytes": 0, "approved": "", "sums": {}})
            run["rows"].append({**line, "when": day(line["time"])})
            run["bytes"], run["approved"] = run["bytes"] + line["bytes"], line["approved"] or run["approved"]
            if line["bytes"]:
                answers, sent = run["sums"].get(line["operation"], (0, 0))
                run["sums"][line["operation"]] = answers + 1, sent + line["bytes"]
        fields = {line["fields"]: line["listed"] for line in asks if line["listed"]}
        told = [each for each in self.told if each.get("kind", "experiment") != "experiment"]
        context = {
            "title": f"What left {site} · fedlens",
            "aside": f"federation {federation}",
            "site": site,
            "federation": federation,
            "log": self,
            "sent": sum(each["bytes"] for each in self.told if "listed" in each),
            "back": self.server_went_back(),
            "runs": runs,
            "left_out": len(self.asks) - len(asks),
            "fields": fields,
            "operations": {
                id: sorted({line["operation"] for line in asks if line.get("fields") == id}) for id in fields
            },
            "events": [
                (
                    day(each["time"]),
                    each["kind"],
                    _about(each),
                    _row(each)[7],
                    "; ".join(each.get("listed", ())),
                    _row(each)[9],
                )
                for each in told
            ],
        }
        return page_text("asked_log.html.j2", context)

    def found(self, id: str) -> dict[str, Any]:
        """The one ask of which a digest begins with `id`. Raises `ConfigError` if there is none, or several."""
        digests, prefix = ("ask", "answer", "payload", "head"), id.lower()
        lines = [line for line in self.asks if any(line[name].startswith(prefix) for name in digests)]
        if len(prefix) < 6 or len(lines) != 1:
            what = f"{count(len(lines))} lines of asks have a digest that begins with {id!r}"
            hint = "give 6 digits or more of ask, answer, payload or head of one line that 'site log --export' writes"
            raise ConfigError(what, hint=hint)
        return lines[0]


def export_log(log: AskedLog, path: Path, site: str, federation: str) -> list[Path]:
    """Writes the log as CSV and as a page that opens offline, beside each other, and returns both paths."""
    texts = {".csv": log.as_csv(), ".html": log.as_page(site, federation)}
    for suffix, text in texts.items():
        write_atomically(path.with_suffix(suffix), text.encode(errors="backslashreplace"), mode=0o600)
    return [path.with_suffix(suffix) for suffix in texts]


def body_rows(folder: Path, line: Mapping[str, Any]) -> list[list[str]]:
    """Each value of a kept body: its name, shape, norm, least, mean and most value, and a histogram of ten bars.

    None of a body that was not kept.
    """
    path = folder / SENT / f"{line['answer']}.safetensors"
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error
    body = read_payload(content, Caps(len(content)), str(path))
    sent = {**body["payload"], "letters": body.get("letters", [])}
    return [[place, shape, *_numbers(value)] for place, shape, value in fields_of(sent)]


def _numbers(value: Any) -> list[str]:
    """Norm, least, mean, most and histogram of a tensor or list; of a number itself, and of a text nothing."""
    if not isinstance(value, torch.Tensor | list):
        return [str(value) if isinstance(value, int | float) else "", "", "", "", ""]
    flat = torch.as_tensor(value).double().flatten()
    finite = flat[flat.isfinite()]
    if not len(finite):
        return ["", "", "", "", ""]
    counts = torch.histc(finite, 10).tolist()
    bars = "".join(_BARS[math.ceil(each / max(counts) * 7)] for each in counts)
    return [
        *(f"{float(each):.4g}" for each in (finite.norm(), finite.min(), finite.mean(), finite.max())),
        bars,
    ]


def _row(line: Mapping[str, Any]) -> list[str]:
    if (kind := line.get("kind")) is not None:
        about = _about({name: value for name, value in line.items() if name != "run"})
        about = about if len(about) <= _WIDEST else f"{about[: _WIDEST - 4]} ..."
        asked = ["", kind, "", "", about]
    else:
        asked = [
            str(line["round"]),
            line["operation"],
            line["client"],
            line["decision"],
            line["reason"] or "",
        ]
    listed = line.get("listed")
    return [
        day(line["time"]),
        line.get("run", ""),
        *asked,
        "" if listed is None else size(line["bytes"]),
        many(len(listed), "field") if listed else "",
        line.get("approved", ""),
    ]


def _about(event: Mapping[str, Any]) -> str:
    """The values of a line of another kind that have no column, without the texts of certificates."""
    left_out = [
        "kind",
        "id",
        "time",
        "chain",
        "approved",
        "line",
        "head",
        *(("listed", "bytes") if "listed" in event else ()),
    ]
    told = sorted(event.items(), key=lambda item: item[0] not in ("by", "reason"))
    return ", ".join(f"{name} {_said(value)}" for name, value in told if name not in left_out)


def _said(value: Any) -> str:
    """A value, and a table of `site.toml` as that file writes it, in one line."""
    if not isinstance(value, Mapping):
        return str(value)
    return (
        f"{{{', '.join(f'{name} = {json.dumps(each, ensure_ascii=False)}' for name, each in value.items())}}}"
    )


def _plain(value: Any) -> str:
    """A cell that no spreadsheet takes for a formula."""
    text = "" if value is None else str(value)
    formula = text.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{text}" if formula and not text.lstrip("+-").replace(".", "", 1).isdigit() else text
