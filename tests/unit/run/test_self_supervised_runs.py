"""Runs without labels: what their files hold, weights for other runs, exact resume, and the end of a collapsed run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from fedlens.api import Experiment, Result, load_result, resume
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.dataset_info import DatasetInfo
from fedlens.run.build import build
from fedlens.run.initial_weights import initial_weights
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan
from fedlens.tasks.moco import moco_v2

FRACTALS = {"name": "fractals", "train": 64, "test": 24, "codes": 30, "iterations": 60, "size": 16}
SIAM = {"name": "simsiam", "width": 8, "bottleneck": 4}
MOCO = {"name": "moco-v2", "width": 16, "queue": 40}
MODEL = {"name": "small-cnn", "norm": "group", "width": 4}


def experiment(task: dict[str, Any], *changes: str, dataset: Any = FRACTALS, **tables: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 4,
        "data": {
            "dataset": dataset,
            "partition": {"name": "iid", "clients": 2},
            "augment": [{"name": "flip"}],
        },
        "model": MODEL,
        "task": task,
        "algorithm": {"name": "fedavg"},
        "local": {"lr": 0.001, "momentum": 0.9, "steps": 2, "batch_size": 16},  # more collapses MoCo at once
        "engine": {"name": "inline"},
    }
    return Experiment(**{**settings, **tables}).with_settings(*changes)


@pytest.fixture(scope="module", params=["fedavg", "centralized"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[SIAM, MOCO], ids=["simsiam", "moco-v2"])
def task(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture(scope="module")
def whole(task: dict[str, Any], algorithm: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A finished run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return experiment(task, algorithm={"name": algorithm}).run(folder, report=False)


def test_a_run_records_the_spread_and_writes_the_encoder(task: dict[str, Any], whole: Result) -> None:
    lines = [json.loads(line) for line in (whole.directory / "metrics.jsonl").read_text().splitlines()]
    assert {"test_embedding_deviation", "test_embedding_rank", "test_alignment"} <= lines[-1].keys()
    assert ("test_loss" in lines[-1]) is (task["name"] == "simsiam")
    assert 0 < lines[-1]["test_embedding_deviation"] < 1.1
    tree = load_file(whole.directory / "model.safetensors")
    assert not [name for name in tree if name.startswith(("encoder", "projector", "key", "queue"))]
    features = whole.model(torch.zeros(2, 3, 16, 16))
    assert features.shape == (2, 8 * 8 * 8)
    assert load_result(whole.directory).model(torch.zeros(1, 3, 16, 16)).shape == (1, 8 * 8 * 8)


@pytest.mark.parametrize("task", [SIAM, MOCO], ids=["simsiam", "moco-v2"])
@pytest.mark.parametrize("dataset", [{"name": "digits"}, {**FRACTALS, "pairs": False}])
def test_two_equal_views_are_refused(task: dict[str, Any], dataset: dict[str, Any], tmp_path: Path) -> None:
    data = {"dataset": dataset, "partition": {"name": "iid", "clients": 2}}
    with pytest.raises(ConfigError, match=r"views of an image of .* are equal.*\(data\.augment"):
        experiment(task, data=data).run(tmp_path / "run")
    drawn = {**data, "dataset": FRACTALS}  # two drawings of the same codes
    experiment(task, data=drawn).run(tmp_path / "drawn", until=0, report=False)


def test_moco_computes_no_logits_in_an_evaluation() -> None:
    task = moco_v2(width=4, queue=8)
    network = task.network(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 6)), 6)
    views = torch.randn(5, 2, 3, 2, 2)
    assert set(network(views)) == {"logits", "z"}
    with torch.no_grad():
        evaluated = network.eval()(views)
    assert set(evaluated) == {"z"}
    assert task.metrics(task.measure(evaluated, None)).keys() == set(task.metric_names)
    assert task.output_values(DatasetInfo("d", "unlabelled", (), (3, 2, 2))) == evaluated["z"][0].numel()


@pytest.mark.parametrize(
    ("change", "images"),
    [("rounds=1", 2 * 16), ("local.batch_size=all", 4 * 2 * 32), ("algorithm.name=centralized", 4 * 2 * 16)],
)
def test_a_queue_longer_than_the_run_is_noted(change: str, images: int) -> None:
    def notes(queue: int) -> list[str]:
        planned = plan(experiment({**MOCO, "queue": queue}, change).config, Source({}))
        return [note for note in build(planned, Path(), False).notes if "queue" in note]

    assert not notes(images)
    (note,) = notes(images + 1)
    assert f"is never full: a client trains on {images:,} images at most" in note


@pytest.mark.parametrize(("task", "travels"), [(SIAM, False), (MOCO, True)], ids=["simsiam", "moco-v2"])
@pytest.mark.parametrize("algorithm", ["fedavg", "centralized"])
def test_initial_weights_go_to_workers_where_a_task_keeps_leaves_at_clients(
    task: dict[str, Any], travels: bool, algorithm: str, tmp_path: Path
) -> None:
    experiment(SIAM).run(tmp_path / "pre", report=False)
    model = {**MODEL, "weights": f"run:{tmp_path / 'pre'}"}
    changed = experiment(task, model=model, algorithm={"name": algorithm})
    built = build(plan(changed.config, Source({})), Path(), False)
    weights = initial_weights(built.model)
    assert weights is not None
    assert weights.travels is travels


def test_lars_resumes_to_the_same_bits_and_is_not_stacked(tmp_path: Path) -> None:
    local = {
        "lr": 2.0,
        "optimizer": "lars",
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "steps": 2,
        "batch_size": 16,
    }
    start = experiment(SIAM, algorithm={"name": "centralized"}, local=local)
    start.run(tmp_path / "whole", report=False)
    start.run(tmp_path / "parts", until=2, report=False)
    resume(tmp_path / "parts", report=False)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    labelled = {"dataset": {"name": "digits"}, "partition": {"name": "iid", "clients": 2}}
    with pytest.raises(ConfigError, match=r"lars scales each leaf by its norm.*local\.optimizer"):
        experiment({}, data=labelled, local=local, engine={"name": "vectorized"}).run(tmp_path / "stacked")


@pytest.mark.parametrize("until", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_a_resumed_run_has_the_same_bits(
    task: dict[str, Any], algorithm: str, until: int, whole: Result, tmp_path: Path
) -> None:
    experiment(task, algorithm={"name": algorithm}).run(tmp_path / "parts", until=until)
    parts = resume(tmp_path / "parts")
    one, other = (load_file(run.directory / "model.safetensors") for run in (whole, parts))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert whole.metrics[-1]["local_loss"] == parts.metrics[-1]["local_loss"]


def test_another_run_starts_from_the_encoder_with_a_new_classifier(tmp_path: Path) -> None:
    experiment(SIAM).run(tmp_path / "pre")
    downstream = experiment(
        {},
        dataset={"name": "synthetic", "shape": (3, 16, 16), "train": 60, "test": 20, "classes": 5},
        model={**MODEL, "weights": f"run:{tmp_path / 'pre'}"},
    )
    downstream.run(tmp_path / "down")
    initial = load_file(tmp_path / "down" / "initial.safetensors")
    pretrained = load_file(tmp_path / "pre" / "model.safetensors")
    assert all(torch.equal(initial[name], value) for name, value in pretrained.items())
    assert set(initial) - set(pretrained) == {name for name in initial if initial[name].shape[:1] == (5,)}


def test_self_supervision_starts_from_a_classifier_without_its_head(tmp_path: Path) -> None:
    data = {"name": "synthetic", "shape": (3, 16, 16), "train": 60, "test": 20, "classes": 4}
    experiment({}, dataset=data, model=MODEL).run(tmp_path / "classes")
    start = {**MODEL, "weights": f"run:{tmp_path / 'classes'}"}
    experiment(SIAM, model=start).run(tmp_path / "views", until=0)
    trained = load_file(tmp_path / "classes" / "model.safetensors")
    initial = load_file(tmp_path / "views" / "initial.safetensors")
    assert initial.keys() < trained.keys()
    assert all(torch.equal(trained[name], value) for name, value in initial.items())
    # The copy in the run directory is what a resumed run starts from.
    resume(tmp_path / "views")


def test_labels_of_a_dataset_are_left_aside(tmp_path: Path) -> None:
    result = experiment(SIAM, dataset={"name": "digits"}).run(tmp_path / "run")
    assert "test_accuracy" not in result.metrics[-1]
    assert load_result(tmp_path / "run").model(torch.zeros(1, 1, 8, 8)).shape == (1, 8 * 4 * 4)


ON_DIGITS: dict[str, Any] = {
    "data": {
        "dataset": {"name": "digits"},
        "partition": {"name": "iid", "clients": 2},
        "augment": [{"name": "crop", "pad": 1}],
    },
    "model": {"name": "mlp", "hidden": 32},
    "rounds": 8,
}
BRIEF = {"momentum": 0.9, "steps": 40, "batch_size": 64, "weight_decay": 1e-3}


def test_a_collapsed_run_ends_with_the_reason_and_a_healthy_one_does_not(tmp_path: Path) -> None:
    """Without predictor and stop-gradient the embeddings fall onto a line (Chen and He 2021, section 4)."""
    tables = {**ON_DIGITS, "local": {"lr": 0.2, **BRIEF}}
    task = {"name": "simsiam", "width": 16, "bottleneck": 4}
    dead = {**task, "predictor": False, "stop_gradient": False}
    with pytest.raises(
        RunFailed, match=r"embeddings have collapsed: the embedding rank .*task\.stop_gradient"
    ):
        experiment(dead, **tables).run(tmp_path / "dead")
    result = experiment(task, **tables).run(tmp_path / "healthy")
    assert result.metrics[-1]["test_embedding_rank"] > 2
    assert not result.warnings


@pytest.mark.nightly
def test_moco_with_old_keys_of_an_encoder_that_moves_fast_collapses(tmp_path: Path) -> None:
    """The queue reaches back 64 steps, the key encoder's average 10: the age of a key says more than its image."""
    task = {"name": "moco-v2", "width": 16}
    with pytest.raises(RunFailed, match=r"embeddings have collapsed: the embedding deviation .*task\.queue"):
        experiment({**task, "queue": 4096, "momentum": 0.9}, **ON_DIGITS, local={"lr": 0.2, **BRIEF}).run(
            tmp_path / "dead"
        )
    result = experiment(
        {**task, "queue": 256, "momentum": 0.99}, **ON_DIGITS, local={"lr": 0.05, **BRIEF}
    ).run(tmp_path / "healthy")
    assert result.metrics[-1]["test_embedding_deviation"] > 0.5
    assert not result.warnings


def test_a_classifier_is_not_trained_without_its_last_layer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"leaves the model without outputs .*model\.classifier"):
        experiment({}, dataset={"name": "digits"}, model={"name": "mlp", "classifier": False}).run(
            tmp_path / "run"
        )


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ({"engine": {"name": "vectorized"}}, "depends on the other images of its batch"),
        ({"model": {"name": "mlp", "cache_features": True}}, "features cannot be kept"),
        ({"algorithm": {"name": "moon"}}, "compares one feature vector"),
        ({"algorithm": {"name": "fedir"}}, "does not define `counts`"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    tables: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=what):
        experiment(SIAM, **tables).run(tmp_path / "run")


@pytest.mark.report_page
def test_the_page_shows_neither_a_best_round_nor_classes(tmp_path: Path) -> None:
    experiment(SIAM).run(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Final embedding deviation" in page
    assert "Best embedding deviation" not in page
    assert "Data per client" in page
    assert "Classes of each client" not in page


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"task": {}}, "have no labels, so a task has to be named"),
        (
            {"data": {"dataset": FRACTALS, "partition": {"name": "dirichlet", "clients": 2, "alpha": 1.0}}},
            "have no labels to partition by",
        ),
    ],
)
def test_images_without_labels_are_refused_where_labels_are_needed(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=what):
        experiment(**{"task": SIAM, **changes}).run(tmp_path / "run")


def test_features_are_predicted_for_image_files(tmp_path: Path) -> None:
    result = experiment(SIAM).run(tmp_path / "run")
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "black.png")
    predictions = result.predict(tmp_path / "black.png", out=tmp_path / "out")
    assert predictions is not None
    header = (tmp_path / "out" / "predictions.csv").read_text().splitlines()[0]
    assert header.split(",") == ["path", *(f"feature_{k}" for k in range(8 * 8 * 8)), "fault"]


@pytest.mark.parametrize("changes", [{"task": {**SIAM, "width": 2}}, {"dataset": {**FRACTALS, "test": 3}}])
def test_too_few_directions_or_images_are_not_taken_for_a_collapse(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    result = experiment(**{"task": SIAM, **changes}).run(tmp_path / "run")
    assert "test_embedding_rank" not in result.metrics[-1]
    assert ("test_embedding_deviation" in result.metrics[-1]) is ("task" in changes)
