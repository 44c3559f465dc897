"""The log of a site's answers survives a kill at any byte, and answers one ask under a number."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import DataError, IdentityError, RunFailed
from fedlens.core.wire.message import Message
from fedlens.files.chained_log import read_chained
from fedlens.site.answers_log import AnswersLog, AskRefused
from tests.unit.site.ask_kit import answer_of, ask_of, refusal_of


def log_in(folder: Path) -> AnswersLog:
    return AnswersLog(folder / "log", folder / "work", clock=lambda: 5.0)


def kept(log: AnswersLog, ask: Message, body: bytes = b"body") -> bytes:
    return bytes(log.keep(ask, answer_of(ask, body, log.state[1]), body))


def test_an_identical_ask_gets_the_stored_bytes_also_after_a_restart(tmp_path: Path) -> None:
    log, ask = log_in(tmp_path), ask_of()
    assert log.find(ask) is None
    sent = kept(log, ask)
    assert bytes(log.find(ask) or b"") == sent
    head = log.state[1]
    log.close()
    again = log_in(tmp_path)
    assert bytes(again.find(ask) or b"") == sent
    assert again.state[1] == head
    line = json.loads((tmp_path / "log" / "asked.jsonl").read_text())
    assert (line["ask"], line["client"], line["time"]) == (ask.digest.hex(), "a", 5)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*/*")} == {0o600}


def test_another_ask_under_the_number_or_of_an_old_attempt_is_refused(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    kept(log, ask_of(attempt=2))
    for ask, what in (
        (ask_of(attempt=2, nonce=b"1" * 16), "another ask"),
        (ask_of(attempt=2, client="b"), "another ask"),
        (ask_of(attempt=1), "attempt 1"),
    ):
        with pytest.raises(AskRefused, match=what):
            log.find(ask)
        log.close()
        log = log_in(tmp_path)
    for ask in (ask_of(attempt=2, slot=1), ask_of(attempt=3), ask_of(run="other")):
        assert log.find(ask) is None


def test_a_refused_ask_is_in_the_log_and_takes_no_number(tmp_path: Path) -> None:
    log, first, other = log_in(tmp_path), ask_of(attempt=2), ask_of(attempt=2, nonce=b"1" * 16)
    sent = kept(log, first)
    for ask in (other, ask_of(attempt=1)):
        log.note(ask, refusal_of(ask, log.state[1]))
    for _ in range(2):
        assert bytes(log.find(first) or b"") == sent
        with pytest.raises(AskRefused, match="another ask"):
            log.find(other)
        log.close()
        log = log_in(tmp_path)
    assert [(line["decision"], line["reason"]) for line in lines_in(tmp_path)] == [
        ("answered", None),
        ("refused", "contract"),
        ("refused", "contract"),
    ]


def test_the_fields_of_answers_stand_once_in_the_log(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for slot, fields in enumerate((["update float32[2]"], ["update float32[2]"], ["loss number"])):
        ask = ask_of(slot=slot, head=b"\x07" * 32)
        log.keep(ask, answer_of(ask, b"body", log.state[1]), b"body", {"fields": fields})
        if slot == 0:
            log.close()
            log = log_in(tmp_path)
    lines = lines_in(tmp_path)
    ids = {line["id"]: line["fields"] for line in lines if line.get("kind") == "fields"}
    answered = [line for line in lines if "kind" not in line]
    assert [ids[line["fields"]] for line in answered] == [["update float32[2]"]] * 2 + [["loss number"]]
    assert len(ids) == 2
    assert {line["server_head"] for line in answered} == {"07" * 32}
    assert {line["bytes"] for line in answered} == {4}


def test_a_log_of_an_earlier_version_is_read_under_its_name(tmp_path: Path) -> None:
    log, ask = log_in(tmp_path), ask_of()
    sent, head = kept(log, ask), log.state[1]
    log.close()
    (tmp_path / "log" / "asked.jsonl").rename(tmp_path / "log" / "answers.jsonl")
    log = log_in(tmp_path)
    assert (bytes(log.find(ask) or b""), log.state[1]) == (sent, head)
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["asked.jsonl"]


def test_a_stored_answer_goes_when_the_next_ask_acknowledges_it(tmp_path: Path) -> None:
    log, first, second = log_in(tmp_path), ask_of(), ask_of(slot=1)
    kept(log, first)
    kept(log, second)
    log.acknowledge([second.digest])
    assert log.find(second) is not None
    for _ in range(2):
        with pytest.raises(AskRefused, match="acknowledged"):
            log.find(first)
        log.close()
        log = log_in(tmp_path)
    assert [path.name for path in (tmp_path / "work").iterdir()] == [second.digest.hex()]


@pytest.mark.parametrize("keeps", [True, False])
def test_bodies_in_sent_that_no_line_names_are_swept_also_once_none_are_kept(
    tmp_path: Path, keeps: bool
) -> None:
    def opened(keeps: bool) -> AnswersLog:
        return AnswersLog(tmp_path / "log", tmp_path / "work", sent=tmp_path / "sent" if keeps else None)

    log, ask = opened(True), ask_of()
    kept(log, ask)
    log.close()
    (named,) = (tmp_path / "sent").iterdir()
    for name in (f"{'0a' * 32}.safetensors", "no digest.safetensors", f".{named.name}.0123456789abcdef.tmp"):
        (tmp_path / "sent" / name).write_bytes(b"of a kill")
    (tmp_path / "work" / "no digest").write_bytes(b"of a kill")
    opened(keeps).close()
    assert list((tmp_path / "sent").iterdir()) == [named]
    assert [path.name for path in (tmp_path / "work").iterdir()] == [ask.digest.hex()]


def test_a_cut_last_line_is_no_error_wherever_it_is_cut(tmp_path: Path) -> None:
    log, first, second = log_in(tmp_path), ask_of(), ask_of(slot=1)
    kept(log, first)
    head, path = log.state[1], tmp_path / "log" / "asked.jsonl"
    whole = path.read_bytes()
    kept(log, second)
    log.close()
    both = path.read_bytes()
    for end in {len(whole), len(whole) + 1, len(both) // 4 * 3, len(both) - 1}:
        path.write_bytes(both[:end])
        again = log_in(tmp_path)
        assert again.state[1] == head
        assert again.find(first) is not None
        assert again.find(second) is None  # it was not sent, so it may be computed again
        assert path.read_bytes() == whole
        kept(again, second)
        assert path.read_bytes() == both
        again.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[0], lines[1].replace(b'"slot":1', b'"slot":9'), lines[2]],
        lambda lines: [lines[1], lines[0], lines[2]],
        lambda lines: [lines[0], b"\n", lines[2]],
        lambda lines: [lines[0], b"x" * 2**17 + b"\n"],
        lambda lines: [lines[0], lines[1].replace(b":", b": ", 1), lines[2]],
    ],
)
def test_any_other_damage_stops_the_site(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]]
) -> None:
    log = log_in(tmp_path)
    for slot in range(3):
        kept(log, ask_of(slot=slot))
    log.close()
    path = tmp_path / "log" / "asked.jsonl"
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(DataError, match="damaged in line"):
        log_in(tmp_path)


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir(mode=0o755)
    with pytest.raises(IdentityError, match="open to other users"):
        log_in(tmp_path)


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log" / "asked.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """The end of the process."""


STEPS = ("write", "fsync", "replace")


@pytest.mark.parametrize("after", ["a kill", "a full disk", "a full disk and a kill"])
@pytest.mark.parametrize("step", range(7))
def test_a_fault_at_any_write_leaves_the_log_as_before_or_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, after: str
) -> None:
    full = after != "a kill"
    log, first, second = log_in(tmp_path), ask_of(), ask_of(slot=1)
    kept(log, first)
    head, calls = log.state[1], iter(range(100))

    def failing(name: str) -> Callable[..., object]:
        real = vars(os)[name]

        def call(*args: object, **options: object) -> object:
            if next(calls) != step:
                return real(*args, **options)
            if name == "write":  # half of a line
                real(args[0], bytes(memoryview(args[1])[:20]))  # type: ignore[arg-type]
            raise OSError(errno.ENOSPC, "full") if full else Killed

        return call

    with monkeypatch.context() as patched:
        for name in STEPS:
            patched.setattr(os, name, failing(name))
        try:
            kept(log, second)
            done = True
        except (Killed, RunFailed):
            done = False
    assert done == (next(calls) <= step)
    if after == "a full disk":  # the site goes on
        assert (log.find(second) is not None) == done
        assert done or (log.state[1] == head and kept(log, second))
    log.close()
    again = log_in(tmp_path)
    assert again.find(first) is not None
    if done or after == "a full disk":
        assert again.find(second) is not None
        assert again.state[1] == log.state[1]
    elif again.find(second) is None:  # always, after an error: what was written is taken back
        assert again.state[1] == head
        assert [path.name for path in (tmp_path / "work").iterdir()] == [first.digest.hex()]
        kept(again, second)
    else:
        assert after == "a kill"
    assert len((tmp_path / "log" / "asked.jsonl").read_bytes().splitlines()) == 2


def test_what_is_written_is_synced_before_it_may_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything written, and the names of new files, are on the disk when `keep` returns."""
    synced, real = list[str](), os.fsync

    def sync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    log = log_in(tmp_path)
    assert synced == ["log"]  # the name of the log
    kept(log, ask_of())
    assert synced[1].startswith(".")
    assert synced[2:] == ["work", "asked.jsonl"]


def test_the_rules_of_the_site_are_logged_when_they_have_changed(tmp_path: Path) -> None:
    for digest in ("aa", "aa", "bb", "bb", "aa"):
        log = AnswersLog(tmp_path / "log", tmp_path / "work")
        log.changed("rules", {"sha256": digest, "allow": {"reviewers": len(set(digest + "b"))}})
        log.close()
    lines = [line for line, _, _ in read_chained(tmp_path / "log" / "asked.jsonl")]
    told = [(line["sha256"], line["allow"]["reviewers"]) for line in lines if line["kind"] == "rules"]
    assert told == [("aa", 2), ("bb", 1), ("aa", 2)]


def test_the_exclusion_list_is_logged_when_it_has_changed(tmp_path: Path) -> None:
    none, one, two = (
        {"lines": n, "images_left_out": n, "sha256": text} for n, text in enumerate(("", "aa", "bb"))
    )
    for values in (none, one, one, two, two, none, none):
        log = AnswersLog(tmp_path / "log", tmp_path / "work")
        log.changed("exclude", values, "run")
        log.close()
    lines = [line for line, _, _ in read_chained(tmp_path / "log" / "asked.jsonl")]
    assert [{name: line[name] for name in one} for line in lines] == [one, two, none]
    assert {line["run"] for line in lines} == {"run"}
