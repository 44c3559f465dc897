"""Collects the measurements of the last round, and keeps them: evaluation.npz and held_out.npz."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.algorithms.client_evaluation import EvaluateOwn
from fedlens.base.errors import FedlensError, told
from fedlens.core.driver import Tally
from fedlens.core.measured import Measured, total
from fedlens.core.protocol import Answer, Answers, Ask, Op, Reply, Request, State, Steps
from fedlens.core.schema import nbytes
from fedlens.core.step_counts import Phase
from fedlens.observers.final_evaluation import (
    PIXELS,
    WORST,
    FinalEvaluation,
    most_confident,
    remove_images,
    scaled_down,
)
from fedlens.observers.held_out_predictions import (
    MOST,
    HeldOutPredictions,
    most_suspicious,
    remove_held_out_images,
)
from fedlens.run.build import Built
from fedlens.run.observer import ObservedRun, Observer, Place
from fedlens.run.rundir import RunDir
from fedlens.tasks.central_evaluation import CONFIDENCES, MISTAKES, Evaluate


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
        built = self._built
        self._collector = EvaluationCollector(built.algorithm.ops, not built.federation.at_sites)
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


_TEST = "@test"
_CLIENTS = 1000  # whose measurements are kept


class EvaluationCollector:
    """Passes the asks and answers of an evaluation on, and keeps the measurements of the test data and the clients.

    The requests for the test data also ask for the most confident mistakes, those for the clients' held-out examples
    for the probabilities of classes. Only asks of `fedlens.tasks.central_evaluation.Evaluate` and
    `fedlens.algorithms.client_evaluation.EvaluateOwn` are changed, so an algorithm's own evaluation is not.

    Args:
        ops: the operations of the algorithm.
        single_images: whether clients are asked about single held-out examples; sites refuse that.

    Attributes:
        of_clients: the measurements of each client on what it holds out, of at most 1,000 clients.
        confidences: the rows of `fedlens.tasks.task.Task.confidences` of each client, until there are 100,000 examples.
    """

    def __init__(self, ops: Mapping[str, Op], single_images: bool = True) -> None:
        self._ops, self._single_images = ops, single_images
        self._parts: list[Measured] = []
        self._asked = 0  # test examples
        self.of_clients: dict[int, Measured] = {}
        self.confidences: dict[int, dict[str, torch.Tensor]] = {}
        self._held_out = 0  # examples in `confidences`

    def collect(self, steps: Generator[Ask, Answers, Any]) -> Generator[Ask, Answers, Any]:
        """The same evaluation, observed."""
        try:
            ask = next(steps)
            while True:
                if isinstance(self._ops.get(ask.op), Evaluate):
                    answers = yield replace(ask, requests=[self._extended(each) for each in ask.requests])
                    ask = steps.send(self._kept(answers))
                elif isinstance(self._ops.get(ask.op), EvaluateOwn):
                    add = _with_confidences if self._single_images else _as_it_is
                    answers = yield replace(ask, requests=[add(each) for each in ask.requests])
                    ask = steps.send(self._of_clients(answers))
                else:
                    ask = steps.send((yield ask))
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()

    def _extended(self, request: Request) -> Request:
        if request.client != _TEST:
            return request
        self._asked += request.payload["stop"] - request.payload["start"]
        return Request(_TEST, {**request.payload, "mistakes": WORST})

    def _kept(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        for answer in answers:
            if isinstance(answer, Reply) and answer.client == _TEST:
                self._parts.append(Measured.from_payload(answer.payload).downloaded())
            yield answer

    def _of_clients(self, answers: Iterable[Answer]) -> Iterator[Answer]:
        for answer in answers:
            yield answer
            if isinstance(answer, Reply) and answer.refused is None:
                measured = Measured.from_payload(answer.payload["after"]).downloaded()
                self._keep(int(answer.client), measured)
                # Not a cost of the algorithm, so that its bytes can be compared with those of other rounds.
                answer.nbytes -= nbytes(_confidences(measured))

    def _keep(self, client: int, measured: Measured) -> None:
        if len(self.of_clients) < _CLIENTS:
            self.of_clients[client] = Measured(measured.sums)
        rows = _confidences(measured)
        if rows and self._held_out + len(rows["label"]) <= MOST:
            self.confidences[client] = rows
            self._held_out += len(rows["label"])

    def measured(self, examples: int) -> Measured | None:
        """The measurements of all `examples` test examples; None if they were not measured, or not once each."""
        return total(self._parts) if self._parts and self._asked == examples else None


def _confidences(measured: Measured) -> dict[str, torch.Tensor]:
    """The rows of `fedlens.tasks.task.Task.confidences`."""
    rows = measured.rows.items()
    return {name.removeprefix(CONFIDENCES): each for name, each in rows if name.startswith(CONFIDENCES)}


def _as_it_is(request: Request) -> Request:
    return request


def _with_confidences(request: Request) -> Request:
    return Request(request.client, {**request.payload, "also": "confidences"})


def write_evaluation(built: Built, directory: RunDir, round: int, collector: EvaluationCollector) -> None:
    """Writes the measurements of the last round to `evaluation.npz`; a file of an earlier last round is replaced.

    Raises `RunFailed` if the disk refuses.
    """
    examples = built.federation.held.get(_TEST)
    measured = None if examples is None else collector.measured(examples)
    if measured is not None:
        final_evaluation(built, round, measured, collector.of_clients).write(directory.evaluation_path)
        return
    with suppress(OSError):
        directory.evaluation_path.unlink()


def final_evaluation(
    built: Built, round: int, measured: Measured, of_clients: Mapping[int, Measured]
) -> FinalEvaluation:
    """What `evaluation.npz` keeps of the measurements: the sums and, as the settings say, images of mistakes."""
    dataset = built.client_data.dataset
    rows = {
        name.removeprefix(MISTAKES): values.numpy()
        for name, values in measured.rows.items()
        if name.startswith(MISTAKES)
    }
    mistakes = most_confident(rows) if rows else {}
    pictured = built.config.keeps_images and len(dataset.input_shape) == 3 and len(mistakes.get("index", ()))
    kept = built.task.recorded(measured, len(dataset.classes))
    whole = [client for client, each in of_clients.items() if not built.task.has_only_totals(each)]
    clients = sorted(whole) if built.task.annotates == "masks" else []
    return FinalEvaluation(
        round,
        dataset.kind,
        tuple(dataset.classes),
        dataset.input_shape,
        {name: value.numpy() for name, value in kept.sums.items()},
        mistakes,
        _images(built, mistakes["index"]) if pictured else None,
        tuple(built.partition.ids[client] for client in clients),
        _stacked([of_clients[client] for client in clients]),
    )


def _stacked(parts: Sequence[Measured]) -> dict[str, NDArray[Any]]:
    """The sums that all clients have, [clients, ...] by name."""
    names = set.intersection(*(set(part.sums) for part in parts)) if parts else set[str]()
    return {name: np.stack([part.sums[name].numpy() for part in parts]) for name in sorted(names)}


def _images(built: Built, index: NDArray[np.int64]) -> NDArray[np.uint8]:
    """uint8 [k, C, h, w]: the test images at these positions; one at a time, because files may be large."""
    test, room = built.client_data.dataset.test, PIXELS // len(index)
    images = (test.batch(torch.tensor([at]))[0][0].numpy() for at in index.tolist())
    return np.stack([scaled_down(image, room) for image in images])
