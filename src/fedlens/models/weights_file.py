"""Reads the tensors of a weights file: safetensors, or a state dictionary of PyTorch. No code in a file is run."""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlens.base.errors import ConfigError, DataError, DecodingError, FedlensError, one_line, text_of
from fedlens.base.memory import free_memory
from fedlens.base.shell_command import quoted_command
from fedlens.core.tensorfile import parse
from fedlens.files.model_digest import DIGEST, model_digest
from fedlens.files.regular_file import NotRegularError, open_regular
from fedlens.models.yolov5.weights import foreign, leaves_of, renamed, stand_ins

WHERE = "model.weights"
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel, and of torch.compile
_GLOBAL = re.compile(r"GLOBAL ([\w.<>]+)")
_POINTER = b"version https://git-lfs"
_SAVE = "save the tensors alone: torch.save(model.state_dict(), FILE)"
_COPIES = 2  # the file's bytes and its tensors are in memory at the same time


@dataclass(frozen=True, eq=False)
class WeightsFile:
    """The tensors of a file by name, without wrapper and prefix, and the SHA-256 of its bytes in hexadecimal."""

    tensors: Mapping[str, Tensor]
    sha256: str
    path: Path
    metadata: Mapping[str, str] = field(default_factory=dict)


def file_of_run(directory: Path) -> Path:
    """The file of a run's final model. Raises `ConfigError` if the directory is no run, or the run is not finished."""
    path = directory / "model.safetensors"
    if path.is_file():
        return path
    if not directory.is_dir():
        raise ConfigError(
            f"run directory not found: {directory}", where=WHERE, hint=_similar(directory) or "check the path"
        )
    if not (directory / "config.toml").is_file():
        raise ConfigError(
            f"{directory} is not a run directory: it has no config.toml",
            where=WHERE,
            hint="name a run directory after 'run:', or a file without 'run:'",
        )
    raise ConfigError(
        f"the run {directory} has no model.safetensors, because it is not finished",
        where=WHERE,
        hint=f"{quoted_command('resume', directory)} finishes it",
    )


def read_weights(path: Path) -> WeightsFile:
    """The tensors of the file at `path`, on the CPU.

    A state dictionary may be wrapped in `state_dict`, `model` or `model_state_dict`, and its names may all begin with
    `module.` or `_orig_mod.`. Entries that are not tensors are left out. Of a network of YOLOv5's authors, which is a
    pickled object, the tensors are read, and called as those of `fedlens.models.yolov5.detector`.

    Raises `ConfigError` if the file is missing, is not a regular file or does not fit the memory, and `DataError` if
    it is damaged, in another format, or contains anything that would have to be run.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "weights.pt"
    >>> torch.save({"state_dict": {"module.w": torch.ones(2)}, "epoch": 3}, path)
    >>> dict(read_weights(path).tensors)
    {'w': tensor([1., 1.])}
    """
    data = _bytes(path)
    sha256 = hashlib.sha256(data).hexdigest()
    metadata: dict[str, str] = {}
    # The length of a safetensors header, its first 8 bytes, may begin like a pickle or an archive.
    if data[8:9] != b"{" and data.startswith((b"PK", b"\x80")):
        values: Any = _state_dictionary(data, path)
    else:
        values, metadata = _safetensors(data, path)
    for _ in range(len(_WRAPPERS)):
        inner = [found for name in _WRAPPERS if isinstance(found := leaves_of(values.get(name)), Mapping)]
        values = inner[0] if inner else values
    tensors = {str(name): value.detach() for name, value in values.items() if isinstance(value, Tensor)}
    if not tensors:
        names = ", ".join(repr(str(name)) for name in list(values)[:5]) or "nothing"
        raise DataError(
            f"the weights file contains no tensors (its entries: {one_line(names)})",
            where=str(path),
            hint="save the state dictionary: torch.save(model.state_dict(), FILE)",
        )
    while prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in tensors)), None):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return WeightsFile(renamed(tensors), sha256, path, metadata)


def _bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            size = file.seek(0, io.SEEK_END)
            free = free_memory()
            if _COPIES * size > free:
                raise ConfigError(
                    f"the weights file {path} has {_mib(size)}, and reading it takes {_mib(_COPIES * size)} of memory, "
                    f"but only {_mib(free)} is free",
                    where=WHERE,
                    hint="free memory, or save the weights alone, without the optimizer's state",
                )
            file.seek(0)
            return file.read()
    except FileNotFoundError:
        hint = (
            _similar(path)
            or "check the path; it starts at the current folder, and a bare name may be in DATA/weights"
        )
        raise ConfigError(f"weights file not found: {path}", where=WHERE, hint=hint) from None
    except NotRegularError as error:
        run = (path / "config.toml").is_file()
        raise ConfigError(
            f"{path} cannot be read as weights: {error}",
            where=WHERE,
            hint=f"set model.weights = 'run:{path}' to start from the run" if run else "name a file",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the weights file {path} cannot be read: {error.strerror or error}", where=WHERE
        ) from None


def _safetensors(data: bytes, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata; the digest of a file that fedlens wrote is checked."""
    try:
        tensors, metadata = parse(data, where=str(path))
    except DecodingError as error:
        raise _unreadable(data, path) from error
    digest = metadata.pop(DIGEST, None)
    if digest is not None and digest != model_digest(tensors, metadata):
        raise DataError(
            "the weights file is corrupt (SHA-256 mismatch)",
            where=str(path),
            hint="copy it from its source again",
        )
    return tensors, metadata


def _unreadable(data: bytes, path: Path) -> DataError:
    """The error for bytes that are no whole safetensors file."""
    where, again = str(path), "download or copy it from its source again"
    if not data:
        return DataError("the weights file is empty", where=where, hint=again)
    if data.startswith(_POINTER):
        return DataError(
            "the weights file is a pointer of Git LFS, not the weights",
            where=where,
            hint="run 'git lfs pull'",
        )
    if data[8:9] == b"{" or path.suffix == ".safetensors":
        return DataError("the weights file is truncated or corrupt", where=where, hint=again)
    return DataError(
        "the weights file is neither a safetensors file nor a state dictionary of PyTorch",
        where=where,
        hint="save it with torch.save(model.state_dict(), FILE) or safetensors.torch.save_file",
    )


def _state_dictionary(data: bytes, path: Path) -> Mapping[Any, Any]:
    """What `torch.save` wrote. Only tensors, numbers, strings and containers are read; anything else is refused."""
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(stand_ins()):
            warnings.simplefilter("ignore")  # on old formats
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except FedlensError:
        raise
    except Exception as error:
        text = text_of(error)
        name = _GLOBAL.search(text)
        if name is not None or ("weights_only" in text and "TorchScript" in text):
            what = f"the Python object '{one_line(name[1])}'" if name else "a TorchScript program"
            raise _object(what, path) from None
        if isinstance(error, pickle.UnpicklingError) and "Unsupported operand" in text:
            raise DataError(
                "the weights file is a pickle with more than tensors in it; fedlens ran nothing of it",
                where=str(path),
                hint=_SAVE,
            ) from None
        raise DataError(
            "the weights file is truncated or corrupt, or PyTorch did not write it",
            where=str(path),
            hint="download or copy it from its source again",
        ) from error
    values = leaves_of(values)
    layers = foreign(values.values() if isinstance(values, Mapping) else [values])
    if layers is not None:
        raise _object(f"the Python object '{layers}'", path)
    if isinstance(values, Mapping):
        return values
    raise DataError(
        f"the weights file contains a {type(values).__name__}, not a state dictionary",
        where=str(path),
        hint=_SAVE,
    )


def _object(what: str, path: Path) -> DataError:
    """The error for a file with an object that is no tensor."""
    return DataError(
        f"the weights file contains {what} besides tensors; fedlens ran nothing of it",
        where=str(path),
        hint=_SAVE,
    )


def _similar(path: Path) -> str | None:
    """A hint with the nearest names in the same folder; None if none is near."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return f"the folder {path.parent} does not exist"
    close = get_close_matches(path.name, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(repr(name) for name in close)}" if close else None


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
