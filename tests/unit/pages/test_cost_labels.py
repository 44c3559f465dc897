"""`fedlens cost` with planted wrong labels: the right client is named, and the listed images are mostly wrong."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fedlens
from fedlens.cli.cost import show
from fedlens.data.dataset import Dataset
from fedlens.pages.cost.labels import label_findings, label_warnings, low_client_sentences
from fedlens.pages.cost.page import write_cost_page
from fedlens.results.run import read_run
from fedlens.studies.cost_study import CostResult, cost
from tests.unit.pages.reading import read_page

SHARES = [0.4, 0.3, 0.26, 0.04]  # of the images; Fulda has few
NAMES = np.array(["Aachen", "Bonn", "Celle", "Fulda"])
TRAINING = 1400


def hospitals() -> tuple[np.ndarray, np.ndarray]:
    """The hospital of each training image, and which labels are wrong: 40 % of Bonn's."""
    rng = np.random.default_rng(0)
    owners = NAMES[rng.choice(4, TRAINING, p=SHARES)]
    return owners, (owners == "Bonn") & (rng.random(TRAINING) < 0.4)


def scans(*args: Any, wrong: bool = True) -> Dataset:
    digits = load_digits()
    images, labels = (digits.images * 15).astype(np.uint8), digits.target.astype(np.int64)
    owners, flipped = hospitals()
    if wrong:
        by = np.random.default_rng(1).integers(1, 10, TRAINING)
        labels[:TRAINING] = np.where(flipped, (labels[:TRAINING] + by) % 10, labels[:TRAINING])
    test = slice(TRAINING, None)
    return fedlens.dataset(images[:TRAINING], labels[:TRAINING], images[test], labels[test], clients=owners)


def right_scans(*args: Any) -> Dataset:
    return scans(wrong=False)


def result_of(dataset: Any, out: Path, **more: Any) -> CostResult:
    experiment = fedlens.Experiment(
        name="scans", rounds=4, model="linear", local={"lr": 0.1, "batch_size": 10}, engine="inline",
        data={"dataset": dataset, "partition": {"name": "natural"}, "normalize": "unit"}, **more,
    )  # fmt: skip
    result = cost(experiment, seeds=1, jobs=0, out=out, report=False)
    write_cost_page(result.directory, result.answer)  # without the pages of the runs, to save time
    return result


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> CostResult:
    return result_of(scans, tmp_path_factory.mktemp("wrong") / "c")


def test_the_mislabelled_hospital_is_named_with_every_model_and_not_the_one_with_few_images(
    wrong: CostResult, capsys: pytest.CaptureFixture[str]
) -> None:
    (low,) = wrong.answer["low_clients"]
    assert low["client"] == "Bonn"
    assert list(low["models"]) == ["federated", "centralized", "iid", "local-only"]
    assert all(each["others"] - each["share"] > 0.2 for each in low["models"].values())
    show(wrong, quiet=False)
    log, page = capsys.readouterr().out, read_page(wrong.page.read_text("utf-8")).text
    for words in (log, page):
        assert "Bonn is clearly below the other clients with every model: check its labels." in words
        assert "Fulda has the lowest value" not in words
        assert "Fulda does worst" not in words


def test_the_listed_images_are_mostly_those_with_wrong_labels(
    wrong: CostResult, capsys: pytest.CaptureFixture[str]
) -> None:
    flipped = set(np.flatnonzero(hospitals()[1]).tolist())
    first = wrong.answer["suspicious"][0]
    assert first["client"] == "Bonn"
    listed = [image["index"] for image in first["images"]]
    precision = np.mean([index in flipped for index in listed])
    assert len(listed) >= 10
    assert precision >= 0.9
    assert first["found"] >= 0.5 * 0.4 * first["held_out"]
    show(wrong, quiet=False)
    log, page = capsys.readouterr().out, read_page(wrong.page.read_text("utf-8")).text
    assert f"training image {listed[0]}: label " in log
    assert "many of these labels may be right" in log
    assert first["found"] == len(listed)
    path = wrong.directory / "labels_to_check.csv"
    assert f"and {len(listed) - 5} more" in log
    assert f"to check: {path}" in log
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["training image"]) for row in rows if row["client"] == "Bonn"] == listed
    assert len(rows) == sum(row["found"] for row in wrong.answer["suspicious"])
    assert "labels_to_check.csv beside this page" in page
    assert "Labels to check" in page
    assert f"training image {listed[0]}" in page


def test_without_the_centralized_model_nobody_is_named(wrong: CostResult) -> None:
    """A client that federated training serves badly would look the same."""
    finished = {row["role"]: {0: read_run(wrong.directory / row["name"])} for row in wrong.answer["runs"]}
    assert [row["client"] for row in label_findings(finished)["low_clients"]] == ["Bonn"]
    del finished["centralized"]
    assert label_findings(finished)["low_clients"] == []


def test_the_sentence_counts_the_images_that_were_compared(wrong: CostResult) -> None:
    (low,) = wrong.answer["low_clients"]
    (said,) = low_client_sentences(wrong.answer)
    assert f"of its {low['held_out']} held-out images right" in said
    fewer = {**low, "models": {role: {**each, "images": 7} for role, each in low["models"].items()}}
    (said,) = low_client_sentences({"low_clients": [{**fewer, "client": "3"}]})
    assert said.startswith("Client 3 is clearly below")
    assert (
        f"of 7 of its {low['held_out']} held-out images (no other client has the classes of the rest) right"
        in said
    )


def test_test_images_of_the_clients_are_said_to_have_the_same_mistakes(wrong: CostResult) -> None:
    assert label_warnings(wrong.answer) == []
    own = {**wrong.answer, "work": {**wrong.answer["work"], "test_drawn": True}}
    (said,) = label_warnings(own)
    assert said.startswith(
        "The test images are drawn from the clients' own images, and no client trains on them. If labels of Bonn are"
    )
    assert label_warnings({**own, "low_clients": []}) == []


def test_right_labels_name_nobody(tmp_path: Path) -> None:
    result = result_of(right_scans, tmp_path / "c", record={"images": False})
    assert result.answer["low_clients"] == []
    assert "check its labels" not in result.page.read_text("utf-8")
    assert sum(row["found"] for row in result.answer["suspicious"]) < 10
    assert "data:image/png" not in result.page.read_text("utf-8")
