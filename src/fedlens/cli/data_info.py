"""`fedlens data info`: the facts of one dataset, and the settings of its reader."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from fedlens.cli.data_list import SAID, as_object
from fedlens.cli.display.output import print_columns, print_json, reported, say
from fedlens.cli.options import DataDir, Debug, Json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fedlens.data.catalogue import DatasetFacts, Presence

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <="}


@dataclass(frozen=True)
class Setting:
    """One setting of a factory, as text; `default` is None for a required setting."""

    name: str
    type: str
    default: str | None
    description: str


def info(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A dataset (fedlens data list).")],
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the facts of a dataset: counts, licence, source, files, and the settings of its reader."""
    with reported(debug, as_json):
        from fedlens.base.registry import settings_model
        from fedlens.data.catalogue import presence
        from fedlens.data.datasets.registry import DATASETS
        from fedlens.settings.datadir import data_directory

        record = _record(name)
        root = data_directory(data_dir)
        found = presence(record, root)
        settings = describe(settings_model, DATASETS.find(name))
        if as_json:
            print_json(
                {
                    **as_object(record, found),
                    "data_dir": str(root),
                    "settings": [asdict(one) for one in settings],
                }
            )
            return
        _print(record, found, root)
        say(f'\nsettings in data.dataset, next to name = "{name}"')
        if not settings:
            say("none")
            return
        rows = [(one.name, one.type, _shown(one.default), one.description) for one in settings]
        print_columns(rows, ("setting", "type", "default", "description"))


def _record(name: str) -> DatasetFacts:
    """The facts of a dataset; those of a plug-in or a reader of your own come from its registry row."""
    from fedlens.base.errors import ConfigError, nearest
    from fedlens.data.catalogue import CATALOGUE, DatasetFacts
    from fedlens.data.datasets.registry import DATASETS

    rows = dict(DATASETS.rows())
    if name in CATALOGUE:
        return CATALOGUE[name]
    if name in rows or ":" in name:
        return DatasetFacts(
            name, "not stated", rows.get(name, "a reader of your own"), "see its own page", own=True
        )
    raise ConfigError(f"unknown dataset '{name}'", hint=nearest(name, {*CATALOGUE, *rows}))


def _print(record: DatasetFacts, found: Presence, root: Path) -> None:
    say(f"{record.name}: {record.summary}\n")
    unit = f" ({record.unit})" if record.unit else ""
    clients = f"{record.clients:,}{unit}" if record.clients else f"not counted{unit}" if unit else "none"
    rows = [
        ("task", record.task),
        ("training examples", _count(record.train)),
        ("test examples", _count(record.test)),
        ("classes", _count(record.classes)),
        ("natural clients", "as in your data" if record.own else clients),
        ("licence", "your own" if record.own else record.licence or "not stated"),
        ("source", record.source or "your own"),
        ("download", record.download or "not stated" if record.files else "nothing"),
        ("how to get it", record.how),
    ]
    print_columns(rows)
    if not record.files:
        return
    say(f"\non this machine: {SAID[found.state]}; looked in {root}")
    here = [("found", path.relative_to(root).as_posix()) for path in found.found]
    print_columns([*here, *(("missing", pattern.replace("|", " or ")) for pattern in found.lacking)])


def _count(count: int | None) -> str:
    return "not stated" if count is None else f"{count:,}"


def describe(settings_model: Callable[..., Any], factory: Callable[..., Any]) -> list[Setting]:
    """The settings of a factory as its signature states them: name, type with bounds, default, description."""
    return [
        Setting(
            name,
            type_name(field.annotation) + _bounds(field.metadata),
            None if field.is_required() else _default(field.default),
            field.description or "",
        )
        for name, field in settings_model(factory).model_fields.items()
    ]


def type_name(annotation: Any) -> str:
    """A type as text: the values of a `Literal`, the parts of a union, plain names of all others.

    >>> type_name(Literal["all", "balanced"]), type_name(int | None), type_name(tuple[int, int])
    ('all | balanced', 'int | none', '[int, int]')
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(parts[0]) + _bounds(parts[1:])
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " | ".join(map(type_name, parts))
    if origin in (list, tuple):
        return f"[{', '.join(type_name(part) if part is not ... else '...' for part in parts)}]"
    if annotation is NoneType:
        return "none"
    return "text" if annotation is str else str(getattr(annotation, "__name__", annotation))


def _bounds(metadata: Any) -> str:
    """The limits of a value, in brackets."""
    found = []
    for item in metadata:
        for part in getattr(item, "metadata", [item]):
            found += [f"{sign} {getattr(part, key)}" for key, sign in _BOUNDS.items() if hasattr(part, key)]
    return f" ({', '.join(found)})" if found else ""


def _shown(default: str | None) -> str:
    return "required" if default is None else default or '""'


def _default(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
