"""Predictions of image files: the run's own accuracy from its test images as files, and every kind of faulty file."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fedlens import Experiment, Result, load_result
from fedlens.base.errors import ConfigError, DataError, FedlensError, RunDirectoryError
from fedlens.core.tensorfile import read_metadata
from fedlens.data.datasets.digits import digits
from fedlens.data.datasets.omniglot import omniglot
from fedlens.run import checkpoint
from fedlens.run.rundir import RunDir
from fedlens.use import predict as predict_module
from fedlens.use.predict import Output, predict
from fedlens.use.trained_model import read_trained
from tests.new_process import new_process
from tests.unit.data.pictures import pixels, write

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "local": {"lr": 1.0, "batch_size": 32},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
}


def run_of(out: Path, model: Any = "linear", **changes: Any) -> Result:
    return Experiment(**{**SETTINGS, "model": model, **changes}).run(out)


def write_test_images(folder: Path, inputs: np.ndarray, targets: np.ndarray) -> Path:
    """Writes each image as PNG into the folder of its class."""
    for row, (image, label) in enumerate(zip(inputs, targets, strict=True)):
        write(
            folder / str(label) / f"{row:05d}.png", image[0] if len(image) == 1 else image.transpose(1, 2, 0)
        )
    return folder


def accuracy(rows: list[dict[str, Any]]) -> float:
    return float(np.mean([row["class"] == Path(row["path"]).parent.name for row in rows]))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = digits(Path(), False, 0)
    return write_test_images(tmp_path_factory.mktemp("digits"), data.test.inputs, data.test.targets)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    torch.set_num_threads(1)
    return run_of(tmp_path_factory.mktemp("run") / "digits")


@pytest.mark.parametrize("round", ["last", "best", 4, None])
def test_the_test_images_as_files_give_the_accuracy_that_the_run_recorded(
    run: Result, images: Path, round: str | int | None
) -> None:
    trained = read_trained(RunDir.open(run.directory), round)
    rows = run.predict(images, round=round)
    assert len(rows) == 360
    assert accuracy(rows) == run.metrics[trained.round]["test_accuracy"]
    assert trained.round == (4 if round in ("last", 4) else 3)


@pytest.mark.nightly
@pytest.mark.real
def test_cifar_images_as_files_give_the_accuracy_that_the_run_recorded(
    tmp_path: Path, real_data: Path
) -> None:
    from fedlens.data.datasets.cifar import cifar10

    settings = {
        "rounds": 1,
        "local": {"lr": 0.05, "steps": 20, "batch_size": 32},
        "data": {"dataset": "cifar10", "partition": {"name": "iid", "clients": 2}},
    }
    result = Experiment(**settings, model={"name": "small-cnn", "norm": "batch"}).run(
        tmp_path / "run", data_dir=real_data
    )
    data = cifar10(real_data, False, 0)
    names = np.array(data.classes)[data.test.targets]
    write_test_images(tmp_path / "images", data.test.inputs, names)
    rows = result.predict(tmp_path / "images", round="last")
    assert len(rows) == 10_000
    assert accuracy(rows) == result.metrics[-1]["test_accuracy"] > 0.15


def test_photographs_are_read_as_the_run_read_them(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[274] = 6
    for row in range(24):
        label, split = row % 2, "test" if row >= 12 else "train"
        noise = pixels(row, 10 + row % 5, 14) // 4 + 150 * label
        write(tmp_path / "data" / split / f"class{label}" / f"{row}.jpg", noise, exif=turned)
    dataset = {"name": "image-folder", "path": str(tmp_path / "data"), "size": [12, 8], "fit": "pad"}
    data = {"dataset": dataset, "partition": {"name": "iid", "clients": 2}}
    result = run_of(tmp_path / "run", data=data)
    shutil.move(tmp_path / "data" / "test", tmp_path / "images")
    shutil.rmtree(tmp_path / "data")
    trained = read_trained(RunDir.open(result.directory), "last")
    assert (trained.form.fit, trained.form.upright, trained.licence) == ("pad", True, "your own")
    assert (trained.form.height, trained.form.width) == (12, 8)
    assert accuracy(result.predict(tmp_path / "images", round="last")) == result.metrics[-1]["test_accuracy"]


@pytest.mark.real
def test_drawings_of_omniglot_are_inverted_as_their_reader_does(real_data: Path) -> None:
    data = omniglot(real_data, False, 0, size=28)
    name = data.classes[0]
    files = sorted((real_data / "omniglot-py" / "images_background" / name).glob("*.png"))
    assert data.form is not None
    decoded = {data.form.decode(path).tobytes() for path in files}
    read = [split.inputs[split.targets == 0] for split in (data.train, data.test)]
    assert {image.tobytes() for part in read for image in part} == decoded


def test_a_row_has_the_most_probable_classes(run: Result, images: Path) -> None:
    rows = run.predict(images / "3", top=3)
    columns = ["path", "class", "score", "class_2", "score_2", "class_3", "score_3", "fault"]
    assert all(list(row) == columns for row in rows)
    assert all(row["score"] >= row["score_2"] >= row["score_3"] >= 0 for row in rows)
    trained = read_trained(RunDir.open(run.directory))
    first = np.array(Image.open(rows[0]["path"]))[None, None]
    inputs = (torch.from_numpy(first).float() / 255 - trained.mean[0]) / trained.std[0]
    with torch.no_grad():
        scores = run.best_model(inputs).softmax(1)[0]
    assert rows[0]["score"] == pytest.approx(float(scores.max()), abs=1e-5)
    assert rows[0]["class"] == str(int(scores.argmax()))
    assert len(run.predict(images / "3", top=99)[0]) == 2 + 2 * 10


def test_the_table_and_a_picture_of_each_image_are_written(run: Result, images: Path, tmp_path: Path) -> None:
    rows = run.predict(images / "7", out=tmp_path / "out", top=2)
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["path"] for row in written] == [row["path"] for row in rows]
    assert [float(row["score_2"]) for row in written] == [row["score_2"] for row in rows]
    pictures = sorted((tmp_path / "out" / "pictures").iterdir())
    assert [path.name for path in pictures] == [
        f"{at:06d}-{Path(row['path']).stem}.png" for at, row in enumerate(rows, 1)
    ]
    with Image.open(pictures[0]) as picture:
        assert picture.size == (224, 250)
        top = np.asarray(picture)[: 8 * 28]
    original = np.asarray(Image.open(rows[0]["path"]))
    assert np.array_equal(top[::28, ::28, 0], original)


def test_without_pictures_only_the_table_is_written(run: Result, images: Path, tmp_path: Path) -> None:
    run.predict(images / "7", out=tmp_path / "out", pictures=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["predictions.csv"]


def test_earlier_predictions_are_replaced_only_by_force_and_other_files_stay(
    run: Result, images: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run.predict(images, out=out)
    (out / "pictures" / "mine.png").touch()
    with pytest.raises(ConfigError, match=r"not empty .*--force"):
        run.predict(images / "7", out=out)
    first = sorted((images / "7").iterdir())[0]
    run.predict(first, out=out, force=True)
    assert {path.name for path in (out / "pictures").iterdir()} == {"mine.png", f"000001-{first.stem}.png"}
    assert len((out / "predictions.csv").read_text().splitlines()) == 2
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="it is a file, not a folder"):
        run.predict(first, out=tmp_path / "file")


def test_pictures_of_an_earlier_prediction_are_no_images_of_the_next(run: Result, tmp_path: Path) -> None:
    write(tmp_path / "a.png", 1)
    for _ in range(2):
        rows = run.predict(tmp_path, out=tmp_path / "out", force=True)
        assert [Path(row["path"]).name for row in rows] == ["a.png"]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with images of all kinds; those that can be predicted begin with "good"."""
    folder = tmp_path / "mixed"
    write(folder / "good.png", 1)
    write(folder / "good-grey.png", pixels(2, channels=1))
    write(folder / "good-alpha.png", pixels(3, channels=4))
    write(folder / "good.gif", 4)
    Image.fromarray(pixels(5)).convert("P").save(folder / "good-palette.png")
    Image.fromarray(pixels(6)).convert("1").save(folder / "good-bits.png")
    Image.fromarray(pixels(7, channels=4), "CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(folder / "sixteen.png")
    Image.fromarray(pixels(8)).save(
        folder / "animated.gif", save_all=True, append_images=[Image.fromarray(pixels(9))]
    )
    whole = (folder / "good.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "named.jpg").write_bytes(whole)
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no image")
    (folder / "outside.png").symlink_to("/etc/hostname")
    (folder / "notes.txt").write_text("left out")
    (folder / ".hidden.png").write_text("left out")
    os.mkfifo(folder / "pipe.png")
    return folder


FAULTS = {
    "cmyk.jpg": "CMYK",
    "sixteen.png": "16 bits per channel",
    "animated.gif": "2 frames",
    "cut.png": "cannot be decoded",
    "named.jpg": "the file is a PNG",
    "empty.png": "empty",
    "text.png": "not a readable image",
    "outside.png": "leads out of the data folder",
    "pipe.png": "a named pipe",
}


def test_a_faulty_file_is_a_row_with_its_fault_and_the_others_are_predicted(
    run: Result, mixed: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing.png"
    rows = {Path(row["path"]).name: row for row in run.predict(mixed, missing, out=tmp_path / "out")}
    good = {name for name, row in rows.items() if row["fault"] is None}
    assert good == {path.name for path in mixed.glob("good*")}
    assert len(good) == 6
    assert set(rows) == good | set(FAULTS) | {"missing.png"}
    for name, words in {**FAULTS, "missing.png": "does not exist"}.items():
        assert words in rows[name]["fault"], name
        assert rows[name]["class"] is None
        assert rows[name]["score"] is None
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        written = {Path(row["path"]).name: row for row in csv.DictReader(file)}
    assert written["cut.png"]["class"] == ""
    assert written["cut.png"]["fault"] == rows["cut.png"]["fault"]
    assert len(list((tmp_path / "out" / "pictures").iterdir())) == 6


def test_a_pipe_and_a_device_that_are_named_do_not_block(run: Result, mixed: Path) -> None:
    rows = run.predict(mixed / "pipe.png", "/dev/zero", mixed / "good.png")
    assert ["a named pipe" in str(rows[0]["fault"]), "a device" in str(rows[1]["fault"])] == [True, True]
    assert rows[2]["fault"] is None


def test_a_file_that_may_not_be_read_is_a_row(run: Result, mixed: Path) -> None:
    (mixed / "good.png").chmod(0)
    if os.access(mixed / "good.png", os.R_OK):
        pytest.skip("this user may read every file")
    assert "Permission denied" in run.predict(mixed / "good.png", mixed / "good.gif")[0]["fault"]


def test_a_name_that_is_no_utf8_is_written_with_an_escape(run: Result, tmp_path: Path) -> None:
    name = os.fsdecode(b"gr\xfcn.png")
    try:
        write(tmp_path / "in" / name, 1)
    except OSError:
        pytest.skip("the file system takes UTF-8 only")
    run.predict(tmp_path / "in", out=tmp_path / "out")
    assert rb"gr\udcfcn.png," in (tmp_path / "out" / "predictions.csv").read_bytes()


def test_patterns_and_folders_name_each_image_once(run: Result, tmp_path: Path) -> None:
    for name in ("b/2.png", "b/1.png", "a/deep/3.png"):
        write(tmp_path / name, 1)
    given = [tmp_path / "b" / "2.png", f"{tmp_path}/b/*.png", f"{tmp_path}/**/*.png", tmp_path / "b"]
    names = [str(Path(row["path"]).relative_to(tmp_path)) for row in run.predict(*given)]
    assert names == ["b/2.png", "b/1.png", "a/deep/3.png"]


def test_no_image_is_an_error_and_nothing_is_written(run: Result, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    for given, words in (
        ([tmp_path / "empty"], r"no image to predict .*empty.*; name image files"),
        ([tmp_path / "none.png"], "no image to predict: the file does not exist"),
        ([f"{tmp_path}/*.jpg"], "no image to predict: no file matches the pattern"),
        ([], "no image to predict"),
    ):
        with pytest.raises(DataError, match=words):
            run.predict(*given, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_top_below_one_is_refused(run: Result, images: Path) -> None:
    with pytest.raises(ConfigError, match="top is 0"):
        run.predict(images, top=0)


def test_at_most_two_batches_are_in_memory(
    run: Result, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict_module, "_MOST", 7)
    started = 0
    decoded = predict_module._decoded

    def counted(*arguments: Any) -> Any:
        nonlocal started
        started += 1
        return decoded(*arguments)

    monkeypatch.setattr(predict_module, "_decoded", counted)
    trained = read_trained(RunDir.open(run.directory), "last")
    for read, _ in enumerate(predict(trained, [images])):
        assert started <= (read // 7 + 2) * 7
    assert started == 360


def test_a_full_disk_ends_with_a_sentence_and_no_table(
    run: Result, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(predict_module, "_draw", full)
    with pytest.raises(FedlensError, match="the disk is full"):
        run.predict(images / "7", out=tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pictures"]


def test_a_round_without_a_model_names_those_that_are_kept(run: Result, images: Path) -> None:
    best = run.summary["best"]["round"]
    with pytest.raises(RunDirectoryError, match=f"keeps no model of round 99 .*{best}"):
        run.predict(images, round=99)
    with pytest.raises(ConfigError, match="the round is 'first', but must be best, last or a number"):
        run.predict(images, round="first")


def copied(run: Result, to: Path) -> Result:
    shutil.copytree(run.directory, to)
    return load_result(to)


def test_a_run_without_a_model_says_why(run: Result, images: Path, tmp_path: Path) -> None:
    made = copied(run, tmp_path / "run")
    (made.directory / "model.safetensors").unlink()
    summary = made.summary
    for status, words in (("interrupted", "was interrupted"), ("failed", "failed"), ("finished", "has lost")):
        (made.directory / "summary.json").write_text(json.dumps({**summary, "status": status}))
        with pytest.raises(RunDirectoryError, match=f"the run {words}.*fedlens resume"):
            made.predict(images)
    (made.directory / "summary.json").unlink()
    with pytest.raises(RunDirectoryError, match="the run has not ended, so it has no model"):
        made.predict(images)


def test_a_run_without_a_best_model_says_that_the_last_is_used(run: Result, tmp_path: Path) -> None:
    made = copied(run, tmp_path / "run")
    (made.directory / "best.safetensors").unlink()
    trained = read_trained(RunDir.open(made.directory))
    assert trained.round == 4
    assert trained.notes == ("the run has no best round, so this is the last model",)
    with pytest.raises(RunDirectoryError, match=r"the run has no best round .*: 4"):
        read_trained(RunDir.open(made.directory), "best")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "text"])
def test_a_damaged_model_file_is_refused(run: Result, images: Path, tmp_path: Path, damage: str) -> None:
    made = copied(run, tmp_path / "run")
    path = made.directory / "best.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 64
    damaged = {"truncated": content[: len(content) // 2], "flipped": content, "text": b"not a model"}[damage]
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"corrupt|not a readable safetensors") as error:
        made.predict(images)
    assert str(path) in str(error.value)


def test_a_model_file_of_an_earlier_version_is_read(run: Result, images: Path, tmp_path: Path) -> None:
    made = copied(run, tmp_path / "run")
    expected = list(made.predict(images / "5"))
    for name in ("best", "model"):
        path = made.directory / f"{name}.safetensors"
        tree, about = checkpoint.read_model(path)
        for key in set(about) - {"model", "classes", "preprocessing", "dataset"}:
            del about[key]
        preprocessing = json.loads(about["preprocessing"])
        about["preprocessing"] = json.dumps({key: preprocessing[key] for key in ("scale", "mean", "std")})
        checkpoint.write_model(path, tree, about)
    assert list(made.predict(images / "5")) == expected
    trained = read_trained(RunDir.open(made.directory), "last")
    assert (trained.round, trained.licence, trained.kind) == (4, "CC BY 4.0", "classification")


@pytest.mark.parametrize("algorithm", ["fedbn", "local-only"])
def test_a_run_of_personal_models_is_refused(images: Path, tmp_path: Path, algorithm: str) -> None:
    data = {**SETTINGS["data"], "validation": 0.2, "validation_from": "client"}
    made = run_of(
        tmp_path / "run",
        {"name": "small-cnn", "width": 2, "norm": "batch"},
        rounds=1,
        algorithm=algorithm,
        data=data,
    )
    (tmp_path / "cost.json").write_text("{}")
    (tmp_path / "federated-seed0").mkdir()
    (tmp_path / "federated-seed0/config.toml").touch()
    with pytest.raises(RunDirectoryError, match=f"'{algorithm}' trains a model for each client") as refused:
        made.predict(images)
    assert re.search(r"only the initial values of '[\w.]+' and \d+ more parameters", str(refused.value))
    hint = {"fedbn": "algorithm.name = 'fedavg'", "local-only": "the federated run beside it"}[algorithm]
    assert hint in str(refused.value)
    assert "--client ID" in str(refused.value)


@pytest.mark.parametrize("algorithm", ["fedbn", "local-only", "fedgkt"])
def test_the_model_of_one_client_comes_from_the_last_checkpoint(
    images: Path, tmp_path: Path, algorithm: str
) -> None:
    net = {"name": "small-cnn", "width": 2, "norm": "batch"}
    table = {"name": algorithm, "client": net, "cut": "1"} if algorithm == "fedgkt" else algorithm
    data = {**SETTINGS["data"], "validation": 0.2, "validation_from": "client"}
    select = {"name": "fixed", "clients": [0, 1]}
    local = {"lr": 0.1, "batch_size": 32}
    made = run_of(tmp_path / "run", net, rounds=2, algorithm=table, data=data, select=select, local=local)
    loaded = checkpoint.load_latest(made.directory / "checkpoint")
    tree, about = checkpoint.read_model(made.directory / "model.safetensors")
    personal = json.loads(about["personal"])
    files = sorted(path.name for path in made.directory.iterdir())
    for client in ("0", "1"):
        own = loaded.payload["clients"][client]["personal"]
        trained = read_trained(RunDir.open(made.directory), client=client)
        assert trained.tree().keys() == tree.keys()
        for name, value in trained.tree().items():
            assert torch.equal(value, own[name] if name in personal else tree[name])
        assert (trained.round, trained.chosen.name) == (2, "last")
        assert f"client '{client}'" in trained.notes[-1]
    assert any(not torch.equal(own[name], tree[name]) for name in personal)
    assert sorted(path.name for path in made.directory.iterdir()) == files  # reading leaves nothing behind
    rows = [list(made.predict(images / "5", client=client)) for client in ("0", "1")]
    assert rows[0] != rows[1]
    for client, fault in (("2", "never trained"), ("9", "no client '9'")):
        with pytest.raises(FedlensError, match=fault):
            made.predict(images, client=client)
    shutil.rmtree(made.directory / "checkpoint")
    with pytest.raises(RunDirectoryError, match="no checkpoint"):
        made.export(tmp_path / "model.safetensors", client="0")


def test_the_model_of_one_client_comes_from_its_file_if_states_are_on_disk(tmp_path: Path) -> None:
    data = {**SETTINGS["data"], "validation": 0.2, "validation_from": "client"}
    local = {"lr": 0.1, "batch_size": 32}
    trees = []
    for memory in (1024, 1):
        engine = {"name": "inline", "state_memory": memory}
        net = {"name": "mlp", "hidden": 600}  # 1.6 MB a client
        made = run_of(
            tmp_path / str(memory),
            net,
            rounds=1,
            algorithm="local-only",
            data=data,
            local=local,
            engine=engine,
        )
        trees.append(read_trained(RunDir.open(made.directory), client="0").tree())
    assert (tmp_path / "1" / "states").exists()
    assert all(torch.equal(trees[0][name], trees[1][name]) for name in trees[0])


def test_a_client_without_parts_of_its_own_has_no_model(run: Result) -> None:
    with pytest.raises(RunDirectoryError, match="client '0' has no model of its own"):
        read_trained(RunDir.open(run.directory), client="0")


def test_a_finetuned_run_says_which_model_predicts(tmp_path: Path) -> None:
    data = {**SETTINGS["data"], "validation": 0.2, "validation_from": "client"}
    made = run_of(tmp_path / "run", rounds=1, algorithm="finetune", data=data)
    (note,) = read_trained(RunDir.open(made.directory), "last").notes
    assert "the models that clients fine-tune are not kept" in note


def test_a_model_of_a_users_file_needs_the_file(images: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    source = "from torch import nn\n\n\ndef net(input_shape, classes):\n    return nn.Sequential(nn.Flatten(), {})\n"
    file.write_text(source.format("nn.Linear(64, classes)"))
    made = run_of(tmp_path / "run", f"{file}:net", rounds=1)
    again = load_result(tmp_path / "run")
    assert accuracy(again.predict(images, round="last")) == made.metrics[-1]["test_accuracy"]
    renamed = file.rename(tmp_path / "other.py")
    new_process()
    with pytest.raises(ConfigError, match=r"net\.py does not exist"):
        load_result(tmp_path / "run").predict(images)
    renamed.write_text(source.format("nn.Linear(64, classes, bias=False)"))
    renamed.rename(file)
    new_process()
    with pytest.raises(RunDirectoryError, match="was edited since the run trained"):
        load_result(tmp_path / "run").predict(images)
    with pytest.raises(RunDirectoryError, match="now has other weights"):
        load_result(tmp_path / "run", accept_changes=True).predict(images)


def test_a_model_that_was_an_object_is_predicted_with_an_equal_object(images: Path, tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    made = run_of(tmp_path / "run", model(), rounds=1)
    rows = load_result(tmp_path / "run", model=model()).predict(images, round="last")
    assert accuracy(rows) == made.metrics[-1]["test_accuracy"]
    with pytest.raises(
        ConfigError, match=r"load_result\(.*, model=\.\.\.\) with an equal object, then \.predict"
    ):
        load_result(tmp_path / "run").predict(images)


def test_the_licence_of_the_data_is_in_the_run(run: Result) -> None:
    environment = json.loads((run.directory / "environment.json").read_text())
    assert environment["data_licence"] == "CC BY 4.0"
    about = read_metadata(run.directory / "model.safetensors")
    assert (about["licence"], about["round"], about["kind"]) == ("CC BY 4.0", "4", "classification")


def test_an_output_folder_that_is_a_link_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    kept = tmp_path / "elsewhere" / "000001-a.png"
    kept.touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pictures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match="pictures is a symbolic link"):
        Output(tmp_path / "out", force=True).make()
    assert kept.exists()
