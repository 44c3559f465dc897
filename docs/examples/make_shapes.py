"""Writes 80 drawings of discs and squares with masks (shapes/masks) and boxes (shapes/boxes.json), to try things on.

python make_shapes.py shapes
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("disc", "square")
COLOURS = ((230, 120, 40), (40, 110, 220))


def main(folder: Path, number: int = 80, side: int = 64) -> None:
    """Draws the images, and writes a mask of each and the boxes of all."""
    draw = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    images, boxes = [], []
    for k in range(number):
        ground = draw.integers(40, 200) + draw.normal(0, 20, (side, side, 3))
        image = Image.fromarray(ground.clip(0, 255).astype(np.uint8))
        mask = Image.new("L", image.size)
        for _ in range(draw.integers(1, 4)):
            kind, size = int(draw.integers(2)), int(draw.integers(side // 5, side // 2))
            left, top = (int(draw.integers(side - size)) for _ in range(2))
            for picture, colour in ((image, COLOURS[kind]), (mask, kind + 1)):
                pen = ImageDraw.Draw(picture)
                (pen.rectangle if kind else pen.ellipse)((left, top, left + size, top + size), colour)
            boxes.append(
                {"id": len(boxes), "image_id": k, "category_id": kind, "bbox": [left, top, size, size]}
            )
        name = f"{k:03}.png"
        image.save(folder / "images" / name)
        mask.save(folder / "masks" / name)
        images.append({"id": k, "file_name": name, "width": side, "height": side})
    classes = [{"id": k, "name": name} for k, name in enumerate(CLASSES)]
    text = json.dumps({"images": images, "annotations": boxes, "categories": classes})
    (folder / "boxes.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
