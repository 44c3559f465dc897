"""`fedlens predict` and `fedlens export`, as they are typed."""

from __future__ import annotations

import csv
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedlens import Experiment, Result
from fedlens.cli.main import app
from fedlens.data.catalogue import CATALOGUE
from fedlens.run import checkpoint
from tests.unit.data.pictures import pixels, write
from tests.unit.use import placed_kit as kit

runner = CliRunner()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    torch.set_num_threads(1)
    return Experiment(
        rounds=2,
        model="linear",
        local={"lr": 0.1, "batch_size": 64},
        data={"dataset": "digits", "partition": {"name": "iid", "clients": 2}},
    ).run(tmp_path_factory.mktemp("run") / "digits")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for at in range(3):
        write(tmp_path / "photos" / f"{at}.png", pixels(at, channels=1))
    return tmp_path / "photos"


def test_predict_says_where_the_table_and_the_pictures_are(run: Result, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = runner.invoke(
        app, ["predict", str(run.directory), str(photos), "--out", str(out), "--round", "last"]
    )
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.splitlines() == [
        f"predicted 3 images with the model of round 2, the last round: {out / 'predictions.csv'}",
        f"labelled pictures: {out / 'pictures'}",
    ]
    rows = (out / "predictions.csv").read_text().splitlines()
    assert rows[0].startswith("path,class,score,class_2,score_2,class_3,")
    assert rows[1].startswith(f"{photos / '0.png'},")
    assert len(list((out / "pictures").iterdir())) == 3


@pytest.fixture
def copy(run: Result, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.directory, tmp_path / "run"))


def test_without_out_the_predictions_are_in_the_run_and_are_not_replaced(copy: Path, photos: Path) -> None:
    command = ["predict", str(copy), str(photos), "--no-pictures"]
    answer = runner.invoke(app, command)
    assert answer.exit_code == 0, answer.output
    table = copy / "predictions" / "predictions.csv"
    assert answer.stdout.rstrip().endswith(f": {table}")
    before = table.read_bytes()
    again = runner.invoke(app, [*command, "--top", "1"])
    assert again.exit_code == 2
    assert "the output folder is not empty" in again.stderr
    assert table.read_bytes() == before
    assert runner.invoke(app, [*command, "--top", "1", "--force"]).exit_code == 0
    assert table.read_bytes() != before


def test_a_link_in_the_place_of_the_predictions_is_not_followed(
    copy: Path, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (copy / "predictions").symlink_to(tmp_path / "outside")
    answer = runner.invoke(app, ["predict", str(copy), str(photos)])
    assert answer.exit_code == 2
    assert "predictions is a symbolic link" in answer.stderr
    assert list((tmp_path / "outside").iterdir()) == []


def test_it_says_what_the_best_round_was_chosen_on(copy: Path, photos: Path, tmp_path: Path) -> None:
    summary = json.loads((copy / "summary.json").read_text())
    best = summary["best"]
    assert best["chosen_on"] == "test"
    held = {**best, "metric": "validation_accuracy", "chosen_on": "validation"}
    for told, words, chosen in (
        (best, "the best by accuracy on the test data", ["best", "accuracy", "test"]),
        (held, "the best by accuracy on the validation data", ["best", "accuracy", "validation"]),
        ({**best, "round": best["round"] + 5}, "the best round", ["best", None, None]),  # of another model
        (None, "the best round", ["best", None, None]),
    ):
        (copy / "summary.json").write_text(json.dumps({**summary, "best": told}))
        command = ["predict", str(copy), str(photos), "--no-pictures", "--force"]
        answer = runner.invoke(app, command)
        assert f"with the model of round {best['round']}, {words}: " in answer.stdout
        assert list(json.loads(runner.invoke(app, [*command, "--json"]).stdout)["chosen"].values()) == chosen
    (copy / "best.safetensors").unlink()
    answer = runner.invoke(app, command)
    assert "note: the run has no best round, so this is the last model" in answer.stdout
    assert "with the model of round 2, the last round: " in answer.stdout


def test_predict_ends_with_1_and_names_the_files_that_it_could_not_predict(
    run: Result, photos: Path, tmp_path: Path
) -> None:
    (photos / "1.png").write_bytes(b"x\x1b[31m")
    command = [
        "predict",
        str(run.directory),
        str(photos),
        "no.png",
        "--out",
        str(tmp_path / "out"),
        "--no-pictures",
    ]
    answer = runner.invoke(app, command)
    assert answer.exit_code == 1
    assert f"warning: {photos / '1.png'}: not a readable image" in answer.stderr
    assert "warning: no.png: the file does not exist" in answer.stderr
    assert answer.stderr.splitlines()[-1] == "error: 2 files of 4 could not be predicted."
    assert answer.stdout.startswith("predicted 2 images")
    again = runner.invoke(app, [*command, "--json"])
    assert again.exit_code == 2
    assert "not empty" in json.loads(again.stdout)["error"]["what"]
    forced = runner.invoke(app, [*command, "--json", "--force"])
    assert forced.exit_code == 1
    found = json.loads(forced.stdout)
    assert (found["images"], found["pictures"], [fault["path"] for fault in found["faults"]]) == (
        2,
        None,
        [str(photos / "1.png"), "no.png"],
    )


def test_a_table_of_predictions_has_nothing_that_a_terminal_or_a_spreadsheet_obeys(
    run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["=cmd.png", "-2+cmd|x.png", "a\x1b[31mb\u202e\udcff\nc.png"]
    for at, name in enumerate(names):
        write(Path(name), pixels(at, channels=1))
    answer = runner.invoke(
        app, ["predict", str(run.directory), "--out", "out", "--no-pictures", "--", *names]
    )
    assert answer.exit_code == 0, answer.output
    text = Path("out/predictions.csv").read_bytes().decode()
    paths = [row["path"] for row in csv.DictReader(text.splitlines())]
    assert paths == ["'=cmd.png", "'-2+cmd|x.png", r"a\x1b[31mb\u202e\udcff\nc.png"]
    assert text.replace("\r\n", "").isprintable()


def test_an_image_beyond_the_limit_is_refused_in_our_words_alone(
    run: Result, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Image.open(photos / "0.png") as image:
        width, height = image.size
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", width * height - 1)
    for command in (
        ["predict", str(run.directory), str(photos), "--out", str(tmp_path / "out")],
        ["data", "check", str(photos), "--format", "image-folder"],
    ):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")  # as a user has them
            answer = runner.invoke(app, command)
        assert answer.exit_code in (1, 2)
        assert f"the image has {width} x {height} pixels; the limit is 0" in answer.output
        assert not shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RUN", "nothing-*.png", "--out", "OUT"], "no image to predict: no file matches the pattern"),
        (["nowhere", "PHOTOS", "--out", "OUT"], "the directory does not exist (nowhere)"),
        (["PHOTOS", "PHOTOS", "--out", "OUT"], "this is not a run directory: it has no config.toml"),
        (["RUN/model.safetensors", "PHOTOS", "--out", "OUT"], "this is a file, not a run directory"),
        (["RUN", "PHOTOS", "--out", "OUT", "--round", "7"], "the run keeps no model of round 7"),
        (
            ["RUN", "PHOTOS", "--out", "OUT", "--round", "frist"],
            "the round is 'frist', but must be best, last or",
        ),
        (["RUN", "PHOTOS", "--out", "PHOTOS"], "the output folder is not empty"),
    ],
)
def test_predict_refuses_in_one_sentence(
    run: Result, photos: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    places = {"RUN": run.directory, "PHOTOS": photos, "OUT": tmp_path / "out"}
    for name, place in places.items():
        arguments = [argument.replace(name, str(place)) for argument in arguments]
    answer = runner.invoke(app, ["predict", *arguments])
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert answer.stderr.startswith("error: ")
    assert words in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_export_says_what_it_wrote(run: Result, tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    answer = runner.invoke(app, ["export", str(run.directory), "--out", str(file), "--round", "last"])
    assert answer.exit_code == 0, answer.output
    first, second, third = answer.stdout.splitlines()
    assert first == f"exported the model of round 2, the last round: {file}"
    assert second.startswith("its outputs differ from the run's model by at most ")
    assert third == f"classes, preprocessing and licence: {file}.json"
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert torch.export.load(file).module()(images)["scores"].shape == (2, 10)
    again = runner.invoke(
        app, ["export", str(run.directory), "--format", "pt2", "--out", str(file), "--json"]
    )
    assert again.exit_code == 2
    assert json.loads(again.stdout)["error"]["what"] == "the file already exists"
    forced = runner.invoke(app, ["export", str(run.directory), "--out", str(file), "--json", "--force"])
    assert forced.exit_code == 0
    assert json.loads(forced.stdout)["classes"] == [str(digit) for digit in range(10)]


def test_export_prints_the_licence_that_forbids_passing_the_model_on(copy: Path, tmp_path: Path) -> None:
    tree, about = checkpoint.read_model(copy / "best.safetensors")
    licence = str(CATALOGUE["camvid"].licence)
    checkpoint.write_model(
        copy / "best.safetensors", tree, {**about, "dataset": "camvid", "licence": licence}
    )
    answer = runner.invoke(app, ["export", str(copy), "--out", str(tmp_path / "model.safetensors")])
    assert answer.exit_code == 0
    sentence = f'This model was trained on CamVid, whose licence is "{licence}".'
    assert answer.stderr == f"warning: {sentence}\n"
    assert json.loads((tmp_path / "model.safetensors.json").read_text())["notice"] == sentence


def test_predict_says_where_masks_and_boxes_are(photos: Path, tmp_path: Path) -> None:
    for data, model, line, key in (
        (kit.masks, "pixels", "masks, in the size of the files: {}/masks", "masks"),
        (
            kit.boxes,
            "spots",
            "boxes with a score of 0.5 or more, in COCO's format: {}/predictions.json",
            "boxes",
        ),
    ):
        result = kit.run(tmp_path / model, data, model, rounds=1)
        out = tmp_path / f"{model}-out"
        command = ["predict", str(result.directory), str(photos), "--out", str(out), "--score", "0.5"]
        answer = runner.invoke(app, command)
        assert answer.exit_code == 0, answer.output
        assert line.format(out) in answer.stdout.splitlines()
        found = json.loads(runner.invoke(app, [*command, "--force", "--json"]).stdout)
        assert {name for name in ("masks", "boxes") if found[name] is not None} == {key}
        assert Path(found[key]).exists()


def test_a_score_beyond_1_is_refused(run: Result, photos: Path, tmp_path: Path) -> None:
    command = ["predict", str(run.directory), str(photos), "--out", str(tmp_path / "out"), "--score", "2"]
    assert runner.invoke(app, command).exit_code == 2
