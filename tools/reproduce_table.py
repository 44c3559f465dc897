"""The table of docs/reproduce.md and costs.json, from the study files.

`python -m tools.reproduce_table` writes both anew; with names such as `hsu2019/fig5`, the costs of these
studies alone. tests/unit/house/test_reproductions.py says when that is needed. Costs follow from the settings,
without reading data or measuring.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from fedlens.cli.reproduce import cost_words
from fedlens.data.catalogue import CATALOGUE
from fedlens.results.rows import Role, needs_data, needs_runs
from fedlens.settings.config import Config, read_config
from fedlens.studies.reproduce import (
    COSTS,
    SCALES,
    ListedStudy,
    StudyCost,
    StudyRecord,
    costs,
    listed_studies,
    study_scales,
)
from fedlens.studies.reproductions import FOLDER, reproductions
from fedlens.studies.study_plan import StudyPlan

PAGE = Path(__file__).parents[1] / "docs" / "reproduce.md"
BALANCED = 120_300  # images of the class-balanced iNaturalist, hsu2020 section 4.1
_TWO_VIEWS = ("simsiam", "moco-v2")
_CELL = 0.4  # examples in an S2 cell on average, as a share of n_max: measured 0.33 to 0.45
_WORK = ("rounds", "local.", "select.", "data.", "algorithm.name", "algorithm.examples")
TABLE = re.compile(r"(<!-- table: reproductions -->\n)(?:\n\|(?:.*\n\|)*.*\n)?")
_LETTERS = {"t": "k", "m": "M", "b": "B"}  # of "thousand", "million" and "billion"
NOWHERE = Path("/nonexistent")  # what is on a machine does not belong on the page


def rendered(page: str) -> str:
    """The page with its table written anew."""
    return TABLE.sub(lambda match: match[1] + "\n" + "".join(f"{row}\n" for row in rows()), page)


def rows() -> list[str]:
    """The lines of the table."""
    lines = [f"| study | what it is | {' | '.join(SCALES[1:])} |", f"|---|---|{'---:|' * len(SCALES[1:])}"]
    return lines + [_row(study) for study in listed_studies(NOWHERE, NOWHERE)]


def _row(study: ListedStudy) -> str:
    cells = [f"`{study.name}`", subject(study), *(_cost(study, scale) for scale in SCALES[1:])]
    return f"| {' | '.join(cells)} |"


def subject(study: ListedStudy) -> str:
    """What a study shows, without the paper and the figure, which its name says."""
    return study.description.rpartition(" (")[0]


def _cost(study: ListedStudy, scale: str) -> str:
    """The cost of a scale in a short form, with a link to its record."""
    words = re.sub(r" (\w)\w+ images$", lambda match: _LETTERS[match[1]], cost_words(study, scale))
    words = words.removesuffix(" images").replace("no training", "none")
    return next(
        (record_link(study.name, each, words) for each in study.records if each.scale == scale), words
    )


def record_link(name: str, record: StudyRecord, words: str = "") -> str:
    """A link to a record on the page of its paper, which `mkdocs build` makes; by default it has the scale's name."""
    paper = name.partition("/")[0]
    return f"[{words or record.scale}](figures/{paper}.md#{name.replace('/', '')}-{record.scale})"


def write_costs(names: list[str]) -> None:
    """Writes costs.json, with the costs of `names` computed anew; of all studies without names."""
    path, known = FOLDER / COSTS, reproductions()
    tables = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in names or known:
        plans = {scale: StudyPlan.load(known[name], scale, check=False) for scale in study_scales(name)}
        tables[name] = {scale: asdict(study_cost(plan)) for scale, plan in plans.items()}
    tables = {name: tables[name] for name in known if name in tables}
    lines = [f"{json.dumps(name)}: {json.dumps(table)}" for name, table in tables.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    costs.cache_clear()


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


if __name__ == "__main__":
    write_costs(sys.argv[1:])
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
