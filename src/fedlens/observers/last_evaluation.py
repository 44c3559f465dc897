"""Keeps the measurements of the last round: evaluation.npz and held_out.npz."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlens.base.errors import FedlensError, told
from fedlens.core.driver import Tally
from fedlens.core.protocol import State, Steps
from fedlens.core.step_counts import Phase
from fedlens.observers.evaluation_collector import EvaluationCollector, write_evaluation
from fedlens.observers.final_evaluation import remove_images, scaled_down
from fedlens.observers.held_out_predictions import (
    PIXELS,
    HeldOutPredictions,
    most_suspicious,
    remove_held_out_images,
)
from fedlens.run.build import Built
from fedlens.run.observer import ObservedRun, Observer, Place
from fedlens.run.rundir import RunDir


class LastEvaluation(Observer):
    """Collects the measurements of the last round while they are evaluated, and writes them."""

    place = Place.COLLECT
    ends_run = True

    def __init__(self, built: Built) -> None:
        self._built = built
        self._collector: EvaluationCollector | None = None

    def began(self, run: ObservedRun) -> None:
        """Removes images that the settings leave out by now."""
        self._run = run
        if not self._built.config.keeps_images:
            remove_images(run.directory.evaluation_path)
            remove_held_out_images(run.directory.held_out_path)

    def asks(self, steps: Steps, phase: Phase, round: int, state: State) -> Steps:
        """Collects the evaluation of the last round."""
        if phase == "training" or round < self._built.config.rounds:
            return steps
        self._collector = EvaluationCollector(self._built.algorithm.ops)
        return self._collector.collect(steps)

    def round_done(self, state: State, tally: Tally, metrics: dict[str, Any]) -> None:
        """Writes both files, once they are collected."""
        if self._collector is None:
            return
        directory, round = self._run.directory, metrics["round"]
        write_evaluation(self._built, directory, round, self._collector)
        for sentence in write_held_out(self._built, directory, round, self._collector.confidences):
            self._run.note(sentence)


def write_held_out(
    built: Built, directory: RunDir, round: int, confidences: Mapping[int, Mapping[str, Tensor]]
) -> list[str]:
    """Writes the predictions of the last round; a file of an earlier last round is replaced, or removed without any.

    Args:
        confidences: by client, the rows of `fedlens.tasks.task.Task.confidences` on all that it holds out.

    Returns a sentence if they cannot be collected, for example because `confidences` of a user's own task does not fit,
    or an image file is gone: the run continues without them. Raises `RunFailed` if the disk refuses.
    """
    predictions, notes = None, []
    try:
        with torch.random.fork_rng(devices=[]):
            predictions = held_out_predictions(built, round, confidences)
    except Exception as error:  # of a user's own task or dataset, which may raise anything
        reason = str(error) if isinstance(error, FedlensError) else told(error)
        notes = [f"the page lists no suspicious labels: {reason}"]
    if predictions is not None:
        predictions.write(directory.held_out_path)
        return notes
    with suppress(OSError):
        directory.held_out_path.unlink()
    return notes


def held_out_predictions(
    built: Built, round: int, confidences: Mapping[int, Mapping[str, Tensor]]
) -> HeldOutPredictions | None:
    """The predictions of all these clients and, unless the settings leave them out, the most suspicious images.

    None without confidences. A client whose rows do not fit the examples that it holds out is left out.
    """
    held_out = {client: built.client_data.client_held_out(client) for client in sorted(confidences)}
    kept = {
        client: index
        for client, index in held_out.items()
        if index is not None and len(index) == len(confidences[client]["label"])
    }
    if not kept:
        return None
    index = torch.cat(list(kept.values()))
    rows = {
        name: torch.cat([confidences[client][name] for client in kept]).numpy()
        for name in ("label", "confidence", "classes", "scores")
    }
    dataset = built.client_data.dataset
    files = dataset.train.files
    predictions = HeldOutPredictions(
        round,
        tuple(dataset.classes),
        tuple(built.partition.ids[client] for client in kept),
        np.cumsum([0, *map(len, kept.values())]).astype(np.int64),
        index.numpy(),
        rows["label"].astype(np.int64),
        rows["confidence"],
        rows["classes"].astype(np.int64),
        rows["scores"],
        () if files is None else tuple(_escaped(files[at]) for at in index.tolist()),
    )
    shown = built.config.keeps_images and len(dataset.input_shape) == 3
    return _with_images(built, predictions) if shown else predictions


def _escaped(name: str) -> str:
    """A name on disk as text that JSON and pages can hold: bytes that are not UTF-8 as escapes."""
    return name.encode(errors="backslashreplace").decode()


def _with_images(built: Built, predictions: HeldOutPredictions) -> HeldOutPredictions:
    rows = most_suspicious(predictions)
    if not len(rows):
        return predictions
    room, train = PIXELS // len(rows), built.client_data.dataset.train
    # One at a time, because files may be large.
    images = [train.batch(torch.tensor([at]))[0][0] for at in predictions.index[rows].tolist()]
    return replace(
        predictions,
        pictured=rows,
        images=np.stack([scaled_down(image.cpu().numpy(), room) for image in images]),
    )
