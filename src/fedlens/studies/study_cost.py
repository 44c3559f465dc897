"""Computes the cost of a study from its settings, without reading data or measuring."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fedlens.data.catalogue import CATALOGUE
from fedlens.results.populations import needs_data, needs_runs
from fedlens.results.rows import Role
from fedlens.settings.config import Config, read_config
from fedlens.studies.expansion import Method
from fedlens.studies.study_plan import StudyPlan

BALANCED = 120_300  # images of the class-balanced iNaturalist, hsu2020 section 4.1
_TWO_VIEWS = ("simsiam", "moco-v2")
_CELL = 0.4  # examples in an S2 cell on average, as a share of n_max: measured 0.33 to 0.45
EVALUATION = 3  # a training step takes about as long as the evaluation of three times its images
_WORK = (
    "rounds",
    "local.",
    "select.",
    "data.",
    "evaluation.",
    "model.",
    "algorithm.name",
    "algorithm.examples",
)


@dataclass(frozen=True)
class RunWork:
    """The images of one run: those it trains on, counting each use, and those it evaluates.

    Attributes:
        test: of the test split.
        cohort: clients in a round; 0 in centralized training.
    """

    trained: float
    evaluated: float
    test: float = 0.0
    cohort: float = 0.0


@dataclass(frozen=True)
class StudyCost:
    """The cost of a study at one scale.

    Attributes:
        runs: runs of tuning and final runs.
        images: trained on in all runs, counting each use.
        hours: of one core; None if the speed of a model is not known.
        datasets: the names of the datasets that it reads, in order.
        pretraining_images, pretraining_hours: of its pre-trainings, which the other numbers leave out.
    """

    runs: int
    images: float
    hours: float | None
    datasets: tuple[str, ...]
    pretraining_images: float = 0.0
    pretraining_hours: float | None = 0.0


def study_cost(plan: StudyPlan) -> StudyCost:
    """The cost of a study. Runs that successive halving or divergence would end early are counted in full.

    The points of a method have equal weight in the cost of its final runs, since the chosen one is unknown.
    """
    runs, images, seconds = 0, 0.0, 0.0
    speeds_known, datasets = True, dict[str, None]()
    cells, shown = plan.cells, (plan.source.settings.figures, plan.source.settings.tables)
    trains = needs_runs(*shown)
    for case in cells.cases:
        for method in cells.methods:
            points = cells.points(method)
            some = points if any(map(_changes_work, points[0])) else points[:1]
            if needs_data(*shown):
                datasets[cells.made(method, case, points[0], "final").config.data.dataset["name"]] = None
            for role, number in _numbers(plan, method, len(points)).items() if trains else ():
                runs += number
                for point in some:
                    config = cells.made(method, case, point, role).config
                    work, speed = run_work(config), images_per_second(config)
                    evaluated = work.evaluated
                    if role == "final":
                        evaluated += analyzed_images(config, plan.source.settings.analyses, work)
                    images += number / len(some) * work.trained
                    speeds_known = speeds_known and speed is not None
                    seconds += number / len(some) * (work.trained + evaluated / EVALUATION) / (speed or 1)
    hours = seconds / 3600 if speeds_known else None
    before = [_pretraining(plan, name) for name in dict.fromkeys(run.method for run in plan.pretraining)]
    datasets |= {config.data.dataset["name"]: None for config, _, _ in before}
    known = all(spent is not None for _, _, spent in before)
    return StudyCost(
        runs,
        images,
        hours,
        tuple(datasets),
        sum(trained for _, trained, _ in before),
        sum(spent or 0.0 for _, _, spent in before) if known else None,
    )


def _pretraining(plan: StudyPlan, name: str) -> tuple[Config, float, float | None]:
    """The settings of a pre-training, its images and its hours of one core; an image of two views counts twice."""
    config = read_config(dict(next(run for run in plan.pretraining if run.method == name).settings))
    views = 2 if config.task is not None and config.task.get("name") in _TWO_VIEWS else 1
    work, speed = run_work(config), images_per_second(config)
    hours = None if speed is None else (work.trained + work.evaluated / EVALUATION) * views / speed / 3600
    return config, work.trained * views, hours


def _changes_work(key: str) -> bool:
    return key.startswith(_WORK) and key != "local.lr"


def _numbers(plan: StudyPlan, method: Method, points: int) -> dict[Role, int]:
    """The number of runs of a cell, by role."""
    if plan.cells.tune is None:
        return {"final": len(plan.cells.seeds)}
    tuning = points * len(plan.cells.tuning_seeds[method.name])
    return {"tune": tuning, "final": len(plan.cells.seeds) if plan.refits else 0}


def run_work(config: Config) -> RunWork:
    """The images of a run with these settings, at clients of the mean size.

    >>> from fedlens.settings.config import read_config
    >>> run_work(read_config({"rounds": 10, "model": "hsu-cnn", "local": {"lr": 0.1, "epochs": 2},
    ...     "data": {"dataset": "cifar10", "partition": {"name": "iid", "clients": 100}},
    ...     "select": {"name": "uniform", "fraction": 0.1}, "evaluation": {"every": 5}}))
    RunWork(trained=100000.0, evaluated=30000.0, test=10000.0, cohort=10.0)
    """
    facts = CATALOGUE.get(config.data.dataset["name"])
    partition = config.data.partition or {}
    train = config.data.dataset.get("train") or (facts and facts.train) or BALANCED
    test = config.data.dataset.get("test") if isinstance(config.data.dataset.get("test"), int) else None
    test = test or (facts and facts.test) or 0
    clients = partition.get("clients") or (facts and facts.clients) or 1
    if partition.get("name") == "s2":
        clients = max(1, round(train / (_CELL * partition["n_max"])))
    if config.data.parties is not None:
        train = round(config.data.parties.overlap * train)
    size = partition.get("size")
    if size is not None and config.data.validation_from == "client":
        train = size * clients
    held_out = config.data.validation * train
    train -= held_out
    if size is not None and config.data.validation_from != "client":
        train = size * clients  # of what the server has left
    rounds = config.rounds
    cohort = 0.0
    if config.algorithm["name"] == "centralized":
        trained = _visit(config, train, virtual=None)
    else:
        cohort = _share(config, clients) * clients
        trained = cohort * _visit(config, train / clients, _virtual(config))
    evaluations = 1 + -(-rounds // config.evaluation.every)
    evaluated = evaluations * (test + held_out + (train if config.evaluation.train else 0))
    aggregate = config.aggregate or {}
    if aggregate.get("name") == "optimal-convex":
        evaluated += rounds * _search(aggregate) * (test if aggregate.get("on") == "test" else held_out)
    return RunWork(float(rounds * trained), float(evaluated), float(test), float(cohort))


def analyzed_images(config: Config, analyses: Mapping[str, Mapping[str, Any]], work: RunWork) -> float:
    """The images that the analyses of a run evaluate, of the recorded local models and their combinations."""
    kept = config.record.local_models
    rounds = 0 if kept is None else sum(kept.includes(round) for round in range(1, config.rounds + 1))
    models = 0.0
    for name, settings in analyses.items():
        if name in ("dynamics", "calibration"):
            models += work.cohort + 2
        elif name == "loss-surface":
            models += settings.get("count", 200) + 1
        elif name == "optimal-aggregation":
            models += _search(settings)
        elif name == "line":
            models += settings.get("points", 11)
    return rounds * models * work.test


def _search(settings: Mapping[str, Any]) -> float:
    """Evaluations of all examples in a search for the best weights, whose steps have a backward pass."""
    starts, epochs = settings.get("starts", 3), settings.get("epochs", 20)
    return float(starts * (EVALUATION * epochs + 1) + 1)


def _share(config: Config, clients: int) -> float:
    """The share of the clients that take part in a round."""
    select = config.select or {"name": "all"}
    asked = select.get("clients_per_round")
    if asked is not None:
        return float(asked) / clients
    fraction = select.get("fraction")
    return 1.0 if fraction is None else max(1, round(fraction * clients)) / clients


def _virtual(config: Config) -> int | None:
    """N_VC of FedVC."""
    if config.algorithm["name"] == "fedvc":
        return int(config.algorithm.get("examples") or config.local.examples or 256)
    return None


def _visit(config: Config, held: float, virtual: int | None) -> float:
    """The images that a client with `held` images trains on in a round."""
    local = config.local
    held = float(virtual or local.examples or held)
    if config.algorithm["name"] == "liadmm" and config.algorithm.get("gradient", "full") != "training":
        return held if config.algorithm.get("gradient", "full") == "full" else float(local.batch(round(held)))
    if local.steps:
        return float(local.steps * local.batch(max(1, round(held))))
    return held * (local.epochs or 1)


@cache
def _speeds() -> Mapping[str, Any]:
    text = (files("fedlens") / "recipes" / "studies" / "speeds.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def images_per_second(config: Config) -> float | None:
    """Images that one core trains on in a second, from speeds.toml; None for a model that is not in it.

    The speed is that of the nearest measured size of images (or number of patches) and width of the network (`width`,
    `units` of a recurrent one, or `hidden`), times the ratio of the areas and of the squared widths.
    """
    speeds = _speeds()
    measured = speeds["models"].get(_model_key(config))
    if measured is None:
        return None
    entries = measured if isinstance(measured, list) else [measured]
    usual = speeds["sides"].get(config.data.dataset["name"], entries[0]["side"])
    size = config.data.dataset.get("size", usual)
    area = float(size[0] * size[1] if isinstance(size, list | tuple) else size**2)
    model = {**entries[0], **config.model}  # the first entry is of the width without settings
    entry = min(entries, key=lambda each: sum(abs(math.log(ratio)) for ratio in _ratios(each, area, model)))
    rate = entry.get(config.engine.get("precision", "fp32"), entry["fp32"])
    return float(rate / math.prod(_ratios(entry, area, model)))


def _ratios(entry: Mapping[str, Any], area: float, model: Mapping[str, Any]) -> list[float]:
    """The pixels (or patches) of an image, and the squared width of the network, as multiples of a measured entry's."""
    patch = model["patch"] / entry["patch"] if "patch" in entry else 1.0
    widths = [model[key] / entry[key] for key in ("width", "units", "hidden") if key in entry]
    return [area / (entry["side"] * patch) ** 2, *(ratio**2 for ratio in widths)]


def _model_key(config: Config) -> str:
    name, backbone = config.model["name"], config.model.get("backbone")
    return f"{name}-{backbone}" if backbone else str(name)
