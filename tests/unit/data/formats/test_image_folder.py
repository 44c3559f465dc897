import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.registry import read_settings
from fedlens.data.dataset import Dataset
from fedlens.data.formats.image_folder import fill, image_folder
from fedlens.data.formats.reader import examine
from fedlens.data.formats.scan import Scan
from fedlens.data.images import ImageFiles
from tests.unit.data.pictures import pixels, write


def lay_out(root: Path, *names: str) -> None:
    """A picture of its own at each name."""
    for at, name in enumerate(names):
        write(root / name, pixels(at))


def dataset(root: Path, seed: int = 0, **settings: Any) -> Dataset:
    chosen = read_settings(image_folder, {"path": str(root), "size": 8, **settings}, "data.dataset")
    return image_folder(Path("unused"), False, seed, **chosen)


def check(root: Path, **settings: Any) -> tuple[Scan, list[str]]:
    """The scan, and where (below the folder) and what of each finding."""
    chosen = read_settings(image_folder, {"path": str(root), **settings}, "data.dataset")
    found = examine(fill, chosen, full=True)
    return found, [f"{f.where.removeprefix(f'{root}').lstrip('/')}: {f.what}" for f in found.findings]


def names(split: Any) -> list[str]:
    assert isinstance(split.inputs, ImageFiles)
    return [split.inputs.files[at] for at in range(len(split))]


def plain(root: Path, each: int = 5) -> None:
    lay_out(root, *(f"{name}/{at}.png" for name in ("cat", "dog") for at in range(each)))


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    plain(tmp_path)
    found = dataset(tmp_path)
    assert (found.name, found.classes, found.kind) == ("image-folder", ("cat", "dog"), "classification")
    assert found.input_shape == (3, 8, 8)
    assert (len(found.train), len(found.test)) == (8, 2)
    for split in (found.train, found.test):
        for at, name in enumerate(names(split)):
            assert found.classes[split.targets[at]] == name.split("/")[0]
            seed = ["cat", "dog"].index(name.split("/")[0]) * 5 + int(name.split("/")[1][0])
            np.testing.assert_array_equal(split.inputs.decode(at), pixels(seed).transpose(2, 0, 1))
    assert np.bincount(found.test.targets).tolist() == [1, 1]
    assert sorted(names(found.train) + names(found.test)) == [
        f"{c}/{n}.png" for c in ("cat", "dog") for n in range(5)
    ]
    scaled = found.train.inputs.take(np.arange(8)) / 255
    np.testing.assert_allclose(found.mean, scaled.mean(axis=(0, 2, 3)), rtol=1e-12)
    assert found.notes == ()
    assert names(dataset(tmp_path, seed=0).test) == names(found.test)
    assert {tuple(names(dataset(tmp_path, seed=seed).test)) for seed in range(8)} > {tuple(names(found.test))}


def test_size_channels_and_fit_are_passed_on(tmp_path: Path) -> None:
    plain(tmp_path)
    found = dataset(tmp_path, size=[4, 6], channels=1, fit="pad")
    assert found.input_shape == (1, 4, 6)
    assert len(found.mean) == 1
    assert not found.train.inputs.decode(0)[0][:, 0].any()  # 4 x 4 in the middle of 4 x 6


def test_photographs_are_turned_as_their_tag_says(tmp_path: Path) -> None:
    plain(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 3
    write(tmp_path / "cat/0.png", pixels(0), exif=exif)
    found = dataset(tmp_path, test=0.1)
    at = names(found.train).index("cat/0.png") if "cat/0.png" in names(found.train) else None
    split, at = (found.train, at) if at is not None else (found.test, names(found.test).index("cat/0.png"))
    np.testing.assert_array_equal(split.inputs.decode(at), pixels(0)[::-1, ::-1].transpose(2, 0, 1))


@pytest.mark.parametrize("held", ["test", "val"])
def test_folders_of_splits(tmp_path: Path, held: str) -> None:
    lay_out(tmp_path, "train/cat/a.png", "train/dog/b.png", f"{held}/dog/c.png", f"{held}/cat/d.png")
    found = dataset(tmp_path)
    assert names(found.train) == ["train/cat/a.png", "train/dog/b.png"]
    assert names(found.test) == [f"{held}/cat/d.png", f"{held}/dog/c.png"]
    assert found.test.targets.tolist() == [0, 1]
    assert ("the split 'validation' is the test data" in found.notes[0]) == (held == "val")


def test_a_validation_split_beside_a_test_split_is_left_out_and_noted(tmp_path: Path) -> None:
    lay_out(
        tmp_path, *(f"{split}/{c}/{split}.png" for split in ("train", "Valid", "test") for c in ("a", "b"))
    )
    for at, name in enumerate(sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.png"))):
        write(tmp_path / name, pixels(at))
    found = dataset(tmp_path)
    assert (len(found.train), len(found.test)) == (2, 2)
    assert found.notes[:1] == (
        "the 2 images of the split 'validation' are not used; data.validation holds out training data",
    )


def test_a_folder_train_alone_is_split(tmp_path: Path) -> None:
    lay_out(tmp_path, *(f"train/{name}/{at}.png" for name in ("cat", "dog") for at in range(5)))
    found = dataset(tmp_path)
    assert found.classes == ("cat", "dog")
    assert (len(found.train), len(found.test)) == (8, 2)


def test_classes_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    lay_out(tmp_path, *(f"{name}/{at}.png" for name in ("bus", "train") for at in range(5)))
    found = dataset(tmp_path)
    assert found.classes == ("bus", "train")
    assert found.notes == ("the folder train is read as a class, because bus is not a split",)
    assert dataset(tmp_path, classes=["bus", "train"]).notes == ()
    lay_out(tmp_path, *(f"test/{at}.png" for at in range(5, 10)))
    for at in range(5):
        (tmp_path / f"bus/{at}.png").unlink()
    (tmp_path / "bus").rmdir()
    assert dataset(tmp_path, classes=["test", "train"]).classes == ("test", "train")


def test_folders_of_splits_beside_others_are_a_fault_of_the_whole(tmp_path: Path) -> None:
    lay_out(tmp_path, "train/cat/a.png", "test/cat/b.png", "extra/cat/c.png")
    assert ": the folders test, train are splits, but extra not" in check(tmp_path)[1]


@pytest.mark.parametrize("other", ["extra/cat/c.png", "unlabelled/c.png"])
def test_a_folder_train_beside_one_that_is_no_split_is_not_taken_for_a_class(
    tmp_path: Path, other: str
) -> None:
    lay_out(tmp_path, "train/cat/a.png", "train/dog/b.png", other, other.replace("c.png", "d.png"))
    name = other.split("/")[0]
    findings = examine(fill, {"path": str(tmp_path)}, full=False).findings
    (finding,) = findings
    assert finding.what == f"the folder train has the name of a split, but {name} not"
    assert finding.hint is not None
    assert not finding.example
    both = sorted(["train", name])
    assert tomllib.loads(finding.hint.rpartition("all are classes, data.dataset.")[2]) == {"classes": both}
    found, told = check(tmp_path, classes=both)
    assert told == []
    assert (found.classes, found.splits) == (tuple(both), None)
    (tmp_path / name).rename(tmp_path / "test")
    assert check(tmp_path)[0].splits is not None


def test_a_table_of_splits_stands_above_the_names_of_folders(tmp_path: Path) -> None:
    files = ["train/x/a.png", "train/x/b.png", "extra/c.png", "extra/d.png"]
    lay_out(tmp_path, *files)
    lines = [f"{name},{label}" for name, label in zip(files, "pqpq", strict=True)]
    told = check(tmp_path, table=str(tmp_path / table(tmp_path, *lines, header="path,label")))[1]
    assert told == [": the folder train has the name of a split, but extra not"]
    with pytest.raises(DataError, match="write the split of each image in the table"):
        dataset(tmp_path, table="t.csv")
    lines = [f"{line},{split}" for line, split in zip(lines, ["train", "train", "test", "test"], strict=True)]
    found, told = check(tmp_path, table=str(tmp_path / table(tmp_path, *lines, header="path,label,split")))
    assert (found.splits, told) == (["test", "test", "train", "train"], [])


def test_a_folder_with_a_number_for_a_name_is_no_position_in_classes(tmp_path: Path) -> None:
    lay_out(tmp_path, "cat/a.png", "cat/b.png", "dog/c.png", "1/d.png")
    found, told = check(tmp_path, classes=["cat", "dog"])
    assert told == ["1/d.png: there is no class '1'"]
    assert found.labels == [-1, 0, 0, 1]
    assert found.bad == {0}


@pytest.mark.parametrize(
    ("layout", "levels"),
    [
        ("{label}/{client}/{at}.png", (None, 2)),
        ("{client}/{label}/{at}.png", (2, 1)),
        ("{client}/{label}/{at}.png", (2, -2)),
    ],
)
@pytest.mark.parametrize("split", ["", "train/"])
def test_folders_say_class_and_client(tmp_path: Path, layout: str, levels: tuple, split: str) -> None:
    cells = [(label, client) for label in ("cat", "dog") for client in ("north", "south")]
    lay_out(tmp_path, *(split + layout.format(label=l, client=c, at=at) for l, c in cells for at in range(5)))  # noqa: E741
    found = dataset(tmp_path, label_level=levels[0], client_level=levels[1])
    assert found.classes == ("cat", "dog")
    for part, count in ((found.train, 4), (found.test, 1)):
        pairs = list(zip(part.targets.tolist(), part.columns["client"].tolist(), strict=True))
        assert sorted(pairs) == sorted([(c, who) for c in (0, 1) for who in ("north", "south")] * count)
    assert len(found.table().column("client")) == 16


def table(root: Path, *lines: str, header: str = "path,label,client") -> str:
    (root / "t.csv").write_text("\n".join([header, *lines]) + "\n")
    return "t.csv"


def test_a_table_says_class_client_and_split(tmp_path: Path) -> None:
    lay_out(tmp_path, *(f"scans/{at}.png" for at in range(6)))
    lines = [f"scans/{at}.png,{'ab'[at % 2]},h{at // 3},{'test' if at > 3 else 'train'}" for at in range(6)]
    found = dataset(tmp_path, table=table(tmp_path, *lines, header="path,label,client,split"))
    assert names(found.train) == [f"scans/{at}.png" for at in range(4)]
    assert found.train.targets.tolist() == [0, 1, 0, 1]
    assert found.test.columns["client"].tolist() == ["h1", "h1"]
    assert found.classes == ("a", "b")


def test_a_table_leaves_the_class_to_the_folders_only_if_label_level_says_so(tmp_path: Path) -> None:
    plain(tmp_path)
    lines = [f"{c}/{n}.png,h{n % 2}" for c in ("cat", "dog") for n in range(5)]
    name = table(tmp_path, *lines, header="path,client")
    with pytest.raises(DataError, match=r"there is no column 'label' .*line 1\); add it; .*label_level = 1"):
        dataset(tmp_path, table=name)
    found = dataset(tmp_path, table=name, label_level=1)
    assert found.classes == ("cat", "dog")
    assert set(found.train.columns["client"]) == {"h0", "h1"}


def test_with_a_table_that_cannot_be_read_only_it_and_the_images_are_told(tmp_path: Path) -> None:
    lay_out(tmp_path, *(f"{at}.png" for at in range(4)), "train/x.png", "extra/y.png")
    (tmp_path / "2.png").write_bytes(b"")
    (tmp_path / "t.csv").write_bytes("path,label\n0.png,ü\n".encode("latin-1"))
    found, told = check(tmp_path, table="t.csv")
    assert told == [
        "t.csv, line 2: the byte 0xfc is not UTF-8; the encoding is probably Windows-1252 (Latin-1)",
        "2.png: the file is empty (0 bytes)",
    ]
    assert found.facts()["images"] == 5


def test_that_no_image_has_a_label_is_told_once(tmp_path: Path) -> None:
    lay_out(tmp_path, *(f"{at}.png" for at in range(4)))
    assert check(tmp_path)[1] == [": no image is in a folder of a class"]
    assert check(tmp_path, label_level=2)[1] == [": no image is 2 folders deep"]
    name = table(tmp_path, *(f"{at}.png,x" for at in range(4)), header="path,hospital")
    assert check(tmp_path, table=name, label_level=1)[1] == [": no image is in a folder of a class"]


def test_all_missing_columns_are_reported_at_once_and_the_names_are_checked_all_the_same(
    tmp_path: Path,
) -> None:
    plain(tmp_path)
    rows = [(c, n) for c in ("cat", "dog") for n in range(5)]
    lines = [f"{c}/{n}.png,{'mainz' if n == 3 else 'Mainz'},{c if n else 'Cat'}" for c, n in rows]
    name = table(tmp_path, *lines, header="file,hospital,klass")
    found, told = check(tmp_path, table=name, client_column="hospital")
    assert told == ["t.csv, line 1: there is no column 'path'", "t.csv, line 1: there is no column 'label'"]
    assert [finding.hint.partition("; data.dataset.label_level")[0] for finding in found.findings] == [
        "did you mean 'file'? Rename it to 'path', or set data.dataset.path_column = \"file\"",
        "did you mean 'klass'? Rename it to 'label', or set data.dataset.label_column = \"klass\"",
    ]
    warnings = " ".join(map(str, found.findings.warnings))
    assert "t.csv, lines 5 and 10: the client 'mainz' (2 images) looks like 'Mainz' (8 images)" in warnings
    assert "t.csv, lines 2 and 7: the class 'Cat' (2 images) looks like 'cat' (4 images)" in warnings
    found, told = check(tmp_path, table=name, client_column="hospitl", path_column="fil", label_column="klas")
    assert [line.partition("column ")[2].partition(",")[0] for line in told] == [
        "'fil'",
        "'klas'",
        "'hospitl'",
    ]
    settings = {"client_column": "hospital", "path_column": "file", "label_column": "klass"}
    found, told = check(tmp_path, table=name, **settings)
    assert (told, sorted(found.columns)) == ([], ["client", "hospital"])


def test_without_a_column_of_files_the_other_missing_columns_are_reported_too(tmp_path: Path) -> None:
    plain(tmp_path)
    name = table(tmp_path, "cat/0,x", header="image_name,kind")
    told = check(tmp_path, table=name)[1]
    assert told == ["t.csv, line 1: there is no column 'path'", "t.csv, line 1: there is no column 'label'"]
    name = table(tmp_path, "7,cat/0.png", header="file,where")
    assert "did you mean 'where'?" in str(check(tmp_path, table=name)[0].findings.found[0].hint)
    with pytest.raises(ConfigError, match=r"there is no table \(path_column\)"):
        dataset(tmp_path, path_column="file")


@pytest.mark.parametrize("column", ["klass", "Label", "labels", "kategory", "diagnose"])
def test_a_missing_label_column_is_an_error_that_suggests_the_nearest(tmp_path: Path, column: str) -> None:
    plain(tmp_path)
    rows = [(c, n) for c in ("cat", "dog") for n in range(5)]
    lines = [f"{c}/{n}.png,h{n % 2},{'ab'[n % 2]}" for c, n in rows]
    name = table(tmp_path, *lines, header=f"path,hospital,{column}")
    with pytest.raises(DataError) as caught:
        dataset(tmp_path, table=name, client_column="hospital")
    assert caught.value.what == "there is no column 'label'"
    assert str(caught.value.where).endswith("t.csv, line 1")
    assert str(caught.value.hint).startswith(
        f"did you mean '{column}'? Rename it to 'label', or set data.dataset.label_column = \"{column}\"; "
    )
    found = dataset(tmp_path, table=name, client_column="hospital", label_column=column)
    assert found.classes == ("a", "b")
    assert "klass" not in found.train.columns


def test_without_a_near_column_the_others_are_listed(tmp_path: Path) -> None:
    plain(tmp_path)
    lines = [f"{c}/{n}.png,1,2" for c in ("cat", "dog") for n in range(5)]
    with pytest.raises(DataError, match="to the one of the classes, of age, dose; "):
        dataset(tmp_path, table=table(tmp_path, *lines, header="path,age,dose"))


def test_a_label_column_has_to_be_one(tmp_path: Path) -> None:
    plain(tmp_path)
    name = table(tmp_path, "cat/0.png,x,h", header="path,klass,client")
    missing = "there is no column 'klas', which data.dataset.label_column names.*did you mean 'klass'"
    with pytest.raises(DataError, match=missing):
        dataset(tmp_path, table=name, label_column="klas")
    for given, what in (
        ({"table": name, "label_column": "path"}, r"the column 'path' gives its file, not its class"),
        ({"label_column": "klass"}, "give a table with such a column"),
        (
            {"table": name, "label_column": "klass", "client_column": "klass"},
            "the column 'klass' gives its class, not the client",
        ),
    ):
        with pytest.raises(ConfigError, match=what):
            dataset(tmp_path, **given)
    empty = table(tmp_path, *(f"{c}/{n}.png,{c[n:]},h" for c in ("cat", "dog") for n in range(5)),
                  header="path,klass,client")  # fmt: skip
    told = check(tmp_path, table=empty, label_column="klass")[1]
    assert "t.csv, line 5: the cell 'klass' is empty" in told


def test_classes_fix_the_order(tmp_path: Path) -> None:
    plain(tmp_path)
    found = dataset(tmp_path, classes=["dog", "cat"])
    assert found.classes == ("dog", "cat")
    assert all(
        found.classes[t] == n.split("/")[0]
        for t, n in zip(found.train.targets, names(found.train), strict=True)
    )
    _, told = check(tmp_path, classes=["dogg", "cat"])
    assert f"{tmp_path}/dog/0.png".removeprefix(f"{tmp_path}/") + ": there is no class 'dog'" in told
    with pytest.raises(ConfigError, match="twice"):
        check(tmp_path, classes=["dog", "dog"])


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "cat/1.png").write_bytes(b"")
    (tmp_path / "dog/notes.txt").write_text("notes")
    (tmp_path / "dog/.hidden").write_text("x")
    (tmp_path / "dog/Thumbs.db").write_text("x")
    (tmp_path / "README.md").write_text("beside the folders")
    (tmp_path / "bird").mkdir()
    write(tmp_path / "stray.png", pixels(99))
    found, told = check(tmp_path)
    assert told == [
        "bird: the folder of a class has no image",
        "stray.png: the image is not in a folder of a class",
        "dog/notes.txt: the file name has no ending of an image",
        "cat/1.png: the file is empty (0 bytes)",
    ]
    facts = found.facts()
    assert facts.pop("sizes")["most_frequent"] == [8, 8]
    assert facts.pop("training") == {
        "width": 8,
        "height": 8,
        "channels": 3,
        "why": "the most frequent size of the files",
        "enlarged": 0,
    }
    assert set(facts.pop("looks")["class"]) == {"cat", "dog"}
    assert facts == {
        "format": "image-folder",
        "images": 9,
        "left_out": 2,
        "classes": {"cat": 4, "dog": 5},
        "columns": [],
        "notes": [],
    }
    with pytest.raises(DataError, match=r"4 problems in the data") as caught:
        dataset(tmp_path, client_pattern="([0-9]|stray)", test=0.5)
    command = f"fedlens data check {tmp_path} --format image-folder --set size=8 --set test=0.5"
    assert f"{command} --set 'client_pattern=([0-9]|stray)'; or leave" in str(caught.value)
    skipping = dataset(tmp_path, on_error="skip")
    assert len(skipping.train) + len(skipping.test) == 9
    assert skipping.notes[0] == "left out 2 of 11 images"
    assert all(note.startswith("skipped ") for note in skipping.notes[1:5])
    assert "1 class has fewer than 5 images: 'cat' 4;" in skipping.notes[5]
    assert len(skipping.notes) == 6


def test_damage_within_a_file_is_found_by_the_check(tmp_path: Path) -> None:
    plain(tmp_path)
    path = write(tmp_path / "cat/0.png", pixels(0, 64, 64))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    (only,) = check(tmp_path)[1]
    assert only.startswith("cat/0.png: the image cannot be decoded")


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (["cat/a.png", "cat/b.png"], ": there is only one class, 'cat'"),
        (["train/cat/a.png", "train/dog/b.png", "test/cat/c.png", "test/owl/d.png"],
         ": the class 'owl' has test examples but no training examples"),
        (["test/cat/a.png", "test/dog/b.png"], ": no example is in the split 'train'"),
        ([], ": the folder has no images"),
    ],
)  # fmt: skip
def test_faults_of_the_whole(tmp_path: Path, files: list[str], what: str) -> None:
    lay_out(tmp_path, *files)
    assert check(tmp_path)[1] == [what]
    with pytest.raises(DataError):
        dataset(tmp_path, on_error="skip")


def test_a_leak_between_splits_is_counted(tmp_path: Path) -> None:
    lay_out(tmp_path, "train/cat/a.png", "train/dog/b.png", "test/cat/c.png", "test/dog/d.png")
    write(tmp_path / "test/dog/d.png", pixels(1))
    (only,) = check(tmp_path)[1]
    assert only == (
        ": 1 image is in more than one split, a leak: "
        "'train/dog/b.png' (train) is the same as 'test/dog/d.png' (test)"
    )


def test_the_draw_of_test_images_makes_no_leak(tmp_path: Path) -> None:
    plain(tmp_path, 10)
    for at in range(10):
        write(tmp_path / f"cat/{at}.png", pixels(77))  # all cats are one and the same
    found = dataset(tmp_path)
    assert [name.split("/")[0] for name in names(found.test)] == ["dog", "dog"]
    assert found.notes == ("2 images drawn as test data stay in training, which has identical ones",)


def test_the_folder_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder does not exist.*/nowhere"):
        dataset(tmp_path / "nowhere")
    write(tmp_path / "a.png", 0)
    with pytest.raises(DataError, match="it is a file, not a folder"):
        dataset(tmp_path / "a.png")


def test_the_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(tmp_path / "pictures")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(dataset(Path("~/pictures")).train) == 8


def test_a_label_level_has_nothing_to_say_beside_a_label_column(tmp_path: Path) -> None:
    plain(tmp_path)
    name = table(tmp_path, "cat/0.png,x,h")
    with pytest.raises(ConfigError, match="label_level has no effect"):
        check(tmp_path, table=name, label_level=1)


def test_classes_that_differ_by_case_only_are_a_warning_that_a_run_says_too(tmp_path: Path) -> None:
    lay_out(tmp_path, *(f"Cat/{at}.png" for at in range(6)), *(f"cat/{at}.png" for at in range(6, 12)))
    (warning,) = check(tmp_path)[0].findings.warnings
    assert warning.what == "the class 'cat' (6 images) looks like 'Cat' (6 images)"
    assert dataset(tmp_path).notes == (str(warning),)


def test_a_split_of_which_every_image_is_at_fault_is_named(tmp_path: Path) -> None:
    lay_out(
        tmp_path, *(f"{split}/{kind}/{at}.png" for split in ("train", "test") for kind in "ab" for at in "12")
    )
    for path in sorted((tmp_path / "test").rglob("*.png")):
        path.write_bytes(b"")
    for on_error in ("stop", "skip"):
        with pytest.raises(
            DataError, match=r"every image of the split 'test' is faulty; the first is test/a/1\.png"
        ):
            dataset(tmp_path, on_error=on_error)
