from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import fedlens
from fedlens.cli.data_check import check
from fedlens.data.partition.partition import Partition
from tests.unit.data.formats.boxed import write_voc
from tests.unit.data.pictures import pixels, write

app = typer.Typer()
app.command("check")(check)
app.command("other")(lambda: None)
runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for label, name in enumerate(("cat", "dog")):
        for k in range(2):
            write(tmp_path / "data" / name / f"{k}.png", 10 * label + k)
    return tmp_path / "data"


def test_nothing_wrong_is_exit_code_0_and_a_summary(folder: Path) -> None:
    for at, name in enumerate(
        f"{c}/{client}{k}.png" for c in ("cat", "dog") for client in "ab" for k in "123"
    ):
        write(folder / name, 50 + at)
    for name in ("cat", "dog"):
        for k in range(2):
            (folder / name / f"{k}.png").unlink()
    words = ["--set", "client_pattern=/([ab])[0-9]"]
    answer = runner.invoke(app, ["check", "data", "--format", "image-folder", *words])
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert answer.stdout.splitlines() == [
        "images    12",
        "sizes     8x8 (all)",
        "colours   colour (RGB) 12",
        "training  8x8 pixels, 3 channels (the most frequent size of the files; size=N changes it)",
        "classes   cat 6, dog 6",
        "splits    none; a share is held out as test data",
        "clients   2: a 6, b 6",
        "no problems found",
        'to train on it, write in an experiment: [data] dataset = { name = "image-folder", path = "data", '
        'client_pattern = "/([ab])[0-9]" }',
    ]


def test_warnings_are_listed_and_keep_exit_code_0(folder: Path) -> None:
    answer = runner.invoke(app, ["check", "data", "--format", "image-folder"])
    assert answer.exit_code == 0
    *_, few, client, verdict, _ = answer.stdout.splitlines()
    assert few == (
        "warning: data: 2 classes have fewer than 5 images: 'cat' 2, 'dog' 2; check the spelling, or add images."
    )
    assert client.startswith("warning: data: no client is named, so the partition has to make clients")
    assert verdict == "no errors, 2 warnings"
    found = json.loads(runner.invoke(app, ["check", "data", "--format", "image-folder", "--json"]).stdout)
    assert found["ok"] is True
    assert [sorted(warning) for warning in found["warnings"]] == [["hint", "what", "where"]] * 2
    assert found["dataset"] == {"name": "image-folder", "path": "data"}


def test_sizes_and_colours_are_told_with_the_size_of_training_and_why(folder: Path) -> None:
    for at in range(3):
        write(folder / "cat" / f"large{at}.png", pixels(at, 480, 640))
    write(folder / "cat" / "grey.png", pixels(7, 8, 8, channels=1))
    words = ["check", "data", "--format", "image-folder"]
    lines = dict(line.split(None, 1) for line in runner.invoke(app, words).stdout.splitlines())
    assert lines["sizes"] == "8x8 to 640x480, 2 sizes; most frequent 8x8 (62.5 %)"
    assert lines["colours"] == "grey (L) 1, colour (RGB) 7"
    for setting, said in (("[6,8]", "8x6 pixels, 3 channels (as set by size)"),
                          ("9", "9x9 pixels, 3 channels (as set by size; 5 smaller images enlarged)")):  # fmt: skip
        lines = dict(
            line.split(None, 1)
            for line in runner.invoke(
                app, [*words, "--set", f"data.dataset.size={setting}"]
            ).stdout.splitlines()
        )
        assert lines["training"] == said
    for path in folder.rglob("*.png"):
        write(path, pixels(len(path.name), channels=1))
    assert "1 suits grey images)" in runner.invoke(app, words).stdout


def test_settings_reach_the_reader(folder: Path) -> None:
    words = ["--set", "client_pattern=([0-9]).png", "--set", "label_level=1"]
    answer = runner.invoke(app, ["check", "data", "--format", "image-folder", *words])
    assert answer.exit_code == 0
    assert "clients   2: 0 2, 1 2" in answer.stdout


def test_every_fault_is_listed_file_by_file_and_the_exit_code_is_1(folder: Path) -> None:
    (folder / "dog" / "1.png").write_bytes(b"")
    (folder / "cat" / "1.png").write_bytes((folder / "cat" / "0.png").read_bytes()[:60])
    answer = runner.invoke(app, ["check", "data", "--format", "image-folder"])
    assert answer.exit_code == 1
    first, second, blank, *summary = answer.stdout.splitlines()
    assert first.startswith("data/cat/1.png: the image cannot be decoded: ")
    assert second == "data/dog/1.png: the file is empty (0 bytes); copy or export it again."
    assert blank == ""
    assert summary[0] == "images    2, and 2 with problems"
    assert summary[-1] == (
        "to train on it without these problems, write in an experiment: "
        '[data] dataset = { name = "image-folder", path = "data", on_error = "skip" }'
    )
    assert summary[-2] == (
        '2 problems and 2 warnings; a run stops at problems, or leaves them out with data.dataset.on_error = "skip"'
    )


def test_leaving_out_nearly_all_images_is_not_advised(folder: Path) -> None:
    for at in range(12):
        (folder / "cat" / f"x{at}.png").write_bytes(b"")
    answer = runner.invoke(app, ["check", "data", "--format", "image-folder"])
    assert answer.exit_code == 1
    assert "; hardly any image is without one, so correct what they have in common first" in answer.stdout
    assert "skip" not in answer.stdout


def test_what_is_wrong_with_the_whole_is_told_apart(folder: Path) -> None:
    write_voc(folder / "voc")
    lists = folder / "voc" / "ImageSets" / "Main"
    (lists / "train.txt").write_text("a\nb\nc\n")
    answer = runner.invoke(app, ["check", "data/voc", "--format", "voc-xml"])
    assert answer.exit_code == 1
    assert "1 image is in more than one split, a leak" in answer.stdout
    assert answer.stdout.splitlines()[-1] == (
        "1 problem and 2 warnings; 1 affects the whole dataset and must be fixed first"
    )
    (folder / "voc" / "Annotations" / "d.xml").write_text("")
    last = runner.invoke(app, ["check", "data/voc", "--format", "voc-xml"]).stdout.splitlines()[-1]
    assert last.startswith("2 problems")


def test_a_table_that_cannot_be_read_does_not_flood(folder: Path) -> None:
    for k in range(3):
        (folder / "cat" / f"{k}.png").replace(folder / f"c{k}.png") if k < 2 else write(folder / "c2.png", 5)
    (folder / "cat").rmdir()
    (folder / "dog" / "0.png").write_bytes(b"")
    (folder / "t.csv").write_bytes("path,label\nc0.png,kätzchen\n".encode("cp1252"))
    answer = runner.invoke(app, ["check", "data", "--format", "csv"])
    assert answer.exit_code == 1
    listed, _, summary = answer.stdout.partition("\n\n")
    first, second = listed.splitlines()
    assert first.startswith("data/t.csv, line 2: the byte 0xe4 is not UTF-8")
    assert second.startswith("data/dog/0.png: the file is empty")
    assert summary.splitlines()[-1].startswith("2 problems; 1 affects the whole dataset")


def test_json_is_one_object(folder: Path) -> None:
    answer = runner.invoke(app, ["check", "data", "--format", "image-folder", "--json"])
    assert (answer.exit_code, answer.stderr) == (0, "")
    found = json.loads(answer.stdout)
    assert found["ok"] is True
    assert (found["images"], found["classes"], found["findings"]) == (4, {"cat": 2, "dog": 2}, [])
    (folder / "dog" / "1.png").write_bytes(b"")
    answer = runner.invoke(app, ["check", "data", "--format", "image-folder", "--json"])
    assert answer.exit_code == 1
    found = json.loads(answer.stdout)
    assert found["ok"] is False
    assert found["findings"] == [
        {
            "where": "data/dog/1.png",
            "what": "the file is empty (0 bytes)",
            "hint": "copy or export it again",
            "example": True,
        }
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--format", "imagefolder"],
            "there is no format 'imagefolder' (--format); did you mean 'image-folder'.",
        ),
        (
            ["--format", "csv"],
            "the folder has no table (data); name the table with --set table=FILE.",
        ),
        (
            ["--format", "mask-folder", "--set", "classes=road,tree"],
            "'classes' is 'road,tree', but must be a list (--set classes); "
            'write a list, e.g. --set \'classes=["road", "tree"]\'.',
        ),
        (
            ["--write", "own.txt"],
            "'own.txt' does not end in .toml (--write); experiments end in .toml.",
        ),
        (
            ["--format", "voc-xml", "--set", "size"],
            "'size' is not key=value (--set); write e.g. --set local.lr=0.1.",
        ),
        (
            ["--format", "image-folder", "--set", "client_level=0"],
            "client_level is 0 (client_level); 1 is the first folder.",
        ),
    ],
)
def test_a_request_that_is_wrong_is_one_sentence_and_exit_code_2(
    folder: Path, words: list[str], said: str
) -> None:
    answer = runner.invoke(app, ["check", "data", *words])
    assert (answer.exit_code, answer.stdout, answer.stderr) == (2, "", f"error: {said}\n")


def test_long_lists_are_cut_and_json_has_them_all(folder: Path) -> None:
    for k in range(30):
        write(folder / "dog" / f"p{k:02}_.png", 100 + k)
    words = ["check", "data", "--format", "image-folder", "--set", "client_pattern=/p?([0-9]+)"]
    answer = runner.invoke(app, words)
    assert answer.exit_code == 0, answer.stdout
    line = next(line for line in answer.stdout.splitlines() if line.startswith("clients"))
    assert line.startswith("clients   32: 0 2, 1 2, 00 1, ")
    assert line.endswith(" and 12 more")
    assert len(json.loads(runner.invoke(app, [*words, "--json"]).stdout)["clients"]) == 32


def test_more_than_five_of_a_kind_are_one_line_and_json_lists_each(folder: Path) -> None:
    table = [f"{name}/{k}.png,{name}" for name in ("cat", "dog") for k in range(2)]
    (folder / "t.csv").write_text(
        "\n".join(["path,label", *table, *(f"gone {k}.png,cat" for k in range(120))])
    )
    (folder / "dog" / "1.png").write_bytes(b"")
    listed, _, rest = runner.invoke(app, ["check", "data"]).stdout.partition("\n\n")[2].partition("\n\n")
    assert listed.splitlines() == [
        "data/dog/1.png: the file is empty (0 bytes); copy or export it again.",
        "data/t.csv, line 6: the file 'gone 0.png' does not exist; remove the line. 119 more of this kind.",
    ]
    assert "121 problems and 2 warnings; a run stops at problems" in rest
    assert '"skip"; --json lists each' in rest
    assert len(json.loads(runner.invoke(app, ["check", "data", "--json"]).stdout)["findings"]) == 121


@pytest.mark.parametrize("faulty", [False, True])
def test_an_experiment_is_written_ready_to_run_and_never_over_another_file(
    folder: Path, faulty: bool
) -> None:
    for at in range(40):
        write(folder / ("cat", "dog")[at % 2] / f"{'ab'[at % 4 // 2]}{at}.png", 50 + at)
    if faulty:
        (folder / "dog" / "1.png").write_bytes(b"")
    words = [
        "check",
        "data",
        "--set",
        "client_pattern=/([ab])",
        "--set",
        "on_error=skip",
        "--write",
        "own data.toml",
    ]
    for path in (folder / "cat" / "0.png", folder / "cat" / "1.png", folder / "dog" / "0.png"):
        path.unlink()
    if not faulty:
        (folder / "dog" / "1.png").unlink()
    answer = runner.invoke(app, words)
    assert answer.exit_code == int(faulty), answer.stdout
    assert answer.stdout.splitlines()[0] == (
        "format: image-folder, because it has images in folders, such as cat (--format sets another)"
    )
    assert answer.stdout.splitlines()[-1] == (
        "or run the experiment that was written: fedlens run 'own data.toml'"
    )
    result = fedlens.Experiment.load("own data.toml", ["rounds=1"]).run()
    assert Partition.load(result.directory / "partition.npz").ids == ("a", "b")
    text = Path("own data.toml").read_text()
    assert text.startswith(
        "# Written by: fedlens data check data --format image-folder --set 'client_pattern=/([ab])'"
    )
    again = runner.invoke(app, words)
    assert (again.exit_code, again.stderr) == (
        2, "error: own data.toml already exists (--write); choose another name, or remove it.\n"
    )  # fmt: skip
    assert Path("own data.toml").read_text() == text


def test_nothing_is_written_if_no_run_could_start(folder: Path) -> None:
    answer = runner.invoke(
        app, ["check", "data", "--set", "label_column=kind", "--set", "table=t.csv", "--write", "o.toml"]
    )
    assert answer.exit_code == 1
    assert (
        answer.stdout.splitlines()[-1]
        == "o.toml is not written, because no run could start: fix the problems first"
    )
    assert not Path("o.toml").exists()


def test_nothing_is_written_if_no_image_is_left(folder: Path) -> None:
    for path in folder.glob("*/*.png"):
        path.write_bytes(b"")
    answer = runner.invoke(app, ["check", "data", "--format", "image-folder", "--write", "o.toml"])
    assert "to train on it" not in answer.stdout
    assert answer.stdout.splitlines()[-1].startswith("o.toml is not written")
    assert not Path("o.toml").exists()


def test_the_command_in_a_written_experiment_may_have_any_character(folder: Path) -> None:
    odd = folder.rename("odd\x1b[31m\r\n\x7f\u202e")
    for at in range(20):
        write(odd / ("cat", "dog")[at % 2] / f"{at}.png", 50 + at)
    assert runner.invoke(app, ["check", str(odd), "--write", "o.toml"]).exit_code == 0
    first, *rest = Path("o.toml").read_bytes().decode().split("\n")
    assert first.isprintable()
    assert tomllib.loads("\n".join([first, *rest]))["data"]["dataset"]["path"] == str(odd)
