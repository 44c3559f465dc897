"""Runs of a study that start from a pre-training of the same study."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedlens
from fedlens.base.errors import ConfigError
from fedlens.results.rows import Results
from fedlens.run.checkpoint import read_model
from fedlens.studies.carry_out import cached_folder
from fedlens.studies.study_plan import StudyPlan
from tests.unit.studies.study_kit import Heard, without_clock
from tools.reproduce_table import study_cost

pytestmark = pytest.mark.usefixtures("quick_jobs")

BASE = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1},
    "checkpoint": {"seconds": 0.0},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}, "normalize": "unit"},
}
STARTED = {"set": {"model.weights": "pretrained:good"}}
STUDY: dict[str, Any] = {
    "base": BASE,
    "pretrained": {
        "good": {"label": "pooled", "base": BASE, "set": {"algorithm.name": "centralized", "rounds": 3}}
    },
    "methods": {"random": {}, "started": STARTED},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights(path: Path) -> dict[str, Any]:
    return dict(read_model(path)[0])


def run(folder: Path, study: dict[str, Any] = STUDY, jobs: int = 0, heard: Heard | None = None) -> Any:
    return fedlens.Study(**study).run(folder, jobs=jobs, report=False, progress=heard or Heard())


def directory(folder: Path, name: str) -> Path:
    return next(path for path in (folder / "runs").iterdir() if path.name.startswith(name))


def test_a_run_starts_from_the_final_model_of_its_pretraining_which_is_done_once(tmp_path: Path) -> None:
    heard = Heard()
    result = run(tmp_path / "s", heard=heard)
    assert heard.ended == ["good-pretrain-seed0", "random-seed0", "started-seed0"]
    made = directory(tmp_path / "s", "good")
    start = weights(directory(tmp_path / "s", "started") / "initial.safetensors")
    given = weights(made / "model.safetensors")
    assert all((start[name] == value).all() for name, value in given.items())
    [random, started] = result.results.rows
    final = result.results.lines[result.results.info.pretrained[0].digest].curve["test_accuracy"][-1]
    assert started.curve["test_accuracy"][0] == final > random.curve["test_accuracy"][0] + 0.3
    assert [row["method"] for row in result.runs] == ["random", "started"]
    again = Heard()
    run(tmp_path / "s", heard=again)
    assert again.ended == []


def test_a_second_study_takes_the_pretraining_from_the_cache(tmp_path: Path) -> None:
    run(tmp_path / "one")
    [start] = StudyPlan.load(STUDY).pretraining
    summary = cached_folder(start) / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "note": "from the cache"}))
    other = {**STUDY, "methods": {"started": {"set": {**STARTED["set"], "rounds": 1}}}}
    run(tmp_path / "two", other)
    assert "from the cache" in (directory(tmp_path / "two", "good") / "summary.json").read_text()
    environment = cached_folder(start) / "environment.json"
    environment.write_text(environment.read_text().replace("data_sha256", "data_sha257"))
    run(tmp_path / "three", other)  # of other data: it is trained anew
    assert "from the cache" not in (directory(tmp_path / "three", "good") / "summary.json").read_text()


def test_the_digest_of_a_run_depends_on_the_settings_of_its_pretraining_and_on_no_path_or_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(pretrained: dict[str, Any], name: str = "good") -> str:
        methods = {"started": {"set": {"model.weights": f"pretrained:{name}"}}}
        return StudyPlan.load({**STUDY, "pretrained": {name: pretrained}, "methods": methods}).runs[0].digest

    good = STUDY["pretrained"]["good"]
    before = digest(good)
    assert digest(good | {"label": "other"}, "renamed") == before
    assert digest(good | {"seed": 1}) != before
    assert digest(good | {"set": {**good["set"], "rounds": 4}}) != before
    monkeypatch.chdir(tmp_path)
    assert digest(good) == before
    assert str(tmp_path) not in json.dumps(dict(StudyPlan.load(STUDY).runs[1].settings))


def test_a_case_can_have_other_weights_in_place_of_a_pretraining() -> None:
    other = {"base": BASE, "set": {"algorithm.name": "centralized", "rounds": 1}}
    good = {**STUDY["pretrained"]["good"], "cases": {"two": "pretrained:other", "three": "none"}}
    cases = {
        name: {"set": {"data.partition.clients": n}} for name, n in (("one", 4), ("two", 5), ("three", 6))
    }
    study = {**STUDY, "pretrained": {"good": good, "other": other}, "cases": cases, "methods": {"a": STARTED}}
    plan = StudyPlan.load(study)
    assert [run.start and run.start.method for run in plan.runs] == ["good", "other", None]
    assert [run.method for run in plan.pretraining] == ["good", "other"]
    good["cases"] = {"tow": "none"}
    with pytest.raises(ConfigError, match=r"no case 'tow'.*did you mean 'two'"):
        StudyPlan.load(study)


def test_an_unknown_pretraining_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no pre-training 'god'.*did you mean 'pretrained:good'"):
        StudyPlan.load({**STUDY, "methods": {"a": {"set": {"model.weights": "pretrained:god"}}}})
    with pytest.raises(ConfigError, match=r"add a table \[pretrained.god\]"):
        StudyPlan.load({"base": BASE, "set": {"model.weights": "pretrained:god"}})
    inner = {**STUDY["pretrained"], "two": {"base": BASE, "set": {"model.weights": "pretrained:good"}}}
    with pytest.raises(ConfigError, match="no pre-training 'good'"):
        StudyPlan.load({**STUDY, "pretrained": inner})


@pytest.mark.parametrize("jobs", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_runs_of_a_pretraining_that_failed_are_rows_with_its_reason(tmp_path: Path, jobs: int) -> None:
    collapsed = {
        "rounds": 8,
        "model": "mlp",
        "task": {"name": "simsiam", "predictor": False, "stop_gradient": False},
        "algorithm": "centralized",
        "local": {"lr": 0.3, "momentum": 0.9, "batch_size": 64},
        "data": {
            "dataset": {"name": "fractals", "train": 256, "test": 32, "codes": 20, "size": 8, "channels": 1},
            "partition": {"name": "iid", "clients": 1},
        },
    }
    study = {
        **STUDY,
        "set": {"model.name": "mlp"},
        "pretrained": {"good": {"base": collapsed}},
    }
    result = run(tmp_path / "s", study, jobs=jobs)
    [random, line] = result.results.rows
    assert (random.method, random.status) == ("random", "finished")
    assert line.status == "failed"
    assert line.reason is not None
    assert line.reason.startswith("its pre-training 'good' failed: The embeddings have collapsed")
    heard = Heard()
    run(tmp_path / "s", study, heard=heard)  # both are tried again
    assert heard.ended == ["good-pretrain-seed0", "started-seed0"]


def test_an_interrupted_pretraining_continues_and_gives_the_same(tmp_path: Path) -> None:
    class Stop(Heard):
        def round_done(self, run: Any, round: int, rounds: int) -> None:
            super().round_done(run, round, rounds)
            if run.role == "pretrain" and round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", heard=Stop())
    assert not (tmp_path / "cut" / "results.jsonl").exists()
    heard = Heard()
    run(tmp_path / "cut", heard=heard)
    assert ("good-pretrain-seed0", 3, 3) in heard.rounds
    assert ("good-pretrain-seed0", 1, 3) not in heard.rounds
    shutil.rmtree(tmp_path / "cache")
    run(tmp_path / "straight", jobs=2)
    assert without_clock(tmp_path / "cut") == without_clock(tmp_path / "straight")


def test_a_killed_run_without_its_note_is_recognized(tmp_path: Path) -> None:
    """config.toml has the path of the pre-training, where the plan has its digest."""
    run(tmp_path / "s")
    started = directory(tmp_path / "s", "started")
    (started / "planned.json").unlink()
    lines = (tmp_path / "s" / "results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "s" / "results.jsonl").write_text("".join(lines[:-1]))
    heard = Heard()
    run(tmp_path / "s", heard=heard)
    assert heard.ended == ["started-seed0"]


def test_estimates_pages_and_costs_show_pretraining_apart(tmp_path: Path) -> None:
    study = fedlens.Study(**STUDY)
    estimated = study.estimate(tmp_path / "s", jobs=1)
    assert (estimated.runs, estimated.images) == ({"final": 2}, 2 * 2 * 1437)
    assert (estimated.pretraining["left"], estimated.pretraining["images"]) == (1, 3 * 1437)
    assert any(text.startswith("Before them, 1 pre-training on 4,311 images") for text in estimated.sentences)
    result = run(tmp_path / "s")
    assert "1 pre-training is done or in the cache." in study.estimate(tmp_path / "t").sentences
    result.write()
    table = (tmp_path / "s" / "tables" / "pretraining.csv").read_text()
    assert table.splitlines()[1].startswith('pooled,finished,3,"4,311"')
    assert "1 pre-training, once for all runs" in result.page.read_text()
    assert len(Results.read(tmp_path / "s").info.entries) == 2
    cost = study_cost(StudyPlan.load(STUDY))
    assert (cost.runs, cost.images, cost.pretraining_images) == (2, 2 * 2 * 1437, 3 * 1437)


def test_the_metric_of_a_study_is_that_of_its_runs_and_not_of_its_pretrainings(tmp_path: Path) -> None:
    task = {"name": "simsiam"}
    images = {"name": "fractals", "train": 32, "test": 8, "codes": 20, "size": 8, "channels": 1}
    base = {
        "rounds": 1,
        "model": "mlp",
        "task": task,
        "algorithm": "centralized",
        "local": {"lr": 0.01, "batch_size": 16},
        "data": {"dataset": images, "partition": {"name": "iid", "clients": 1}},
    }
    study = {**STUDY, "pretrained": {"good": {"base": base}}, "set": {"model.name": "mlp"}}
    results = run(tmp_path / "s", study).results
    assert results.lines[results.info.pretrained[0].digest].main == "test_embedding_deviation"
    assert results.metric == "test_accuracy"
    named = run(tmp_path / "named", {**study, "metric": "test_accuracy"})  # not refused as unmeasured
    assert {line.status for line in named.results.lines.values()} == {"finished"}


def test_a_scale_replaces_a_pretraining_and_says_so() -> None:
    small = {"pretrained": {"good": {**STUDY["pretrained"]["good"], "set": {"rounds": 1}}}}
    plan = StudyPlan.load({**STUDY, "scales": {"smoke": small}}, "smoke")
    assert ("pre-training pooled: rounds", "3", "1") in plan.differences
