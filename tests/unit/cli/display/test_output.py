from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlens.base.printable import printable
from fedlens.cli.display import output
from fedlens.cli.display.output import OutputLost, from_printing, print_columns, print_json, say


class Full(io.StringIO):
    """A stream on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_terminal_would_obey_is_escaped_and_the_rest_is_not() -> None:
    for number in (
        *range(0x20),
        *range(0x7F, 0xA0),
        0x61C,
        0x200E,
        *range(0x202A, 0x202F),
        0x2066,
        0x2069,
        0xDC80,
    ):
        if chr(number) != "\n":
            escaped = printable(f"a{chr(number)}b")
            assert len(escaped) > 3, number
            assert escaped.isprintable(), number
    assert printable("Zürich, 東京, naïve – 👩‍⚕️") == "Zürich, 東京, naïve – 👩‍⚕️"


def test_a_name_cannot_break_a_table_or_forge_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_columns([("north\nwest 100 %", "1"), ("\x1b[2Jsouth", "2")], ("client\r", "size"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(r"client\r ")
    assert lines[1].startswith(r"north\nwest 100 %")
    assert lines[2].startswith(r"\x1b[2Jsouth")
    assert len(lines) == 3


def test_json_on_a_terminal_holds_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": "\x9b31m\u202eä"})
    assert capsys.readouterr().out == '{\n  "name": "\\u009b31m\\u202eä"\n}\n'


@pytest.mark.parametrize(
    "show",
    [lambda: say("text"), lambda: print_json({}), lambda: print_columns([("a", "b")])],
    ids=["say", "json", "columns"],
)
def test_an_error_of_printing_is_told_from_one_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, show: Callable[[], None]
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space") as full:
        show()
    # What fails is the stream's own write, in Python here and in C where the stream is a real one.
    assert full.value.__traceback__ is not None
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(OSError, match="No such file") as missing:
        (tmp_path / "none").read_text()
    assert not from_printing(missing.value)


def test_closed_output_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputLost, match="standard output cannot be written: it is closed") as lost:
        say("text")
    assert (lost.value.exit_code, lost.value.broken_pipe) == (1, False)


def test_a_broken_pipe_ends_as_of_a_process_that_the_pipe_ended(capsys: pytest.CaptureFixture[str]) -> None:
    lost = OutputLost(OSError(errno.EPIPE, "Broken pipe"))
    lost.report()
    assert capsys.readouterr() == ("", "")
    assert lost.exit_code == output.BROKEN_PIPE
