"""Writes folders in the layout of Pascal VOC, which BCCD has too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

Box = tuple[str, float, float, float, float]  # class, xmin, ymin, xmax, ymax


def write_image(path: Path, width: int, height: int, seed: int = 0) -> np.ndarray:
    """A JPEG of a few smooth colours; the pixels as PIL gives them back, [H, W, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)
    picture.save(path, quality=95) if path.suffix == ".jpg" else picture.save(path)
    return np.asarray(Image.open(path))


def xml(name: str, width: int, height: int, boxes: Sequence[Box], difficult: Sequence[int] = ()) -> str:
    """An annotation as VOC has it: tabs, <pose>, and an object's parts with boxes of their own."""
    objects = []
    for at, (kind, *corners) in enumerate(boxes):
        edges = "".join(
            f"\t\t\t<{edge}>{value:g}</{edge}>\n"
            for edge, value in zip(
                ("xmax", "xmin", "ymax", "ymin"), np.array(corners)[[2, 0, 3, 1]], strict=True
            )
        )
        part = (
            "\t\t<part>\n\t\t\t<name>head</name>\n\t\t\t<bndbox>\n\t\t\t\t<xmin>1</xmin>\n\t\t\t\t<ymin>1</ymin>\n"
            "\t\t\t\t<xmax>3</xmax>\n\t\t\t\t<ymax>3</ymax>\n\t\t\t</bndbox>\n\t\t</part>\n"
        )
        objects.append(
            f"\t<object>\n\t\t<name>{kind}</name>\n\t\t<pose>Frontal</pose>\n\t\t<truncated>0</truncated>\n"
            f"\t\t<difficult>{int(at in difficult)}</difficult>\n\t\t<bndbox>\n"
            f"{edges}\t\t</bndbox>\n{part}\t</object>\n"
        )
    return (
        f"<annotation>\n\t<folder>VOC2012</folder>\n\t<filename>{name}.jpg</filename>\n\t<size>\n"
        f"\t\t<width>{width}</width>\n\t\t<height>{height}</height>\n\t\t<depth>3</depth>\n\t</size>\n"
        f"\t<segmented>0</segmented>\n{''.join(objects)}</annotation>\n"
    )


def write_annotated(
    folder: Path, name: str, width: int, height: int, boxes: Sequence[Box], difficult: Sequence[int] = ()
) -> np.ndarray:
    """An image and its annotation; the image's pixels."""
    (folder / "Annotations").mkdir(parents=True, exist_ok=True)
    (folder / "Annotations" / f"{name}.xml").write_text(xml(name, width, height, boxes, difficult))
    return write_image(folder / "JPEGImages" / f"{name}.jpg", width, height)


def write_list(folder: Path, task: str, name: str, ids: Sequence[str]) -> None:
    path = folder / "ImageSets" / task / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{each}\n" for each in ids))
