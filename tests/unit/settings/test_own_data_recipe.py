from __future__ import annotations

import errno
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError, RunFailed
from fedlens.settings.config import read_config
from fedlens.settings.own_data_recipe import check_writable, recipe_text, write_recipe

SMALL = {"images": 100, "training": {"width": 8, "height": 64}}
LARGE = {"images": 100, "training": {"width": 224, "height": 8}}


@pytest.mark.parametrize(
    ("facts", "model", "task"),
    [
        (SMALL | {"classes": {"cat": 3, "dog": 4}}, "small-cnn", None),
        (LARGE | {"classes": {"cat": 3, "dog": 4}}, "resnet18", None),
        (SMALL | {"classes": {"cat": 3}, "labels": 3, "clients": {"a": 1, "b": 2}}, "small-cnn", None),
        (LARGE | {"classes": {"cat": 3}, "boxes": 3}, "yolov5n", None),
        (LARGE | {"classes": ["road"], "pixels": {"road": 3, "void": 0}}, "unet", None),
        (SMALL | {"classes": []}, "resnet20", "simsiam"),
    ],
)
def test_model_task_and_partition_follow_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], model: str, task: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = {"name": "coco-json", "path": "a b", "annotations": {"train": "x.json", "test": "y.json"}}
    values = tomllib.loads(recipe_text(dataset, facts, Path("my cells!.toml")))
    assert read_config(values)
    assert values["data"]["dataset"] == dataset
    assert values["data"]["partition"]["name"] == ("natural" if "clients" in facts else "iid")
    assert (values["name"], values["model"]["name"], values.get("task", {}).get("name")) == (
        "my-cells",
        model,
        task,
    )
    batch_normalization = model != "small-cnn"
    assert values["local"].get("last_batch") == ("drop" if batch_normalization else None)


@pytest.mark.parametrize(
    ("more", "epochs", "why"),
    [
        ({"boxes": 9, "clients": {"a": 39, "b": 40, "c": 41}}, 5, "32 training images: 20 steps"),
        ({"boxes": 9, "splits": {"train": 24, "test": 96}}, 10, "6 training images: 10 steps"),
        ({"pixels": {"road": 3}, "images": 4000}, 1, "800 training images: 100 steps"),
        ({"classes": ["a"], "images": 400}, 4, "80 training images: 20 steps"),
    ],
)
def test_a_client_makes_enough_steps_a_round_to_learn(more: dict[str, Any], epochs: int, why: str) -> None:
    facts: dict[str, Any] = LARGE | {"images": 120} | more
    text = recipe_text({"name": "coco-json", "path": "cells"}, facts, Path("cells.toml"))
    assert tomllib.loads(text)["local"]["epochs"] == epochs
    assert f"has about {why} a round." in text


def test_paths_are_absolute_in_a_file_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scans").mkdir()
    dataset = {"name": "image-folder", "path": "scans", "table": "in the folder of the data.csv"}
    values = tomllib.loads(recipe_text(dataset, SMALL, tmp_path / "sub" / "x.toml"))
    assert values["data"]["dataset"] == dataset | {"path": str(tmp_path / "scans")}


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "link.toml").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"link\.toml already exists \(--write\)"):
        check_writable(tmp_path / "link.toml")
    with pytest.raises(ConfigError, match=r"the folder .* does not exist"):
        check_writable(tmp_path / "none" / "x.toml")


def test_a_full_disk_leaves_no_file_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"the disk is full, so own\.toml could not be written"):
        write_recipe({"name": "csv", "path": "data"}, SMALL, tmp_path / "own.toml")
    assert not list(tmp_path.iterdir())
