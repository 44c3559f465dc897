"""Snapshots of pages of runs, of partitions, of analyses, of comparisons and of what federation costs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np

from fedlens import Experiment, cost
from fedlens.algorithms.private_averaging import privacy_curves
from fedlens.benchmark import picture
from fedlens.benchmark.comparison import ComparisonRow, Ratio
from fedlens.cli.cost import show
from fedlens.core.algorithm_base import ClientGraph, OwnCurve
from fedlens.data.partition.partition import Partition
from fedlens.data.table import Table
from fedlens.data.vertical.feature_partition import partition_features
from fedlens.models.darts import PUBLISHED
from fedlens.pages.analysis_page import INDEX, write_analysis_page
from fedlens.pages.compare import curve_figure, write_page_of, write_plot
from fedlens.pages.cost.answer import cost_answer
from fedlens.pages.cost.page import write_cost_page
from fedlens.pages.partition_page import write_captions, write_page
from fedlens.pages.run_page import write_report
from fedlens.privacy.settings import PrivacySettings
from fedlens.results.comparison import Comparison, readable
from fedlens.results.figures import analysis_figures, pictures
from fedlens.results.figures.partition_figures import places_map
from fedlens.results.figures.study_figures import draw
from fedlens.results.run import Run
from fedlens.studies.cost_study import CostResult
from tests.golden.folders import settings
from tests.snapshots.analysis_rows import ROWS
from tests.snapshots.figures import described, instead_of_files, of_study
from tests.snapshots.kit import ARCHIVES, Snapshots, as_text, unpack
from tests.snapshots.page_text import page_snapshot
from tests.snapshots.study_snapshots import FIGURES
from tests.unit.pages.test_classification_section import evaluation
from tests.unit.pages.test_cost_answer import study as made_runs
from tests.unit.results.fake_run import class_counts, line, make_partition, make_run

COST = settings("digits", rounds=4, select={"name": "uniform", "clients_per_round": 3})
SEEDS = 2
_TASKS = sorted({path.name.removesuffix(".tar.xz") for path in ARCHIVES.iterdir()} - {"cost"})


@contextmanager
def somewhere() -> Iterator[Path]:
    """A temporary folder as the working directory, so that no page names it."""
    with TemporaryDirectory() as folder, chdir(folder), mock.patch.dict(os.environ, {"COLUMNS": "120"}):
        yield Path()


def of_task(name: str) -> str:
    """The page of a finished run of a task."""
    with somewhere() as root:
        return page_snapshot(write_report(unpack(name, root)))


def of_fake(**made: Any) -> str:
    """The page of a run that was never run."""
    with somewhere() as root:
        return page_snapshot(write_report(make_run(root, **made)))


def _interrupted() -> str:
    warning = {
        "kind": "diverging", "metric": "test_loss", "since": 2, "until": 3, "sentence": "It rises.", "try": "Lower lr.",
    }  # fmt: skip
    rows = [
        line(at, validation_accuracy=at / 10, train_loss=2.0 - at / 5, bytes_peer=5_000) for at in range(5)
    ]
    rows[3] |= {"skipped": "no update was accepted", "test_loss": None}
    best = {"round": 2, "metric": "validation_accuracy", "value": 0.2, "chosen_on": "validation"}
    traffic = {
        "clients": {
            "train": {"rounds": [1, 4], "down": {"model": 650}, "up": {"update": 650, "weight": 1}, "replies": 20,
                      "bytes_down": 5e4, "bytes_up": 6e4, "bytes_peer": 7e3, "measured": ["loss"]},
            "evaluate": {"rounds": [2, 2], "down": {}, "up": {}, "replies": 3, "bytes_down": 10, "bytes_up": 20},
        },
        "server": {"evaluate": ["@test", "@validation"]},
    }  # fmt: skip
    summary = {
        "status": "interrupted", "warnings": [warning], "best": best, "traffic": traffic,
        "failures": {"mercy": {"timeout": 2, "the update is not finite": 1}, "oak": {"timeout": 4}},
        "changes": [{"after_round": 2, "key": "local.lr", "before": 0.05, "after": 0.01}],
        "disclosures": ["Each client sends the mean of its features."], "pooled": ["The class counts of all clients."],
        "notes": ["the client 'mercy' (2 images) looks like 'Mercy'", *(f"skipped {k}.png" for k in range(6))],
    }  # fmt: skip
    return of_fake(metrics=rows, summary=summary, counts=class_counts(4, 3))


def _of_peers() -> str:
    rows = [line(at, consensus_distance=at / 2, peers_accuracy_worst=0.1) for at in range(6)]
    curves = [
        OwnCurve("consensus_distance", "how far apart", {"consensus_distance": "distance"}),
        OwnCurve("accuracy", "of peers", {"peers_accuracy_worst": "worst", "test_accuracy": "mean model"}),
    ]
    ring = ClientGraph("In each mixing", 4, [(0, 1, 0.3), (1, 2, 0.3), (2, 3, 0.3), (0, 3, 0.1)])
    shown = {
        "curves": [each._asdict() for each in curves],
        "graphs": [ring._asdict()],
        "model": "the mean model",
    }
    counts = class_counts(4, 3, even=False)
    return of_fake(rounds=5, metrics=rows, summary={"shown": shown}, counts=counts, algorithm="dsgd")


def _private() -> str:
    hidden = ("clients", "examples", "bytes_up", "bytes_down", "seconds", "elapsed", "local_loss")
    rows = [
        {k: v for k, v in line(at, epsilon=at / 2, clip=0.5).items() if k not in hidden} for at in range(4)
    ]
    settings = PrivacySettings(clip="adaptive", noise_multiplier=1.5, delta=1e-5)
    curves = [each._asdict() for each in privacy_curves(settings)]
    privacy = {"sentence": "After 3 rounds the model is private.", "assumed": ["The server is trusted."]}
    return of_fake(rounds=3, metrics=rows, summary={"privacy": privacy, "shown": {"curves": curves}})


def _of_a_search() -> str:
    with somewhere() as root:
        run = make_run(root, rounds=2, algorithm="fednas")
        (run / "genotype.json").write_text(json.dumps(PUBLISHED), encoding="utf-8")
        return page_snapshot(write_report(run))


def _of_parties() -> str:
    with somewhere() as root:
        data = {"dataset": "digits", "parties": {"split": "quadrants", "overlap": 0.8}}
        run = make_run(root, rounds=2, algorithm="vertical", config={"data": data})
        four = partition_features(40, (1, 8, 8), seed=0, split="quadrants", overlap=0.8, dataset="digits")
        replace(four, pictures=(np.arange(64, dtype=np.uint8).reshape(1, 8, 8),)).save(run / "partition.npz")
        return page_snapshot(write_report(run))


def _bounded() -> str:
    with somewhere() as root:
        same = {"summary": {"partition": {"digest": "p", "examples": 100, "clients": 3, "emd": 1.0}}}
        make_run(root, name="upper", algorithm="centralized", run_id="upper", **same)
        return page_snapshot(write_report(make_run(root, name="lower", run_id="lower", **same)))


def _of_many_classes() -> str:
    """A classifier of 40 classes with more images of mistakes than are shown, and 60 clients of very uneven sizes."""
    with somewhere() as root:
        run = make_run(root, counts=_uneven())
        evaluation(40, 600).write(run / "evaluation.npz")
        return page_snapshot(write_report(run))


def _uneven() -> Any:
    return class_counts(60, 40, even=False) * (1 + 50 * (np.arange(60) % 7 == 0))[:, None]


def of_partition() -> str:
    """The page, the captions and the pictures of a partition with features, and the map of its places."""
    counts = class_counts(6, 4, even=False)
    marked = make_partition(
        counts, list("abcd"), features={"blur": np.arange(6.0), "brightness": np.arange(6.0) / 9}
    )
    with somewhere() as root, instead_of_files() as drawn:
        places = _places()
        page = page_snapshot(write_page(marked, root / "partition.html", places))
        captions = write_captions(marked, root / "captions.txt", places).read_text("utf-8")
        pictures.draw(marked, root, ["svg"], places)
        few = page_snapshot(write_page(replace(marked, census=None, features={}), root / "sizes.html"))
    return "\n".join([page, captions, few, as_text(drawn)])


def of_pictures_of_many() -> str:
    """The pictures of a partition with more classes than have names, and of very uneven sizes."""
    with somewhere() as root, instead_of_files() as drawn:
        pictures.draw(make_partition(_uneven()[::6, ::2]), root, ["svg"])
        return as_text(drawn)


def _places() -> Any:
    labels = np.arange(24) % 11
    columns = {"lat": np.linspace(48, 53, 24), "lon": np.linspace(8, 13, 24)}
    columns["lat"][5] = np.nan
    table = replace(Table.of(labels, columns), classes=tuple(f"bird {k}" for k in range(11)))
    return places_map(Partition.of_owners(labels % 3, 3), table)


def of_analyses() -> str:
    """The page of the analyses of a run."""
    with somewhere() as root:
        run = make_run(root)
        folder = run / "analyses"
        folder.mkdir()
        rows_of = {**ROWS, "own.py:mine": [{"round": 1, "value": 0.5}] * 3}
        index = {
            name: {
                "rows": f"{k}.jsonl", "figures": [f"{k}.svg"], "settings": {"count": k}, "on": "test",
                "fedlens": "0.1.0", "command": f"fedlens analyze RUN {name}",
            }
            for k, name in enumerate(rows_of)
        }  # fmt: skip
        (folder / INDEX).write_text(json.dumps(index))
        for k, rows in enumerate(rows_of.values()):
            (folder / f"{k}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return page_snapshot(write_analysis_page(folder, Run.open(run)))


def of_single_analyses() -> str:
    """The figures of each analysis of one run, and of one that recorded a single round."""
    made: dict[str, Any] = {}
    for name, rows in ROWS.items():
        made[name] = [of_study(figure) for figure in analysis_figures.analysis_figures(name, rows)]
        once = [row for row in rows if row["round"] == rows[0]["round"]]
        again = [of_study(figure) for figure in analysis_figures.analysis_figures(name, once)]
        made[f"{name} of one round"] = (
            again if name == "loss-surface" else [figure["caption"] for figure in again]
        )
    return as_text(made)


def _compared(root: Path) -> Comparison:
    """Runs of several seeds, a bound, one that failed, one with warnings, another metric, and clients."""
    partition = {"digest": "p", "held_out_digest": "h", "examples": 100, "clients": 3, "emd": 1.0}

    def run(name: str, algorithm: str, seed: int, final: float, **more: Any) -> None:
        metrics = more.pop("metrics", [line(k, test_accuracy=final * k / 2) for k in range(3)])
        seeds = {"seed": seed, "seeds": {"data": 0, "partition": 0, "initialization": seed}}
        summary = {"seed": seed, "partition": partition, **more.pop("summary", {})}
        path = make_run(
            root, name=name, run_id=f"{algorithm}-{seed}", algorithm=algorithm, metrics=metrics,
            config={**seeds, **more.pop("config", {})}, summary=summary, **more,
        )  # fmt: skip
        rows = [
            {"round": 2, "client": client, "validation_examples": 20, "validation_accuracy": final + by}
            for client, by in (("mercy", -0.3), ("oak", 0.05), ("ulm", 0.0))
        ]
        (path / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    spread = {"clients_accuracy_mean": 0.7, "clients_accuracy_worst_decile": 0.4}
    for seed, final in enumerate((0.8, 0.9, 0.7)):
        more = {"seconds": 2.0 + seed, "examples": 450 + 90 * seed, "bytes_up": 1e5 * (1 + seed)}
        rows = [line(k, test_accuracy=final * k / 2, **spread, **(more if k else {})) for k in range(3)]
        run("digits", "fedavg", seed, final, metrics=rows)
        run("bound", "centralized", seed, 0.95)
    run("alone", "local-only", 0, 0.6)
    run("digits", "fedadam", 0, 0.85, summary={"warnings": [{"since": 1, "until": 2, "kind": "chance"}]})
    run("broken", "fedavg", 0, 0.2, summary={"status": "failed", "error": "out of memory"})
    other = [line(k, test_accuracy=..., test_map50=0.1 * k, bytes_up=..., bytes_down=...) for k in range(3)]
    best = {"round": 2, "metric": "test_map50", "value": 0.2, "chosen_on": "test"}
    squares = {"data": {"dataset": "squares", "partition": "natural"}}
    run(
        "boxes", "fedavg", 0, 0.2, metrics=other, config=squares, summary={"best": best, "dataset": "squares"}
    )
    (root / "gone").mkdir()
    (root / "gone" / "config.toml").write_text("name = ")
    return Comparison.of([root])


def of_comparison() -> str:
    """The rows of `compare`, its table for the terminal, its notes, and the data of its figure for papers."""
    with somewhere() as root:
        found = _compared(root / "runs")
        each = Comparison.of([root / "runs" / "digits"], each=True)
        return as_text(
            {
                "rows": found.rows,
                "table": readable(found.rows),
                "notes": [*found.notes, *found.skipped],
                "each": readable(each.rows),
                "figure": described(curve_figure(found)),
                "loss": described(curve_figure(found, "loss")),
            }
        )


def _page_of_comparison() -> str:
    with somewhere() as root:
        return page_snapshot(write_page_of(_compared(root / "runs"), root / "compare.html"))


@cache
def _cost() -> Mapping[str, str]:
    """The answer, the page and the words of the terminal of a finished `cost`, which repeats no run."""
    with somewhere() as root:
        out = unpack("cost", root)
        result = cost(Experiment(**COST), seeds=SEEDS, jobs=0, out=out)
        with redirect_stdout(StringIO()) as printed:
            show(result, quiet=False)
        answer = json.loads((out / "cost.json").read_text("utf-8"))
        return {"json": as_text(answer), "page": page_snapshot(result.page), "words": printed.getvalue()}


def _cost_of_fakes() -> str:
    """The page and the words of the terminal of a `cost` with three seeds, of which one run is unfinished."""
    with somewhere() as root:
        out = root / "cost"
        planned = made_runs(
            out, **{"iid-seed1": {"status": "failed", "error": "out of memory", "warnings": []}}
        )
        answer = cost_answer(out, planned)
        page = page_snapshot(write_cost_page(out, answer))
        with redirect_stdout(StringIO()) as printed:
            show(CostResult(out, answer), quiet=False)
        return "\n".join([page, printed.getvalue(), as_text(answer)])


def of_pictures() -> str:
    """The pictures for papers: of a classifier, of compared runs, of studies with each mark and map, of a benchmark."""
    times = {"seconds": (1.0,), "to_limit": Ratio(1.25, 1.1, 1.4)}
    rows = [
        ComparisonRow("small", "limit", "limit", images_per_s=1000.0),
        ComparisonRow(
            "small", "workers", "fedlens", {"processes": 2, "threads": 1}, images_per_s=1250.0, **times
        ),
        ComparisonRow("small", "another", "peer", reason="not installed"),
        ComparisonRow("large", "by hand", "by hand", images_per_s=20.0),
    ]
    with somewhere() as root, instead_of_files() as drawn:
        pictures.draw_evaluation(unpack("classification", root), root, ["svg"])
        write_plot(_compared(root / "runs"), root / "compare.svg")
        for name in (
            "setting-document",
            "setting-tuned",
            "setting-bars",
            "curves-batches",
            "heat",
            "effective-lr",
        ):
            study, spec = FIGURES[name]
            draw(study(), spec, root / f"study-{name}.svg")
        picture.draw(rows, root / "bench.svg")
        return as_text(drawn)


SNAPSHOTS: Snapshots = {
    **{f"pages/run-{name}.txt": partial(of_task, name) for name in _TASKS},
    "pages/run-interrupted.txt": _interrupted,
    "pages/run-of-peers.txt": _of_peers,
    "pages/run-private.txt": _private,
    "pages/run-of-a-search.txt": _of_a_search,
    "pages/run-of-parties.txt": _of_parties,
    "pages/run-bounded.txt": _bounded,
    "pages/run-failed.txt": partial(
        of_fake, metrics=[line(0)], summary={"status": "failed", "error": "out of memory"}
    ),
    "pages/run-not-evaluated.txt": partial(of_fake, metrics=[], summary={}),
    "pages/run-of-many-classes.txt": _of_many_classes,
    "pages/partition.txt": of_partition,
    "figures/pictures-of-many.json": of_pictures_of_many,
    "pages/cost-of-fakes.txt": _cost_of_fakes,
    "pages/analyses.txt": of_analyses,
    "pages/compare.txt": _page_of_comparison,
    "pages/cost.txt": lambda: _cost()["page"],
    "tables/cost.json": lambda: _cost()["json"],
    "tables/cost-in-the-terminal.txt": lambda: _cost()["words"],
    "tables/compare.json": of_comparison,
    "figures/analyses.json": of_single_analyses,
    "figures/pictures.json": of_pictures,
}
