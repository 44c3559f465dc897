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
    rows = [
        (
            name,
            f"{shape[2]} x {shape[1]}",
            many(shape[0], "channel"),
            sizes[k],
            sizes[k] - len(partition.shared),
            roles[k],
        )
        for k, (name, shape) in enumerate(zip(partition.ids, shapes, strict=True))
    ]
    windows = partition.windows
    urls = [data_url(picture) for picture in partition.pictures] if shows_images(run) else []
    if windows is None:
        boxes = [[(0, 0, shape[2], shape[1])] for shape in shapes]
    else:
        boxes = [[(window.left, window.top, window.width, window.height) for window in windows]]
    names = list(zip(partition.ids, roles, strict=True))
    shown = [names] if windows is not None else [[name] for name in names]
    drawings = [
        _drawing(of_one, named, urls[k] if k < len(urls) else "", _OWN_SIDE if windows is None else _SIDE)
        for k, (of_one, named) in enumerate(zip(boxes, shown, strict=True))
    ]
    what = "images of its own" if windows is None else "one window of every image"
    used, taking = "which training uses", run.config.get("algorithm", {}).get("parties")
    if taking is not None:  # some of them, see algorithm.parties
        named_so = ", ".join(partition.ids[k] for k in sorted(set(taking)))
        used = f"and training uses the {count(len(partition.shared_by(taking)))} of those that take part ({named_so})"
    lead = (
        f"Each party holds {what}. All {len(partition)} parties hold {count(len(partition.shared))} training images, "
        f"{used}; party "
        f"{partition.ids[partition.labels_at]} has the labels."
    )
    if urls:
        lead += f" This page contains {many(len(urls), 'test image')}. {LEAVES_OUT}"
    who = (
        f"{count(len(partition))} parties"
        if taking is None
        else f"{len(set(taking))} of {len(partition)} parties"
    )
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
