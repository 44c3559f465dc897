"""Computes the runs and training images of a study from its settings, without reading data or measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedlens.data.catalogue import CATALOGUE
from fedlens.results.populations import needs_data, needs_runs
from fedlens.settings.config import Config, read_config

if TYPE_CHECKING:
    from fedlens.results.rows import Role
    from fedlens.studies.study_plan import StudyPlan

BALANCED = 120_300  # images of the class-balanced iNaturalist, hsu2020 section 4.1
_TWO_VIEWS = ("simsiam", "moco-v2")
_CELL = 0.4  # examples in an S2 cell on average, as a share of n_max: measured 0.33 to 0.45
_WORK = ("rounds", "local.", "select.", "data.", "algorithm.name", "algorithm.examples")


@dataclass(frozen=True)
class StudyCost:
    """The cost of a study at one scale.

    Attributes:
        runs: runs of tuning and final runs.
        images: trained on in all runs, counting each use.
        datasets: the names of the datasets that it reads, in order.
        pretraining_images: of its pre-trainings, which the other numbers leave out; an image of two views counts twice.
    """

    runs: int
    images: int
    datasets: Sequence[str]
    pretraining_images: int = 0


def study_cost(plan: StudyPlan) -> StudyCost:
    """The cost of a study. Runs that successive halving or divergence would end early are counted in full.

    The points of a method have equal weight in the cost of its final runs, since the chosen one is unknown.
    """
    runs, images, datasets = 0, 0.0, dict[str, None]()
    cells, shown = plan.cells, (plan.source.settings.figures, plan.source.settings.tables)
    for case in cells.cases:
        for method in cells.methods:
            points = cells.points(method)
            some = points if any(map(_changes_work, points[0])) else points[:1]
            if needs_data(*shown):
                datasets[cells.made(method, case, points[0], "final").config.data.dataset["name"]] = None
            number: dict[Role, int] = {"final": len(cells.seeds) if plan.refits or cells.tune is None else 0}
            if cells.tune is not None:
                number["tune"] = len(points) * len(cells.tuning_seeds[method.name])
            for role, many in number.items() if needs_runs(*shown) else ():
                runs += many
                trained = (trained_images(cells.made(method, case, point, role).config) for point in some)
                images += many / len(some) * sum(trained)
    before = 0.0
    settings: dict[str, Mapping[str, object]] = {}
    for run in plan.pretraining:
        settings.setdefault(run.method, run.settings)
    for config in map(read_config, map(dict, settings.values())):
        datasets[config.data.dataset["name"]] = None
        views = 2 if config.task is not None and config.task.get("name") in _TWO_VIEWS else 1
        before += views * trained_images(config)
    return StudyCost(runs, round(images), [*datasets], round(before))


def _changes_work(key: str) -> bool:
    return key.startswith(_WORK) and key != "local.lr"


def trained_images(config: Config) -> float:
    """The images that a run with these settings trains on, counting each use, at clients of the mean size.

    >>> from fedlens.settings.config import read_config
    >>> trained_images(read_config({"rounds": 10, "model": "hsu-cnn", "local": {"lr": 0.1, "epochs": 2},
    ...     "data": {"dataset": "cifar10", "partition": {"name": "iid", "clients": 100}},
    ...     "select": {"name": "uniform", "fraction": 0.1}}))
    100000.0
    """
    facts, dataset = CATALOGUE.get(config.data.dataset["name"]), config.data.dataset
    partition = config.data.partition or {}
    train = dataset.get("train") or (facts and facts.train) or BALANCED
    clients = partition.get("clients") or (facts and facts.clients) or 1
    if partition.get("name") == "s2":
        clients = max(1, round(train / (_CELL * partition["n_max"])))
    if config.data.parties is not None:
        train = round(config.data.parties.overlap * train)
    size = partition.get("size")
    if size is not None and config.data.validation_from == "client":
        train = size * clients
    train -= config.data.validation * train
    if size is not None and config.data.validation_from != "client":
        train = size * clients  # of what the server has left
    if config.algorithm["name"] == "centralized":
        return float(config.rounds * _visit(config, train, virtual=None))
    cohort = _share(config, clients) * clients
    return float(config.rounds * cohort * _visit(config, train / clients, _virtual(config)))


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
