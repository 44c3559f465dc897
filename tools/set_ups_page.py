"""docs/set-ups.md: the papers' tables of data and settings, from the recipes and the catalogue.

`python -m tools.set_ups_page` writes it anew; test_papers.py says when that is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlens.data.catalogue import CATALOGUE
from fedlens.settings.config import Config, read_config
from fedlens.settings.config_source import read_source, recipes

PAGE = Path(__file__).parents[1] / "docs" / "set-ups.md"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(?:\n(?:In all rows: .*\n\n)?\|(?:.*\n\|)*.*\n)?")
STARTS = {"none": "scratch", "imagenet": "ImageNet"}


def rendered(page: str) -> str:
    """The page with its tables written anew."""
    tables = {
        "suite": _suite(),
        "segmentation": _segmentation(),
        "partitions": _partitions(),
        "fedavg": _fedavg(),
    }
    tables |= {"chendata": _chen_data(), "chentraining": _chen_training()}
    return TABLE.sub(lambda match: match[1] + "\n" + "".join(f"{line}\n" for line in tables[match[2]]), page)


def _of(*beginnings: str) -> dict[str, Config]:
    """The settings of the recipes whose names begin so."""
    names = [name for name in recipes() if name.startswith(beginnings)]
    return {name: read_config(read_source(name).values) for name in names}


def _lines(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The table without the columns that are equal in all rows; a sentence before it says what they have."""
    unique = list(dict.fromkeys(tuple(str(cell) for cell in row) for row in rows))
    equal = [name for name, cells in zip(head, zip(*unique, strict=True), strict=True) if len({*cells}) == 1]
    kept = [
        [cell for name, cell in zip(head, row, strict=True) if name not in equal] for row in (head, *unique)
    ]
    lines = [f"| {' | '.join(row)} |" for row in kept]
    lines.insert(1, "|" + "---|" * len(kept[0]))
    stated = [f"{name} {unique[0][head.index(name)]}" for name in equal]
    return ([f"In all rows: {', '.join(stated)}.", ""] if stated else []) + lines


def _title(config: Config) -> str:
    return f"`{CATALOGUE[config.data.dataset['name']].name}`"


def _model(config: Config) -> str:
    backbone = config.model.get("backbone")
    return f"`{config.model['name']}`" + (f" on `{backbone}`" if backbone else "")


def _start(config: Config) -> str:
    weights, frozen = str(config.model.get("weights", "none")), config.model.get("freeze")
    return STARTS.get(weights, f"`{weights}`") + (f", `{frozen}` frozen" if frozen else "")


def _partition(config: Config) -> str:
    options = ", ".join(
        f"{key} {value}" for key, value in config.data.partition.items() if key not in ("name", "clients")
    )
    return f"`{config.data.partition['name']}`" + (f" ({options})" if options else "")


def _clients(config: Config) -> str:
    facts = CATALOGUE[config.data.dataset["name"]]
    stated = config.data.partition.get("clients", facts.clients)
    return "by the data" if stated is None else f"{stated:,}"


def _a_round(select: Mapping[str, Any]) -> str:
    if select["name"] == "all":
        return "all"
    return (
        f"{select['clients_per_round']}"
        if "clients_per_round" in select
        else f"{100 * select['fraction']:g} %"
    )


def _rate(config: Config) -> str:
    local = config.local
    decay = f", x {local.lr_decay:g} every {local.lr_decay_every} rounds" if local.lr_decay != 1 else ""
    return f"{local.lr:g}{decay}" + (f", {local.lr_schedule}" if local.lr_schedule != "constant" else "")


def _optimizer(config: Config) -> str:
    return config.local.optimizer + (f", momentum {config.local.momentum:g}" if config.local.momentum else "")


def _work(config: Config) -> str:
    local = config.local
    amounts = {"epochs": local.epochs, "steps": local.steps, "examples": local.examples}
    return " or ".join(f"{amount:,} {unit}" for unit, amount in amounts.items() if amount)


def _federated(*beginnings: str) -> list[Config]:
    return [config for config in _of(*beginnings).values() if config.algorithm["name"] != "centralized"]


def _suite() -> list[str]:
    rows = [
        (CATALOGUE[each.data.dataset["name"]].task, _title(each), _model(each), f"`{each.algorithm['name']}`")
        for each in _federated("fedcv/table2", "fedcv/table5", "fedcv/fig9")
    ]
    return _lines(("task", "dataset", "model", "algorithm"), rows)


def _segmentation() -> list[str]:
    rows = [
        (
            _title(each),
            _model(each),
            _start(each),
            _clients(each),
            _partition(each),
            each.local.batch_size,
            _rate(each),
        )
        for each in _federated("fedcv/table5", "fedcv/table6")
    ]
    return _lines(("dataset", "model", "start", "clients", "partition", "batch", "learning rate"), rows)


def _partitions() -> list[str]:
    rows = [
        (_title(each), _clients(each), _partition(each), CATALOGUE[each.data.dataset["name"]].classes)
        for each in _federated("fedcv/table", "fedcv/fig")
    ]
    return _lines(("dataset", "clients", "partition", "classes"), rows)


def _fedavg() -> list[str]:
    rows = [
        (
            CATALOGUE[each.data.dataset["name"]].task,
            _title(each),
            _a_round(each.select),
            each.local.epochs,
            each.rounds,
        )
        for each in _federated("fedcv/table2", "fedcv/table5", "fedcv/fig")
    ]
    return _lines(("task", "dataset", "clients a round", "local epochs", "rounds"), rows)


def _chen() -> list[Config]:
    names = ("cifar10", "tiny-imagenet", "inaturalist", "cityscapes", "shakespeare", "sent140")
    return _federated(*(f"chen2022/{name}" for name in names))


def _chen_data() -> list[str]:
    rows = []
    for each in _chen():
        facts = CATALOGUE[each.data.dataset["name"]]
        counts = (f"{n:,}" if n else "unknown" for n in (facts.classes, facts.train, facts.test))
        rows.append(
            (
                _title(each),
                facts.task,
                *counts,
                _clients(each),
                each.data.dataset.get("size", "as it is"),
                _model(each),
            )
        )
    head = ("dataset", "task", "classes", "training", "test", "clients", "image size", "model")
    return _lines(head, rows)


def _chen_training() -> list[str]:
    rows = [
        (
            _title(each), _partition(each), _a_round(each.select), _optimizer(each), _rate(each), each.local.batch_size,
            _work(each), f"{each.local.weight_decay:g}", each.rounds,
        )
        for each in _chen()
    ]  # fmt: skip
    head = (
        "dataset", "partition", "clients a round", "optimizer", "learning rate", "batch", "local training",
        "weight decay", "rounds",
    )  # fmt: skip
    return _lines(head, rows)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
