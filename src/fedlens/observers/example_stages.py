"""Predicts the example images with the first, the last and the best model: examples.npz."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlens.core.driver import Tally
from fedlens.core.protocol import State
from fedlens.observers.example_predictions import remove_examples
from fedlens.observers.predict_examples import write_examples
from fedlens.run.build import Built
from fedlens.run.observer import ObservedRun, Observer, Place


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
