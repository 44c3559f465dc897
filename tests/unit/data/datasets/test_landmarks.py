"""Google Landmarks v2 in the published layouts, and the filter rules against hand-made and brute-force cases."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedlens.base.errors import ConfigError, DataError
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.datasets import dataset_files, landmarks
from fedlens.data.datasets.folders import check_images_present
from fedlens.data.datasets.landmarks import (
    Rules,
    gld23k,
    kept_images,
    landmarks_user_160k,
    leftover_images,
    read_authors,
    read_clean,
)
from fedlens.data.partition.natural import natural
from tests.unit.data.layouts import with_facts

TRAIN = [("7", "0a1", 0), ("12", "0b2", 1), ("7", "1c3", 2), ("12", "1d4", 0), ("3", "2e5", 1)]
TEST = [("f00", 0), ("f01", 2)]


def write_lists(root: Path, name: str) -> None:
    train, test = (root / file for file in CATALOGUE[name].files[0][:2])
    train.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{user},{image},{kind}\n" for user, image, kind in TRAIN]
    train.write_text("user_id,image_id,class\n" + "".join(rows))
    test.write_text("image_id,class\n" + "".join(f"{i},{c}\n" for i, c in TEST))


def write_images(root: Path, layout: str, images: list[str]) -> None:
    for number, image in enumerate(images):
        name = layout.format(*image[:3], id=image)
        path = root / "google-landmarks-v2" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 8), (40 * number, 0, 0)).save(path, quality=95)


IDS = [image for _, image, _ in TRAIN] + [image for image, _ in TEST]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    return with_counts(monkeypatch, (5, 3, 3, 2))


def with_counts(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int, int, int]) -> str:
    train, clients, classes, test = counts
    facts = {"train": train, "clients": clients, "classes": classes, "test": test}
    return with_facts(monkeypatch, "landmarks-user-160k", **facts).name


@pytest.mark.parametrize("layout", ["train/{0}/{1}/{2}/{id}.jpg", "{0}/{1}/{2}/{id}.jpg", "images/{id}.jpg"])
def test_the_published_lists_are_read_with_images_in_either_layout(
    tmp_path: Path, small: str, layout: str
) -> None:
    write_lists(tmp_path, small)
    write_images(tmp_path, layout, IDS)
    data = landmarks_user_160k(tmp_path, False, 0, size=8)
    assert (data.name, data.kind, data.classes) == ("landmarks-user-160k", "classification", ("0", "1", "2"))
    assert data.train.targets.tolist() == [0, 1, 2, 0, 1]
    assert data.test.targets.tolist() == [0, 2]
    assert data.train.columns["client"].tolist() == ["7", "12", "7", "12", "3"]
    assert data.train.columns["image_id"].tolist() == IDS[:5]
    assert data.input_shape == (3, 8, 8)
    reds = [data.train.inputs.decode(at)[0, 4, 4] for at in range(5)]
    np.testing.assert_allclose(reds, [0, 40, 80, 120, 160], atol=3)
    assert abs(int(data.test.inputs.decode(1)[0, 4, 4]) - 240) <= 3
    population = natural(data.table(), 0)
    assert sorted(zip(population.ids, population.sizes().tolist(), strict=True)) == [
        ("12", 2),
        ("3", 1),
        ("7", 2),
    ]


def test_gld23k_has_lists_of_its_own(tmp_path: Path) -> None:
    write_lists(tmp_path, "gld23k")
    write_images(tmp_path, "images/{id}.jpg", IDS)
    data = gld23k(tmp_path, False, 0)
    assert (data.name, len(data.train), len(data.test), data.input_shape) == ("gld23k", 5, 2, (3, 224, 224))


def test_a_partition_needs_no_images_and_who_wants_them_hears_how_to_get_them(
    tmp_path: Path, small: str
) -> None:
    write_lists(tmp_path, small)
    bare = landmarks_user_160k(tmp_path, False, 0)
    partition = natural(bare.table(), 0)
    told = r"7 of the 7 images of Landmarks-User-160k are missing, .* train/0/a/1/0a1\.jpg.*images_499"
    with pytest.raises(DataError, match=told):
        check_images_present(bare)
    write_images(
        tmp_path, "images/{id}.jpg", IDS[1:-1]
    )  # the first one lacks, and the layout is found all the same
    with pytest.raises(DataError, match=r"2 of the 7 images .* the first is images/0a1\.jpg"):
        check_images_present(landmarks_user_160k(tmp_path, False, 0))
    write_images(tmp_path, "images/{id}.jpg", IDS)
    whole = landmarks_user_160k(tmp_path, False, 0)
    check_images_present(whole)
    assert not whole.seeded
    assert natural(whole.table(), 0).digest == partition.digest


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((6, 3, 3, 2), "6 training images were expected, found 5 .*federated_train.csv"),
        ((5, 4, 3, 2), "4 users were expected, found 3"),
        ((5, 3, 2, 2), "2 landmarks were expected, found 3"),
        ((5, 3, 3, 9), "9 test images were expected, found 2 .*test.csv"),
    ],
)
def test_a_list_that_is_not_the_published_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int, int, int], told: str
) -> None:
    write_lists(tmp_path, with_counts(monkeypatch, counts))
    with pytest.raises(DataError, match=told):
        landmarks_user_160k(tmp_path, False, 0)


def test_the_published_counts_are_those_of_the_paper() -> None:
    facts = CATALOGUE["landmarks-user-160k"]
    assert (facts.train, facts.clients, facts.classes, facts.test) == (164_172, 1_262, 2_028, 19_526)


def test_nothing_there_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"gld23k/mini_gld_train_split.csv, .*gld23k/mini_gld_test.csv.*--download"
    ):
        gld23k(tmp_path, False, 0)
    with pytest.raises(
        DataError, match=r"landmarks-user-160k/federated_train.csv, .*landmarks-user-160k/test.csv"
    ):
        landmarks_user_160k(tmp_path, False, 0, source="csv")
    with pytest.raises(DataError, match="train_clean"):
        landmarks_user_160k(tmp_path, False, 0)
    with pytest.raises(DataError, match=r"--download does not fetch it: .*google-landmark/metadata/ into"):
        landmarks_user_160k(tmp_path, True, 0, source="metadata")
    write_lists(tmp_path, "gld23k")
    with pytest.raises(ConfigError, match="size"):
        gld23k(tmp_path, False, 0, size=0)


def test_download_fetches_the_lists_and_takes_them_out_of_their_archive(
    tmp_path: Path, small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lists(tmp_path / "made", small)
    asked = []

    def fetch(resource, folder: Path) -> Path:
        asked.append(resource.urls[0])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / resource.name
        with zipfile.ZipFile(path, "w") as packed:
            made = tmp_path / "made" / "federated_vision_datasets"
            for file in sorted(made.rglob("*.csv")):
                packed.write(file, file.relative_to(made).as_posix())
            packed.writestr("landmarks-user-160k/README", "not wanted")
        return path

    monkeypatch.setattr(dataset_files, "fetch", fetch)
    write_images(tmp_path, "images/{id}.jpg", IDS)
    assert len(landmarks_user_160k(tmp_path, True, 0, size=8).train) == 5
    assert asked == [
        "https://storage.googleapis.com/gresearch/federated-vision-datasets/landmarks-user-160k.zip"
    ]
    folder = tmp_path / "federated_vision_datasets" / "landmarks-user-160k"
    assert sorted(path.name for path in folder.iterdir()) == ["federated_train.csv", "test.csv"]
    landmarks_user_160k(tmp_path, True, 0, size=8)
    assert len(asked) == 1


# --- the rules of hsu2020 4.2


def test_the_rules_are_those_of_the_paper() -> None:
    assert Rules() == Rules(30, 10, 30, 5)


def test_thirty_images_by_ten_users_who_have_thirty_of_five_landmarks_are_kept() -> None:
    """The smallest set that meets the rules with 10 users: 10 landmarks, 3 images of each by each user."""
    users, marks, _ = (a.ravel() for a in np.meshgrid(range(10), range(10), range(3), indexing="ij"))
    assert kept_images(marks, users).all()
    without = np.flatnonzero((users == 0) & (marks == 0))[0]
    kept = kept_images(np.delete(marks, without), np.delete(users, without))
    assert not kept.any()  # user 0 has 29 images, then every landmark has 9 users


def test_five_landmarks_are_enough_and_four_are_not() -> None:
    users = np.repeat(np.arange(10), 30)
    marks = np.tile(np.arange(30) % 5, 10)
    assert kept_images(marks, users).all()
    assert not kept_images(np.tile(np.arange(30) % 4, 10), users).any()
    # One user with four of them goes; then every landmark has nine users, and all of it goes.
    marks[:30] = np.arange(30) % 4
    assert not kept_images(marks, users).any()
    assert kept_images(marks, users, Rules(30, 9, 30, 5)).sum() == 270


def test_what_one_rule_drops_can_make_another_one_drop_more() -> None:
    """A chain: landmark 0 lacks users, so user 0 lacks images, so landmark 1 lacks images, and so on."""
    #        landmark 0 | user 0 and 1 | user 1 and 2 | user 2 and 3
    marks = np.array([0, 1, 1, 2, 2, 3, 3])
    users = np.array([0, 0, 1, 1, 2, 2, 3])
    rules = Rules(2, 2, 2, 1)
    assert not kept_images(marks, users, rules).any()
    once = kept_images(marks, users, Rules(1, 1, 2, 1))
    assert once.tolist() == [True] * 6 + [False]


def brute_force(marks: np.ndarray, users: np.ndarray, rules: Rules) -> np.ndarray:
    """The largest selection of landmarks and users of which every one meets the rules."""
    best = np.zeros(len(marks), bool)
    every_mark, every_user = range(marks.max() + 1), range(users.max() + 1)
    for some_marks in itertools.chain.from_iterable(
        itertools.combinations(every_mark, k) for k in range(len(every_mark) + 1)
    ):
        for some_users in itertools.chain.from_iterable(
            itertools.combinations(every_user, k) for k in range(len(every_user) + 1)
        ):
            kept = np.isin(marks, some_marks) & np.isin(users, some_users)
            if meets(marks[kept], users[kept], rules, some_marks, some_users) and kept.sum() > best.sum():
                best = kept
    return best


def meets(marks: np.ndarray, users: np.ndarray, rules: Rules, some_marks, some_users) -> bool:
    return all(
        (marks == one).sum() >= rules.images_per_landmark
        and len(set(users[marks == one].tolist())) >= rules.users_per_landmark
        for one in some_marks
    ) and all(
        (users == one).sum() >= rules.images_per_user
        and len(set(marks[users == one].tolist())) >= rules.landmarks_per_user
        for one in some_users
    )


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20)
RULES = st.builds(Rules, *[st.integers(1, 4), st.integers(1, 3)] * 2)


@given(PAIRS, RULES)
def test_the_rules_keep_the_largest_selection_that_meets_them(pairs, rules: Rules) -> None:
    marks, users = (np.array(side) for side in zip(*pairs, strict=True))
    kept = kept_images(marks, users, rules)
    np.testing.assert_array_equal(kept, brute_force(marks, users, rules))
    # Applied again nothing more goes, and users first comes to the same.
    assert kept_images(marks[kept], users[kept], rules).all()
    turned = Rules(
        rules.images_per_user, rules.landmarks_per_user, rules.images_per_landmark, rules.users_per_landmark
    )
    np.testing.assert_array_equal(kept_images(users, marks, turned), kept)


def test_the_test_split_is_of_other_users_and_at_most_ten_a_landmark() -> None:
    marks = np.repeat([0, 1, 2], [20, 20, 20])
    users = np.tile([0, 1, 2, 3], 15)
    kept = (users == 0) & (marks < 2)
    kept[0] = False  # an image of user 0 that training does not keep is none to test on
    rows = leftover_images(marks, users, kept, seed=0)
    assert np.bincount(marks[rows]).tolist() == [10, 10]  # landmark 2 is not trained on
    assert not (users[rows] == 0).any()
    assert (np.diff(rows) > 0).all()
    assert rows.tolist() == leftover_images(marks, users, kept, seed=0).tolist()
    assert rows.tolist() != leftover_images(marks, users, kept, seed=1).tolist()
    assert np.bincount(marks[leftover_images(marks, users, kept, 0, each=40)]).tolist() == [15, 15]
    with pytest.raises(ConfigError, match="each is 0"):
        leftover_images(marks, users, kept, 0, each=0)


def test_every_leftover_image_is_equally_likely() -> None:
    marks, users, kept = np.zeros(7, int), np.arange(7), np.arange(7) == 0
    drawn = [leftover_images(marks, users, kept, seed, each=2) for seed in range(600)]
    counts = np.bincount(np.concatenate(drawn), minlength=7)
    assert counts[0] == 0
    assert (abs(counts[1:] - 200) < 45).all(), counts


# --- the metadata


def write_metadata(root: Path, rows: list[tuple[int, str, str]]) -> None:
    """(landmark, image, author) in the layout of GLD-v2."""
    folder = root / "google-landmarks-v2"
    folder.mkdir(parents=True, exist_ok=True)
    by_mark: dict[int, list[str]] = {}
    for mark, image, _ in rows:
        by_mark.setdefault(mark, []).append(image)
    clean = [f"{mark},{' '.join(images)}\n" for mark, images in by_mark.items()]
    (folder / "train_clean.csv").write_text("landmark_id,images\n" + "".join(clean))
    told = [f'{image},http://x/{image},"{author}",CC BY,"A, b ""c"""\n' for _, image, author in rows]
    noise = "ffff,http://x/f,Nobody,CC BY,of the images that are not clean\n"
    (folder / "train_attribution.csv").write_text("id,url,author,license,title\n" + noise + "".join(told))


def test_a_population_is_built_from_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landmarks, "RULES", Rules(2, 2, 2, 2))
    rows = [
        (90, "a00", "Ann, of B"),
        (90, "a01", "Cy"),
        (40, "a02", "Ann, of B"),
        (40, "a03", "Cy"),
        (40, "a04", "Dee"),  # one image: a user who trains nothing, so it can be tested on
        (70, "a05", "Dee"),  # a landmark that is dropped
        (90, "a06", ""),
    ]
    write_metadata(tmp_path, rows)
    write_images(tmp_path, "train/{0}/{1}/{2}/{id}.jpg", [image for _, image, _ in rows])
    data = landmarks_user_160k(tmp_path, False, 0, size=8, source="metadata")
    assert data.classes == ("landmark 40", "landmark 90")
    assert data.train.columns["image_id"].tolist() == ["a00", "a01", "a02", "a03"]
    assert data.train.targets.tolist() == [1, 1, 0, 0]
    assert data.train.columns["client"].tolist() == ["Ann, of B", "Cy", "Ann, of B", "Cy"]
    assert data.test.columns["image_id"].tolist() == ["a04"]
    assert data.test.targets.tolist() == [0]
    assert "left out 1 clean images without an author" in data.notes
    assert data.seeded
    assert any("not compared with the published lists" in note for note in data.notes)
    assert landmarks_user_160k(tmp_path, False, 0, size=8).notes == data.notes  # "auto" finds no lists
    monkeypatch.setattr(landmarks, "RULES", Rules())
    with pytest.raises(DataError, match="no image meets the rules"):
        landmarks_user_160k(tmp_path, False, 0, source="metadata")


def test_a_line_of_the_clean_list_may_be_longer_than_a_csv_cell(tmp_path: Path) -> None:
    path = tmp_path / "train_clean.csv"
    ids = [f"{number:016x}" for number in range(9_000)]
    path.write_text(f"landmark_id,images\n5,{' '.join(ids)}\n8,ff\n")
    images, marks = read_clean(path)
    assert images.tolist() == [*ids, "ff"]
    assert marks.tolist() == [5] * 9_000 + [8]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("id,images\n1,a\n", "not landmark_id,images .*line 1"),
        ("landmark_id,images\n1,a b\nx,c\n", "were expected .*line 3"),
        ("landmark_id,images\n1,\n", "were expected .*line 2"),
        ("landmark_id,images\n1,a b\n2,b\n", "1 images are listed more than once"),
    ],
)
def test_a_damaged_clean_list_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "train_clean.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=told):
        read_clean(path)


def test_an_image_without_attribution_is_told(tmp_path: Path) -> None:
    write_metadata(tmp_path, [(1, "a", "Ann")])
    path = tmp_path / "google-landmarks-v2" / "train_attribution.csv"
    owners, authors = read_authors(path, np.array(["a", "ffff"]))
    assert [authors[k] for k in owners] == ["Ann", "Nobody"]
    with pytest.raises(DataError, match="1 of the 2 clean images are not in it, 'zz' is the first"):
        read_authors(path, np.array(["a", "zz"]))
