"""The section "Example predictions" in the page of a run: the same test images after the first, best and last round."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import RunDirectoryError
from fedlens.base.format import finite, many, percent
from fedlens.observers.example_predictions import (
    PIXELS,
    STAGES,
    ExamplePredictions,
    scaled_mask,
)
from fedlens.observers.final_evaluation import scaled_down
from fedlens.pages.classification_section import data_url
from fedlens.pages.shown_images import LEAVES_OUT, shows_images
from fedlens.results.figures.chart import short
from fedlens.results.run import Run, subtable
from fedlens.vision.mask_colors import VOID_COLOR, ink_on, mask_colors

_SCORE = 0.25  # from which a predicted box is drawn, if the settings do not say it
_MOST = 2_000_000  # characters of all pictures in a page
_SHRINK = (1.0, 0.6, 0.4, 0.25)  # of the area of the pictures, until they are small enough
_VOID = 255
_HATCH = 254  # the second colour of the pattern of pixels without a class, in palettes of at most 254 classes
_NAMED = 40  # classes in the legend
_LABELLED = 25  # boxes of a picture with class and score written beside them
_SHOWN_WIDTH = 345  # of a picture with boxes on a wide screen, in pixels
_AGREE, _DIFFER = (236, 239, 243), (194, 0, 107)  # the second is no class's colour


@dataclass(frozen=True)
class Shot:
    """A picture of an example: a data URL, its description for readers who cannot see it, and its caption."""

    picture: str
    about: str
    caption: str


@dataclass(frozen=True)
class DrawnBox:
    """A box of a picture, in its pixels, with its label; an empty `label` is not drawn.

    Args:
        color, ink: of the box, and of the text on it, as #rrggbb.
        about: the text that a browser shows at the box.
        label_at: left, top and width of the label.
    """

    left: float
    top: float
    width: float
    height: float
    color: str
    ink: str
    about: str
    label: str = ""
    label_at: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class BoxPicture:
    """The boxes over an image after one round."""

    about: str
    caption: str
    true: Sequence[DrawnBox]
    found: Sequence[DrawnBox]


def example_section(run: Run) -> dict[str, Any] | None:
    """The section of a run; with only `missing`, a sentence, if the file is corrupt. None without examples."""
    if not shows_images(run):
        return None
    try:
        examples = run.examples
    except RunDirectoryError as error:
        return {"missing": f"This section is missing: {error.what}."}
    if examples is None:
        return None
    titles = _titles(examples.rounds)
    shown = (
        _masks(examples, titles) if examples.annotates == "masks" else _boxes(examples, titles, _lowest(run))
    )
    rounds = "; ".join(title.lower() for title in titles.values())
    lead = [
        f"{many(len(examples.index), 'test image')}, spread evenly over the test data, with the predictions of the "
        f"global model: {rounds}.",
        f"The boxes of the {_LABELLED} highest scores of an image have their class and score."
        if "labelled" in shown
        else "",
        f"This page contains these images; {LEAVES_OUT}",
    ]
    return {"missing": "", "lead": lead, "kind": examples.annotates, "columns": len(titles), **shown}


def _titles(rounds: Mapping[str, int]) -> dict[str, str]:
    """The title of each different round, by the first of its stages."""
    stages: dict[int, list[str]] = {}
    for stage in STAGES:
        if stage in rounds:
            stages.setdefault(rounds[stage], []).append(stage)
    titles = {}
    for round, names in stages.items():
        later = [name for name in names if name != "first"]
        before = "before training" if round == 0 else "first" if not later else ""
        words = " and ".join(filter(None, [before, *later]))
        titles[names[0]] = f"Round {round}, {words}"
    return titles


# ---- masks


def _masks(examples: ExamplePredictions, titles: Mapping[str, str]) -> dict[str, Any]:
    for shrink in _SHRINK:
        room = int(shrink * PIXELS / len(examples.index))
        images = [scaled_down(image, room) for image in examples.images]
        rows = [_mask_row(examples, titles, k, image) for k, image in enumerate(images)]
        if sum(len(shot.picture) for row in rows for shot in row) <= _MOST:
            break
    pixels = np.zeros(256, np.int64)
    for part in (examples.truth, *(examples.answers[stage] for stage in titles)):
        pixels += np.bincount(part["class"].ravel(), minlength=256)
    known = [k for k in np.flatnonzero(pixels).tolist() if k < len(examples.classes)]
    named = sorted(sorted(known, key=lambda k: -pixels[k])[:_NAMED])
    colors = _hex(mask_colors(len(examples.classes)))
    return {
        "legend": [(examples.classes[k], colors[k]) for k in named],
        "more": many(len(known) - len(named), "more class", "more classes")
        if len(known) > len(named)
        else "",
        "void": bool(pixels[_VOID]),
        "agree": "#{:02x}{:02x}{:02x}".format(*_AGREE),
        "differ": "#{:02x}{:02x}{:02x}".format(*_DIFFER),
        "examples": [
            {"title": f"Test image {at}", "shots": row}
            for at, row in zip(examples.index.tolist(), rows, strict=True)
        ],
    }


def _mask_row(
    examples: ExamplePredictions, titles: Mapping[str, str], k: int, image: NDArray[np.uint8]
) -> list[Shot]:
    """Image and answers, then truth and differences: the cells of two rows, from left to right."""
    at, classes = int(examples.index[k]), examples.classes
    size = image.shape[1], image.shape[2]
    truth = scaled_mask(examples.truth["class"][k], *size)
    above = [Shot(data_url(image), f"Test image {at}", "image")]
    below = [Shot(_mask_url(truth, len(classes)), f"True classes: {_shares(truth, classes)}", "truth")]
    for stage, title in titles.items():
        answer = scaled_mask(examples.answers[stage]["class"][k], *size)
        url = _mask_url(answer, len(classes))
        above.append(Shot(url, f"{title}, predicted: {_shares(answer, classes)}", title))
        labelled = truth != _VOID
        wrong = labelled & (answer != truth)
        share = percent(float(wrong.sum()) / labelled.sum()) if labelled.any() else ""
        text = f"{share} of the pixels differ" if share else "no pixel has a true class"
        below.append(Shot(_difference_url(wrong, labelled), f"{title}: {text}", text))
    return [*above, *below]


def _shares(mask: NDArray[np.uint8], classes: Sequence[str]) -> str:
    """The three most frequent classes with their share of the pixels."""
    pixels = np.bincount(mask.ravel(), minlength=256)[: len(classes)]
    first = [k for k in np.argsort(-pixels, kind="stable")[:3].tolist() if pixels[k]]
    return ", ".join(f"{classes[k]} {percent(pixels[k] / mask.size)}" for k in first) or "none"


def _mask_url(mask: NDArray[np.uint8], classes: int) -> str:
    """A PNG with a palette of a mask; pixels without a class have a pattern of stripes."""
    palette = np.full((256, 3), VOID_COLOR, np.uint8)
    palette[:classes] = mask_colors(classes)
    shown = mask
    if classes <= _HATCH:
        palette[_HATCH] = 255
        shown = np.where((mask == _VOID) & _stripes(mask.shape), _HATCH, mask).astype(np.uint8)
    return _palette_url(shown, palette)


def _difference_url(wrong: NDArray[np.bool_], labelled: NDArray[np.bool_]) -> str:
    palette = np.array([_AGREE, _DIFFER, VOID_COLOR, (255, 255, 255)], np.uint8)
    void = np.where(_stripes(wrong.shape), 3, 2)
    return _palette_url(np.where(labelled, wrong, void).astype(np.uint8), palette)


def _stripes(shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """bool [H, W]: diagonal stripes, two of six pixels wide."""
    rows, columns = np.indices(shape)
    stripes: NDArray[np.bool_] = (rows + columns) % 6 < 2
    return stripes


def _palette_url(ids: NDArray[np.uint8], palette: NDArray[np.uint8]) -> str:
    from PIL import Image  # here, because most pages have no pictures

    picture = Image.fromarray(ids)
    picture.putpalette(palette.tobytes())
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# ---- boxes


def _lowest(run: Run) -> float:
    """The score from which a predicted box is drawn."""
    given = finite(subtable(run.config, "task").get("shown_score"))
    return _SCORE if given is None else given


def _boxes(examples: ExamplePredictions, titles: Mapping[str, str], lowest: float) -> dict[str, Any]:
    height, width = examples.images.shape[2:]
    colors = mask_colors(len(examples.classes))
    shown = set[int]()
    rows = []
    for k, at in enumerate(examples.index.tolist()):
        true = _of_image(examples.truth, k)
        pictures = []
        for stage, title in titles.items():
            found = _of_image(examples.answers[stage], k)
            found = {name: values[found["scores"] >= lowest] for name, values in found.items()}
            shown |= {*true["labels"].tolist(), *found["labels"].tolist()}
            pictures.append(_box_picture(examples.classes, colors, true, found, title, (width, height)))
        url = data_url(examples.images[k])
        rows.append({"title": f"Test image {at}", "picture": url, "id": f"example-{k}", "pictures": pictures})
    named = sorted(shown)[:_NAMED]
    hexes = _hex(colors)
    return {
        "legend": [(examples.classes[c], hexes[c]) for c in named],
        "more": many(len(shown) - len(named), "more class", "more classes")
        if len(shown) > len(named)
        else "",
        "score": f"{lowest:g}",
        "labelled": _LABELLED,
        "width": width,
        "height": height,
        "font": round(_font(width), 2),
        "examples": rows,
    }


def _of_image(boxes: Mapping[str, NDArray[Any]], image: int) -> dict[str, NDArray[Any]]:
    inside = boxes["image"] == image
    return {name: values[inside] for name, values in boxes.items() if name != "image"}


def _box_picture(
    classes: Sequence[str],
    colors: NDArray[np.uint8],
    true: Mapping[str, NDArray[Any]],
    found: Mapping[str, NDArray[Any]],
    title: str,
    size: tuple[int, int],
) -> BoxPicture:
    hexes = _hex(colors)
    dashed = []
    for box, label in zip(true["boxes"].tolist(), true["labels"].tolist(), strict=True):
        left, top, right, bottom = (round(v, 1) for v in box)
        about = f"true: {classes[label]}"
        dashed.append(DrawnBox(left, top, right - left, bottom - top, hexes[label], "", about))
    solid = []
    order = np.argsort(-found["scores"], kind="stable").tolist()
    for rank, at in enumerate(order):
        label, score = int(found["labels"][at]), float(found["scores"][at])
        left, top, right, bottom = (round(float(v), 1) for v in found["boxes"][at])
        text = f"{short(classes[label], 14)} {score:.2f}" if rank < _LABELLED else ""
        about = f"{classes[label]}, score {score:.2f}"
        place = _label_at(left, top, text, size)
        drawn = DrawnBox(
            left,
            top,
            right - left,
            bottom - top,
            hexes[label],
            ink_on(colors[label].tolist()),
            about,
            text,
            place,
        )
        solid.append(drawn)
    solid.reverse()  # the highest score is drawn last, above the others
    caption = (
        f"{title}: {_counted(len(solid), 'box', 'boxes')}, {_counted(len(dashed), 'true box', 'true boxes')}"
    )
    counts = np.bincount(found["labels"], minlength=len(classes))
    most = [k for k in np.argsort(-counts, kind="stable")[:3].tolist() if counts[k]]
    of = ", ".join(f"{counts[k]} {classes[k]}" for k in most)
    return BoxPicture(f"{caption}{'. Predicted: ' if of else ''}{of}", caption, dashed, solid)


def _counted(number: int, thing: str, things: str) -> str:
    return many(number, thing, things) if number else f"no {thing}"


def _font(width: int) -> float:
    """The size of letters in the pixels of a picture of this width, so that they are legible on the page."""
    return 10 * width / _SHOWN_WIDTH


def _label_at(left: float, top: float, text: str, size: tuple[int, int]) -> tuple[float, float, float]:
    """Left, top and width of a label: above its box, or inside where the image ends there."""
    font = _font(size[0])
    wide = 0.58 * font * len(text) + 0.5 * font
    x = max(0.0, min(left, size[0] - wide))
    y = top - 1.3 * font if top >= 1.3 * font else max(0.0, top)
    return round(x, 1), round(y, 1), round(wide, 1)


def _hex(colors: NDArray[np.uint8]) -> list[str]:
    return ["#{:02x}{:02x}{:02x}".format(*color) for color in colors.tolist()]
