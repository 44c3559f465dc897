"""Checkpoints that survive a kill at any moment and notice a flipped bit, and the final model's file.

A checkpoint is a directory `round-000012` with `tensors.safetensors` and `manifest.json`. The manifest holds
everything that is not a tensor, and the SHA-256 of the tensor file and of itself. Both are written to a temporary
directory, synced to the disk and renamed, so `round-000012` is complete or does not exist.

Client states beyond the memory budget are in separate files (`state_files.py`), which several checkpoints share. The
manifest has their hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlens import __version__
from fedlens.base.errors import DataError, DecodingError, RunDirectoryError, RunFailed
from fedlens.base.parse_text import parse_json
from fedlens.base.shell_command import quoted_command
from fedlens.core import tensorfile
from fedlens.core.device_copies import downloaded
from fedlens.core.payload import decode, encode
from fedlens.core.types import Payload
from fedlens.files.atomic_files import (
    fsync_directory,
    not_regular,
    read_regular,
    refused,
    replacing,
    sweep,
    write_durably,
)
from fedlens.files.model_digest import DIGEST, model_digest
from fedlens.run import state_files

FORMAT = 1

_TENSORS, _MANIFEST = "tensors.safetensors", "manifest.json"
_NAME = re.compile(r"round-(\d{6,18})((?:\.[0-9a-f]{16})?\.saving|\.replaced|\.removing)?")
_ENVELOPE = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "content": (.*)\}\n', re.DOTALL)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read.

    `about` is what was saved besides the payload, `skipped` has a sentence for each newer checkpoint that is corrupt.
    """

    round: int
    payload: dict[str, Any]
    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


class _Damaged(Exception):
    """A corrupt checkpoint; the text says how it shows."""


def save(
    directory: Path,
    round: int,
    payload: Payload,
    states: Iterable[str] = (),
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Save `payload` as the checkpoint of `round` below `directory`, and return its path.

    `states` are the hashes of the files in `states_beside(directory)` that belong to it; they are already on the disk.
    `about` is JSON that `peek` reads without the payload.

    Checkpoints of later rounds are removed once this one is on the disk: the run was resumed from before them. A tensor
    that occurs twice in the payload is stored once and read back as one tensor.

    Raises `RunFailed` if the disk is full or refuses (earlier checkpoints are left unchanged), or if the payload has a
    value that a checkpoint cannot hold.

    >>> import tempfile, torch
    >>> directory = Path(tempfile.mkdtemp())
    >>> save(directory, 3, {"state": {"w": torch.ones(2)}, "clients": {"7": {"steps": 5}}}).name
    'round-000003'
    >>> load_latest(directory).payload
    {'state': {'w': tensor([1., 1.])}, 'clients': {'7': {'steps': 5}}}
    """
    structure, tensors = encode(payload)
    final = path_of(directory, round)
    temporary = final.with_name(f"{final.name}.{secrets.token_hex(8)}.saving")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        written = tensorfile.write(temporary / _TENSORS, tensors)
        write_durably(temporary / _MANIFEST, _manifest(round, structure, written, states, about))
        fsync_directory(temporary)
        _take_place(temporary, final)
        fsync_directory(directory)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        hint = f"then resume with {quoted_command('resume', directory.parent)}: the previous checkpoint is untouched"
        raise refused(error, f"the checkpoint of round {round}", final, hint) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for number, _, path in _entries(directory):
        if number > round:
            _remove(path)
    return final


def load_latest(directory: Path) -> Loaded | None:
    """The newest complete checkpoint below `directory`, or None if none was ever finished.

    Raises `RunDirectoryError` if all checkpoints are corrupt, or if the newest complete one is in the format of another
    version of fedlens.

    >>> import tempfile
    >>> load_latest(Path(tempfile.mkdtemp())) is None
    True
    """
    skipped: list[str] = []
    damaged = False
    for number, suffix, path in sorted(_entries(directory), key=lambda entry: (-entry[0], entry[1])):
        if suffix.endswith(".saving"):
            skipped.append(f"the checkpoint of round {number} is incomplete: saving it was interrupted")
        elif suffix != ".removing":
            try:
                payload, about = _read(path, number, with_states=True)
                return Loaded(number, payload, path, about, skipped)
            except _Damaged as fault:
                damaged = True
                skipped.append(f"the checkpoint of round {number} is corrupt ({fault}) and was skipped")
    if damaged:
        new = quoted_command("run", directory.parent / "config.toml", out="ANOTHER_DIRECTORY")
        hint = f"start a new run: {new}"
        what = f"no checkpoint can be read: {'; '.join(skipped)}"
        raise RunDirectoryError(what, where=str(directory), hint=hint)
    return None


def peek(directory: Path) -> tuple[int, dict[str, Any]] | None:
    """The round and `about` of the newest checkpoint whose manifest can be read; None if there is none.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> _ = save(directory, 3, {}, about={"note": "x"})
    >>> peek(directory)
    (3, {'note': 'x'})
    """
    for number, suffix, path in sorted(_entries(directory), key=lambda entry: (-entry[0], entry[1])):
        if suffix in ("", ".replaced"):
            with suppress(_Damaged, OSError, RunDirectoryError):
                return number, _content(path)["about"]
    return None


def load(path: Path) -> Loaded:
    """The checkpoint at `path`, for example of the best round. Raises `RunDirectoryError` if it is corrupt.

    The files of client states are not checked: only the model is read from it.

    >>> import tempfile
    >>> load(save(Path(tempfile.mkdtemp()), 1, {"best": 0.5})).payload
    {'best': 0.5}
    """
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        raise RunDirectoryError("no checkpoint found", where=str(path))
    try:
        payload, about = _read(path, int(match[1]))
        return Loaded(int(match[1]), payload, path, about)
    except _Damaged as fault:
        raise RunDirectoryError(f"the checkpoint is corrupt ({fault})", where=str(path)) from None


def states_beside(directory: Path) -> Path:
    """The folder of the client state files that the checkpoints below `directory` refer to.

    >>> states_beside(Path("run/checkpoint")).as_posix()
    'run/states'
    """
    return directory.parent / "states"


def states_of_all(directory: Path) -> set[str]:
    """The hashes of the state files that the intact checkpoints below `directory` refer to.

    Raises `OSError` if one cannot be read at the moment.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> _ = save(directory, 1, {}, states=["ab12"]), save(directory, 2, {}, states=["cd34", "ab12"])
    >>> sorted(states_of_all(directory))
    ['ab12', 'cd34']
    """
    found: set[str] = set()
    for _, suffix, path in _entries(directory):
        if suffix in ("", ".replaced"):
            with suppress(_Damaged, FileNotFoundError):
                found.update(_content(path)["states"])
    return found


def path_of(directory: Path, round: int) -> Path:
    """The path of the checkpoint of `round`, whether it exists or not.

    >>> path_of(Path("checkpoint"), 12).name
    'round-000012'
    """
    if round < 0:
        raise ValueError(f"round is {round}, but must be at least 0")
    return directory / f"round-{round:06d}"


def rounds_saved(directory: Path) -> list[int]:
    """The rounds of the checkpoints below `directory`, in order."""
    return sorted(number for number, suffix, _ in _entries(directory) if suffix == "")


def prune(directory: Path, keep: int = 2, best: int | None = None) -> None:
    """Remove all but the last `keep` checkpoints and that of round `best`, and the leftovers of killed saves.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> for round in range(6):
    ...     _ = save(directory, round, {})
    >>> prune(directory, keep=2, best=1)
    >>> sorted(path.name for path in directory.iterdir())
    ['round-000001', 'round-000004', 'round-000005']
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, but must be at least 1: a run needs its last checkpoint")
    entries = _entries(directory)
    complete = {number for number, suffix, _ in entries if suffix == ""}
    usable = sorted(complete | {number for number, suffix, _ in entries if suffix == ".replaced"})
    kept = {*usable[-keep:], best}
    for number, suffix, path in entries:
        leftover = suffix.endswith((".saving", ".removing")) or (suffix == ".replaced" and number in complete)
        if leftover or number not in kept:
            _remove(path)


def write_model(
    path: Path, tree: Mapping[str, Tensor], metadata: Mapping[str, str], named: bool = True
) -> None:
    """Write a model as one safetensors file, with `metadata` and a digest of it all in the file's metadata.

    The file at `path` is replaced atomically; `named` is that of `replacing`.
    Raises `RunFailed` if the disk is full or refuses, or if a tensor cannot be stored.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> write_model(path, {"w": torch.ones(2)}, {"classes": '["cat", "dog"]'})
    >>> read_model(path)
    ({'w': tensor([1., 1.])}, {'classes': '["cat", "dog"]'})
    """
    tree = downloaded(tree)  # for the digest and the file
    try:
        sweep(path.parent)
        with replacing(path, named) as temporary:
            tensorfile.write(temporary, tree, {**metadata, DIGEST: model_digest(tree, metadata)})
    except OSError as error:
        raise refused(error, "the model", path) from error
    except ValueError as error:
        raise RunFailed(f"the model could not be written: {error}", where=str(path)) from error


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tree and the metadata of a file from `write_model`.

    Raises `DataError` if the file is missing, was not written by fedlens, or is corrupt.
    """
    try:
        contents = tensorfile.read(path)
    except OSError as error:
        raise DataError(f"the model cannot be read: {error.strerror or error}", where=str(path)) from error
    except DecodingError as error:
        what = f"the model is not a readable safetensors file: {error.what}"
        raise DataError(what, where=str(path)) from error
    metadata = dict(contents.metadata)
    digest = metadata.pop(DIGEST, None)
    if digest is None:
        raise DataError("the file has no digest, so fedlens did not write it", where=str(path))
    if digest != model_digest(contents.tensors, metadata):
        hint = "copy it from its source again, or use a checkpoint of the run"
        raise DataError("the model is corrupt (SHA-256 mismatch)", where=str(path), hint=hint)
    return contents.tensors, metadata


def _entries(directory: Path) -> list[tuple[int, str, Path]]:
    """Each checkpoint, or what is left of one, as (round, suffix, path)."""
    if not directory.is_dir():
        return []
    if directory.is_symlink():
        raise not_regular(directory)  # checkpoints are removed here, and would be removed elsewhere
    matches = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    return [(int(match[1]), match[2] or "", path) for match, path in matches if match]


def _take_place(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final`; one of that name steps aside first, to where `load_latest` finds it."""
    aside = final.with_name(final.name + ".replaced")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    os.rename(temporary, final)
    shutil.rmtree(aside, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a directory, by a rename first: one that is half removed must not look damaged.

    What the disk does not let go of stays: a run does not end for that.
    """
    doomed = path.with_name(path.name.partition(".")[0] + ".removing")
    with suppress(OSError):
        if path.is_symlink():  # the target is not ours
            path.unlink()
            return
        if path != doomed:
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _manifest(
    round: int,
    structure: Any,
    written: tensorfile.Written,
    states: Iterable[str],
    about: Mapping[str, Any] | None,
) -> bytes:
    content = {
        "fedlens": __version__,
        "format": FORMAT,
        "round": round,
        "tensors": {"file": _TENSORS, "bytes": written.size, "sha256": written.sha256},
        "states": sorted(set(states)),
        "about": dict(about or {}),
        "payload": structure,
    }
    text = json.dumps(content).encode()
    return b'{"sha256": "%s", "content": %s}\n' % (hashlib.sha256(text).hexdigest().encode(), text)


def _content(path: Path) -> dict[str, Any]:
    """The contents of a manifest, after its checksum and its types are checked."""
    if path.is_symlink():
        raise _Damaged("it is a symbolic link")
    match = _ENVELOPE.fullmatch(read_regular(path / _MANIFEST))
    if match is None or hashlib.sha256(match[2]).hexdigest().encode() != match[1]:
        raise _Damaged(f"{_MANIFEST} has a wrong checksum")
    try:
        content = parse_json(match[2])
    except ValueError as error:
        raise _Damaged(f"{_MANIFEST} is not JSON: {error}") from None
    # A checksum only shows accidents: whoever wrote the file may have written anything.
    if not isinstance(content, dict) or "payload" not in content:
        raise _Damaged(f"{_MANIFEST} is not a manifest")
    content = {"states": [], "about": {}, **content}
    tensors = content.get("tensors")
    if not (
        isinstance(content.get("round"), int)
        and isinstance(content.get("format"), int)
        and isinstance(tensors, dict)
        and isinstance(tensors.get("sha256"), str)
        and isinstance(content["about"], dict)
        and isinstance(content["states"], list)
        and all(state_files.is_key(key) for key in content["states"])
    ):
        raise _Damaged(f"{_MANIFEST} has a value of the wrong type")
    return content


def _read(path: Path, number: int, with_states: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The payload of a checkpoint, and what was saved about it."""
    try:
        content = _content(path)
        _check_format(content, path)
        if content["round"] != number:
            raise _Damaged(f"it belongs to round {content['round']}")
        contents = tensorfile.read(path / _TENSORS)
    except RunDirectoryError as error:
        if error.where == str(path):  # of another version
            raise
        raise _Damaged(error.what) from None
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise _Damaged(f"{name}: {error.strerror or error}") from error
    except DecodingError as error:
        raise _Damaged(f"{_TENSORS}: {error.what}") from error
    said = tensorfile.Written(content["tensors"].get("bytes"), content["tensors"]["sha256"])
    if contents.written != said:
        raise _Damaged(f"{_TENSORS} has a wrong checksum")
    for key in content["states"] if with_states else ():
        fault = state_files.fault_of(states_beside(path.parent), key)
        if fault is not None:
            raise _Damaged(f"the state of a client, {key[:16]}...: {fault}")
    try:  # a forged manifest can name tensors, types and shapes that do not exist
        return decode(content["payload"], contents.tensors), content["about"]
    except DecodingError as error:
        raise _Damaged(f"{_MANIFEST} does not match {_TENSORS}: {error.what} ({error.where})") from error


def _check_format(content: Mapping[str, Any], path: Path) -> None:
    if content["format"] != FORMAT:
        by = content.get("fedlens", "another version")
        raise RunDirectoryError(
            f"the checkpoint was written by fedlens {by} in format {content['format']}, "
            f"and this is fedlens {__version__}, which reads format {FORMAT}",
            where=str(path),
            hint=f"resume the run with fedlens {by}, or start a new run in another directory",
        )
