"""Profiles an experiment: time by part of a round, cost of the model, share of the chip's peak."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedlens.benchmark.profile_memory import Memory, measure_memory
from fedlens.benchmark.profile_model import ModelCost, cost_of
from fedlens.benchmark.profile_peak import Peak, peak_of
from fedlens.benchmark.profile_rounds import Rounds, evaluations, measure
from fedlens.core.errors import ConfigError, nearest
from fedlens.core.protocol import Program
from fedlens.engines.devices import usable_cores
from fedlens.experiment.build import Built, build, data_directory, plan
from fedlens.experiment.config import read_config
from fedlens.experiment.config_source import Source, read_source
from fedlens.experiment.environment import describe_environment
from fedlens.experiment.resolve import resolve
from fedlens.experiment.results import subject
from fedlens.models import MODELS


@dataclass(frozen=True)
class Traffic:
    """Bytes, as a run counts them: of a client and of a round, the mean of the rounds, and of the whole run."""

    down_a_client: float
    up_a_client: float
    down_a_round: float
    up_a_round: float
    down_a_run: float
    up_a_run: float


@dataclass(frozen=True)
class Speed:
    """What training achieves, in FLOP/s, of the model's own passes: what a client rule computes besides is left out.

    Attributes:
        images: a second, of training rounds without the clock.
        round: FLOPs of training over the seconds of those rounds.
        passes: the same over the seconds of the forward and backward passes alone, a worker or this process.
        workers: how many computed at once.
        peak: what all of their cores, or the GPU, could do.
    """

    images: float
    round: float
    passes: float
    workers: int
    peak: Peak


@dataclass(frozen=True)
class Profile:
    """The measurements of one profile."""

    title: dict[str, Any]
    rounds: Rounds
    every: int
    model: ModelCost
    memory: Memory | str
    traffic: Traffic
    speed: Speed
    environment: dict[str, Any]

    def parts(self) -> dict[str, float]:
        """Seconds a round by part; an evaluation is spread over the rounds between two."""
        return self._with_evaluation(self.rounds.training.mean_parts(), self.rounds.evaluation.mean_parts())

    def worker_parts(self) -> dict[str, float]:
        """The same summed over the workers; empty where this process does the work."""
        workers = self.rounds.workers
        return self._with_evaluation(workers, self.rounds.worker_evaluation) if workers else {}

    def _with_evaluation(
        self, training: Mapping[str, float], evaluation: Mapping[str, float]
    ) -> dict[str, float]:
        spread = sum(evaluation.values()) / self.every
        return {**training, "evaluation": training.get("evaluation", 0.0) + spread}

    @property
    def seconds(self) -> float:
        """Seconds of a round with the clock, its share of an evaluation included: the sum of the parts."""
        return fmean(self.rounds.training.timed) + fmean(self.rounds.evaluation.timed) / self.every

    @property
    def plain_seconds(self) -> float:
        """The same without the clock."""
        return fmean(self.rounds.training.plain) + fmean(self.rounds.evaluation.plain) / self.every

    def document(self) -> dict[str, Any]:
        """As plain values, for JSON: seconds, bytes, FLOPs."""
        training, evaluation = self.rounds.training, self.rounds.evaluation
        return {
            "experiment": self.title,
            "round": {
                "seconds": self.seconds,
                "seconds_without_clock": self.plain_seconds,
                "clock_overhead": training.overhead,
                "clock_overhead_quartiles": training.quartiles,
                "pairs": len(training.timed),
                "evaluated_every": self.every,
                "parts": self.parts(),
                "workers": {"processes": self.rounds.processes, "parts": self.worker_parts()},
                "training_seconds": {"timed": training.timed, "plain": training.plain},
                "evaluation_seconds": {"timed": evaluation.timed, "plain": evaluation.plain},
            },
            "model": model_document(self.model),
            "files": {"model": self.rounds.model_bytes, "checkpoint": self.rounds.checkpoint_bytes},
            "memory": {"not_measured": self.memory} if isinstance(self.memory, str) else asdict(self.memory),
            "bytes": asdict(self.traffic),
            "speed": {**asdict(self.speed), "share_of_peak": self.speed.round / self.speed.peak.flops},
            "environment": self.environment,
        }


def profile(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    rounds: int | None = None,
    peak: float | None = None,
    trace: Path | None = None,
    data_dir: Path | None = None,
    download: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
    command: Sequence[str] = (),
) -> Profile:
    """Profiles some rounds of a recipe or a TOML file without writing a run directory.

    Args:
        overrides: `key=value`, on top of its settings.
        rounds: how many are timed, each paired with one that is not; by default as many as take about 20 s.
        peak: the chip's peak in FLOP/s; by default from its data sheet or a measurement.
        trace: a file for a Chrome trace of one more round.
        data_dir, download, say: as for a run.
        command: the command line, for the record.

    Raises `FedlensError` as a run of it would.
    """
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # else torch.profiler writes messages of its own to the terminal
    source = read_source(recipe, overrides)
    planned = plan(read_config(source.values, source.locate), source)
    engine = planned.engine()
    try:
        engine.warm()
        built = build(planned, data_directory(data_dir), download, engine, say)
        if rounds is not None and rounds < 1:
            raise ConfigError(f"{rounds} rounds are to be timed", where="--rounds", hint="take at least 1")
        measured = measure(built, rounds, trace)
    finally:
        engine.close()
    config = built.config
    program = engine.applied(Program({}, built.holders, 0))
    device, precision = program.device, program.arithmetic.precision
    typical = config.local.batch(round(median(_sizes(built))))
    cost = cost_of(built.model.build, built.model.input_shape, typical)
    workers = max(1, measured.processes)
    cores = min(workers * int(config.engine.get("threads") or 1), usable_cores())
    ceiling = Peak(peak, "given") if peak is not None else peak_of(device, precision, cores)
    return Profile(
        _title(built, device, precision),
        measured,
        config.evaluation.every,
        cost,
        measure_memory(built, measured.asked, measured.largest_state),
        _traffic(built, measured),
        _speed(measured, cost, workers, ceiling),
        describe_environment(command, config.seed),
    )


def profile_model(
    name: str, overrides: Sequence[str], shape: Sequence[int], classes: int, batch: int = 32
) -> ModelCost:
    """What a model of `fedlens list models`, or `module:function`, costs by itself; `overrides` are its settings.

    Raises `ConfigError` where there is none such, or it cannot be made for these images.
    """
    values: dict[str, Any] = {"model": {"name": name}}
    source = Source(values)
    if overrides:
        from fedlens.experiment.config_source import override

        source = override(source, overrides)
        stray = next((key for key in source.values if key != "model"), None)
        if stray is not None:
            raise ConfigError(
                f"without a recipe only settings of the model can be set, and '{stray}' is none",
                where=f"--set {stray}",
                hint=nearest(stray, ["model"]),
            )
    found = resolve(MODELS, source.values["model"], "model", source)
    found.made(lambda: found.factory(tuple(shape), classes, **found.settings))
    return cost_of(lambda: found.factory(tuple(shape), classes, **found.settings), shape, batch)


def model_document(cost: ModelCost) -> dict[str, Any]:
    """A model's cost as plain values."""
    return {**asdict(cost), "macs": cost.macs, "step_an_image": cost.step_an_image}


def _sizes(built: Built) -> list[int]:
    """How many examples each client trains on that holds any."""
    sizes = built.federation.sizes[built.federation.eligible].tolist()
    return [built.config.local.examples or int(size) for size in sizes]


def _title(built: Built, device: str, precision: str) -> dict[str, Any]:
    return {
        **subject(built),
        "input_shape": list(built.model.input_shape),
        "classes": built.model.classes,
        "engine": dict(built.config.engine),
        "device": device,
        "precision": precision,
    }


def _traffic(built: Built, found: Rounds) -> Traffic:
    config, tallies, measuring = built.config, found.tallies, found.measuring
    replies = max(1, sum(tally.clients for tally in tallies))
    down, up = fmean(t.bytes_down for t in tallies), fmean(t.bytes_up for t in tallies)
    times = evaluations(config.rounds, config.evaluation.every)
    return Traffic(
        sum(t.bytes_down for t in tallies) / replies,
        sum(t.bytes_up for t in tallies) / replies,
        down,
        up,
        down * config.rounds + measuring.bytes_down * times,
        up * config.rounds + measuring.bytes_up * times,
    )


def _speed(found: Rounds, cost: ModelCost, workers: int, peak: Peak) -> Speed:
    examples = fmean(tally.sums.get("examples", 0.0) for tally in found.tallies)
    inside = found.workers or found.training.mean_parts()
    passes = sum(value for name, value in inside.items() if name.partition(".")[0] in ("forward", "backward"))
    flops, seconds = examples * cost.step_an_image, fmean(found.training.plain)
    return Speed(
        examples / seconds, flops / seconds, workers * flops / passes if passes else 0.0, workers, peak
    )
