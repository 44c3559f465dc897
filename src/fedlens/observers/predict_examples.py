"""Predicts a few test images with the first, the last and the best model of the run: examples.npz."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedlens.base.errors import FedlensError, RunDirectoryError, told
from fedlens.core.driver import Tally
from fedlens.core.protocol import State
from fedlens.core.tree import load_into
from fedlens.data.normalize import normalize
from fedlens.observers.example_predictions import (
    BOXES,
    LOWEST,
    PIXELS,
    Annotates,
    ExamplePredictions,
    found_boxes,
    remove_examples,
    scaled_mask,
    spread_evenly,
)
from fedlens.observers.final_evaluation import scaled_down
from fedlens.run.build import Built
from fedlens.run.observer import ObservedRun, Observer, Place
from fedlens.run.rundir import RunDir
from fedlens.vision.box_batch import BoxBatch


class ExampleStages(Observer):
    """Writes the predictions of a global model that was measured on the test data.

    Without a metric of the test data, each client has a model of its own.
    """

    place = Place.COLLECT
    ends_run = True

    def __init__(self, built: Built) -> None:
        self._built = built

    def began(self, run: ObservedRun) -> None:
        """Removes images that the settings leave out by now."""
        self._run = run
        if not self._built.config.keeps_images:
            remove_examples(run.directory.examples_path)

    def round_done(self, state: State, tally: Tally, metrics: dict[str, Any]) -> None:
        """Predicts with the untrained model."""
        if metrics["round"] == 0 and _of_test_data(metrics):
            self._predict("first", (0, state))

    def ended(self, metrics: Mapping[str, Any], states: Mapping[str, tuple[int, State]]) -> None:
        """Predicts with the last model, and if that succeeds with the best."""
        if _of_test_data(metrics) and self._predict("last", states["last"]) and "best" in states:
            self._predict("best", states["best"])

    def _predict(self, stage: str, state: tuple[int, State]) -> bool:
        notes = write_examples(self._built, self._run.directory, {stage: state})
        for sentence in notes:
            self._run.note(sentence)
        return not notes


def _of_test_data(metrics: Mapping[str, Any]) -> bool:
    return any(name.startswith("test_") for name in metrics)


def write_examples(built: Built, directory: RunDir, states: Mapping[str, tuple[int, State]]) -> list[str]:
    """Predicts the example images with the models of these stages, and adds the predictions to `examples.npz`.

    Writes nothing if the task predicts neither masks nor boxes, or the settings leave out images. The random state of
    the process does not change.

    Args:
        states: the round and the server state of each stage ("first", "best", "last"). "first" begins a new file.

    Returns a sentence if the predictions cannot be made, for example because `predict` of a user's own task fails: the
    run continues without them. Raises `RunFailed` if the disk refuses.
    """
    annotates = built.task.annotates
    shown = built.config.keeps_images and len(built.client_data.dataset.input_shape) == 3
    if annotates is None or not shown:
        return []
    try:
        with torch.random.fork_rng(devices=[]):
            examples = _with_answers(built, annotates, _earlier(directory, states), states)
    except Exception as error:  # of a user's own task or model, which may raise anything
        reason = str(error) if isinstance(error, FedlensError) else told(error)
        return [f"the page shows no example predictions of the {' and '.join(states)} round: {reason}"]
    examples.write(directory.examples_path)
    return []


def _earlier(directory: RunDir, states: Mapping[str, tuple[int, State]]) -> ExamplePredictions | None:
    """The predictions of earlier stages; None without any, or if the file is corrupt."""
    if "first" in states or not directory.examples_path.exists():
        return None
    try:
        return ExamplePredictions.read(directory.examples_path)
    except RunDirectoryError:
        return None


def _with_answers(
    built: Built,
    annotates: Annotates,
    earlier: ExamplePredictions | None,
    states: Mapping[str, tuple[int, State]],
) -> ExamplePredictions:
    dataset = built.client_data.dataset
    index = spread_evenly(len(dataset.test))
    images, targets = [], []
    for at in index.tolist():  # one at a time, because files may be large
        image, target = dataset.test.batch(torch.tensor([at]))
        images.append(image)
        targets.append(target)
    small = np.stack([scaled_down(image[0].cpu().numpy(), PIXELS // len(index)) for image in images])
    truth = _joined(annotates, [_truth(annotates, target) for target in targets], images, small)
    by_round: dict[int, dict[str, NDArray[Any]]] = {}
    answers, rounds = dict(earlier.answers) if earlier else {}, dict(earlier.rounds) if earlier else {}
    for stage, (round, state) in states.items():
        if round not in by_round:
            predictions = _predictions(built, annotates, state, images)
            by_round[round] = _joined(annotates, predictions, images, small)
        answers[stage], rounds[stage] = by_round[round], round
    return ExamplePredictions(annotates, tuple(dataset.classes), index, small, truth, answers, rounds)


def _predictions(
    built: Built, annotates: Annotates, state: State, images: list[torch.Tensor]
) -> list[dict[str, NDArray[Any]]]:
    """The prediction of each image by the global model of this state."""
    model, tree = built.algorithm.model(state)
    module = model.build(initial=False)
    load_into(module, tree)
    module.eval()
    dataset, found = built.client_data.dataset, []
    with torch.inference_mode():
        for image in images:
            inputs = normalize(image.cpu(), dataset.mean, dataset.std)
            prediction = built.task.predict(built.evaluation_size(built.task, module, inputs, None))
            found.append(_of_one(annotates, {name: v[0].cpu().numpy() for name, v in prediction.items()}))
    return found


def _of_one(annotates: Annotates, prediction: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    if annotates == "masks":
        return {"class": prediction["class"]}
    boxes, labels, scores = (prediction[name] for name in ("boxes", "labels", "scores"))
    rows = found_boxes(boxes, labels, scores, LOWEST, BOXES)
    return {"boxes": boxes[rows], "labels": labels[rows], "scores": scores[rows].astype(np.float32)}


def _truth(annotates: Annotates, target: Any) -> dict[str, NDArray[Any]]:
    """The target of one image, in the form of a prediction."""
    if annotates == "masks":
        return {"class": target[0].cpu().numpy()}
    boxes, labels = BoxBatch.of(target, 0)
    return {"boxes": boxes.cpu().numpy(), "labels": labels.cpu().numpy()}


def _joined(
    annotates: Annotates,
    parts: list[dict[str, NDArray[Any]]],
    images: list[torch.Tensor],
    small: NDArray[np.uint8],
) -> dict[str, NDArray[Any]]:
    """The masks or boxes of all images in one array each, at the size of the small images."""
    height, width = small.shape[2:]
    if annotates == "masks":
        for image, part in zip(images, parts, strict=True):
            if part["class"].shape != tuple(image.shape[2:]):
                raise ValueError(f"a mask is {list(part['class'].shape)}, its image {list(image.shape[2:])}")
        return {"class": np.stack([scaled_mask(part["class"], height, width) for part in parts])}
    scales = [(width / image.shape[3], height / image.shape[2]) for image in images]
    boxes = [part["boxes"] * np.array([x, y, x, y]) for part, (x, y) in zip(parts, scales, strict=True)]
    joined: dict[str, NDArray[Any]] = {
        "boxes": np.concatenate(boxes).astype(np.float32),
        "labels": np.concatenate([part["labels"] for part in parts]).astype(np.int64),
        "image": np.repeat(np.arange(len(parts)), [len(part["labels"]) for part in parts]),
    }
    if "scores" in parts[0]:
        joined["scores"] = np.concatenate([part["scores"] for part in parts])
    return joined
