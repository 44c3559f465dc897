"""`fedlens pretrain`: its files, exact resume, what other runs take of it, and what it refuses before training."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from fedlens import Experiment
from fedlens.base.errors import ConfigError, FedlensError, RunDirectoryError
from fedlens.cli.main import app
from fedlens.models.registry import MODELS
from fedlens.models.weights import load_weights
from fedlens.models.weights_file import read_weights
from fedlens.pages.contact_sheet import sheet_of_views
from fedlens.pretraining import pretrain
from fedlens.run.progress import ProgressBase
from fedlens.run.rundir import RunDir
from fedlens.settings.config_source import Source, override
from tests.unit.cli.printed import parsed
from tests.unit.data.datasets.small_files import leaf, write_leaf
from tests.unit.data.pictures import write

runner = CliRunner()
DATA: dict[str, Any] = {
    "dataset": {"name": "fractals", "train": 64, "test": 24, "codes": 30, "iterations": 60, "size": 16},
    "partition": {"name": "iid", "clients": 2},
    "augment": ["flip"],
}


DIGITS = {"dataset": "digits", "partition": {"name": "iid", "clients": 2}}


def experiment(*changes: str, **tables: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 3,
        "data": DATA,
        "model": {"name": "small-cnn", "norm": "group", "width": 4},
        "task": {"name": "simsiam", "width": 8, "bottleneck": 4},
        "local": {"lr": 0.05, "momentum": 0.9, "steps": 2, "batch_size": 16},
        "checkpoint": {"seconds": 0},
        "engine": "inline",
    }
    return Experiment(**{**settings, **tables}).with_settings(*changes)


class Interrupting(ProgressBase):
    """Interrupts the run after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == self.round:
            raise KeyboardInterrupt


class Noted(ProgressBase):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_it_writes_weights_that_a_classifier_starts_from(tmp_path: Path) -> None:
    out = tmp_path / "new" / "fractals.safetensors"
    made = pretrain(experiment(), out)
    tree = load_file(out)
    assert made.written
    last = load_file(made.files.run / "model.safetensors")
    assert tree.keys() == last.keys()
    assert all(torch.equal(tree[name], last[name]) for name in tree)
    Experiment(
        rounds=1,
        data={
            "dataset": {"name": "synthetic", "shape": (3, 16, 16), "train": 40, "test": 20, "classes": 4},
            "partition": {"name": "iid", "clients": 2},
        },
        model={"name": "small-cnn", "norm": "group", "width": 4, "weights": str(out)},
        local={"lr": 0.1},
        engine="inline",
    ).run(tmp_path / "down", until=0, report=False)
    initial = load_file(tmp_path / "down" / "initial.safetensors")
    assert all(torch.equal(initial[name], value) for name, value in tree.items())
    assert len(initial) == len(tree) + 2  # the new classifier


def test_the_card_says_how_the_weights_came_about(tmp_path: Path) -> None:
    made = pretrain(experiment("seed=7", "model.width=4"), tmp_path / "my own" / "w.safetensors")
    card = made.files.card.read_text()
    for words in (
        "| Task | `simsiam` |",
        "64 training examples of 2 clients",
        "| Examples seen | 192, 3 epochs",
        "| Seed | 7 |",
        "| Licence of the data | none needed |",
        f"PyTorch {torch.__version__}",
        "| test_embedding_deviation |",
        "--set model=small-cnn --set model.norm=group --set model.width=4 --set ",
        "](w.png)",
    ):
        assert words in card, words
    assert json.loads(made.files.facts.read_text())["model"] == "small-cnn"
    (command,) = [line[2:] for line in card.splitlines() if line.startswith("$ ")]
    verbs, given = parsed(command)
    assert verbs == "run"
    model = override(Source({}), given["changes"]).values["model"]
    assert model == {"name": "small-cnn", "norm": "group", "width": 4, "weights": str(made.files.weights)}


def test_the_sheet_shows_both_views_below_each_other(tmp_path: Path) -> None:
    made = pretrain(experiment("rounds=1"), tmp_path / "w.safetensors")
    picture = np.asarray(Image.open(made.files.sheet))
    assert picture.shape == (
        8 * 18 * 4,
        12 * 18 * 4,
        3,
    )  # 48 images in rows of 12, two views of 16 pixels, enlarged
    first, second = picture[4:68, 4:68], picture[76:140, 4:68]
    assert first.max() > 0
    assert second.max() > 0
    assert (first != second).any()


def test_a_sheet_puts_each_view_in_its_row() -> None:
    views = np.arange(5 * 2, dtype=np.uint8).reshape(5, 2, 1, 1, 1).repeat(64, 3).repeat(64, 4)
    picture = np.asarray(sheet_of_views(views, columns=3))
    assert picture[33::66, 33::66, 0].tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 255], [7, 9, 255]]


def test_an_interrupted_call_continues_to_the_same_bits(tmp_path: Path) -> None:
    whole = pretrain(experiment(), tmp_path / "whole.safetensors")
    out = tmp_path / "parts.safetensors"
    for round in (0, 2):
        with pytest.raises(KeyboardInterrupt):
            pretrain(experiment(), out, progress=Interrupting(round))
        assert not out.exists()
    parts = pretrain(experiment(), out)
    assert out.read_bytes() == whole.files.weights.read_bytes()
    assert parts.files.sheet.read_bytes() == whole.files.sheet.read_bytes()
    assert parts.result.metrics[-1]["local_loss"] == whole.result.metrics[-1]["local_loss"]


def test_a_model_that_no_run_directory_holds_is_refused_before_training(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ConfigError, match=r"the model is an object, .* pass a function that makes it"):
        pretrain(experiment(model=net, task="classification", data=DIGITS), tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_finished_one_is_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    pretrain(experiment(), out)
    before, progress = stamps(tmp_path), Noted()
    assert not pretrain(experiment(), out, progress=progress).written
    assert stamps(tmp_path) == before
    assert progress.notes == [f"{out} is already written"]
    assert pretrain(experiment(), out, force=True).written
    assert {path for path, stamp in stamps(tmp_path).items() if before[path] != stamp} == {
        str(tmp_path / name) for name in ("w.safetensors", "w.safetensors.json", "w.md")
    }


def test_files_that_a_kill_left_out_are_written_without_training(tmp_path: Path) -> None:
    made = pretrain(experiment(), tmp_path / "w.safetensors")
    weights = made.files.weights.read_bytes()
    made.files.weights.unlink()
    assert pretrain(experiment(), tmp_path / "w.safetensors", progress=Interrupting(1)).written
    assert made.files.weights.read_bytes() == weights


@pytest.mark.parametrize("force", [False, True])
def test_a_contact_sheet_that_was_deleted_is_drawn_again(force: bool, tmp_path: Path) -> None:
    made = pretrain(experiment("rounds=1"), tmp_path / "w.safetensors")
    sheet = made.files.sheet.read_bytes()
    made.files.sheet.unlink()
    assert pretrain(experiment("rounds=1"), tmp_path / "w.safetensors", force=force).written
    assert made.files.sheet.read_bytes() == sheet
    assert "](w.png)" in made.files.card.read_text()


@pytest.mark.parametrize("name", ["w.safetensors", "w.safetensors.json", "w.md", "w.png"])
def test_existing_files_are_replaced_only_with_force(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"the file already exists .*{name}.*--force"):
        pretrain(experiment(), tmp_path / "w.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    pretrain(experiment("rounds=1"), tmp_path / "w.safetensors", force=True)
    assert (tmp_path / name).read_bytes() != b"mine"


def test_other_settings_are_not_mixed_with_an_earlier_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pretrain(experiment(), tmp_path / "w.safetensors", progress=Interrupting(1))
    with pytest.raises(RunDirectoryError, match=r"other settings: task\.width was 8 and is 16 \(.*w\.run\)"):
        pretrain(experiment("task.width=16"), tmp_path / "w.safetensors", force=True)
    experiment("rounds=1").run(tmp_path / "v.run", report=False)
    with pytest.raises(RunDirectoryError, match="'fedlens pretrain' did not start"):
        pretrain(experiment("rounds=1"), tmp_path / "v.safetensors")


def test_a_run_that_another_process_trains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pretrain(experiment(), tmp_path / "w.safetensors", progress=Interrupting(1))
    with (
        RunDir.open(tmp_path / "w.run").lock(),
        pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"),
    ):
        pretrain(experiment(), tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("out", "what"),
    [
        ("weights.pt", r"ends in '\.pt', but must end in \.safetensors .*name it weights\.safetensors"),
        ("weights", "has no ending"),
        ("folder.safetensors", "is a directory"),
        ("file/w.safetensors", "is a file, not a directory"),
    ],
)
def test_a_path_that_cannot_be_written_starts_nothing(out: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").write_text("")
    before = stamps(tmp_path)
    with pytest.raises(ConfigError, match=what):
        pretrain(experiment(), tmp_path / out)
    assert stamps(tmp_path) == before


def test_a_directory_without_the_right_to_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match="is not writable"):
        pretrain(experiment(), tmp_path / "new" / "w.safetensors")


def test_personal_models_have_no_weights_of_all(tmp_path: Path) -> None:
    data = {**DATA, "validation": 0.2, "validation_from": "client"}
    with pytest.raises(ConfigError, match=r"'fedbn' makes a model for each client.*algorithm\.name"):
        pretrain(
            experiment("algorithm=fedbn", data=data, model={"name": "small-cnn", "norm": "batch"}),
            tmp_path / "w.safetensors",
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", ["", "faces"])
def test_a_folder_of_images_without_classes_is_enough(inside: str, tmp_path: Path) -> None:
    folder = tmp_path / "generated"
    for at in range(20):
        write(
            folder / inside / f"{at}.png",
            np.random.default_rng(at).integers(0, 256, (16, 16, 3)).astype(np.uint8),
        )
    table = {"name": "image-folder", "path": str(folder), "labels": False, "test": 0.2, "size": 16}
    data = {**DATA, "dataset": table}
    made = pretrain(experiment("rounds=1", data=data), tmp_path / "w.safetensors", report=False)
    assert "16 training examples of 2 clients" in made.files.card.read_text()
    assert "No training images are shown, because they are your own" in made.files.card.read_text()
    assert not made.files.sheet.exists()
    with pytest.raises(ConfigError, match="labels is false, so label_level has no effect"):
        pretrain(
            experiment(data={**data, "dataset": {**table, "label_level": 1}}), tmp_path / "v.safetensors"
        )


def test_a_folder_with_one_image_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "generated" / "0.png", np.zeros((16, 16, 3), np.uint8))
    table = {
        "name": "image-folder",
        "path": str(tmp_path / "generated"),
        "labels": False,
        "test": 0.2,
        "size": 16,
    }
    with pytest.raises(ConfigError, match=r"the folder has one image, 0\.png"):
        pretrain(experiment(data={**DATA, "dataset": table}), tmp_path / "w.safetensors")


def test_the_backbone_of_a_segmentation_network_takes_the_weights(tmp_path: Path) -> None:
    data = {**DATA, "dataset": {**DATA["dataset"], "size": 32, "train": 8}}
    tables: dict[str, Any] = {"data": data, "local": {"lr": 0.01, "steps": 1, "batch_size": 4}}
    start = experiment("rounds=1", **tables, model="mobilenet-v2", evaluation={"every": 1, "batch_size": 8})
    made = pretrain(start, tmp_path / "w.safetensors", report=False)
    network = MODELS.find("unet", where="model")((3, 64, 64), 4)
    match = load_weights(network, read_weights(made.files.weights), 4)
    assert match.backbone == "encoder"
    assert match.backbone_leaves == len(match.loaded)


def test_the_command_names_its_files_and_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/bin/fedlens", "pretrain", "digits", "--out", "w.safetensors"])
    command = ["pretrain", "digits", "--out", "w.safetensors", "--rounds", "1", "--no-report"]
    answer = runner.invoke(app, command)
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.splitlines()[-3:] == [
        "weights: w.safetensors",
        "card: w.md",
        "training images: w.png",
    ]
    assert runner.invoke(app, [*command, "--quiet"]).stdout == "w.safetensors\n"
    found = json.loads(runner.invoke(app, [*command, "--json"]).stdout)
    assert found["files"]["weights"] == "w.safetensors"
    refused = runner.invoke(app, [*command, "--set", "local.lr=0.01"])
    assert refused.exit_code == 2
    assert "other settings: local.lr was" in refused.stderr
    assert "use --set local.lr=0.1" in runner.invoke(app, [*command, "--lr", "0.1"]).stderr

    def interrupted(*arguments: Any, **more: Any) -> None:
        more["progress"].started({**OUTLINE, "directory": "w.run"})
        raise KeyboardInterrupt

    monkeypatch.setattr("fedlens.pretraining.pretrain", interrupted)
    stopped = runner.invoke(app, command)
    assert stopped.exit_code == 130
    assert "resume with: fedlens pretrain digits --out w.safetensors" in stopped.stderr


OUTLINE = {
    "name": "x",
    "rounds": 1,
    "clients": 1,
    "clients_per_round": 1,
    "algorithm": "fedavg",
    "dataset": "digits",
    "model": "linear",
    "parameters": 1,
    "engine": "inline",
    "disclosures": [],
}


def test_a_wrong_recipe_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(FedlensError, match="no-such-recipe"):
        pretrain("no-such-recipe", tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_text_has_no_sheet(tmp_path: Path) -> None:
    text = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\nRough winds do shake"
    for split, stretch in (("train", (0, 12)), ("test", (12, 16))):
        spoken = ([text[at : at + 80] for at in range(*stretch)], [text[at + 80] for at in range(*stretch)])
        write_leaf(tmp_path / "data" / "shakespeare" / split, leaf({"SONNET": spoken}))
    lines = experiment(
        data={"dataset": "shakespeare", "partition": {"name": "iid", "clients": 2}},
        model={"name": "lstm", "units": 4, "embedding": 2},
        task={},
    )
    out = tmp_path / "w.v1.safetensors"
    made = pretrain(lines, out, data_dir=tmp_path / "data", report=False)
    assert not made.files.sheet.exists()
    assert "](w.v1.png)" not in made.files.card.read_text()
    assert not pretrain(lines, out).written
