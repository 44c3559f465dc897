"""Keeps the measurements of the last round: evaluation.npz and held_out.npz."""

from __future__ import annotations

from typing import Any

from fedlens.core.driver import Tally
from fedlens.core.protocol import State, Steps
from fedlens.core.step_counts import Phase
from fedlens.observers.evaluation_collector import EvaluationCollector, write_evaluation
from fedlens.observers.final_evaluation import remove_images
from fedlens.observers.held_out_predictions import remove_held_out_images
from fedlens.observers.write_held_out import write_held_out
from fedlens.run.build import Built
from fedlens.run.observer import ObservedRun, Observer, Place


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
