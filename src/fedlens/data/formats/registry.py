"""The formats of a user's own data by name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from fedlens.base.errors import ConfigError, nearest
from fedlens.base.registry import Factory
from fedlens.data.formats.scan import Fill


@dataclass(frozen=True)
class FormatEntry:
    """One format: its module here, with `fill` and a dataset factory of the module's name, and a summary."""

    module: str
    summary: str

    def fill(self) -> Fill:
        """The function that completes the scan of a folder in this format."""
        fill: Fill = import_module(f"{__package__}.{self.module}").fill
        return fill

    def reader(self) -> Factory:
        """The dataset factory, whose keyword-only parameters are the settings."""
        factory: Factory = getattr(import_module(f"{__package__}.{self.module}"), self.module)
        return factory


FORMATS = {
    "image-folder": FormatEntry("image_folder", "a folder of images for each class"),
    "csv": FormatEntry("image_folder", "images, and a table path,label[,client][,split]"),
    "parquet": FormatEntry("parquet", "images in Parquet files of the Hugging Face hub"),
    "mask-folder": FormatEntry("mask_folder", "images, and masks of class ids by name"),
    "coco-json": FormatEntry("coco_json", "images, and boxes in COCO's JSON"),
    "voc-xml": FormatEntry("voc_xml", "images, and boxes in Pascal VOC's XML"),
    "yolo-txt": FormatEntry("yolo_txt", "images, and boxes in YOLO's text files"),
}


def find_format(name: str) -> FormatEntry:
    """The format called `name`. Raises `ConfigError` with the nearest right name if there is none."""
    if name not in FORMATS:
        raise ConfigError(f"there is no format '{name}'", where="--format", hint=nearest(name, FORMATS))
    return FORMATS[name]
