"""LEAF's files: JSON by user, each user converted to arrays as soon as it is parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import DataError
from fedlens.data.dataset import Examples
from fedlens.data.datasets.dataset_files import damaged, locate, read_json

_AGAIN = "the file is not as LEAF writes it: create it again with LEAF's preprocess.sh"

Converted = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True, eq=False)
class User:
    """The data of one user in a file: inputs `x` and as many targets `y`, as they stand there."""

    x: list[Any]
    y: list[Any]

    def fault(self, example: int, what: str) -> DataError:
        """The error for one example of this user. The reader of the file adds the file and the user."""
        return DataError(f"example {example} {what}", hint=_AGAIN)


def split_folders(root: Path, name: str) -> tuple[Path, Path]:
    """(train, test): the folders with LEAF's JSON files of the dataset `name`.

    They are `root/<name>`, `root/<name>/data` or `root/leaf/data/<name>/data`. Raises `DataError` with the way
    to create them if they are missing.
    """
    train, test = locate(name, root)
    return train.parent, test.parent


def by_user(folder: Path, convert: Callable[[User], Converted], unit: str) -> Examples:
    """The examples of a split; the columns `client` and `unit` are the user of each. See `read_split`."""
    inputs, targets, users = read_split(folder, convert)
    return Examples(inputs, targets, {"client": users, unit: users})


def read_split(folder: Path, convert: Callable[[User], Converted]) -> tuple[Any, Any, NDArray[np.str_]]:
    """(inputs [n, ...], targets [n], user of each [n]): all JSON files of a folder, user by user.

    `convert` makes the arrays of one user. Files are read one by one, in the order of the numbers in their
    names. A user without examples (LEAF leaves such entries behind) is left out.

    Raises `DataError` if no file has examples, a file is not what LEAF writes (see `read_users`), or a user is
    in two files.
    """
    arrays: dict[str, Converted] = {}
    file_of: dict[str, Path] = {}
    for path in sorted(folder.glob("*.json"), key=_natural):
        for name, converted in read_users(path, convert).items():
            if name in file_of:
                hint = "keep the files of one run of LEAF's preprocess.sh only"
                raise damaged(f"the user '{name}' is in {file_of[name].name} too", path, hint=hint)
            file_of[name] = path
            arrays[name] = converted
    if not arrays:
        raise damaged("the files have no examples", folder, hint=_AGAIN)
    inputs, targets = zip(*arrays.values(), strict=True)
    sizes = [len(one) for one in targets]
    return np.concatenate(inputs), np.concatenate(targets), np.repeat(np.array(list(arrays)), sizes)


def read_users(path: Path, convert: Callable[[User], Converted]) -> dict[str, Converted]:
    """The converted arrays of the users of one file that have examples, in the file's order.

    A file is `{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}`; other
    keys, such as LEAF's `hierarchies`, do not matter. Each user is converted as soon as it is parsed, because
    the numbers of a file of FEMNIST take ten times the memory of its text.

    Raises `DataError` with the file, and the line and column or the user, if it is not JSON, lacks a key,
    lists a user without data, has data of a user whom it does not list, or counts other than `num_samples`.
    """

    def build(pairs: list[tuple[str, Any]]) -> Any:
        entries = dict(pairs)
        x, y = entries.get("x"), entries.get("y")
        if isinstance(x, list) and isinstance(y, list):
            return _converted(User(x, y), convert)
        if len(entries) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for at, name in enumerate(names) if name in names[:at])
            raise damaged(f"the user '{twice}' has data twice", path, hint=_AGAIN)
        return entries

    content = read_json(path, build, _AGAIN)
    users, counts, data = (_entry(content, key, path) for key in ("users", "num_samples", "user_data"))
    if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
        raise damaged("'users' and 'num_samples' are not lists of one length", path, hint=_AGAIN)
    if not isinstance(data, dict):
        raise damaged("'user_data' is not an object with the data of each user", path, hint=_AGAIN)
    for name, converted in data.items():
        if isinstance(converted, DataError):
            raise DataError(converted.what, where=f"{path}, user '{name}'", hint=converted.hint)
        if not isinstance(converted, tuple):
            key = "y" if isinstance(converted, dict) and isinstance(converted.get("x"), list) else "x"
            raise DataError(f"the user has no list '{key}'", where=f"{path}, user '{name}'", hint=_AGAIN)
    _check_counts(users, counts, {name: len(targets) for name, (_, targets) in data.items()}, path)
    return {name: converted for name, converted in data.items() if len(converted[1])}


def _converted(user: User, convert: Callable[[User], Converted]) -> Converted | DataError:
    """The arrays of a user, or what is wrong with it: only the reader of the file knows its name."""
    if len(user.x) != len(user.y):
        what = f"the user has {len(user.x)} inputs 'x' and {len(user.y)} targets 'y'"
        return DataError(what, hint=_AGAIN)
    if not user.y:
        return np.empty(0), np.empty(0)
    try:
        return convert(user)
    except DataError as error:
        return error


def _entry(content: Any, key: str, path: Path) -> Any:
    if not isinstance(content, dict) or key not in content:
        raise damaged(f"the key '{key}' is missing", path, hint=_AGAIN)
    return content[key]


def _check_counts(users: Sequence[str], counts: Sequence[int], sizes: dict[str, int], path: Path) -> None:
    """Raises `DataError` if the lists of users and of their numbers of examples do not fit the data."""
    without = [name for name in users if name not in sizes]
    if without:
        what = f"{len(without)} users have no data in 'user_data', the first is '{without[0]}'"
        raise damaged(what, path, hint=_AGAIN)
    for name, count in zip(users, counts, strict=True):
        if sizes[name] != count:
            what = f"'num_samples' says {count} for the user '{name}', who has {sizes[name]} examples"
            raise damaged(what, path, hint=_AGAIN)
    listed = set(users)
    unlisted = [name for name, size in sizes.items() if size and name not in listed]
    if unlisted:
        what = f"{len(unlisted)} users with data are not in 'users', the first is '{unlisted[0]}'"
        raise damaged(what, path, hint=_AGAIN)


def whole_numbers(user: User, below: int) -> NDArray[np.int64]:
    """int64 [n]: the targets of a user. Raises `DataError` if one is not a whole number in 0 .. below - 1."""
    for at, value in enumerate(user.y):
        if type(value) is not int or not 0 <= value < below:
            raise user.fault(
                at, f"has the label {value!r}, and a whole number in 0 .. {below - 1} is expected"
            )
    return np.array(user.y, np.int64)


def _natural(path: Path) -> list[tuple[int, str]]:
    """A sort key that puts `all_data_10` after `all_data_9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
