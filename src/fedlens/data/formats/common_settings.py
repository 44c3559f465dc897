"""The settings shared by the readers of a user's own data, each written once, and the command that checks them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from fedlens.base.shell_command import setting, shell_command
from fedlens.data.decoding import Fit as FitValue
from fedlens.data.diagnostics import OnError as OnErrorValue
from fedlens.data.partition.settings import whole_path

_NOT_CHECKED = ("path", "on_error")  # `on_error` is for runs: a check lists every problem


def whole_table(path: str | None) -> str | None:
    """The absolute path of a table that exists as seen from the current directory; others may be in the data folder."""
    return whole_path(path) if path is not None and Path(path).expanduser().exists() else path


_Side = Annotated[int, Field(ge=1, le=4096)]

Folder = Annotated[
    str,
    Field(min_length=1, description="the folder of your data, seen from where you are"),
    AfterValidator(whole_path),
]
Size = Annotated[
    _Side | tuple[_Side, _Side] | None,
    Field(
        description="pixels of every image after scaling: a number, or [height, width]; by default the most frequent "
        "size of the images, at most 224 on the longer side"
    ),
]
Channels = Annotated[Literal[1, 3], Field(description="3 for colour, 1 for grey")]
Fit = Annotated[
    FitValue,
    Field(description="'crop' cuts the longer side, 'pad' fills the shorter one, 'stretch' scales both"),
]
Test = Annotated[
    float, Field(gt=0, lt=1, description="share held out as test data, if your data have no splits")
]
OnError = Annotated[
    OnErrorValue,
    Field(description="'stop' at any problem, or 'skip' faulty images (or boxes)"),
]
Classes = Annotated[
    list[str] | None,
    Field(description="names of the classes, in order; by default all in the data, sorted"),
]
TableFile = Annotated[
    str | None,
    Field(
        description="CSV file with the columns path[,label][,client][,split] and any others, one line per image; "
        "paths start at the folder of your data"
    ),
    AfterValidator(whole_table),
]
PathColumn = Annotated[
    str | None,
    Field(min_length=1, description="column of the table with the file of an image; by default path"),
]
ClientColumn = Annotated[
    str | None,
    Field(description="column of the table (or field of the annotations) with the client of an image"),
]
ClientLevel = Annotated[
    int | None,
    Field(description="folder named after the client: 1 is the first, -1 the one that contains the image"),
]
ClientPattern = Annotated[
    str | None,
    Field(description="regular expression; its one group, searched in the path, is the client"),
]


def height_width(size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of the setting `size`.

    >>> height_width(224), height_width((100, 200))
    ((224, 224), (100, 200))
    """
    return (size, size) if isinstance(size, int) else size


def check_command(format: str, settings: Mapping[str, Any], write: Path | None = None) -> str:
    """The `fedlens data check` of data in a format, with those settings of its reader that are not the default.

    `write` is the file of an experiment to write.

    >>> check_command("image-folder", {"path": "my images", "path_column": "file", "classes": ["a", "b"]})
    'fedlens data check \\'my images\\' --format image-folder --set path_column=file --set \\'classes=["a", "b"]\\''
    """
    changes = [setting(key, value) for key, value in settings.items() if key not in _NOT_CHECKED]
    words = ("data", "check", str(settings["path"]), "--format", format)
    return shell_command(*words, changes=changes, write=write)
