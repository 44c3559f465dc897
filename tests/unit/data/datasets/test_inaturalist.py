"""iNaturalist-2017 in the published layout, the balanced subset, and hsu2020's populations from both sources."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import settings_model
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.datasets import dataset_files, inaturalist
from fedlens.data.datasets.folders import check_images_present
from fedlens.data.datasets.inaturalist import (
    GEO,
    USER_120K,
    find_lists,
    inaturalist_2017,
    inaturalist_geo_1k,
    inaturalist_geo_3k,
    inaturalist_geo_30k,
    inaturalist_user_120k,
)
from fedlens.data.datasets.inaturalist_metadata import balanced, read_metadata
from fedlens.data.partition.natural import natural
from fedlens.settings.make_partition import make_partition
from tests.unit.data.layouts import with_facts

SPECIES = [("Plantae", "Acer rubrum"), ("Aves", "Pica pica"), ("Aves", "Corvus corax")]
# (image id, species, user, latitude, longitude)
TRAIN = [
    (10, 0, 7, 52.5, 13.4),
    (11, 0, 7, 52.5, 13.4),
    (12, 0, 8, -33.9, 151.2),
    (13, 1, 8, -33.9, 151.2),
    (14, 1, 7, 52.5, 13.4),
    (15, 2, 9, None, None),
    (16, 0, None, 40.7, -74.0),
]
VAL = [(20, 1, 8, 0.0, 0.0), (21, 0, 30, 1.0, 1.0), (22, 2, 7, 2.0, 2.0)]


def file_name(image: int, species: int) -> str:
    return f"train_val_images/{SPECIES[species][0]}/{SPECIES[species][1]}/{image:032x}.jpg"


def annotations(rows) -> dict:
    """The category ids 101, 102 and 100 are neither in order nor in the order of the names."""
    ids = [101, 102, 100]
    return {
        "info": {"year": 2017},
        "images": [{"id": i, "width": 800, "height": 600, "file_name": file_name(i, s)} for i, s, *_ in rows],
        "categories": [{"id": ids[k], "supercategory": a, "name": b} for k, (a, b) in enumerate(SPECIES)],
        "annotations": [{"id": n, "image_id": i, "category_id": ids[s]} for n, (i, s, *_) in enumerate(rows)],
    }


def locations(rows) -> list[dict]:
    shown = [
        {"id": i, "lat": lat, "lon": lon, "loc_uncert": 10, "user_id": user, "date": "2016-01-01"}
        for i, _, user, lat, lon in rows
    ]
    return shown[::-1]  # the order does not matter


def write(folder: Path, name: str, content: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder / name


def write_metadata(root: Path, train=TRAIN, val=VAL, inner: str = "") -> None:
    folder = root / "inaturalist-2017" / inner
    for name, rows in (("train", train), ("val", val)):
        write(folder, f"{name}2017.json", annotations(rows))
        write(folder, f"{name}2017_locations.json", locations(rows))


def write_images(root: Path, rows=(*TRAIN, *VAL)) -> None:
    for image, species, *_ in rows:
        path = root / "inaturalist-2017" / file_name(image, species)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 12), (10 * image, 0, 0)).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_metadata(tmp_path)
    write_images(tmp_path)
    return tmp_path


def stem(*images: int) -> list[str]:
    return [f"{image:032x}" for image in images]


def test_all_of_it_is_read_with_users_and_places(root: Path) -> None:
    data = inaturalist_2017(root, False, 0, size=8)
    # Classes by category id: 100, 101, 102.
    assert data.classes == ("Corvus corax", "Acer rubrum", "Pica pica")
    assert data.train.targets.tolist() == [1, 1, 1, 2, 2, 0, 1]
    assert data.test.targets.tolist() == [2, 1, 0]
    assert data.input_shape == (3, 8, 8)
    columns = data.train.columns
    assert columns["user_id"].tolist() == ["7", "7", "8", "8", "7", "9", ""]
    assert columns["client"].tolist() == ["7", "7", "8", "8", "7", "9", "unknown"]
    assert columns["supercategory"].tolist() == ["Plantae"] * 3 + ["Aves"] * 3 + ["Plantae"]
    assert columns["image_id"].tolist() == stem(*range(10, 17))
    np.testing.assert_array_equal(columns["lat"], [52.5, 52.5, -33.9, -33.9, 52.5, np.nan, 40.7])
    np.testing.assert_array_equal(columns["lon"], [13.4, 13.4, 151.2, 151.2, 13.4, np.nan, -74.0])
    reds = [int(data.train.inputs.decode(at)[0, 4, 4]) for at in range(7)]
    np.testing.assert_allclose(reds, [10 * image for image, *_ in TRAIN], atol=4)
    assert data.notes == (
        "train2017_locations.json has no place for 1 of 7 images",
        "train2017_locations.json has no user for 1 of 7 images",
    )
    assert natural(data.table(), 0).ids == ("7", "8", "9", "unknown")


def test_the_metadata_may_lie_in_the_folders_of_their_archives(tmp_path: Path) -> None:
    write_metadata(tmp_path, inner="train_val2017")
    folder = tmp_path / "inaturalist-2017"
    (folder / "inat2017_locations").mkdir()
    for name in ("train", "val"):
        (folder / "train_val2017" / f"{name}2017_locations.json").rename(
            folder / "inat2017_locations" / f"{name}2017_locations.json"
        )
    write_images(tmp_path)
    assert len(inaturalist_2017(tmp_path, False, 0).train) == 7


def test_the_usual_size_is_that_of_the_paper(root: Path) -> None:
    assert inaturalist_2017(root, False, 0).input_shape == (3, 299, 299)
    assert settings_model(inaturalist_2017).model_fields["size"].default == 299


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    for download in (False, True):
        with pytest.raises(DataError, match=r"train2017_locations\.json.*186 GB"):
            inaturalist_2017(tmp_path, download, 0)


def test_a_partition_needs_no_images_and_who_wants_them_hears_how_to_get_them(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    bare = inaturalist_2017(tmp_path, False, 0)
    partition = natural(bare.table(), 0)
    told = r"10 of the 10 images of iNaturalist-2017 are missing.*train_val_images\.tar\.gz"
    with pytest.raises(DataError, match=told) as raised:
        check_images_present(bare)
    assert raised.value.where == str(tmp_path / "inaturalist-2017")
    write_images(tmp_path, TRAIN)
    with pytest.raises(DataError, match=r"3 of the 10 images of iNaturalist-2017 are missing.*Pica pica"):
        check_images_present(inaturalist_2017(tmp_path, False, 0))
    check_images_present(replace(bare, on_error="skip"))  # which leaves out what it cannot read
    write_images(tmp_path, VAL)
    whole = inaturalist_2017(tmp_path, False, 0)
    check_images_present(whole)
    assert natural(whole.table(), 0).digest == partition.digest


def test_partition_make_works_with_lists_and_metadata_alone(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    write_lists(tmp_path, "inaturalist-geo", "federated_train_geo_3k.csv")
    made = make_partition("inaturalist-geo-3k", "natural", root=tmp_path).partition
    assert (made.ids, made.sizes().tolist()) == (("7", "8", "9"), [2, 1, 1])
    users = ["column=user_id"]
    by_user = make_partition("inaturalist-geo-3k", "natural", users, root=tmp_path).partition
    assert by_user.ids == ("7", "8", "9")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda a, _: a.pop("categories"), "no list 'categories'"),
        (lambda a, _: a["annotations"].pop(), "the image 16 has no annotation"),
        (lambda a, _: a["annotations"][0].update(image_id=99), "an annotation is of image 99"),
        (lambda a, _: a["annotations"][0].update(category_id=5), "an annotation is of category 5"),
        (lambda a, _: a["images"][1].update(id=10), "the image 10 occurs twice"),
        (lambda a, _: a["categories"][1].update(id=101), "the category 101 occurs twice"),
        (lambda a, _: a["images"][2].pop("file_name"), "the entry 12 has no 'file_name'"),
        (lambda _, b: b[0].pop("user_id"), "the entry 16 has no 'user_id'"),
        (lambda _, b: b.append(dict(b[0])), "the image 16 has two locations"),
        (lambda _, b: b[0].update(lat=91), r"the image 16 is at latitude 91, longitude -74\.0"),
        (lambda _, b: b[0].update(lon="west"), "the image 16 is at .* longitude west"),
        (lambda _, b: b.append(5), "the entry 5 has no 'id'"),
    ],
)
def test_metadata_that_contradict_themselves_are_told(tmp_path: Path, change, told: str) -> None:
    marks, places = annotations(TRAIN), locations(TRAIN)
    change(marks, places)
    paths = write(tmp_path, "a.json", marks), write(tmp_path, "b.json", places)
    with pytest.raises(DataError, match=told) as raised:
        read_metadata(*paths)
    assert raised.value.where in map(str, paths)


def test_places_of_other_images_and_places_that_are_no_numbers_are_no_matter(tmp_path: Path) -> None:
    places = [*locations(TRAIN)[:-1], {"id": 999, "lat": 1, "lon": 1, "user_id": 1}]
    places[0] |= {"lat": float("nan")}
    found, notes = read_metadata(
        write(tmp_path, "a.json", annotations(TRAIN)), write(tmp_path, "b.json", places)
    )
    assert np.isnan(found.lat).tolist() == [True, False, False, False, False, True, True]
    assert np.isnan(found.lon).tolist() == np.isnan(found.lat).tolist()
    assert notes == ("b.json has no place for 3 of 7 images", "b.json has no user for 2 of 7 images")


@pytest.mark.parametrize(("text", "told"), [("{", "not valid JSON"), ("[]", "an object was expected")])
def test_files_that_are_no_metadata_are_told(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=told):
        read_metadata(tmp_path / "a.json", write(tmp_path, "b.json", []))
    with pytest.raises(DataError, match="cannot be read"):
        read_metadata(tmp_path / "none.json", tmp_path / "b.json")
    with pytest.raises(DataError, match="a list was expected"):
        read_metadata(write(tmp_path, "a.json", annotations(TRAIN)), write(tmp_path, "b.json", {}))


def test_splits_of_other_categories_are_told(root: Path) -> None:
    path = root / "inaturalist-2017" / "val2017.json"
    content = json.loads(path.read_text())
    content["categories"][0]["name"] = "Homo sapiens"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="do not have the same categories"):
        inaturalist_2017(root, False, 0)


# --- the balanced subset


def test_classes_with_too_few_are_left_out_and_the_others_cut() -> None:
    labels = np.array([3, 1, 1, 3, 0, 3, 1, 3])
    rows = balanced(labels, 3, seed=0)
    assert np.bincount(labels[rows], minlength=4).tolist() == [0, 3, 0, 3]
    assert [row for row in rows if labels[row] == 1] == [1, 2, 6]
    assert balanced(labels, 4, seed=0).tolist() == [0, 3, 5, 7]
    with pytest.raises(ConfigError, match="no class has 5 examples, the largest has 4"):
        balanced(labels, 5, seed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        balanced(labels, 0, seed=0)


def test_every_example_of_a_class_is_equally_likely() -> None:
    labels = np.repeat([0, 1], [5, 2])
    drawn = np.concatenate([balanced(labels, 2, seed) for seed in range(500)])
    counts = np.bincount(drawn, minlength=7)
    assert counts[5:].tolist() == [500, 500]
    assert (abs(counts[:5] - 200) < 45).all(), counts


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 9))
def test_the_balanced_subset_is_as_described(labels: list[int], per_class: int, seed: int) -> None:
    counts = np.bincount(labels)
    if counts.max() < per_class:
        with pytest.raises(ConfigError):
            balanced(labels, per_class, seed)
        return
    rows = balanced(labels, per_class, seed)
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(
        np.bincount(np.array(labels)[rows], minlength=len(counts)),
        np.where(counts >= per_class, per_class, 0),
    )
    assert balanced(labels, per_class, seed).tolist() == rows.tolist()


@pytest.fixture
def two_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two examples of each species instead of a hundred."""
    monkeypatch.setattr(inaturalist, "PER_CLASS", 2)


@pytest.mark.usefixtures("two_each")
def test_the_balanced_subset_numbers_its_species_anew_and_restricts_the_test_split(root: Path) -> None:
    data = inaturalist_2017(root, False, 3, subset="balanced")
    assert data.classes == ("Acer rubrum", "Pica pica")
    assert data.seeded
    assert not inaturalist_2017(root, False, 3).seeded
    assert sorted(data.train.targets.tolist()) == [0, 0, 1, 1]
    assert data.test.targets.tolist() == [1, 0]
    assert data.test.columns["image_id"].tolist() == stem(20, 21)
    assert {
        tuple(inaturalist_2017(root, False, s, subset="balanced").train.columns["image_id"])
        for s in range(20)
    } > {tuple(data.train.columns["image_id"])}


# --- the populations, from the metadata


@pytest.mark.usefixtures("two_each")
def test_users_are_the_clients_and_images_without_one_are_left_out(root: Path) -> None:
    for seed in range(8):
        data = inaturalist_user_120k(root, False, seed)
        images = data.train.columns["image_id"].tolist()
        owner = {f"{i:032x}": str(user) for i, _, user, *_ in TRAIN}
        assert data.train.columns["client"].tolist() == [owner[image] for image in images]
        assert f"{16:032x}" not in images
        gone = 4 - len(images)
        assert any(f"left out {gone} of 4 training images whose user" in note for note in data.notes) == (
            gone > 0
        )
        assert any("not the published population image for image" in note for note in data.notes)


@pytest.mark.usefixtures("two_each")
def test_cells_are_the_clients(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # n_min is 10 images at n_max = 1,000, so that this little set has no cell; with n_max = 2 it has.
    with pytest.raises(ConfigError, match="has 10 examples or more"):
        inaturalist_geo_1k(root, False, 1)
    monkeypatch.setitem(CATALOGUE, "inaturalist-geo-tiny", CATALOGUE["inaturalist-geo-100"])
    small = inaturalist.Population("inaturalist-geo-tiny", 2)
    data = inaturalist._population(small, root, False, 1, 8, "metadata")
    images = data.train.columns["image_id"].tolist()
    place = {f"{i:032x}": lat for i, _, _, lat, _ in TRAIN}
    cells = data.train.columns["cell"].tolist()
    assert data.train.columns["client"].tolist() == cells
    assert images == sorted(images)  # the published order, not cell after cell
    for a, one in enumerate(images):
        for b, other in enumerate(images):
            assert (cells[a] == cells[b]) or place[one] != place[other]
    assert data.name == "inaturalist-geo-tiny"


# --- the populations, from the published lists

ROWS = [("7", 11, 1), ("8", 13, 0), ("9", 15, 2), ("7", 10, 1)]  # the list's classes: magpie, maple, raven
TESTS = [(22, 2), (20, 0)]


def write_lists(root: Path, folder: str, name: str, label: bool = False) -> Path:
    place = root / "federated_vision_datasets" / folder
    place.mkdir(parents=True, exist_ok=True)
    more = ",label" if label else ""
    rows = [f"{user},{image:032x},{kind}{more and ',x'}\n" for user, image, kind in ROWS]
    (place / name).write_text(f"user_id,image_id,class{more}\n" + "".join(rows))
    tests = [f"{image:032x},{kind}{more and ',x'}\n" for image, kind in TESTS]
    (place / "test.csv").write_text(f"image_id,class{more}\n" + "".join(tests))
    return place


def write_tff(root: Path) -> None:
    place = root / "federated_vision_datasets" / "inaturalist"
    place.mkdir(parents=True, exist_ok=True)
    cells = ["89c", "NA", "6b1", "89c"]
    rows = [f"{i:032x},{user},{cell},{kind}\n" for (user, i, kind), cell in zip(ROWS, cells, strict=True)]
    (place / "iNaturalist_train.csv").write_text("image_id,user_120k,geo_3k,class\n" + "".join(rows))
    tests = [f"{image:032x},{kind}\n" for image, kind in TESTS]
    (place / "iNaturalist_test.csv").write_text("image_id,class\n" + "".join(tests))


@pytest.fixture
def tiny_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A User-120k of four images of three users."""
    with_facts(monkeypatch, "inaturalist-user-120k", train=4, clients=3)


@pytest.mark.usefixtures("tiny_user")
@pytest.mark.parametrize("tff", [False, True])
def test_the_published_users_are_read(root: Path, tff: bool) -> None:
    if tff:
        write_tff(root)
    else:
        write_lists(root, "inaturalist-user-120k", "federated_train_user_120k.csv", label=True)
    data = inaturalist_user_120k(root, False, 0, size=8)
    columns = data.train.columns
    assert columns["client"].tolist() == columns["user_id"].tolist() == ["7", "8", "9", "7"]
    assert columns["image_id"].tolist() == stem(11, 13, 15, 10)
    assert data.classes == ("Pica pica", "Acer rubrum", "Corvus corax")  # the list's numbers
    assert data.train.targets.tolist() == [1, 0, 2, 1]
    assert data.test.targets.tolist() == [2, 0]
    assert columns["supercategory"].tolist() == ["Plantae", "Aves", "Aves", "Plantae"]
    np.testing.assert_array_equal(columns["lat"], [52.5, -33.9, np.nan, 52.5])
    assert ("label" in columns) == (not tff)
    assert abs(int(data.train.inputs.decode(1)[0, 4, 4]) - 130) <= 4
    assert (data.notes, data.seeded) == ((), False)
    population = natural(data.table(), 0)
    assert (population.ids, population.sizes().tolist()) == (("7", "8", "9"), [2, 1, 1])


@pytest.mark.parametrize("tff", [False, True])
def test_the_published_cells_are_read(root: Path, tff: bool) -> None:
    if tff:
        write_tff(root)
    else:
        write_lists(root, "inaturalist-geo", "federated_train_geo_3k.csv")
    data = inaturalist_geo_3k(root, False, 0)
    cells = ["89c", "6b1", "89c"] if tff else ["7", "8", "9", "7"]
    assert data.train.columns["client"].tolist() == data.train.columns["cell"].tolist() == cells
    users = ["7", "9", "7"] if tff else ["7", "8", "9", "7"]
    assert data.train.columns["user_id"].tolist() == users  # of the metadata
    assert any("TensorFlow Federated ships 136" in note for note in data.notes)


@pytest.mark.usefixtures("tiny_user")
def test_lists_alone_do_where_the_images_are_in_their_folders(tmp_path: Path) -> None:
    write_images(tmp_path)
    write_lists(tmp_path, "inaturalist-user-120k", "federated_train_user_120k.csv")
    data = inaturalist_user_120k(tmp_path, False, 0)
    assert data.classes == ("Pica pica", "Acer rubrum", "Corvus corax")
    assert data.train.columns["supercategory"].tolist() == ["Plantae", "Aves", "Aves", "Plantae"]
    assert np.isnan(data.train.columns["lat"]).all()
    assert data.notes == ("without the metadata in inaturalist-2017/ the places are not known",)


@pytest.mark.parametrize("key", GEO)
def test_a_list_is_not_taken_for_another(tmp_path: Path, key: str) -> None:
    for other in GEO:
        if other != key:
            write_lists(tmp_path, "inaturalist-geo", f"federated_train_geo_{other}.csv")
    write_lists(tmp_path, "inaturalist-geo", f"federated_train_geo_{key}_mine.csv")
    assert find_lists(GEO[key], tmp_path, False) is None
    place = write_lists(tmp_path, "inaturalist-geo", f"federated_train_geo_{key}.csv")
    assert find_lists(GEO[key], tmp_path, False) == (
        place / f"federated_train_geo_{key}.csv",
        "user_id",
        place / "test.csv",
    )
    assert find_lists(USER_120K, tmp_path, False) is None


def test_a_user_list_of_another_size_is_refused(root: Path) -> None:
    write_lists(root, "inaturalist-user-120k", "federated_train_user_120k.csv")
    with pytest.raises(DataError, match="120,300 images of 9,275 users were expected, found 4 of 3"):
        inaturalist_user_120k(root, False, 0)
    assert len(GEO) == 6
    assert {key: one.facts.clients for key, one in GEO.items()} == {
        "100": 3607, "300": 1209, "1k": 369, "3k": 136, "10k": 39, "30k": 12,
    }  # fmt: skip
    assert [one.n_max for one in GEO.values()] == [100, 300, 1_000, 3_000, 10_000, 30_000]


@pytest.mark.usefixtures("tiny_user")
def test_images_and_classes_that_are_not_known_are_told(root: Path) -> None:
    place = write_lists(root, "inaturalist-user-120k", "federated_train_user_120k.csv")
    test = place / "test.csv"
    good = test.read_text()
    test.write_text(good + f"{12:032x},0\n")
    with pytest.raises(DataError, match=r"1 of the 3 images of the list are not known, '0+c' .*line 4"):
        inaturalist_user_120k(root, False, 0)  # image 12 is a training image
    test.write_text(good.replace(",2\n", ",3\n"))
    with pytest.raises(DataError, match=r"class 3 is not among the 3 of the training list.*line 2"):
        inaturalist_user_120k(root, False, 0)
    test.write_text(good + f"{11:032x},0\n")
    with pytest.raises(DataError, match="1 images are in both lists"):
        inaturalist_user_120k(root, False, 0)


@pytest.mark.usefixtures("tiny_user")
def test_a_class_of_two_species_is_noted(root: Path) -> None:
    place = write_lists(root, "inaturalist-user-120k", "federated_train_user_120k.csv")
    path = place / "federated_train_user_120k.csv"
    path.write_text(path.read_text().replace(f"{10:032x},1", f"{14:032x},1"))
    data = inaturalist_user_120k(root, False, 0)
    assert any(
        note.startswith("1 images of federated_train_user_120k.csv are of another species")
        for note in data.notes
    )


def test_the_source_decides_what_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inaturalist, "PER_CLASS", 2)
    with pytest.raises(DataError, match=r"iNaturalist_train\.csv"):
        inaturalist_user_120k(root, False, 0, source="csv")
    assert any("metadata" in note for note in inaturalist_user_120k(root, False, 0).notes)
    write_lists(root, "inaturalist-user-120k", "federated_train_user_120k.csv")
    with pytest.raises(DataError, match="were expected"):
        inaturalist_user_120k(root, False, 0)
    drawn = inaturalist_user_120k(root, False, 0, source="metadata")
    assert any("metadata" in note for note in drawn.notes)
    assert drawn.seeded


@pytest.mark.usefixtures("tiny_user")
def test_download_fetches_the_lists_of_tensorflow_federated(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(resource, folder: Path) -> Path:
        asked.append((resource.urls[0], resource.md5))
        write_tff(root)
        return folder / resource.name

    monkeypatch.setattr(dataset_files, "fetch", fetch)
    assert len(inaturalist_user_120k(root, True, 0, source="csv").train) == 4
    base = "https://storage.googleapis.com/tff-datasets-public"
    assert asked == [
        (f"{base}/iNaturalist_train.csv", "63d5a41699434bc2b13f5853f3764c18"),
        (f"{base}/iNaturalist_test.csv", "bcf08a5a740ee76dac4e5af668081891"),
    ]
    inaturalist_user_120k(root, True, 0)
    assert len(asked) == 2


def test_without_lists_and_metadata_both_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"iNaturalist_train\.csv.*train2017\.json.*run again") as caught:
        inaturalist_user_120k(tmp_path, False, 0)
    assert "does not fetch" not in str(caught.value)
    with pytest.raises(DataError, match="--download does not fetch it"):
        inaturalist_user_120k(tmp_path, False, 0, source="metadata")
    write_tff(tmp_path)
    with pytest.raises(DataError, match="the list has no column 'geo_1k'"):
        inaturalist_geo_1k(tmp_path, False, 0)


@pytest.mark.usefixtures("tiny_user")
def test_a_list_without_its_column_is_fetched_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tff(root)
    path = root / CATALOGUE["inaturalist-user-120k"].files[1][0]
    path.write_text(path.read_text().replace("user_120k", "other"))

    def fetch(resource, folder: Path) -> Path:
        write_tff(root)
        return folder / resource.name

    monkeypatch.setattr(dataset_files, "fetch", fetch)
    assert len(inaturalist_user_120k(root, True, 0, source="csv").train) == 4


def test_the_first_list_by_name_is_taken_in_any_case(tmp_path: Path) -> None:
    names = [
        "a_USER_120k.csv",
        "b-user-120k.csv",
        "c_user_120K.csv",
        "0_superuser120k.csv",
        "0_user_x_120k.csv",
    ]
    for name in reversed(names):
        place = write_lists(tmp_path, "inaturalist-user-120k", f"federated_train_{name}")
    lists = find_lists(USER_120K, tmp_path, False)
    assert lists == (place / f"federated_train_{names[0]}", "user_id", place / "test.csv")


def test_the_factories_have_names_of_their_own() -> None:
    assert pickle.loads(pickle.dumps(inaturalist_geo_30k)) is inaturalist_geo_30k
    assert "30,000" in (inaturalist_geo_30k.__doc__ or "")
    assert set(settings_model(inaturalist_geo_30k).model_fields) == {"size", "source"}
