"""Own data of several parties: what is read from their tables, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedlens.base.errors import DataError
from fedlens.cli.main import app
from fedlens.data.dataset import Dataset
from fedlens.data.loading import loaded
from fedlens.data.normalize import normalize, normalized
from fedlens.data.vertical.party_files import check_parties, party_files
from fedlens.data.vertical.vertical_datasets import (
    PartyDataset,
    federate_parties,
    party_facts,
    vertical_datasets,
    with_pictures,
)
from tests.unit.data.pictures import pixels
from tests.unit.data.vertical.tables import Rows, rows_of_parties, write_parties


def read(folder: Path, grey: Rows | None = None, colour: Rows | None = None) -> Dataset:
    return party_files(Path(), False, 0, files=write_parties(folder, grey, colour))


def test_each_party_has_its_images_and_the_test_images_that_all_have(tmp_path: Path) -> None:
    data = read(tmp_path)
    grey = data.parties[0]
    assert grey is not None
    assert data.parties[1] is None
    assert (data.input_shape, grey.input_shape) == ((3, 6, 10), (1, 8, 8))
    held = [set(split.columns["id"].tolist()) for split in (data.train, data.test, grey.train, grey.test)]
    assert held == [
        {"001", "002", "003", "005", "006", "009", "010", "011"},
        {"000", "008"},
        {"001", "002", "003", "006", "007", "009", "010", "011"},
        {"000", "008"},
    ]
    assert (grey.train.targets.shape, grey.classes, data.classes) == ((8, 0), (), ("cat", "dog"))
    assert data.train.targets.tolist() == [int(name) % 2 for name in data.train.columns["id"].tolist()]
    assert "grey.csv: images: 8x8, the most frequent size of the files" in data.notes
    assert not any("data.dataset.size" in note for note in data.notes)


@pytest.mark.parametrize("cache", [0, 2**20])
def test_a_party_reads_the_image_of_an_id_normalized_by_its_own_moments(tmp_path: Path, cache: int) -> None:
    data = normalized(loaded(read(tmp_path), cache), "standard")
    assert [split.lazy for split in data.splits] == [cache == 0] * 4
    client_data, partition = federate_parties(data, 0)
    assert (partition.ids, partition.labels_at, partition.sizes().tolist()) == (("grey", "colour"), 1, [8, 8])
    assert partition.shared == ("001", "002", "003", "006", "009", "010", "011")
    source = vertical_datasets(client_data.dataset, partition)
    facts = party_facts(partition, "psi")
    assert facts is not None
    assert (facts.windows, facts.shapes, facts.names) == (None, ((1, 8, 8), (3, 6, 10)), ("grey", "colour"))
    for k, (view, shape) in enumerate(zip(data.of_parties, ((8, 8, 1), (6, 10, 3)), strict=True)):
        for party in (source.data_of(k), source.data_of(k).held["@test"]):
            stored = np.stack([pixels(int(name), *shape).reshape(shape) for name in party.ids])
            expected = normalize(torch.from_numpy(stored).permute(0, 3, 1, 2), view.mean, view.std)
            torch.testing.assert_close(party.inputs(torch.arange(len(party))), expected)
            assert len(party.ids) in (2, 8)
    shown = with_pictures(partition, client_data.dataset).pictures
    np.testing.assert_array_equal(shown[0][0], pixels(0, 8, 8, 1))
    np.testing.assert_array_equal(shown[1].transpose(1, 2, 0), pixels(0, 6, 10))
    assert data.of_parties[0].mean != data.of_parties[1].mean
    assert source.data_of(1).held["@test"].labels(torch.arange(2)).tolist() == [0, 0]
    with pytest.raises(DataError, match="this party has no labels"):
        source.data_of(0).labels(torch.tensor([0]))
    with pytest.raises(KeyError):
        source.data_of("@test")


def test_half_scaling_is_that_of_every_party(tmp_path: Path) -> None:
    data = normalized(read(tmp_path), "half")
    assert [view.mean for view in data.of_parties] == [(0.5,), (0.5, 0.5, 0.5)]


GREY, COLOUR = rows_of_parties()


@pytest.mark.parametrize(
    ("grey", "colour", "what"),
    [
        ([*GREY, GREY[1]], None, "the id '{first}' is in line 2 too | grey.csv, line 12"),
        ([*GREY, ["", "grey/5.png"]], None, "the cell 'id' is empty | grey.csv, line 12"),
        ([["name", "path"], *GREY[1:]], None, "there is no column 'id' | grey.csv, line 1"),
        ([["id", "file"], *GREY[1:]], None, "there is no column 'path' | grey.csv, line 1"),
        (
            [*GREY, ["x", "../a.png"]],
            None,
            "the path '../a.png' is not below the data folder | grey.csv, line 12",
        ),
        ([*GREY, ["x", "grey/99.png"]], None, "the file does not exist | grey/99.png"),
        ([["id", "path"], *([str(int(name)), path] for name, path in GREY[1:])], None, "'007' is not '7'"),
        (GREY[:1], None, "the table has only its first line"),
        (None, [[*row[:3], ("names", "x")[n > 0]] for n, row in enumerate(COLOUR)], "no party has labels"),
        (
            [["id", "path", "label"], *([*row, ("cat", "dog")[k % 2]] for k, row in enumerate(GREY[1:]))],
            None,
            "the column 'label' belongs in the table of the one party with labels | grey.csv, line 1); remove",
        ),
        (
            [["id", "path", "split"], *([*row, ("train", "test")[k % 2]] for k, row in enumerate(GREY[1:]))],
            None,
            "the column 'split' belongs in the table of the one party with labels | grey.csv, line 1); remove",
        ),
        (
            None,
            [[row[0], *row[2:]] for row in COLOUR],
            "the column 'split' belongs | colour.csv, line 1); add",
        ),
        (
            None,
            [COLOUR[0], *([row[0], "train", *row[2:]] for row in COLOUR[1:])],
            "every example is in the split",
        ),
        (None, [COLOUR[0], *([*row[:3], ""] for row in COLOUR[1:])], "the cell 'label' is empty"),
        (
            [GREY[0], *(row for row in GREY[1:] if row[0] not in ("000", "008"))],
            None,
            "no test image has an id that is in the tables of all parties",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(
    tmp_path: Path, grey: Rows | None, colour: Rows | None, what: str
) -> None:
    if what.startswith("no party"):
        colour = [["path", "split", "id", "names"], *COLOUR[1:]]
    with pytest.raises(DataError) as caught:
        read(tmp_path, grey, colour)
    for part in what.replace("{first}", GREY[1][0]).split(" | "):
        assert part in str(caught.value)


def test_a_check_decodes_every_image_of_every_party(tmp_path: Path) -> None:
    tables = write_parties(tmp_path)
    assert not check_parties(tables).findings
    image = tmp_path / "grey/3.png"
    content = bytearray(image.read_bytes())
    content[60] ^= 255
    image.write_bytes(content)
    checked = check_parties(tables)
    assert [(finding.where, finding.example) for finding in checked.findings] == [(str(image), True)]
    assert checked.ready is None
    assert checked.facts["left_out"] == 1


def run_check(*arguments: object) -> tuple[int, str]:
    answer = CliRunner().invoke(app, ["data", "check", *map(str, arguments)])
    return answer.exit_code, answer.output


def test_the_command_checks_the_tables_of_parties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parties(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, told = run_check("grey.csv", "colour.csv")
    assert code == 0
    assert "at all parties  7 training images and 2 test images" in told
    assert '[data] parties = { files = ["grey.csv", "colour.csv"] }' in told
    assert "size=N" not in told
    facts = json.loads(run_check("grey.csv", "colour.csv", "--json")[1])
    assert facts["shared"] == {"training": 7, "test": 2}
    assert facts["dataset"] == {"files": ["grey.csv", "colour.csv"]}
    code, told = run_check("grey.csv", "grey.csv")
    assert code == 1
    assert "no party has labels" in told
    code, told = run_check("grey.csv", "colour.csv", "--write", "new.toml")
    assert code != 0
    assert "several files are the tables of parties" in told
    assert not Path("new.toml").exists()


def test_validation_examples_of_tables_are_found_by_their_ids(tmp_path: Path) -> None:
    data = loaded(read(tmp_path), 2**20)
    client_data, partition = federate_parties(data, 0, 0.3, 1)
    grey, colour = (
        vertical_datasets(client_data.dataset, partition, client_data.held_out).data_of(k) for k in range(2)
    )
    assert isinstance(grey, PartyDataset)
    assert isinstance(colour, PartyDataset)
    held = grey.held["@validation"], colour.held["@validation"]
    assert held[0].ids == held[1].ids
    assert len(held[0].ids) == 2
    for party, examples in zip((grey, colour), held, strict=True):
        assert not set(examples.ids) & set(party.ids)
    every = torch.arange(2)
    assert held[1].labels(every).tolist() == [int(name) % 2 for name in held[1].ids]
    for name, image in zip(held[0].ids, held[0].inputs(every), strict=True):
        train = data.of_parties[0].train
        at = train.columns["id"].tolist().index(name)
        assert torch.equal(
            image, normalize(torch.from_numpy(train.inputs[at : at + 1]), grey.mean, grey.std)[0]
        )
