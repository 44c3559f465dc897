"""A run that dies and is resumed, again and again, in one process that has imported everything once.

Reads lines of JSON from standard input, each a folder and a plan, a list of lives there. Each life is a forked
`fedlens` command with the `args` given, or with `"auto"` for `run` the first time and `resume` from then on, and with

- `call`, `signal`: the signal it gets right before its n-th step in writing to disk (a sync, a rename, a tensor);
- `after`, `signal`: the signal it gets so many seconds after it began, or, with `lines`, after so many rounds of its
  own were written to metrics.jsonl in `out`;
- `times`: how often it gets the signal;
- `ignored`: the signal that it ignores from the start, as under nohup;
- `limit`: the largest file that it may write, in bytes;
- `stdout`: "closed", "full", or "broken pipe";
- `page`: a directory lies where its result page is to be written.

Writes a line of JSON for each plan: how each life ended, in what time, and what it said.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedlens.pages.run_page
from fedlens import api, carry_out
from fedlens.__main__ import main as command
from fedlens.cli.main import app
from fedlens.core import tensorfile
from fedlens.files import atomic_files as files
from fedlens.run import build, checkpoint, environment, runner
from fedlens.use import results

os.fsync = lambda fd: None  # what is written need not survive a power cut
PRELOADED = (api, app, build, checkpoint, environment, files, results, runner, fedlens.pages.run_page)


def arguments(life: dict[str, Any]) -> list[str]:
    if life["args"] != "auto":
        return list(life["args"])
    out = Path(life["out"])
    if (out / "config.toml").exists():
        return ["resume", str(out), "--json"]
    shutil.rmtree(out, ignore_errors=True)
    return ["run", "run.toml", "--out", str(out), "--json"]


def dying_at(call: int, number: int) -> None:
    """Sends this process the signal right before the call-th step of writing."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), number)
            return function(*arguments, **more)

        return step

    os.fsync, os.rename, os.replace = map(counted, (os.fsync, os.rename, os.replace))
    tensorfile.contiguous = counted(tensorfile.contiguous)
    tensorfile.serialize_file = counted(tensorfile.serialize_file)


def occupy_page() -> None:
    """Makes a directory of the name of the result page, right before it is written."""
    write_report = carry_out.write_report

    def occupied(directory: Path) -> Path:
        (directory / "report.html").mkdir()
        return write_report(directory)

    carry_out.write_report = occupied


def lose_output(how: str | None) -> None:
    """Makes standard output one that cannot be written."""
    if how == "closed":
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]  # as Python does
    elif how == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif how is not None:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        os.close(writer)


def live(life: dict[str, Any]) -> None:
    """The child's whole life; does not return."""
    if "limit" in life:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (life["limit"], resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
    if "call" in life:
        dying_at(life["call"], getattr(signal, life["signal"]))
    if "ignored" in life:
        signal.signal(getattr(signal, life["ignored"]), signal.SIG_IGN)
    if "page" in life:
        occupy_page()
    else:
        carry_out._report = lambda directory, progress: None  # as in the other tests: a third of the time
    lose_output(life.get("stdout"))
    sys.argv = ["fedlens", *arguments(life)]
    code: Any = 0
    try:
        command()
    except SystemExit as end:
        code = end.code or 0
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(int(code))


def lines(life: dict[str, Any]) -> int:
    try:
        return (Path(life["out"]) / "metrics.jsonl").read_bytes().count(b"\n")
    except (OSError, KeyError):
        return 0


def outcome(life: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began, before = time.monotonic(), lines(life)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            live(life)
        waiting = "after" in life
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if waiting and ("lines" not in life or lines(life) >= before + life["lines"]):
                time.sleep(life["after"])
                waiting = False
                with contextlib.suppress(ProcessLookupError):
                    for _ in range(life.get("times", 1)):
                        os.killpg(pid, getattr(signal, life["signal"]))
                        time.sleep(0.005)
            time.sleep(0.002)
        status = os.waitstatus_to_exitcode(ended[1])
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
        return {"code": status, "seconds": time.monotonic() - began, "out": said[0], "err": said[1]}


def main() -> None:
    for line in sys.stdin:
        cwd, plan = json.loads(line)
        os.chdir(cwd)
        print(json.dumps([outcome(life) for life in plan]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
