"""Reads the recordings of a run: the models before and after local training, round by round.

`recordings/round-000005` of a run directory has

- `before.safetensors` and `after.safetensors`: the global model before and after the round;
- `exchange-0-slot-00003.safetensors`: of one reply, `model/LEAF`, the local model without the leaves that never
  change, if `record.local_models` names the round; and `FIELD/LEAF`, what the client sent, if `record.updates` does;
- `recording.json`, written last: the clients, the numbers that they sent, and the SHA-256 of each file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlens.base.errors import DecodingError, RunDirectoryError
from fedlens.base.shell_command import quoted_command
from fedlens.core import tensorfile
from fedlens.files.text_files import read_json
from fedlens.run.rundir import RunDir

FORMAT = 1
BEFORE, AFTER, MANIFEST = "before.safetensors", "after.safetensors", "recording.json"
MODEL = "model"
UPDATE = "update"
STARTED = "started"  # the key of environment.json
_REPLY = re.compile(r"exchange-\d+-slot-\d{5,}\.safetensors")
_FOLDER = re.compile(r"round-(\d{6,18})")


@dataclass(frozen=True)
class RecordedReply:
    """What one client sent in a recorded round.

    Attributes:
        client: its name.
        number: its row in the partition, or the name of data at the server.
        op: the operation that it answered.
        trained: whether its local model is recorded.
        slot: its place in the ask.
        numbers: the numbers that it sent, such as `weight`.
        file: the name of its file.
    """

    client: str
    number: int | str
    op: str
    trained: bool
    slot: int
    numbers: Mapping[str, float]
    file: str

    @property
    def weight(self) -> float:
        """Its weight in the average; 1 if it sent none."""
        return float(self.numbers.get("weight", 1.0))


@dataclass(frozen=True)
class RecordedRound:
    """The recording of one round.

    Attributes:
        folder: its files.
        round: its number.
        local_models: whether the local models are recorded.
        updates: whether all that clients sent is recorded.
        trains: whether the algorithm's replies hold local models.
        replies: what was recorded of each reply, in order.
    """

    folder: Path
    round: int
    local_models: bool
    updates: bool
    trains: bool
    replies: tuple[RecordedReply, ...]
    sha256: Mapping[str, str]

    @property
    def trained(self) -> list[RecordedReply]:
        """The replies with a local model; empty if none is recorded."""
        return [reply for reply in self.replies if reply.trained]

    def before(self) -> dict[str, Tensor]:
        """The global model before the round."""
        return self._read(BEFORE)

    def after(self) -> dict[str, Tensor]:
        """The global model after the round."""
        return self._read(AFTER)

    def local_model(
        self, reply: RecordedReply, before: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The model of a client after local training, whole; `before` saves reading the global model again."""
        leaves = self._under(reply, MODEL)
        return {**(self.before() if before is None else before), **leaves}

    def sent(self, reply: RecordedReply, field: str = UPDATE) -> dict[str, Tensor]:
        """A tree that a client sent, such as its `update`: w^t - w_k of the trainable weights."""
        return self._under(reply, field)

    def _under(self, reply: RecordedReply, name: str) -> dict[str, Tensor]:
        start = f"{name}/"
        found = {
            leaf.removeprefix(start): value
            for leaf, value in self._read(reply.file).items()
            if leaf.startswith(start)
        }
        if not found:
            setting = "record.local_models" if name == MODEL else "record.updates"
            raise RunDirectoryError(
                f"the recording of round {self.round} has no '{name}' of client {reply.client}",
                where=str(self.folder),
                hint=f"set {setting} and repeat the run",
            )
        return found

    def _read(self, name: str) -> dict[str, Tensor]:
        path = self.folder / name
        if path.name != name:
            raise _corrupt(
                self.folder / MANIFEST, f"it names the file '{name}', which is none of this recording"
            )
        try:
            contents = tensorfile.read(path)
        except (OSError, DecodingError) as error:
            raise _corrupt(path, error.what if isinstance(error, DecodingError) else str(error)) from error
        if contents.written.sha256 != self.sha256.get(name):
            raise _corrupt(path, "SHA-256 mismatch")
        return contents.tensors


def recorded_rounds(run: RunDir) -> list[RecordedRound]:
    """The recorded rounds of a run in order; a round whose recording was interrupted is left out.

    Raises `RunDirectoryError` if a recording is corrupt, or of another run.
    """
    started = (run.read_environment() or {}).get(STARTED)
    rounds = [_read_round(path, started) for path in _folders(run)]
    return sorted((found for found in rounds if found is not None), key=lambda found: found.round)


def intact_round(run: RunDir, round: int) -> RecordedRound | None:
    """The recording of a round; None if it is missing or a file of it is corrupt."""
    try:
        found = _read_round(
            folder_of(run.recordings_path, round), (run.read_environment() or {}).get(STARTED)
        )
        if found is not None:
            for name in found.sha256:
                found._read(name)
    except RunDirectoryError:
        return None
    return found


def _folders(run: RunDir) -> list[Path]:
    path = run.recordings_path
    return [each for each in path.iterdir() if _FOLDER.fullmatch(each.name)] if path.is_dir() else []


def folder_of(recordings: Path, round: int) -> Path:
    """The folder of a round."""
    return recordings / f"round-{round:06d}"


def _read_round(folder: Path, started: Any) -> RecordedRound | None:
    path = folder / MANIFEST
    try:
        content: Any = read_json(path)
    except RunDirectoryError as error:
        raise RunDirectoryError(error.what, where=error.where, hint=_again(path)) from None
    if content is None:
        return None
    if content.get("format") != FORMAT:
        raise RunDirectoryError(
            f"the recording has format {content.get('format')}, and this version of fedlens reads {FORMAT}",
            where=str(path),
            hint="use the version that made the run",
        )
    if content.get("run") != started:
        raise RunDirectoryError(
            f"the recording is of another run, which was started at {content.get('run')}, and this one at {started}",
            where=str(folder),
            hint="move the folder back to its run",
        )
    if content.get("round") != int(folder.name.removeprefix("round-")):
        raise _corrupt(path, f"it is of round {content.get('round')}")
    try:
        replies = tuple(
            RecordedReply(
                str(row["client"]),
                row["number"],
                row["op"],
                bool(row["trained"]),
                int(row["slot"]),
                dict(row["numbers"]),
                str(row["file"]),
            )
            for row in content["clients"]
        )
        recorded = RecordedRound(
            folder,
            int(content["round"]),
            bool(content["local_models"]),
            bool(content["updates"]),
            bool(content["trains"]),
            replies,
            dict(content["sha256"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from error
    for reply in replies:
        if not _REPLY.fullmatch(reply.file):
            raise _corrupt(path, f"it names the file '{reply.file}', which is none of this recording")
    for name in (BEFORE, AFTER, *(reply.file for reply in replies)):
        if name not in recorded.sha256:
            raise _corrupt(path, f"it has no SHA-256 of {name}")
    return recorded


def _corrupt(path: Path, reason: str) -> RunDirectoryError:
    what = f"{path.name} of the recording is corrupt: {reason}"
    return RunDirectoryError(what, where=str(path), hint=_again(path))


def _again(path: Path) -> str:
    number = int(path.parent.name.removeprefix("round-"))
    return f"{quoted_command('analyze', path.parents[2], record=number)} records this round again"
