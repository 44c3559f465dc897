"""LEAF's files: JSON by user, read one user at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.core.errors import DataError
from fedlens.data.datasets.folders import by_hand

REPOSITORY = "github.com/TalwalkarLab/leaf"
_AGAIN = "the file is not as LEAF writes it: make it again with LEAF's preprocess.sh"
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()

Converted = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, eq=False)
class User:
    """What one file says of one user: as many targets `y` as inputs `x`, as they stand there."""

    name: str
    x: list[Any]
    y: list[Any]
    where: str

    def fault(self, example: int, what: str) -> DataError:
        """The error for one example of this user."""
        return DataError(f"example {example} {what}", where=self.where, hint=_AGAIN)


def split_folders(root: Path, name: str) -> tuple[Path, Path]:
    """(train, test): the folders with LEAF's JSON files of the dataset `name`.

    They are looked for in `root/<name>`, `root/<name>/data` and `root/leaf/data/<name>/data`. Raises
    `DataError` that says how to make them where they are not there.
    """
    for place in (name, f"{name}/data", f"leaf/data/{name}/data"):
        train, test = root / place / "train", root / place / "test"
        if train.is_dir() and test.is_dir():
            return train, test
    raise by_hand(
        name,
        root,
        f"{name}/train/*.json and {name}/test/*.json",
        f"get LEAF ({REPOSITORY}), run ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample in data/{name}, "
        f"and put its data/train and data/test into {name}",
    )


def read_split(folder: Path, convert: Callable[[User], Converted]) -> tuple[Any, Any, NDArray[np.str_]]:
    """(inputs [n, ...], targets [n], user of each [n]): all JSON files of a folder, user after user.

    `convert` makes the arrays of one user. Files are read one after the other by the numbers in their names.
    A user without examples (LEAF leaves such entries behind) does not appear.

    Raises `DataError` where there is no file, a file is not what LEAF writes (see `users`), or a user is in
    two files.
    """
    paths = sorted(folder.glob("*.json"), key=_natural)
    if not paths:
        raise DataError(
            "there is no JSON file in the folder", where=str(folder), hint="see LEAF's data folder"
        )
    inputs, targets, names, sizes = [], [], [], []
    seen: dict[str, Path] = {}
    for path in paths:
        for user in users(path):
            if user.name in seen:
                raise DataError(
                    f"the user '{user.name}' is in {seen[user.name].name} too",
                    where=str(path),
                    hint="keep the files of one run of LEAF's preprocess.sh only",
                )
            seen[user.name] = path
            some_inputs, some_targets = convert(user)
            inputs.append(some_inputs)
            targets.append(some_targets)
            names.append(user.name)
            sizes.append(len(some_targets))
    if not names:
        raise DataError("the files have no examples", where=str(folder), hint=_AGAIN)
    return np.concatenate(inputs), np.concatenate(targets), np.repeat(np.array(names), sizes)


def users(path: Path) -> Iterator[User]:
    """The users of one file that have examples, in the file's order.

    A file is `{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}`; LEAF's
    `hierarchies` are left unread. Only one user is taken apart at a time: the numbers of a file of FEMNIST
    take ten times the room of its text.

    Raises `DataError` with the file, and the line and column or the user, where it is not JSON, lacks a key,
    lists a user without data, has data of a user whom it does not list, or counts other than `num_samples`.
    What concerns the file as a whole is said after its last user.
    """
    cursor = _Cursor(path)
    head: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for key in cursor.members():
        if key != "user_data":
            head[key] = cursor.value()
            continue
        head[key] = None
        for name in cursor.members():
            user = _user(name, cursor.value(), path)
            if name in sizes:
                raise DataError(f"the user '{name}' has data twice", where=str(path), hint=_AGAIN)
            sizes[name] = len(user.y)
            if user.y:
                yield user
    cursor.finish()
    _check(head, sizes, path)


def whole_numbers(user: User, below: int) -> NDArray[np.int64]:
    """int64 [n]: the targets of a user. Raises `DataError` where one is not a whole number in 0 .. below - 1."""
    for at, value in enumerate(user.y):
        if type(value) is not int or not 0 <= value < below:
            raise user.fault(
                at, f"has the label {value!r}, and a whole number in 0 .. {below - 1} is expected"
            )
    return np.array(user.y, np.int64)


def _user(name: str, data: Any, path: Path) -> User:
    where = f"{path}, user '{name}'"
    for key in ("x", "y"):
        if not isinstance(data, dict) or not isinstance(data.get(key), list):
            raise DataError(f"the user has no list '{key}'", where=where, hint=_AGAIN)
    if len(data["x"]) != len(data["y"]):
        raise DataError(
            f"the user has {len(data['x'])} inputs 'x' and {len(data['y'])} targets 'y'",
            where=where,
            hint=_AGAIN,
        )
    return User(name, data["x"], data["y"], where)


def _check(head: dict[str, Any], sizes: dict[str, int], path: Path) -> None:
    """Raises `DataError` where the lists of users and of their numbers of examples are not those of the data."""

    def fault(what: str) -> DataError:
        return DataError(what, where=str(path), hint=_AGAIN)

    for key in ("users", "num_samples", "user_data"):
        if key not in head:
            raise fault(f"the key '{key}' is missing")
    listed, counts = head["users"], head["num_samples"]
    if not isinstance(listed, list) or not isinstance(counts, list) or len(listed) != len(counts):
        raise fault("'users' and 'num_samples' are not lists of one length")
    gone = [name for name in listed if name not in sizes]
    if gone:
        raise fault(f"{len(gone)} users have no data in 'user_data', the first is '{gone[0]}'")
    for name, count in zip(listed, counts, strict=True):
        if sizes[name] != count:
            raise fault(f"'num_samples' says {count} for the user '{name}', who has {sizes[name]} examples")
    known = set(listed)
    unknown = [name for name, size in sizes.items() if size and name not in known]
    if unknown:
        raise fault(f"{len(unknown)} users with data are not in 'users', the first is '{unknown[0]}'")


class _Cursor:
    """Where in the text of a JSON file reading has come to."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        try:
            self.text = path.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"the file is not UTF-8 at byte {error.start}", where=str(path), hint=_AGAIN
            ) from error
        except OSError as error:
            raise DataError(f"the file cannot be read: {error.strerror}", where=str(path)) from error

    def value(self) -> Any:
        """The value that begins here."""
        self._skip()
        try:
            found, self.at = _DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            raise self._fault(error.msg, error.pos) from error
        except RecursionError as error:
            raise self._fault("too deep", self.at) from error
        return found

    def members(self) -> Iterator[str]:
        """The keys of the object that begins here; whoever takes them reads each value before the next key."""
        self._need("{")
        if self._took("}"):
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise self._fault("a key in quotes was expected", self.at)
            self._need(":")
            yield key
            if self._took("}"):
                return
            self._need(",")

    def finish(self) -> None:
        """Raises `DataError` where the text goes on."""
        self._skip()
        if self.at < len(self.text):
            raise self._fault("the file goes on after its end", self.at)

    def _need(self, sign: str) -> None:
        if not self._took(sign):
            raise self._fault(f"'{sign}' was expected", self.at)

    def _took(self, sign: str) -> bool:
        self._skip()
        taken = self.text.startswith(sign, self.at)
        self.at += taken
        return taken

    def _skip(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _fault(self, what: str, at: int) -> DataError:
        line = self.text.count("\n", 0, at) + 1
        column = at - self.text.rfind("\n", 0, at)
        return DataError(
            f"the file is not valid JSON: {what}",
            where=f"{self.path}, line {line}, column {column}",
            hint=_AGAIN,
        )


def _natural(path: Path) -> list[tuple[int, str]]:
    """`all_data_10` after `all_data_9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
