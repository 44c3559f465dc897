"""The section "Parties" in the page of a vertical run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.data.vertical.feature_partition import FeaturePartition, partition_features
from fedlens.pages.parties_section import parties_section
from fedlens.pages.run_page import write_report
from fedlens.results.run import read_run
from tests.unit.results.fake_run import make_run


def windows() -> FeaturePartition:
    p = partition_features(
        100, (1, 8, 12), seed=0, split="quadrants", overlap=0.8, labels_at=2, dataset="digits"
    )
    return replace(p, pictures=(np.arange(96, dtype=np.uint8).reshape(1, 8, 12),))


def own() -> FeaturePartition:
    names = (("a", "b", "c"), ("c", "a"))
    rows, shapes = (np.arange(3), np.arange(2)), ((1, 8, 8), (3, 6, 12))
    pictures = (np.zeros((1, 8, 8), np.uint8), np.zeros((3, 6, 12), np.uint8))
    return FeaturePartition(("x<ray", "photo"), rows, shapes, None, 1, {}, "party-files", names, pictures)


def run_of(
    folder: Path, partition: FeaturePartition, images: object = "auto", dataset: str = "digits"
) -> Path:
    data = {"dataset": {"name": dataset}, "parties": {"split": "quadrants"}}
    directory = make_run(folder, config={"data": data, "record": {"images": images}})
    partition.save(directory / "partition.npz")
    return directory


def section(folder: Path, *given: Any) -> dict[str, Any]:
    shown = parties_section(read_run(run_of(folder, *given)))
    assert shown is not None
    return shown


def test_the_windows_are_drawn_over_a_test_image_with_the_rows_of_each_party(tmp_path: Path) -> None:
    shown = section(tmp_path, windows())
    assert "All 4 parties hold 80 training images" in " ".join(shown["lead"])
    assert "party 2 has the labels" in " ".join(shown["lead"])
    assert shown["rows"][1:3] == [
        ("1", "6 x 4", "1 channel", 85, 5, ""),
        ("2", "6 x 4", "1 channel", 85, 5, "labels"),
    ]
    (drawing,) = shown["drawings"]
    assert (drawing["width"], drawing["height"]) == (360, 240)
    assert [window["at"] for window in drawing["windows"]] == [
        [0, 0, 180, 120],
        [180, 0, 180, 120],
        [0, 120, 180, 120],
        [180, 120, 180, 120],
    ]
    assert [window["role"] for window in drawing["windows"]] == ["", "", "labels", ""]
    assert drawing["picture"].startswith("data:image/png;base64,")
    assert "This page contains 1 test image;" in " ".join(shown["lead"])


def test_parties_with_images_of_their_own_have_a_drawing_each(tmp_path: Path) -> None:
    shown = section(tmp_path, own(), True, "party-files")
    assert [(d["width"], d["height"], len(d["windows"])) for d in shown["drawings"]] == [
        (180, 180, 1),
        (180, 90, 1),
    ]
    assert [row[:5] for row in shown["rows"]] == [
        ("x<ray", "8 x 8", "1 channel", 3, 1),
        ("photo", "12 x 6", "3 channels", 2, 0),
    ]
    assert len({d["picture"] for d in shown["drawings"]}) == 2


def test_a_run_of_some_of_the_parties_says_on_what_they_trained(tmp_path: Path) -> None:
    run = read_run(run_of(tmp_path, own()))
    run.config["algorithm"] = {"name": "vertical", "parties": [0]}
    shown = parties_section(run)
    assert shown is not None
    assert "hold 2 training images, and training uses the 3 of those that take part (x<ray)." in " ".join(
        shown["lead"]
    )
    assert shown["who"] == "1 of 2 parties"


@pytest.mark.parametrize(("images", "dataset"), [("auto", "party-files"), (False, "digits")])
def test_pictures_are_left_out_where_the_settings_say_so(
    tmp_path: Path, images: object, dataset: str
) -> None:
    shown = section(tmp_path, own(), images, dataset)
    assert [d["picture"] for d in shown["drawings"]] == ["", ""]
    assert "test image" not in " ".join(shown["lead"])


def test_the_page_shows_the_parties_and_escapes_their_names(tmp_path: Path) -> None:
    page = write_report(run_of(tmp_path, own(), True, "party-files")).read_text(encoding="utf-8")
    assert "<h2>Parties</h2>" in page
    assert "between <b>2 parties</b>" in page
    assert "x&lt;ray" in page
    assert "x<ray" not in page
    assert "How many training images each party holds, and how many all of them hold." in page
    assert "Data per client" not in page
    assert "evaluation.clients=all" not in page  # which parties refuse
    assert "no predictions of single images are kept" in page


def test_a_run_of_clients_has_no_parties(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    assert parties_section(read_run(directory)) is None
    assert "<h2>Parties</h2>" not in write_report(directory).read_text(encoding="utf-8")
