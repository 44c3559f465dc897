"""What is compared with what. Nothing here was changed after its results were seen, but for what the page says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from benchmarks.evidence.cells import VALIDATION, Cell, overlaid
from benchmarks.evidence.statistics import final
from benchmarks.evidence.store import Line

Settings = Mapping[str, Any]  # dotted keys

TUNING_SEED, SEEDS = 100, (0, 1, 2)
LRS = (0.03, 0.1, 0.3)

BASE: Mapping[str, Any] = overlaid(
    {},
    {
        "rounds": 100,
        "data.dataset": "benchmarks.evidence.data:small_fashion",
        "data.partition.clients": 100,
        "model.name": "mlp",
        "select.clients_per_round": 10,
        "local.batch_size": 20,
        "local.epochs": 2,
        "evaluation.every": 4,
        "checkpoint.seconds": 3600.0,
    },
)


@dataclass(frozen=True)
class Method:
    """An algorithm with its settings, and the values of a setting of its own that are tried beside `local.lr`.

    Differences are to the study's baseline, or to the method whose label is `beside`.
    """

    label: str
    settings: Settings
    grid: Mapping[str, Sequence[float]]
    beside: str = ""


@dataclass(frozen=True)
class Study:
    """Every method in every case, at the same number of tuning runs each.

    Attributes:
        name: of its tables.
        file: whose results and command it belongs to.
        cases: populations, by their name in the tables.
        baseline: the method that the others are set beside, where they name no other.
        target: the accuracy that rounds are counted to.
    """

    name: str
    file: str
    cases: Mapping[str, Settings]
    methods: Sequence[Method]
    baseline: str
    settings: Settings = field(default_factory=dict)
    target: float = 0.75


def tuned(label: str, name: str, own: tuple[str, Sequence[float]], beside: str = "", **more: Any) -> Method:
    """A method with the local learning rates that everyone tries, and two values of one setting of its own."""
    settings = {"algorithm.name": name, **{key.replace("__", "."): value for key, value in more.items()}}
    return Method(label, settings, {"local.lr": LRS, own[0]: own[1]}, beside)


# Where a method has no setting of its own, its server learning rate is tried at two values instead, so that nobody
# has more runs to choose from than another.
STEP = ("algorithm.lr", (0.5, 1.0))
BETA = ("algorithm.momentum", (0.7, 0.9))
ADAPTIVE = ("algorithm.lr", (0.003, 0.01))

FEDAVG = tuned("FedAvg", "fedavg", STEP)
FEDAVGM = tuned("FedAvgM", "fedavgm", BETA)


def dirichlet(alpha: float) -> Settings:
    """hsu2019's populations: equal sizes, class distributions from Dir(alpha p)."""
    return {"data.partition.name": "dirichlet", "data.partition.alpha": alpha}


UNEVEN = {"data.partition.name": "dirichlet-classwise", "data.partition.alpha": 0.1}
SHARDS = {"data.partition.name": "shards", "data.partition.classes_per_client": 2}

HSU2019 = Study(
    "hsu2019",
    "hsu2019",
    {f"alpha = {alpha:g}": dirichlet(alpha) for alpha in (100.0, 1.0, 0.1, 0.0)},
    (FEDAVG, FEDAVGM),
    "FedAvg",
)

FEDIR = Study(
    "fedir",
    "hsu2020",
    {f"alpha = {alpha:g}": dirichlet(alpha) for alpha in (1.0, 0.1)},
    (
        FEDAVG,
        tuned("FedIR", "fedir", STEP),
        FEDAVGM,
        tuned("FedIR, server momentum", "fedavgm", BETA, "FedAvgM", client__name="reweighted"),
    ),
    "FedAvg",
)

FEDVC = Study(
    "fedvc",
    "hsu2020",
    {
        "sizes alone": {"data.partition.name": "quantity", "data.partition.sizes": "log-normal"},
        "sizes and classes": UNEVEN,
    },
    (
        FEDAVG,
        tuned("FedVC", "fedvc", STEP, algorithm__examples=100, rounds=240),
        FEDAVGM,
        tuned(
            "FedVC, server momentum",
            "fedvc",
            ("server.momentum", BETA[1]),
            "FedAvgM",
            algorithm__examples=100,
            server__name="momentum",
            rounds=240,
        ),
    ),
    "FedAvg",
    {"local.epochs": 1},
)

COMPARE = Study(
    "compare",
    "compare",
    {"Dirichlet": UNEVEN, "two classes": SHARDS},
    (
        FEDAVG,
        FEDAVGM,
        tuned("FedProx", "fedprox", ("algorithm.mu", (0.01, 0.1))),
        tuned("SCAFFOLD", "scaffold", STEP),
        tuned("FedNova", "fednova", STEP),
        tuned("FedDyn", "feddyn", ("algorithm.alpha", (0.05, 0.5))),
        tuned("MOON", "moon", ("algorithm.mu", (1.0, 5.0))),
        tuned("FedAdam", "fedadam", ADAPTIVE),
        tuned("FedYogi", "fedyogi", ADAPTIVE),
        tuned("FedAdagrad", "fedadagrad", ("algorithm.lr", (0.01, 0.03))),
    ),
    "FedAvg",
)


def told(label: str, name: str, more: Settings | None = None, **own: Any) -> Method:
    """A method at the settings that its document gives: nothing is tuned."""
    settings = {"algorithm.name": name, **{f"algorithm.{key}": v for key, v in own.items()}, **(more or {})}
    return Method(label, settings, {})


# The document says neither of how many clients a tenth takes part, nor what stands for the gradient of its Eq. 4.5 in
# "10 epochs" of training, nor what becomes of the clients that are not drawn.
_TWENTY = {"data.partition.clients": 20, "select.clients_per_round": 2}
_IID = {"data.partition.name": "iid"}
_ONE_GRADIENT = {"local.momentum": 0.0, "local.epochs": 1}  # Eq. 4.5 as it stands has no local steps
GHAEMI2022 = Study(
    "ghaemi2022",
    "ghaemi2022",
    {
        "IID": _IID,
        "two classes": SHARDS,
        "IID, 20 clients": {**_IID, **_TWENTY},
        "two classes, 20 clients": {**SHARDS, **_TWENTY},
    },
    (
        told("FedAvg", "fedavg"),
        told("LIADMM", "liadmm", _ONE_GRADIENT),
        told("LIADMM, absent clients kept", "liadmm", _ONE_GRADIENT, absent="last"),
        told("LIADMM, training", "liadmm", gradient="training"),
        told("LIADMM, training, absent clients kept", "liadmm", gradient="training", absent="last"),
    ),
    "FedAvg",
    {
        "rounds": 80,
        "local.lr": 0.05,
        "local.momentum": 0.9,
        "local.epochs": 10,
        "local.batch_size": 128,
    },
)

STUDIES: Mapping[str, Sequence[Study]] = {
    "hsu2019": (HSU2019,),
    "hsu2020": (FEDVC, FEDIR),
    "ghaemi2022": (GHAEMI2022,),
    "compare": (COMPARE,),
}


def tuning_cells(study: Study) -> Iterator[Cell]:
    """One run for each point of each method's grid, on held-out training images."""
    for case, method in product(study.cases, study.methods):
        for point in points(method):
            if point:
                yield _tuning(study, case, method, point)


def final_cells(study: Study, there: Mapping[str, Line]) -> Iterator[Cell]:
    """Three runs of each method at the values that tuning chose, as far as its tuning runs are there."""
    for case, method in product(study.cases, study.methods):
        point = chosen(study, case, method, there)
        if point is not None:
            for seed in SEEDS:
                settings = _settings(study, case, method, {**point, "seed": seed})
                yield Cell(case, method.label, "final", settings)


def _tuning(study: Study, case: str, method: Method, point: Settings) -> Cell:
    held_out = {"seed": TUNING_SEED, "data.validation": VALIDATION}
    return Cell(case, method.label, "tune", _settings(study, case, method, {**point, **held_out}))


def _settings(study: Study, case: str, method: Method, more: Settings) -> dict[str, Any]:
    return overlaid(BASE, {**study.settings, **study.cases[case], **method.settings, **more})


def points(method: Method) -> list[dict[str, float]]:
    """The points of a method's grid; one empty point where it has none."""
    return [dict(zip(method.grid, values, strict=True)) for values in product(*method.grid.values())]


def chosen(study: Study, case: str, method: Method, there: Mapping[str, Line]) -> dict[str, float] | None:
    """The point with the best accuracy on held-out images, the first of equals; None where a tuning run is missing.

    A run that diverged is never chosen, unless they all did.
    """
    if not method.grid:
        return {}
    scores = []
    for point in points(method):
        line = there.get(_tuning(study, case, method, point).digest)
        if line is None:
            return None
        scores.append(-1.0 if "failed" in line else final(line["curve"]))
    return points(method)[scores.index(max(scores))]
