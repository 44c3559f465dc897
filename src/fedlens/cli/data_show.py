"""`fedlens data show`: samples of a dataset by class, as a picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from fedlens.cli.display.output import reported, say
from fedlens.cli.options import DataDir, DatasetChanges, Debug, Download

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
        from fedlens.report.contact_sheet import png
        from fedlens.report.dataset_samples import Samples, sheet
        from fedlens.report.pictures import write_picture
        from fedlens.settings.datadir import data_directory
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
