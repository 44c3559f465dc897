"""Profiles an experiment: time by part of a round, cost of the model, share of the chip's peak."""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import torch

from fedlens.base.errors import ConfigError, nearest
from fedlens.benchmark.profile_client import count_launches, measure_memory
from fedlens.benchmark.profile_model import ModelCost, cost_of
from fedlens.benchmark.profile_rounds import ProfiledRounds, measure
from fedlens.core.arithmetic import Arithmetic, Precision
from fedlens.core.protocol import Program
from fedlens.engines.devices import usable_cores
from fedlens.models.registry import MODELS
from fedlens.run.build import Built, build, data_directory
from fedlens.run.environment import describe_environment
from fedlens.settings.config_source import Source, override, read_source
from fedlens.settings.plan import plan_of
from fedlens.settings.resolve import resolve
from fedlens.use.results import subject


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
) -> dict[str, Any]:
    """Profiles some rounds of a recipe or a TOML file without writing a run directory.

    Returns the measurements as plain values, in seconds, bytes and FLOPs: what `fedlens bench profile` prints, and
    writes with `--json`.

    Args:
        overrides: `key=value`, on top of its settings.
        rounds: how many are timed, each paired with one that is not; by default as many as take about 20 s.
        peak: the chip's peak in FLOP/s; by default from its data sheet or a measurement.
        trace: a file for a Chrome trace of one more round.
        data_dir, download, say: as for a run.
        command: the command line, for the record.

    Raises `FedlensError` as a run of it would.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch.profiler prints messages of its own
    source = read_source(recipe, overrides)
    planned = plan_of(source)
    engine = planned.engine()
    try:
        engine.warm()
        built = build(planned, data_directory(data_dir), download, engine, say)
        measured = measure(built, rounds, trace)
    finally:
        engine.close()
    config = built.config
    program = engine.applied(Program({}, built.client_data, 0))
    device, precision = program.device, program.arithmetic.precision
    sizes = built.federation.sizes[built.federation.eligible].tolist()
    typical = round(median(config.local.examples or size for size in sizes))
    cost = cost_of(built.model.build, built.model.input_shape, config.local.batch(typical))
    workers = max(1, measured.processes)
    cores = min(workers * int(config.engine.get("threads") or 1), usable_cores())
    return {
        "experiment": {
            **subject(built),
            "input_shape": list(built.model.input_shape),
            "classes": built.model.classes,
            "engine": dict(config.engine),
            "device": device,
            "precision": precision,
        },
        "round": _round(measured, config.evaluation.every),
        "model": _model(cost),
        "files": {"model": measured.model_bytes, "checkpoint": measured.checkpoint_bytes},
        "memory": measure_memory(built, measured.ask, measured.client_state),
        "launches": count_launches(built, measured.ask, measured.client_state),
        "bytes": _bytes(built, measured),
        "speed": _speed(
            measured, cost, workers, Peak(peak, "given") if peak else peak_of(device, precision, cores)
        ),
        "environment": describe_environment(command, config.seed),
    }


def profile_model(
    name: str, overrides: Sequence[str], shape: Sequence[int], classes: int, batch: int = 32
) -> dict[str, Any]:
    """The cost of a model of `fedlens list models`, or `module:function`; `overrides` are its settings.

    Returns plain values, as `profile`. Raises `ConfigError` where the model does not exist or cannot be made for these
    images.
    """
    source = override(Source({"model": {"name": name}}), overrides)
    stray = next((key for key in source.values if key != "model"), None)
    if stray is not None:
        raise ConfigError(
            f"'{stray}' is not a setting of the model: without a recipe, only settings of the model can be set",
            where=f"--set {stray}",
            hint=nearest(stray, ["model"]),
        )
    factory = resolve(MODELS, source.values["model"], "model", source)
    return {
        "experiment": {"model": name, "input_shape": list(shape), "classes": classes},
        "model": _model(cost_of(partial(factory, tuple(shape), classes), shape, batch)),
    }


def _model(cost: ModelCost) -> dict[str, Any]:
    return {**asdict(cost), "macs": cost.macs, "step_an_image": cost.step_an_image}


def _round(measured: ProfiledRounds, every: int) -> dict[str, Any]:
    """The time of a round by part; an evaluation is spread over the `every` rounds between two of them."""
    training, evaluation = measured.training, measured.evaluation

    def mean(of_training: Mapping[str, float], of_evaluation: Mapping[str, float]) -> dict[str, float]:
        parts = {name: value / len(training.timed) for name, value in of_training.items()}
        share = sum(of_evaluation.values()) / len(evaluation.timed) / every
        return {**parts, "evaluation": parts.get("evaluation", 0.0) + share}

    ratios = [timed / plain - 1 for timed, plain in zip(training.timed, training.plain, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "seconds": fmean(training.timed) + fmean(evaluation.timed) / every,
        "seconds_without_clock": fmean(training.plain) + fmean(evaluation.plain) / every,
        "clock_overhead": middle,
        "clock_overhead_quartiles": [low, high],
        "pairs": len(training.timed),
        "evaluated_every": every,
        "parts": mean(training.parts, evaluation.parts),
        "workers": {
            "processes": measured.processes,
            "parts": mean(training.worker_parts, evaluation.worker_parts) if measured.processes else {},
        },
        "training_seconds": {"timed": training.timed, "plain": training.plain},
        "evaluation_seconds": {"timed": evaluation.timed, "plain": evaluation.plain},
    }


def _bytes(built: Built, measured: ProfiledRounds) -> dict[str, float]:
    """Bytes, as a run counts them: of a client and of a round, the mean of the rounds, and of the whole run."""
    rounds, tallies = built.config.rounds, measured.training.tallies
    evaluation = measured.evaluation.tallies[-1]
    times = evaluations(rounds, built.config.evaluation.every)
    replies = max(1, sum(tally.clients for tally in tallies))
    sent: dict[str, float] = {}
    for way, trained, evaluated in (
        ("down", [tally.bytes_down for tally in tallies], evaluation.bytes_down),
        ("up", [tally.bytes_up for tally in tallies], evaluation.bytes_up),
        ("peer", [tally.bytes_peer for tally in tallies], evaluation.bytes_peer),
    ):
        if way == "peer" and not any(trained):
            continue
        sent[f"{way}_a_client"] = sum(trained) / replies
        sent[f"{way}_a_round"] = fmean(trained)
        sent[f"{way}_a_run"] = fmean(trained) * rounds + evaluated * times
    return sent


def evaluations(rounds: int, every: int) -> int:
    """How many evaluations a run of so many rounds has, with the one before its first round.

    >>> evaluations(10, 4)  # after rounds 0, 4, 8 and 10
    4
    """
    return 1 + rounds // every + (rounds % every != 0)


def _speed(measured: ProfiledRounds, cost: ModelCost, workers: int, peak: Peak) -> dict[str, Any]:
    """What training achieves: images a second, and FLOP/s of the model's own passes.

    `round` is over the seconds of rounds without the clock, `passes` over those of the forward and backward passes
    alone, summed over the workers. What a client rule computes on top is left out.
    """
    training = measured.training
    examples = fmean(tally.sums.get("examples", 0.0) for tally in training.tallies)
    parts = training.worker_parts if measured.processes else training.parts
    passes = parts["forward"] + parts["backward"]
    flops, seconds = examples * cost.step_an_image, fmean(training.plain)
    return {
        "images": examples / seconds,
        "round": flops / seconds,
        "passes": workers * flops * len(training.timed) / passes if passes else 0.0,
        "workers": workers,
        "peak": asdict(peak),
        "share_of_peak": flops / seconds / peak.flops,
    }


# Dense TFLOP/s from the makers' data sheets; the first label that `torch.cuda.get_device_name` contains applies.
_SHEETS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H100 PCIe", {"fp32": 51.2, "tf32": 378.0, "bf16": 756.5, "fp16": 756.5}),
    ("H100 NVL", {"fp32": 60.0, "tf32": 417.5, "bf16": 835.0, "fp16": 835.0}),
    ("H100", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    ("H200", {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}),
    ("A100", {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}),
    ("V100", {"fp32": 15.7, "fp16": 125.0}),
    ("T4", {"fp32": 8.1, "fp16": 65.0}),
)
_SIDE, _SIDE_GPU = 2048, 8192
_TIMES = 3
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Peak:
    """FLOP/s, and a phrase that says where the figure is from."""

    flops: float
    source: str


def peak_of(device: str, precision: Precision, cores: int) -> Peak:
    """The peak of this device in this precision; on a CPU, of so many cores.

    >>> peak_of("cpu", "fp32", 1).source
    'measured: a product of 2048 x 2048 matrices in fp32 on 1 core'
    """
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
        sheet = next((sheet for label, sheet in _SHEETS if label in name), {})
        if precision in sheet:
            return Peak(sheet[precision] * 1e12, f"data sheet of {name}, {precision}, dense")
        side, where = _SIDE_GPU, name
    else:
        side, where = _SIDE, f"{cores} core{'s' * (cores != 1)}"
    return Peak(
        _measured(device, precision, side, cores),
        f"measured: a product of {side} x {side} matrices in {precision} on {where}",
    )


def _measured(device: str, precision: Precision, side: int, cores: int) -> float:
    """FLOP/s of the fastest of a few products."""
    on_gpu = torch.device(device).type == "cuda"
    with ExitStack() as restore:
        restore.callback(torch.set_num_threads, torch.get_num_threads())
        restore.enter_context(Arithmetic(precision).on(torch.device(device)))
        torch.set_num_threads(cores)
        a = torch.ones(side, side, dtype=_TYPES.get(precision, torch.float32), device=device)

        def product() -> None:
            torch.mm(a, a)
            if on_gpu:
                torch.cuda.synchronize(device)

        product()  # the first one allocates memory and starts libraries
        return 2 * side**3 / min(timeit.repeat(product, number=1, repeat=_TIMES))
