"""Held-out images whose label is contradicted confidently by models that did not train on them.

See `fedlens.observers.held_out_predictions` for what one model says. It suggests another class if that class is also
more probable than the label. Of several models, an image is listed if more than half of them suggest the same other
class; images are ranked by the margin, the mean over all models, which is 0 for a
model that does not contradict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import RunDirectoryError
from fedlens.base.format import many, percent
from fedlens.files.atomic_files import write_atomically
from fedlens.observers.held_out_predictions import HeldOutPredictions
from fedlens.pages.classification_section import data_url
from fedlens.pages.shown_images import HOW, LEAVES_OUT, may_get_images, shows_images
from fedlens.results.run import Run
from fedlens.results.study_table import csv_text

SHOWN = 12  # images of a client on a page
CLIENTS = 10
FILE = "labels_to_check.csv"
NOTES = (
    "The models did not train on these images.",
    "Models are wrong too, and many of these labels may be right: look at the images before you change a label.",
)


@dataclass(frozen=True)
class SuspiciousImage:
    """One held-out image.

    Args:
        index: its position in the training split.
        file: the name of its file, or empty.
        label, suggested: names of classes.
        confidence: the probability of its label, the mean over the models.
        models: how many of the models suggest this class.
        picture: a data URL, or empty.
    """

    index: int
    file: str
    label: str
    suggested: str
    confidence: float
    models: int
    picture: str = ""

    @property
    def name(self) -> str:
        """Its file, or its position."""
        return self.file or f"training image {self.index}"


@dataclass(frozen=True)
class SuspiciousLabels:
    """The suspicious images of one client, the most suspicious first.

    Args:
        client: its name.
        held_out: its held-out images.
        found: how many of them are suspicious.
        models: how many models were asked.
        images: all of them, or on a page the first ones.
    """

    client: str
    held_out: int
    found: int
    models: int
    images: Sequence[SuspiciousImage] = field(default_factory=list)

    @property
    def pictured(self) -> bool:
        """Whether an image has a picture."""
        return any(image.picture for image in self.images)

    @property
    def title(self) -> str:
        """The client, and how much of its images is listed."""
        shown = f", the first {len(self.images)} shown" if self.found > len(self.images) else ""
        return f"{self.client}: {self.found:,} of {many(self.held_out, 'held-out image')}{shown}"

    def as_row(self) -> dict[str, Any]:
        """For JSON, without pictures."""
        images = [{k: v for k, v in asdict(image).items() if k != "picture"} for image in self.images]
        return {**asdict(self), "images": images}

    def head(self) -> list[str]:
        """The columns of `rows`."""
        head = ["image", "label", "models suggest" if self.models > 1 else "the model suggests"]
        return [*head, "probability of the label", *(["models that agree"] if self.models > 1 else [])]

    def rows(self) -> list[list[str]]:
        """One row an image, for a page without pictures."""
        rows = [[i.name, i.label, i.suggested, percent(i.confidence)] for i in self.images]
        if self.models == 1:
            return rows
        return [[*row, f"{i.models} of {self.models}"] for row, i in zip(rows, self.images, strict=True)]


def suspicious_labels(
    runs: Sequence[HeldOutPredictions], first: Collection[str] = (), pictures: bool = False
) -> list[SuspiciousLabels]:
    """The suspicious images of each client: of those in `first`, then of those with the largest share of them.

    Args:
        runs: predictions by models that did not train on these images. Those that hold out other images than the first
            are left out.
        first: the names of clients that come first.
        pictures: with the images, if a run keeps them.
    """
    alike = [run for run in runs if np.array_equal(run.index, runs[0].index)]
    if not alike:
        return []
    suggested, votes, margins = _majority(alike)
    listed = np.flatnonzero(2 * votes > len(alike))
    shown = _pictures(alike) if pictures else {}
    confidence = np.stack([run.confidence for run in alike]).mean(axis=0, dtype=np.float64)
    one = alike[0]
    order = listed[np.lexsort((listed, -margins[listed]))]
    found = np.bincount(one.owners[listed], minlength=len(one.clients))
    sizes = np.diff(one.offsets)
    ranked = sorted(
        np.flatnonzero(found).tolist(), key=lambda k: (one.clients[k] not in first, -found[k] / sizes[k])
    )
    results = []
    for client in ranked:
        rows = order[one.owners[order] == client].tolist()
        images = [
            SuspiciousImage(
                int(one.index[row]),
                one.files[row] if one.files else "",
                one.classes[int(one.label[row])],
                one.classes[int(suggested[row])],
                float(confidence[row]),
                int(votes[row]),
                data_url(shown[row]) if row in shown else "",
            )
            for row in rows
        ]
        counts = int(sizes[client]), int(found[client])
        results.append(SuspiciousLabels(one.clients[client], *counts, len(alike), images))
    return results


def _majority(
    runs: Sequence[HeldOutPredictions],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """For each image the other class that most models suggest, how many do, and the mean margin of all models."""
    said = np.stack([run.contradictions.classes for run in runs])
    margins = np.stack([run.contradictions.margins for run in runs])
    against = margins > 0
    agreeing = np.stack([((said == one) & against).sum(axis=0) for one in said])
    agreeing = np.where(against, agreeing, 0)
    most = agreeing.argmax(axis=0)
    at = np.arange(said.shape[1])
    return said[most, at], agreeing[most, at], np.maximum(margins, 0.0).mean(axis=0)


def _pictures(runs: Sequence[HeldOutPredictions]) -> dict[int, NDArray[np.uint8]]:
    """The images that the runs keep, by row."""
    return {
        int(row): image
        for run in runs
        if run.pictured is not None and run.images is not None
        for row, image in zip(run.pictured, run.images, strict=True)
    }


def label_section(run: Run) -> dict[str, Any] | None:
    """The card of a run, whose one model is asked; None if its clients' held-out images have no predictions.

    Writes `labels_to_check.csv`, which the card names, or removes an earlier one.
    """
    try:
        predictions = run.held_out
    except RunDirectoryError as error:
        return {"lead": f"This section is missing: {error}.", "clients": []}
    if predictions is None:
        write_labels(run.labels_path, [])
        return None
    listed = suspicious_labels([predictions], pictures=shows_images(run))
    write_labels(run.labels_path, [each.as_row() for each in listed])
    return label_card(listed, HOW if may_get_images(run) else "")


def write_labels(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes all suspicious images, from `SuspiciousLabels.as_row`, as a CSV file; without any, removes the file."""
    if not rows:
        with suppress(OSError):
            path.unlink()
        return
    head = ("client", "file", "training image", "label", "models suggest")
    table: list[tuple[object, ...]] = [(*head, "probability of the label", "models that agree", "models")]
    for row in rows:
        for image in row["images"]:
            seen = (image["suggested"], image["confidence"], image["models"], row["models"])
            table.append((row["client"], image["file"] or None, image["index"], image["label"], *seen))
    write_atomically(path, csv_text(table).encode(errors="backslashreplace"))


def label_card(clients: Sequence[SuspiciousLabels], how: str = "") -> dict[str, Any]:
    """The card "Labels to check", with up to 12 images of up to 10 clients.

    `how` says how to get the images, if they are left out only because nobody asked for them.
    """
    if not clients:
        none = "No held-out image has a label that the models contradict with confidence."
        return {"lead": none, "clients": []}
    by = "the model contradicts" if clients[0].models == 1 else "the models contradict"
    lead = [f"Held-out images whose label {by} with confidence, the most suspicious first.", *NOTES]
    if clients[0].models == 1:
        lead[1] = lead[1].replace("The models", "The model")
    images = many(sum(each.found for each in clients), "such image")
    lead.append(f"{FILE} beside this page lists {images} of {many(len(clients), 'client')}.")
    clients = [replace(each, images=each.images[:SHOWN]) for each in clients[:CLIENTS]]
    pictured = any(each.pictured for each in clients)
    lead.append(f"This page contains these images of the clients; {LEAVES_OUT}" if pictured else how)
    return {"lead": lead, "clients": clients}
