"""What people see of a site's log: verified lines, a CSV file, a page, and a kept body in numbers."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.format import size
from fedlens.core.wire.census import ChannelSums, CountedClient, SiteCensus
from fedlens.core.wire.message import Message, write_payload
from fedlens.core.wire.sent_fields import sent_fields
from fedlens.files.chained_log import ChainedLog
from fedlens.identity.file_cipher import FileCipher
from fedlens.identity.keys import KeyPair
from fedlens.site.answers_log import AnswersLog
from fedlens.site.log_export import AskedLog, body_rows, export_log
from tests.unit.site.ask_kit import answer_of, ask_of, refusal_of

CENSUS = SiteCensus(
    "ward-a", [CountedClient("ward-a", 12)], {"fedlens": "1"}, "ab" * 32, ChannelSums(12, 48, (1.0,), (0.5,))
)
PAYLOAD = {"update": {"weight": torch.arange(4.0).reshape(2, 2)}, "weight": 12.0}


def site_in(folder: Path, sent: bool = False) -> list[Message]:
    """The folder of a site that has answered twice and refused once; the three asks."""
    log = AnswersLog(folder / "log", folder / "work", lambda: 1.8e9, sent=folder / "sent" if sent else None)
    log.introduce({"ward-a": b"PEM A", "server": b"PEM S"})
    log.introduce({"ward-a": b"PEM A", "server": b"PEM S"}, "run", "ab" * 32, ["ward-a", "reviewer"])
    log.census("run", CENSUS)
    asks, body = [ask_of(slot=slot, round=slot + 1) for slot in range(3)], write_payload({"payload": PAYLOAD})
    for ask in asks[:2]:
        log.keep(ask, answer_of(ask, body, log.state[1]), body, {"fields": sent_fields(PAYLOAD)})
    log.note(asks[2], refusal_of(asks[2], log.state[1], "policy"))
    log.event("purged", run="run", files=1)
    log.close()
    return asks


def test_a_log_is_read_with_who_approved_and_what_left(tmp_path: Path) -> None:
    asks = site_in(tmp_path)
    log = AskedLog.read(tmp_path)
    assert (log.lines, len(log.asks)) == (9, 3)
    assert [line["ask"] for line in log.asks] == [ask.digest.hex() for ask in asks]
    log.asks[1]["run"] = "20261128-014605-d6ee"
    row = [row for row in log.rows() if row[5]][1]
    assert row[1] == "20261128-014605-d6ee"  # as people see it everywhere
    assert row[2:] == ["2", "train", "a", "answered", "", "264 B", "2 fields", "reviewer, ward-a"]
    assert [row for row in log.rows() if row[5]][-1][5:8] == ["refused", "policy", "0 B"]
    assert log.rows(last=1)[0][3:] == ["purged", "", "", "files 1", "", "", ""]
    (told,) = [row for row in log.rows() if row[3] == "census"]
    assert told[6] == "channels_summed 1, clients 1, examples 12"  # nothing is held out yet
    assert told[7:] == [
        f"{len(json.dumps(CENSUS.to_plain(), separators=(',', ':')))} B",
        "9 fields",
        "reviewer, ward-a",
    ]
    assert log.asks[0]["listed"] == ["update.weight float32[2,2]", "weight number"]
    assert not AskedLog.read(tmp_path / "new").lines


@pytest.mark.parametrize("side", ["site", "server"])
@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda lines: [*lines[:2], *lines[3:]], 3),
        (lambda lines: [lines[0], lines[1].replace(b'"round":1', b'"round":2'), *lines[2:]], 2),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 2),
        (lambda lines: [lines[0], lines[0], *lines[1:]], 2),
        (lambda lines: [lines[0], b"{}\n", *lines[1:]], 2),
    ],
    ids=["cut", "edited", "swapped", "inserted", "another"],
)
def test_the_first_line_that_is_not_genuine_is_named(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], line: int, side: str
) -> None:
    path = tmp_path / "log" / "asked.jsonl"
    path.parent.mkdir(mode=0o700)
    log = ChainedLog(path)
    for round in range(5):
        log.append({"round": round, "run": "run"})
    log.close()
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(DataError, match=f"damaged in line {line}:"):
        AskedLog.read(tmp_path) if side == "site" else ChainedLog(path)


def test_a_line_that_a_power_cut_left_in_part_is_removed(tmp_path: Path) -> None:
    site_in(tmp_path)
    path = tmp_path / "log" / "asked.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert AskedLog.read(tmp_path).lines == 8  # also beside a process that is writing
    log = ChainedLog(path)
    assert (log.count, log.head) == (8, log.head_at(8))
    assert path.read_bytes() == whole[: whole.rstrip(b"\n").rindex(b"\n") + 1]
    log.close()


def test_a_long_log_is_read_whole_and_its_page_has_the_end(tmp_path: Path) -> None:
    site_in(tmp_path)
    log = ChainedLog(tmp_path / "log" / "asked.jsonl")
    line = {
        name: value
        for name, value in AskedLog.read(tmp_path).asks[0].items()
        if name not in ("head", "listed", "approved")
    }
    for round in range(10_000):
        log.append({**line, "round": round}, sync=False)
    log.close()
    read = AskedLog.read(tmp_path)
    assert len(read.asks) == 10_003
    page = read.as_page("ward-a", "hospitals")
    assert page.count("<tr>") < 6_000
    assert "5,003 earlier requests" in page


def test_the_export_has_each_ask_with_digests_and_no_value(tmp_path: Path) -> None:
    site_in(tmp_path)
    log = AskedLog.read(tmp_path)
    table, page = export_log(log, tmp_path / "audit.html", "ward-a", "hospitals")
    assert {path.stat().st_mode & 0o777 for path in (table, page)} == {0o600}
    rows = list(csv.DictReader(table.read_text().splitlines()))
    others = [row for row in rows if not row["decision"]]
    assert {row["operation"] for row in others} >= {"experiment", "purged"}
    for row in others:
        if row["operation"] == "experiment":
            assert (row["approved by"], "approved" in row["reason"]) == ("reviewer, ward-a", False)
    (told,) = [row for row in others if row["operation"] == "census"]
    assert int(told["bytes"]) > 100
    assert told["fields"].startswith("clients[1].name text; clients[1].examples number; ")
    assert told["fields"].endswith(
        "sums.images number; sums.pixels number; sums.values number[1]; sums.squares number[1]"
    )
    assert told["approved by"] == "reviewer, ward-a"
    assert others[-1]["reason"] == "files 1, run run"
    rows = [row for row in rows if row["decision"]]
    assert [row["decision"] for row in rows] == ["answered", "answered", "refused"]
    for row, line in zip(rows, log.asks, strict=True):
        assert {name: row[name] for name in ("ask", "answer", "payload", "head")}.items() <= line.items()
        assert row["approved by"] == "reviewer, ward-a"
    assert rows[0]["fields"] == "update.weight float32[2,2]; weight number"
    text = page.read_text()
    for shown in (
        "train",
        "264",
        told["fields"],
        size(2 * 264 + int(told["bytes"])),
        "update.weight float32[2,2]",
        rows[0]["answer"][:12],
        "reviewer, ward-a",
        log.head,
    ):
        assert shown in text
    assert "A tail that was cut off does not show in the file itself" in text
    assert "PEM" not in text
    assert str(tmp_path) not in text


def test_a_page_with_rules_and_reasons_warns_and_fits_its_card(tmp_path: Path) -> None:
    site_in(tmp_path)
    held = "Read the card &#39;Other lines&#39; before you hand on the page or the CSV file."
    assert held not in AskedLog.read(tmp_path).as_page("ward-a", "hospitals")
    log = AnswersLog(tmp_path / "log", tmp_path / "work", lambda: 1.8e9)
    log.changed("rules", {"sha256": "aa", "reviewers": {"officer": 60 * "x"}})
    rules = AskedLog.read(tmp_path).as_page("ward-a", "hospitals")
    log.event("rejected", by="officer", reason="no agreement")
    log.close()
    both = AskedLog.read(tmp_path).as_page("ward-a", "hospitals")
    for page, reasons in ((rules, False), (both, True)):
        (told,) = re.findall(f"<li>([^<]*){held}</li>", page)
        assert told.startswith("The rules of the site (site.toml), with paths of its data, and names and ")
        assert ("The reasons of rejections" in told) == reasons
    when = r'<td style="white-space:nowrap">2027-01-15 08:00 UTC</td>'
    assert re.search(f'<tr>{when}<td>rules</td><td class="name">reviewers .*{60 * "x"}', both)


def test_a_server_whose_log_went_back_is_named(tmp_path: Path) -> None:
    log = AnswersLog(tmp_path / "log", tmp_path / "work")

    def asked(round: int, lines: Any, head: bytes, run: str = "run") -> None:
        ask = ask_of(details={"log_lines": lines}, round=round, head=head * 32, run=run)
        log.note(ask, refusal_of(ask))

    for round, lines, head in ((1, 0, b"0"), (3, 9, b"9"), (2, 4, b"4"), (4, 9, b"9"), (5, "x", b"x")):
        asked(round, lines, head)  # the third one came late
    assert not AskedLog.read(tmp_path).server_went_back()
    asked(6, 8, b"8")
    asked(1, 5, b"5", "other")
    asked(2, 5, b"6", "other")
    log.close()
    other, one = AskedLog.read(tmp_path).server_went_back()
    assert other.startswith("run other: in the ask ")
    assert other.endswith("the server's log was changed")
    assert one.endswith("the server's log has 8 lines, and had 9")
    assert one in AskedLog.read(tmp_path).as_page("a", "b").replace("&#39;", "'")


def test_a_line_of_an_earlier_version_has_a_decision(tmp_path: Path) -> None:
    asks = site_in(tmp_path)
    log = ChainedLog(tmp_path / "log" / "asked.jsonl")
    line = {**AskedLog.read(tmp_path).asks[0], "outcome": "reply", "ask": asks[2].digest.hex()}
    log.append(
        {name: line[name] for name in line.keys() - {"head", "listed", "approved", "decision", "fields"}}
    )
    log.close()
    assert AskedLog.read(tmp_path).rows()[-1][5:] == ["answered", "", "264 B", "", "reviewer, ward-a"]


def test_the_head_that_the_server_saw_is_found_with_its_line(tmp_path: Path) -> None:
    site_in(tmp_path)
    log = AskedLog.read(tmp_path)
    rows = list(csv.DictReader(log.as_csv().splitlines()))
    lines = [int(row["line"]) for row in rows]
    assert lines == sorted(set(lines))
    assert lines[-1] == log.lines
    assert rows[-1]["head"] == log.head
    assert all(len(row["head"]) == 64 for row in rows)


def test_a_cell_is_no_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    log = AnswersLog(tmp_path / "log", tmp_path / "work")
    ask = ask_of(client="=HYPERLINK(1)")
    log.note(ask, answer_of(ask, b"", bytes(32)))
    log.close()
    text = AskedLog.read(tmp_path).as_csv()
    assert ",'=HYPERLINK(1)," in text
    assert ",'," not in text  # an empty cell is empty


def test_a_kept_body_is_shown_in_norms_and_histograms(tmp_path: Path) -> None:
    asks = site_in(tmp_path, sent=True)
    log = AskedLog.read(tmp_path)
    line = log.found(asks[0].digest.hex()[:10])
    assert log.found(line["answer"][:8].upper()) is log.found(line["head"]) is line
    assert body_rows(tmp_path, line) == [
        ["update.weight", "float32[2,2]", "3.742", "0", "1.5", "3", "█▁▁█▁▁█▁▁█"],
        ["weight", "number", "12.0", "", "", "", ""],
    ]
    kept = list((tmp_path / "sent").iterdir())
    assert {path.name for path in kept} == {f"{each['answer']}.safetensors" for each in log.asks[:2]}
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    for wrong, what in (("abc", "lines"), ("0" * 64, "0 lines"), (line["payload"][:12], "2 lines")):
        with pytest.raises(ConfigError, match=what):
            log.found(wrong)


def test_a_share_of_a_secure_sum_is_not_kept(tmp_path: Path) -> None:
    cipher = FileCipher(KeyPair.make())
    log = AnswersLog(tmp_path / "log", tmp_path / "work", cipher=cipher, sent=tmp_path / "sent")
    ask = ask_of()
    log.keep(ask, answer_of(ask, b"share", log.state[1]), b"share", sealed=True)
    log.close()
    assert not list((tmp_path / "sent").iterdir())


def test_a_body_that_was_not_kept_has_no_rows(tmp_path: Path) -> None:
    site_in(tmp_path)
    assert body_rows(tmp_path, AskedLog.read(tmp_path).asks[0]) == []
    assert not (tmp_path / "sent").exists()
