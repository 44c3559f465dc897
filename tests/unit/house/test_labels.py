"""Titles, labels and keys of every study at every scale name what its runs have. Nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.data.catalogue import CATALOGUE
from fedlens.models.registry import MODELS
from fedlens.studies.reproduce import study_scales
from fedlens.studies.reproductions import reproductions
from fedlens.studies.scale_differences import spellings
from tests.contract.contract_kit import nightly_but
from tests.unit.house.label_terms import terms, wrong_labels

STUDIES = reproductions()
BACKBONES = {"resnet101"}  # of segmentation networks alone


@pytest.mark.parametrize("name", nightly_but(sorted(STUDIES)[::4], sorted(STUDIES)))
def test_labels_name_the_settings_of_their_runs(name: str) -> None:
    wrong = wrong_labels(name, STUDIES[name], study_scales(name))
    assert not wrong, "\n".join(wrong)


HONEST = """
title = "ResNet-20 on digits, not CIFAR-100"
base = "digits"
[scales.smoke.methods.digits-resnet20]
label = "digits, ResNet-20, from scratch, alpha 0.1"
set = { "model.name" = "resnet20", "data.partition" = { name = "dirichlet", clients = 5, alpha = 0.1 } }
[scales.paper]
"""


def test_honest_labels_pass(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(HONEST, encoding="utf-8")
    assert wrong_labels("s", path, ["smoke"]) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("on digits, not", "on", "'ResNet-20 on CIFAR-100': names CIFAR-100, but its runs have the datasets digits"),
        ('"digits, ResNet-20', '"digits, ViT-B/16', "names ViT-B/16, but its runs have the models resnet20"),
        ("methods.digits-resnet20", "methods.gld23k-resnet20", "key 'gld23k-resnet20': names gld23k, but"),
        ("methods.digits-resnet20", "methods.resnet20-ft", "names trained weights, but its runs have model.weights"),
        ("from scratch", "FPS", "names FPS, but its runs have model.weights none"),
        ("alpha 0.1", "alpha 0.5", "names alpha 0.5, but its runs have data.partition.alpha = 0.1"),
        ("alpha 0.1\"", "20 clients\"", "names clients 20, but its runs have data.partition.clients = "),
    ],
)  # fmt: skip
def test_a_wrong_label_is_named_with_study_scale_and_setting(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(HONEST.replace(old, new), encoding="utf-8")
    [wrong] = wrong_labels("s", path, ["smoke"])
    assert wrong.startswith("s, smoke, ")
    assert message in wrong


def test_a_start_of_trained_weights_is_not_called_random(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    text = HONEST.replace(
        '"model.name" = "resnet20",', '"model.name" = "resnet20", "model.weights" = "a.safetensors",'
    )
    path.write_text(text, encoding="utf-8")
    [wrong] = wrong_labels("s", path, ["smoke"])
    assert "names random weights, but its runs have model.weights" in wrong


def test_the_longest_name_counts() -> None:
    found = [
        (term.text, set().union(*term.names.values())) for term in terms("Tiny-ImageNet, cifar10-unet-ft")
    ]
    assert found == [("Tiny-ImageNet", {"tiny-imagenet"}), ("cifar10", {"cifar10"}), ("unet", {"unet"})]


def test_names_are_those_of_datasets_and_models() -> None:
    names = spellings()
    assert set(names["datasets"]) <= set(CATALOGUE)
    assert set(names["models"]) <= {*MODELS, *BACKBONES}
    assert all(
        text.lower() not in ("linear", "natural") for texts in names["models"].values() for text in texts
    )
