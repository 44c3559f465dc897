"""The formats of a user's own data by name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from fedlens.core.errors import ConfigError, nearest
from fedlens.core.registry import Factory
from fedlens.data.formats.scan import Scanner

_HERE = "fedlens.data.formats"


@dataclass(frozen=True)
class FormatEntry:
    """One format: the module with `scan`, its dataset factory, and a one-line summary."""

    module: str
    factory: str
    summary: str

    def scanner(self) -> Scanner:
        """The function that reads a folder in this format."""
        found: Scanner = import_module(self.module).scan
        return found

    def reader(self) -> Factory:
        """The dataset factory, whose keyword-only parameters are the settings."""
        found: Factory = getattr(import_module(self.module), self.factory)
        return found


FORMATS = {
    "image-folder": FormatEntry(f"{_HERE}.image_folder", "image_folder", "a folder of images for each class"),
    "csv": FormatEntry(
        f"{_HERE}.image_folder", "image_folder", "images, and a table path,label[,client][,split]"
    ),
    "mask-folder": FormatEntry(
        f"{_HERE}.mask_folder", "mask_folder", "images, and masks of class ids by name"
    ),
    "coco-json": FormatEntry(f"{_HERE}.coco_json", "coco_json", "images, and boxes in COCO's JSON"),
    "voc-xml": FormatEntry(f"{_HERE}.voc_xml", "voc_xml", "images, and boxes in Pascal VOC's XML"),
    "yolo-txt": FormatEntry(f"{_HERE}.yolo_txt", "yolo_txt", "images, and boxes in YOLO's text files"),
}


def find_format(name: str) -> FormatEntry:
    """The format called `name`. Raises `ConfigError` with the nearest right name where there is none."""
    if name not in FORMATS:
        raise ConfigError(f"there is no format '{name}'", where="--format", hint=nearest(name, FORMATS))
    return FORMATS[name]
