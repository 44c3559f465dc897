"""`fedlens data`: lists, describes and shows datasets, and checks your own data."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

from fedlens.cli.data_check import check
from fedlens.cli.display.output import print_columns, print_json, reported, say
from fedlens.cli.options import DataDir, DatasetChanges, Debug, Download, Json

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedlens.data.catalogue import DatasetFacts, Presence

HEAD = ("dataset", "here", "train", "test", "classes", "clients", "to fetch", "licence")
SAID = {"here": "yes", "partly": "in part", "absent": "no", "built in": "built in", "your own": "your own"}
OWN = "your own data"
UNKNOWN = "unknown"


def list_datasets(
    data_dir: DataDir = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the datasets: which are on this machine, their sizes and licences, and how to get the others."""
    with reported(debug, as_json):
        from fedlens.data.catalogue import CATALOGUE, data_directory, presence

        root = data_directory(data_dir)
        found = {name: presence(record, root) for name, record in CATALOGUE.items()}
        if as_json:
            rows = [as_object(CATALOGUE[name], one) for name, one in found.items()]
            print_json({"data_dir": str(root), "datasets": rows})
            return
        say(f"data directory: {root}")
        groups: dict[str, list[DatasetFacts]] = {}
        for name in found:
            record = CATALOGUE[name]
            groups.setdefault(OWN if record.own else record.task, []).append(record)
        for task, records in groups.items():
            say(f"\n{task}")
            _print_group(records, found)
        _print_how([CATALOGUE[name] for name, one in found.items() if one.state in ("absent", "partly")])


def _print_how(absent: list[DatasetFacts]) -> None:
    names: dict[str, list[str]] = {}
    for record in absent:
        names.setdefault(record.how, []).append(record.name)
    for number, (how, those) in enumerate(names.items()):
        if not number:
            say("\nhow to get the missing datasets")
        say(f"- {', '.join(those)}: {how}")


def _print_group(records: list[DatasetFacts], found: dict[str, Presence]) -> None:
    if all(record.own for record in records):
        print_columns([(record.name, record.task, record.summary) for record in records])
        return
    rows = [(record.name, SAID[found[record.name].state], *_numbers(record)) for record in records]
    print_columns(rows, HEAD, numeric=(2, 3, 4, 5))


def _numbers(record: DatasetFacts) -> tuple[str, ...]:
    """The counts of a dataset; unknown ones are named so, and clients are none without natural clients."""
    clients = "none" if record.unit is None else UNKNOWN
    given = (
        *((count, UNKNOWN) for count in (record.train, record.test, record.classes)),
        (record.clients, clients),
    )
    told = [other if count is None else f"{count:,}" for count, other in given]
    download = record.download or (UNKNOWN if record.files else "nothing")
    return (*told, download, (record.licence or UNKNOWN).partition(";")[0])


def as_object(record: DatasetFacts, found: Presence) -> dict[str, Any]:
    """One dataset as JSON: its facts, and which of its files are on this machine."""
    paths: list[Path] = list(found.found)
    here = {"state": found.state, "found": [str(path) for path in paths], "lacking": list(found.lacking)}
    return {**asdict(record), "here": here}


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
        from fedlens.data.catalogue import data_directory, presence
        from fedlens.data.datasets.registry import DATASETS

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


_NAME = "A dataset (fedlens data list), file.py:function, or a folder of your own data."
_COUNT = "Images of a class; by default 3 with masks or boxes, 4 of more than 20 classes, else 8."
_AUGMENT = 'Augment the images: flip, or {name="crop", pad=4}, as in data.augment; may be repeated.'


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help=_NAME)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A PNG; by default NAME.png. Of texts, a text file.")
    ] = None,
    per_class: Annotated[int | None, typer.Option(metavar="N", min=1, help=_COUNT)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of examples.", min=0)] = 0,
    changes: DatasetChanges = None,
    each: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A row of images with this setting; may be repeated."),
    ] = None,
    augment: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_AUGMENT)] = None,
    data_dir: DataDir = None,
    download: Download = False,
    debug: Debug = False,
) -> None:
    """Draw random training examples of each class, with their masks or boxes. Texts are printed."""
    with reported(debug):
        from fedlens.base.errors import ConfigError
        from fedlens.data.catalogue import data_directory
        from fedlens.pages.contact_sheet import png
        from fedlens.pages.dataset_samples import Samples, sheet
        from fedlens.results.figures.picture import write_picture
        from fedlens.settings.make_partition import read_dataset

        rows = []
        for change in each or [""]:
            settings = [*(changes or ()), *filter(None, [change])]
            data = read_dataset(name, settings, root=data_directory(data_dir), download=download)
            rows.append((change, Samples.of(data, seed, augment or ())))
        if data.kind == "language":
            lines = [line for change, of in rows for line in filter(None, [change, *of.texts(per_class)])]
            if out is None:
                say(*lines)
                return
            content = "".join(f"{line}\n" for line in lines).encode()
        else:
            if out is not None and out.suffix != ".png":
                raise ConfigError(
                    f"'{out.name}' does not end in .png, the format of the picture", where="--out"
                )
            parts = [of.row(change, per_class) if each else of.by_class(per_class) for change, of in rows]
            say(about := parts[0][1])
            content = png(sheet([picture for pictures, _ in parts for picture in pictures], about))
        path = out or Path(re.sub(r"[^\w.-]+", "-", data.name) + ".png")
        say(write_picture(content, path, "or choose another file with --out"))


data = typer.Typer(
    name="data",
    help="List the datasets, describe or show one, check your own.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
data.command("list")(list_datasets)
data.command("info")(info)
data.command("show")(show)
data.command("check")(check)
