"""The settings shared by the readers of images, each written once, and the command that checks a user's own data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator

from fedlens.base.errors import ConfigError
from fedlens.base.shell_command import setting, shell_command
from fedlens.data.decoding import Fit as FitValue
from fedlens.data.diagnostics import OnError as OnErrorValue
from fedlens.data.partition.settings import whole_path

_LARGEST = 16_384  # pixels of a side
_NOT_CHECKED = ("path", "on_error")  # `on_error` is for runs: a check lists every problem


def whole_table(path: str | None) -> str | None:
    """The absolute path of a table that exists as seen from the current directory; others may be in the data folder."""
    return whole_path(path) if path is not None and Path(path).expanduser().exists() else path


def height_width(size: object) -> tuple[int, int]:
    """(height, width) of a setting that is one number, or [height, width].

    Raises `ValueError` if it is neither.

    >>> height_width(256), height_width([360, 480])
    ((256, 256), (360, 480))
    """
    sides = [size, size] if isinstance(size, int) else list(size) if isinstance(size, (list, tuple)) else []
    if len(sides) != 2 or not all(type(side) is int and 1 <= side <= _LARGEST for side in sides):
        raise ValueError(f"it must be one number of pixels, or [height, width], from 1 to {_LARGEST}")
    return sides[0], sides[1]


def size_of(size: object) -> tuple[int, int]:
    """`height_width` for a reader that is called from Python; raises `ConfigError`."""
    try:
        return height_width(size)
    except ValueError as error:
        raise ConfigError(f"the size is {size!r}, and {error}", where="size") from None


def _height_width_or_none(size: object) -> tuple[int, int] | None:
    return None if size is None else height_width(size)


_WHAT = "pixels of every image after scaling: one number, or [height, width]"
_GIVEN = f"{_WHAT}; by default, of your own images, their most frequent size, at most 224 on the longer side"
GivenSize = Annotated[int | tuple[int, int], PlainValidator(height_width), Field(description=_GIVEN)]
SizeOrOwn = Annotated[
    int | tuple[int, int] | None,
    PlainValidator(_height_width_or_none),
    Field(description=f"{_WHAT}; by default the size of the first image"),
]
_Side = Annotated[int, Field(ge=1, le=4096)]

Folder = Annotated[
    str,
    Field(min_length=1, description="the folder of your data, seen from where you are"),
    AfterValidator(whole_path),
]
Size = Annotated[
    _Side | tuple[_Side, _Side] | None,
    Field(description=_GIVEN),
]
Channels = Annotated[Literal[1, 3], Field(description="3 for colour, 1 for grey")]
Fit = Annotated[
    FitValue,
    Field(
        description="for images of another shape: `pad` fills the rest, `crop` cuts out the centre, "
        "`stretch` distorts"
    ),
]
Test = Annotated[
    float,
    Field(
        ge=0,
        lt=1,
        description="share held out as test data, if your data have no splits; 0 for none, which suits sites alone",
    ),
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


def check_command(format: str, settings: Mapping[str, Any], write: Path | None = None) -> str:
    """The `fedlens data check` of data in a format, with those settings of its reader that are not the default.

    `write` is the file of an experiment to write.

    >>> check_command("image-folder", {"path": "my images", "path_column": "file", "classes": ["a", "b"]})
    'fedlens data check \\'my images\\' --format image-folder --set path_column=file --set \\'classes=["a", "b"]\\''
    """
    changes = [setting(key, value) for key, value in settings.items() if key not in _NOT_CHECKED]
    words = ("data", "check", str(settings["path"]), "--format", format)
    return shell_command(*words, changes=changes, write=write)
