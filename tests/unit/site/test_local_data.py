"""The data of a site: labels, clients, what is left out, the census, and sentences for what is wrong."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import ConfigError, DataError, FedlensError
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.data.dataset import channel_moments
from fedlens.data.partition.roster import Roster
from fedlens.identity.keys import KeyPair
from fedlens.site import local_data
from fedlens.site.contract import Contract, read_contract, site_part
from fedlens.site.data_check import check_data
from fedlens.site.local_data import LocalData
from fedlens.site.settings import SITE_FILE, SiteSettings
from fedlens.site.workplace import Proposal, Workplace
from tests.unit.data.formats.test_reader import write_folder
from tests.unit.data.pictures import pixels
from tests.unit.site.site_kit import RUN, plan_at_server, workplace, write_images, write_site

LABELS = ("NV", "MEL", "BKL") * 8
PATIENTS = tuple(f"p{i % 3}" for i in range(24))
MAPPED = {"NV": "nevus", "MEL": "melanoma", "BKL": ""}
FORM: dict[str, Any] = {"name": "sites", "classes": ["melanoma", "nevus"], "input_shape": [1, 8, 8]}


def images(count: int = 24) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8)).astype(np.uint8)


def settings_of(folder: Path, min_examples: int = 1, **data: Any) -> SiteSettings:
    if not (folder / "scans").exists():
        write_images(folder / "scans", images(), LABELS, {"patient": PATIENTS})
    return write_site(folder, {"labels": MAPPED, **data}, allow={"min_examples": min_examples})


def contract_of(settings: SiteSettings, form: Mapping[str, Any] = FORM, **data: Any) -> Contract:
    planned = plan_at_server(
        {
            "rounds": 1,
            "model": "linear",
            "local": {"lr": 0.1, "steps": 1},
            "evaluation": {"clients": "all"},
            "data": {"dataset": dict(form), "validation": 0.25, "validation_from": "client", **data},
        }
    )
    return read_contract(site_part(planned.config), settings)


def opened(folder: Path, run: str = RUN, **data: Any) -> LocalData:
    return LocalData.open(contract_of(settings_of(folder, **data)), "ward", folder, run)


def opened_place(local: LocalData) -> Workplace:
    return workplace(local, Roster.of([local.census()]))


def seen(local: LocalData) -> dict[str, list[str]]:
    """The files of each client, in order; an empty text for one that is left out."""
    files = local.dataset.train.files
    assert files is not None
    return {name: ["" if i < 0 else files[i] for i in at.tolist()] for name, at in local.clients.items()}


def test_labels_are_those_of_the_contract_and_images_without_one_are_left_out(tmp_path: Path) -> None:
    local = opened(tmp_path)
    assert local.names == ("ward",)
    assert local.dataset.classes == ("melanoma", "nevus")
    files = seen(local)["ward"]
    assert files == [f"{i:04d}.png" for i in range(24) if LABELS[i] != "BKL"]
    expected = [FORM["classes"].index(MAPPED[LABELS[int(name[:4])]]) for name in files]
    assert local.dataset.train.targets.tolist() == expected


def test_each_value_of_a_column_is_a_client(tmp_path: Path) -> None:
    local = opened(tmp_path, clients="patient", labels={**MAPPED, "BKL": "nevus"})
    assert {name: len(at) for name, at in local.clients.items()} == {"ward/p0": 8, "ward/p1": 8, "ward/p2": 8}
    assert all(PATIENTS[int(file[:4])] == name[5:] for name, files in seen(local).items() for file in files)


def test_clients_with_few_examples_are_left_out_and_said(tmp_path: Path) -> None:
    settings_of(tmp_path)
    (tmp_path / "out.txt").write_text("0000.png\n")
    local = opened(
        tmp_path, clients="patient", labels={**MAPPED, "BKL": "nevus"}, exclude="out.txt", min_examples=8
    )
    assert local.names == ("ward/p1", "ward/p2")
    assert "1 of 3 clients have fewer than 8 examples: left out" in local.notes
    with pytest.raises(DataError, match="no client has 9 examples; the largest has 8"):
        opened(tmp_path, "other", clients="patient", labels={**MAPPED, "BKL": "nevus"}, min_examples=9)


SCANS: Mapping[str, Sequence[str]] = {
    "scanner": ["A"] * 12 + ["B"] * 12,
    "patient": [f"p{i % 5}" for i in range(12)] + [f"q{i % 2}" for i in range(12)],
}


def site_of_persons(folder: Path, least: int, **data: Any) -> SiteSettings:
    """A site with two scanners of 12 images each, of 5 and 2 persons."""
    if not (folder / "scans").exists():
        write_images(folder / "scans", images(), LABELS, SCANS)
    labels = {**MAPPED, "BKL": "nevus"}
    return write_site(folder, {"labels": labels, "persons": "patient", **data}, allow={"min_persons": least})


def test_clients_with_few_persons_are_left_out_and_said(tmp_path: Path) -> None:
    contract = contract_of(site_of_persons(tmp_path, 3, clients="scanner"))
    local = LocalData.open(contract, "ward", tmp_path, RUN)
    assert local.counted == {"ward/A": "12 images of 5 persons"}
    assert [each.name for each in local.census().clients] == ["ward/A"]
    assert local.notes == ("1 of 2 clients have fewer than 1 examples or 3 persons: left out",)
    *_, step = check_data(tmp_path, "ward")
    assert step.what == f"1 client: ward/A 12 images of 5 persons; {local.notes[0]}"
    contract = contract_of(site_of_persons(tmp_path, 6, clients="scanner"))
    with pytest.raises(
        DataError, match="no client has 1 examples of 6 persons; the largest has 12 images of 5"
    ):
        LocalData.open(contract, "ward", tmp_path, "other")
    *_, step = check_data(tmp_path, "ward")
    assert (step.ok, "allow.min_persons" in step.what) == (False, True)


def test_persons_who_are_left_out_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("")
    contract = contract_of(site_of_persons(tmp_path, 7, exclude="out.txt"))
    place = opened_place(LocalData.open(contract, "ward", tmp_path, RUN))
    assert place.refused("train", 0) == []
    (tmp_path / "out.txt").write_text("q1\n")
    assert place.reread()
    (sentence,) = place.refused("train", 0)
    assert sentence.startswith(
        "'train' over images of 6 persons is not allowed: [allow] min_persons = 7, in "
    )
    assert place.refused("train") == []  # of no client yet
    # The images stay counted for the run, without a place.
    again = LocalData.open(contract, "ward", tmp_path, RUN)
    assert again.counted == {"ward": "24 images of 6 persons"}
    sums = again.census().sums
    assert sums is not None
    assert sums.images == 18  # six of them are of q1


def test_an_image_without_a_person_is_named(tmp_path: Path) -> None:
    contract, table = contract_of(site_of_persons(tmp_path, 1)), tmp_path / "scans" / "scans.csv"
    table.write_text(table.read_text().replace("p3", ""))
    with pytest.raises(DataError, match=r"2 training examples have no 'patient'.*data\.persons"):
        LocalData.open(contract, "ward", tmp_path, RUN)


def test_the_census_counts_and_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_data, "_BLOCK", 5)
    local = opened(tmp_path)
    census = local.census()
    assert [(each.name, each.examples, each.held_out) for each in census.clients] == [("ward", 16, 0)]
    assert census.contract == local.contract.digest
    moments = Roster.of([census]).moments
    assert moments is not None
    pixels = images()[[i for i in range(24) if LABELS[i] != "BKL"], None]
    assert np.allclose(moments, channel_moments(pixels), rtol=1e-12)
    assert census.sums is not None
    assert census.sums.images == 16
    given = contract_of(settings_of(tmp_path), {**FORM, "mean": [0.5], "std": [0.2]})
    assert LocalData.open(given, "ward", tmp_path, RUN).census().sums is None


def test_data_only_shrink_and_the_others_stay_where_they_were(tmp_path: Path) -> None:
    settings_of(tmp_path)
    (tmp_path / "out.txt").write_text("")
    local = opened(tmp_path, exclude="out.txt")
    place = opened_place(local)
    row, before = place.rows["ward"], place.program.data_of(0)
    training, held_out = (part.indices.tolist() for part in (before, before.validation))
    assert place.examples(row) == (12, 4)
    assert not place.reread()
    files = local.dataset.train.files
    assert files is not None
    gone = files[training[0]], files[held_out[0]]
    (tmp_path / "out.txt").write_text("".join(f"{name}\n" for name in gone))
    assert place.reread()
    digest = hashlib.sha256((tmp_path / "out.txt").read_bytes()).hexdigest()
    assert place.excluded == {"lines": 2, "images_left_out": 2, "sha256": digest}
    after = place.program.data_of(0)
    assert (after.indices.tolist(), after.validation.indices.tolist()) == (training[1:], held_out[1:])
    assert place.examples(row) == (11, 3)
    # The list is shortened, a file is deleted, and another one comes: nobody returns, and nobody is added.
    (tmp_path / "out.txt").write_text("")
    assert not place.reread()
    empty = hashlib.sha256(b"").hexdigest()
    assert place.excluded == {
        "lines": 0,
        "images_left_out": 2,
        "sha256": empty,
    }  # of the log, also if none returns
    lost = files[training[1]]
    scans = (tmp_path / "scans" / "scans.csv").read_text()
    (tmp_path / "scans" / lost).rename(tmp_path / "scans" / "new.png")
    (tmp_path / "scans" / "scans.csv").write_text(scans.replace(lost, "new.png"))
    back = opened(tmp_path, exclude="out.txt")
    assert {name for name in seen(back)["ward"] if name} == set(seen(local)["ward"]) - {*gone, lost}
    assert len(back.clients["ward"]) == 16
    assert opened_place(back).examples(row) == (10, 3)
    assert len([name for name in seen(opened(tmp_path, "run-2", exclude="out.txt"))["ward"] if name]) == 16
    record = next((tmp_path / "approved").glob("*.examples.json"))
    assert stat.S_IMODE(record.stat().st_mode) == 0o600


def test_a_value_of_a_column_is_left_out_too(tmp_path: Path) -> None:
    settings_of(tmp_path)
    (tmp_path / "out.txt").write_text("p1\n\nnobody\n0000.png\n")
    local = opened(tmp_path, exclude="out.txt")
    assert any(note.startswith("out.txt: no image or value here has the name '") for note in local.notes)
    assert all(PATIENTS[int(name[:4])] != "p1" for name in seen(local)["ward"])


def test_without_the_list_nothing_is_computed(tmp_path: Path) -> None:
    settings_of(tmp_path)
    (tmp_path / "out.txt").write_text("")
    place = opened_place(opened(tmp_path, exclude="out.txt"))
    (tmp_path / "out.txt").unlink()
    with pytest.raises(DataError, match="an empty file leaves out nothing"):
        place.reread()


def test_data_that_could_not_be_built_are_built_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_of(tmp_path)
    (tmp_path / "out.txt").write_text("")
    place = opened_place(opened(tmp_path, exclude="out.txt"))
    (tmp_path / "out.txt").write_text("0000.png\n")
    with monkeypatch.context() as patch:
        patch.setattr("fedlens.site.workplace._built", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            place.reread()
    assert sum(place.examples(0)) == 16
    assert place.reread()
    assert sum(place.examples(0)) == 15


def test_a_proposal_is_read_approved_counted_and_opened(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    text = contract_of(settings).text
    key = KeyPair.make()
    terms = ExperimentTerms(peers={"clinic": KeyPair.make().public, "ward": key.public})
    proposal = Proposal.read(text, settings, "ward", tmp_path, RUN, terms, key)
    roster = Roster.of([proposal.census()])
    assert proposal.digest == roster.contract
    sizes = {"examples": roster.examples, "held_out": roster.held_out, "images": 16, "owners": np.array([1])}
    mean, std = roster.moments or (None, None)
    place = proposal.open({"ward": 0}, {**sizes, "mean": mean, "std": std})
    assert place.examples(0) == (12, 4)
    assert place.program.secrets_of(0).simulation is None
    assert place.program.secrets_of(0) is place.secrets[0]
    identity = place.secrets[0].identity
    assert (identity.owners, identity.min_cohort) == ({0: "ward"}, 3)
    assert identity.verify(0, b"keys", identity.sign(b"keys"))
    for other in (1, "@train", "@test"):
        with pytest.raises(KeyError):
            place.program.data_of(other)
    for rows, counted in (({"ward": 0}, [15]), ({"ward": 1}, [16]), ({"other": 0}, [16])):
        wrong = {**sizes, "examples": np.array(counted), "held_out": np.array([0]), "mean": mean, "std": std}
        with pytest.raises(DataError, match=r"start a new run|other clients of 'ward'"):
            proposal.open(rows, wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"examples": np.array([16, 2**40])},
        {"examples": np.array([16.5, 1e30])},
        {"examples": np.array([[16, 16]])},
        {"examples": np.array([16, -20])},
        {"examples": [16]},
        {"examples": "ab"},
        {"examples": None},
        {"images": "many"},
        {"mean": None},
        {"mean": [float("nan")]},
        {"std": [0.0]},
        {"std": [0.2, 0.2]},
    ],
)
def test_sizes_that_are_none_are_a_sentence(wrong: dict[str, Any], tmp_path: Path) -> None:
    local = opened(tmp_path)
    sizes = {
        "examples": np.array([16, 4]),
        "held_out": np.array([0, 0]),
        "mean": [0.5],
        "std": [0.2],
        "images": 20,
    }
    Workplace.open(local, {"ward": 0}, sizes)
    with pytest.raises(FedlensError, match=r"not readable|other examples|no mean|not a valid roster"):
        Workplace.open(local, {"ward": 0}, {**sizes, **wrong})


def test_a_mean_that_a_site_approved_is_not_replaced(tmp_path: Path) -> None:
    contract = contract_of(settings_of(tmp_path), {**FORM, "mean": [0.5], "std": [0.2]})
    local = LocalData.open(contract, "ward", tmp_path, RUN)
    sizes = {"examples": np.array([16]), "held_out": np.array([0]), "mean": [0.1], "std": [0.1], "images": 16}
    place = Workplace.open(local, {"ward": 0}, sizes)
    assert place.program.data_of(0).mean == (0.5,)


def test_a_folder_is_read_in_the_format_that_it_has(tmp_path: Path) -> None:
    settings_of(tmp_path)
    local = opened(tmp_path, dataset={"name": "folder", "path": "scans"})
    assert len(local.clients["ward"]) == 16
    half = opened(tmp_path, "run-2", dataset={"name": "folder", "path": "scans", "test": 0.5})
    assert len(half.clients["ward"]) < 12


@pytest.mark.parametrize(
    ("format", "kind", "classes", "shape", "model"),
    [
        ("mask-folder", "segmentation", ["one", "zero"], [3, 8, 8], "unet"),
        ("coco-json", "detection", ["dog", "cat"], [3, 12, 16], "yolov5n"),
    ],
)
def test_masks_and_boxes_are_read_in_the_formats_of_own_data(
    format: str, kind: str, classes: list[str], shape: list[int], model: str, tmp_path: Path
) -> None:
    settings = write_site(tmp_path, {"dataset": {"name": format, **write_folder(tmp_path / "scans", format)}})
    form = {"name": "sites", "kind": kind, "classes": classes, "input_shape": shape}
    planned = plan_at_server(
        {"rounds": 1, "model": model, "local": {"lr": 0.1}, "data": {"dataset": {**form, "test": "digits"}}}
    )
    local = LocalData.open(read_contract(site_part(planned.config), settings), "ward", tmp_path, RUN)
    assert len(local.clients["ward"]) == 4
    assert local.dataset.classes == tuple(classes)
    if kind == "detection":
        assert [local.dataset.train.targets.labels_of(i).tolist() for i in range(4)] == [[1, 0], [], [0], [1]]
    else:
        stored = np.stack([pixels(at, channels=1) % 2 for at in range(4)])
        assert (local.dataset.train.targets == 1 - stored.reshape(4, 8, 8)).all()
    assert local.census().sums is not None


def spoil_table(folder: Path) -> dict[str, Any]:
    path = folder / "scans" / "scans.csv"
    path.write_text(path.read_text().replace(",p1\n", ",\n"))
    return {"clients": "patient"}


def remove_image(folder: Path) -> dict[str, Any]:
    (folder / "scans" / "0003.png").unlink()
    return {}


BAD: Mapping[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "a label that maps to nothing": (
        lambda _: {"labels": {"NV": "nevus"}},
        "the local label 'BKL' is no class",
    ),
    "a class outside the contract": (lambda _: {"labels": {**MAPPED, "NV": "naevus"}}, "no class 'naevus'"),
    "no such label": (lambda _: {"labels": {**MAPPED, "XX": "nevus"}}, "the data have no label 'XX'"),
    "no such column": (lambda _: {"clients": "patents"}, "no column 'patents'"),
    "no such column of persons": (lambda _: {"persons": "patents"}, r"no column 'patents' \(.*data\.persons"),
    "a client without a name": (spoil_table, "in the column 'patient'"),
    "a missing file": (remove_image, "0003.png"),
    "a missing list": (lambda _: {"exclude": "none.txt"}, "the list of what is left out cannot be read"),
    "channels outside the contract": (
        lambda _: {"dataset": {"name": "image-folder", "path": "scans", "table": "scans.csv", "channels": 3}},
        r"the images are \[3, 8, 8\]",
    ),
    "another kind": (
        lambda at: {"dataset": {"name": "mask-folder", **write_folder(at / "masks", "mask-folder")}},
        "the data are for segmentation, and the experiment for classification",
    ),
    "no such folder": (lambda _: {"dataset": {"name": "image-folder", "path": "nowhere"}}, "nowhere"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_wrong_with_the_data_is_a_sentence(bad: str, tmp_path: Path) -> None:
    change, message = BAD[bad]
    settings_of(tmp_path)
    with pytest.raises(FedlensError, match=message) as caught:
        opened(tmp_path, **change(tmp_path))
    assert caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\n", "dataset"),
        ('[data]\ndataset = "digits"\n[allow]\nmin_examples = 0\n', "line 4: allow.min_examples"),
        ('[data]\ndataset = "digits"\nmin_examples = 8\n', r"now a line of \[allow\] \(.*line 3"),
        ('[data]\ndataset = "digits"\n[allow]\nmax_epsilon = inf\n', "line 4: allow.max_epsilon"),
        (
            '[data]\ndataset = "digits"\n[allow]\nmin_persons = 9\n',
            r"needs \[data\] persons.*line 4: allow.min_p",
        ),
        ('[data]\ndataset = "digits"\n[allow]\nsecure_sum = "always"\n', "line 4: allow.secure_sum"),
        ('[data]\ndataset = "digits"\n[files]\nx = "12"\n', "files.x"),
        ('[data]\ndataset = "digits"\nlabel = {}\n', "label"),
        ('[data]\ndataset = "digits"\n[compute]\nthreads = 0\n', "threads"),
        ("data = [", "not valid TOML"),
    ],
)
def test_a_wrong_site_file_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / SITE_FILE).write_text(text)
    with pytest.raises(ConfigError, match=message):
        SiteSettings.read(tmp_path / SITE_FILE)


def test_a_damaged_record_is_a_sentence(tmp_path: Path) -> None:
    opened(tmp_path)
    next((tmp_path / "approved").glob("*.examples.json")).write_text("{")
    with pytest.raises(DataError, match="the list of the examples of this run is damaged"):
        opened(tmp_path)
