"""Measures the encoder of a self-supervised run with the nearest neighbours of labelled images."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedlens.core.driver import Tally
from fedlens.core.protocol import State
from fedlens.run.build import Built
from fedlens.run.observer import Observer, Place


class NearestNeighbours(Observer):
    """Adds the k-NN accuracy on the images of `evaluation.neighbours`, if the table is set."""

    place = Place.MEASURE
    ends_run = True

    def __init__(self, built: Built) -> None:
        self._built = built

    def evaluated(
        self, round: int, state: State, tally: Tally, metrics: Mapping[str, float]
    ) -> Mapping[str, float]:
        """The accuracy of the global model's features."""
        built = self._built
        if built.labelled is None:
            return {}
        _, tree = built.algorithm.model(state)
        program = built.engine.applied(built.program)
        with program.computing():
            return {"test_knn_accuracy": built.labelled.accuracy(tree, torch.device(program.device))}
