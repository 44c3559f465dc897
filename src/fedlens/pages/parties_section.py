"""The section "Parties" in the page of a vertical run: what each party holds of the same examples."""

from __future__ import annotations

from typing import Any

from fedlens.base.format import count, many
from fedlens.data.vertical.feature_partition import FeaturePartition
from fedlens.pages.classification_section import data_url
from fedlens.pages.shown_images import LEAVES_OUT, shows_images
from fedlens.results.run import Run

_SIDE, _OWN_SIDE = 360, 180  # of the longer side of a drawing with all windows, and of that of one party


def parties_section(run: Run) -> dict[str, Any] | None:
    """A sentence, a table of the parties, and drawings of what they see; None for clients with whole examples.

    Windows are drawn over one test image, or over nothing if the run keeps no images. Parties with images of their own
    have a drawing each.
    """
    partition = run.partition
    if not isinstance(partition, FeaturePartition):
        return None
    sizes, shapes = partition.sizes().tolist(), partition.shapes
    roles = ["labels" if k == partition.labels_at else "" for k in range(len(partition))]
    rows = []
    for name, size, (channels, height, width), role in zip(partition.ids, sizes, shapes, roles, strict=True):
        alone = size - len(partition.shared)
        rows.append((name, f"{width} x {height}", many(channels, "channel"), size, alone, role))
    urls = [data_url(picture) for picture in partition.pictures] if shows_images(run) else []
    names = list(zip(partition.ids, roles, strict=True))
    if partition.windows is None:
        what, side, named = "images of its own", _OWN_SIDE, [[name] for name in names]
        boxes = [[(0, 0, shape[2], shape[1])] for shape in shapes]
    else:
        what, side, named = "one window of every image", _SIDE, [names]
        boxes = [[(window.left, window.top, window.width, window.height) for window in partition.windows]]
    drawings = [
        _drawing(*one, urls[k] if k < len(urls) else "", side)
        for k, one in enumerate(zip(boxes, named, strict=True))
    ]
    who, used = f"{count(len(partition))} parties", "which training uses"
    taking = run.config.get("algorithm", {}).get("parties")
    if taking is not None:  # some of them, see algorithm.parties
        who = f"{len(set(taking))} of {len(partition)} parties"
        named_so = ", ".join(partition.ids[k] for k in sorted(set(taking)))
        used = f"and training uses the {count(len(partition.shared_by(taking)))} of those that take part ({named_so})"
    lead = [
        f"Each party holds {what}, and party {partition.ids[partition.labels_at]} has the labels.",
        f"All {len(partition)} parties hold {count(len(partition.shared))} training images, {used}.",
    ]
    if urls:
        lead.append(f"This page contains {many(len(urls), 'test image')}; {LEAVES_OUT}")
    return {"who": who, "lead": lead, "rows": rows, "drawings": drawings}


def _drawing(
    boxes: list[tuple[int, int, int, int]], named: list[tuple[str, str]], picture: str, side: int
) -> dict[str, Any]:
    """The windows of one image, in units of the drawing, with their names and roles."""
    width, height = max(left + w for left, _, w, _ in boxes), max(top + h for _, top, _, h in boxes)
    scale = side / max(width, height)
    windows = [
        {"at": [round(scale * part, 1) for part in box], "name": name, "role": role}
        for box, (name, role) in zip(boxes, named, strict=True)
    ]
    return {
        "width": round(scale * width, 1),
        "height": round(scale * height, 1),
        "picture": picture,
        "windows": windows,
    }
