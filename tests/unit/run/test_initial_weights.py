"""Runs that start from weights in a file or in a run: what they say, keep and need."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from fedlens import Experiment, load_result, resume
from fedlens.base.errors import ConfigError, DataError, FedlensError, RunDirectoryError
from fedlens.cli.main import app
from fedlens.run import client_data
from fedlens.run.checkpoint import read_model
from fedlens.run.progress import ProgressBase
from tests.covering import covering

SMALL = {"name": "small-cnn", "width": 4, "norm": "batch"}


class Listens(ProgressBase):
    """Keeps the notes of a run; stops it after a round."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.notes: list[str] = []
        self.stop_after = stop_after

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def round_done(self, line: Any) -> None:
        if line["round"] == self.stop_after:
            raise KeyboardInterrupt


def experiment(model: Any, rounds: int = 2, algorithm: str = "fedavg", **more: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": rounds,
        "seed": 5,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 20}},
        "model": model,
        "algorithm": algorithm,
        "select": {"clients_per_round": 3},
        "local": {"lr": 0.1, "steps": 2, "batch_size": 8},
        "engine": "inline",
        "checkpoint": {"seconds": 0},
    }
    return Experiment(**{**settings, **more})


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rounds, whose model others start from."""
    return experiment(SMALL).run(tmp_path_factory.mktemp("runs") / "first").directory


@pytest.fixture
def file(first: Path, tmp_path: Path) -> Path:
    """A file of weights that can be removed."""
    return shutil.copy(first / "model.safetensors", tmp_path / "weights.safetensors")


def test_a_bare_name_is_looked_for_in_the_data_folder_too(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, data = tmp_path / "here", tmp_path / "data"
    here.mkdir()
    (data / "weights").mkdir(parents=True)
    there = shutil.copy(first / "model.safetensors", data / "weights" / "w.safetensors")
    monkeypatch.chdir(here)
    run = experiment({**SMALL, "weights": "w.safetensors"}).run(tmp_path / "a", data_dir=data, report=False)
    assert run.config["model"]["weights"] == str(there)
    with pytest.raises(ConfigError, match="weights file not found"):
        experiment({**SMALL, "weights": "no/w.safetensors"}).run(tmp_path / "b", data_dir=data, report=False)
    shutil.copy(first / "model.safetensors", here / "w.safetensors")
    own = experiment({**SMALL, "weights": "w.safetensors"}).run(tmp_path / "c", data_dir=data, report=False)
    assert own.config["model"]["weights"] == str(here / "w.safetensors")


def evaluated(run: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["test_loss"], line["test_accuracy"]) for line in lines]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return read_model(run / "model.safetensors")[0]


def same(one: Path, other: Path) -> bool:
    left, right = weights_of(one), weights_of(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_round_zero_has_the_numbers_that_the_file_was_saved_with(
    first: Path, file: Path, tmp_path: Path
) -> None:
    listener = Listens()
    run = experiment({**SMALL, "weights": str(file)}).run(tmp_path / "run", progress=listener)
    assert evaluated(run.directory)[0] == evaluated(first)[-1]
    said = f"weights from {file}: 14 of 14 leaves loaded"
    assert said in listener.notes
    assert said in run.summary["notes"]


def test_a_run_starts_from_a_finished_run(first: Path, tmp_path: Path) -> None:
    run = experiment({**SMALL, "weights": f"run:{first}"}).run(tmp_path / "run")
    assert evaluated(run.directory)[0] == evaluated(first)[-1]


def test_the_run_keeps_the_path_the_digest_and_what_matched(file: Path, tmp_path: Path) -> None:
    import hashlib

    run = experiment({**SMALL, "weights": str(file)}).run(tmp_path / "run").directory
    model = Experiment.load(run / "config.toml").config.model
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (model["weights"], model["weights_sha256"]) == (str(file), digest)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["weights"] == {
        "source": str(file), "sha256": digest, "loaded": 14, "leaves": 14, "resized": [], "drawn": [], "unused": []
    }  # fmt: skip
    about = json.loads(read_model(run / "model.safetensors")[1]["model"])
    assert "weights" not in json.dumps(about), "a model file needs no other file"


def test_without_weights_a_run_keeps_no_initial_model(first: Path) -> None:
    assert not (first / "initial.safetensors").exists()
    assert "weights" not in json.loads((first / "environment.json").read_text())


def test_a_run_s_own_settings_repeat_it_and_notice_another_file(file: Path, tmp_path: Path) -> None:
    run = experiment({**SMALL, "weights": str(file)}).run(tmp_path / "run").directory
    again = Experiment.load(run / "config.toml")
    assert same(run, again.run(tmp_path / "again").directory)
    tensors = load_file(file)
    save_file({name: value + 1 for name, value in tensors.items()}, file)
    with pytest.raises(ConfigError, match=r"has the SHA-256 .*model\.weights_sha256"):
        again.run(tmp_path / "third")
    assert not (tmp_path / "third").exists()
    other = again.with_settings(f"model.weights={file}")
    assert other.run(tmp_path / "other").summary["status"] == "finished"


@pytest.mark.parametrize(("algorithm", "engine"), covering(["fedavg", "fedbn"], ["inline", "processes"]))
def test_a_resumed_run_needs_no_file_and_gives_the_same_bits(
    file: Path, tmp_path: Path, algorithm: str, engine: str, quick_workers: None
) -> None:
    data = {
        "dataset": "digits", "partition": {"name": "iid", "clients": 20}, "validation": 0.2, "validation_from": "client"
    }  # fmt: skip
    made = experiment(
        {**SMALL, "weights": str(file)},
        rounds=4,
        algorithm=algorithm,
        data=data,
        engine={"name": engine, "workers": 2} if engine == "processes" else engine,
    )
    whole = made.run(tmp_path / "whole").directory
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "cut", progress=Listens(stop_after=2))
    file.unlink()
    listener = Listens()
    resume(tmp_path / "cut", progress=listener)
    assert same(whole, tmp_path / "cut")
    assert f"weights from {file}: 14 of 14 leaves loaded" in listener.notes
    for name in ("metrics.jsonl",):
        lines = [
            [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "elapsed")} for line in text]
            for text in ((run / name).read_text().splitlines() for run in (whole, tmp_path / "cut"))
        ]
        assert lines[0] == lines[1]


def test_a_run_that_was_killed_before_its_first_round_resumes_without_the_file(
    file: Path, tmp_path: Path
) -> None:
    made = experiment({**SMALL, "weights": str(file)})
    whole = made.run(tmp_path / "whole").directory
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "cut", progress=Listens(stop_after=0))
    shutil.rmtree(tmp_path / "cut" / "checkpoint")
    file.unlink()
    resume(tmp_path / "cut")
    assert same(whole, tmp_path / "cut")


def test_a_damaged_copy_of_the_initial_model_ends_resume(file: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        experiment({**SMALL, "weights": str(file)}).run(tmp_path / "cut", progress=Listens(stop_after=1))
    copy = tmp_path / "cut" / "initial.safetensors"
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    with pytest.raises(DataError, match=r"initial\.safetensors"):
        resume(tmp_path / "cut")


def test_resume_notices_other_weights_in_the_settings(file: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        experiment({**SMALL, "weights": str(file)}).run(tmp_path / "cut", progress=Listens(stop_after=1))
    config = tmp_path / "cut" / "config.toml"
    config.write_text(config.read_text().replace(str(file), str(file.with_name("other.pt"))))
    with pytest.raises(RunDirectoryError, match=r"edited since round 1: model\.weights is .*, was"):
        resume(tmp_path / "cut")


def test_two_files_give_two_experiments(file: Path, tmp_path: Path) -> None:
    digests = set()
    for number in range(2):
        save_file({name: value + number for name, value in load_file(file).items()}, file)
        run = experiment({**SMALL, "weights": str(file)}, rounds=1).run(tmp_path / f"run{number}").directory
        digests.add(Experiment.load(run / "config.toml").config.model["weights_sha256"])
    assert len(digests) == 2


def test_another_engine_gives_the_same_bits(file: Path, tmp_path: Path, quick_workers: None) -> None:
    model = {**SMALL, "weights": str(file)}
    one = experiment(model).run(tmp_path / "one").directory
    two = experiment(model, engine={"name": "processes", "workers": 2}).run(tmp_path / "two").directory
    assert same(one, two)


def test_a_relative_path_is_looked_for_beside_the_settings_too(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "study"
    study.mkdir()
    shutil.copy(first / "model.safetensors", study / "start.safetensors")
    text = (
        (first / "config.toml")
        .read_text()
        .replace('name = "small-cnn"', 'name = "small-cnn"\nweights = "{}"')
    )
    monkeypatch.chdir(tmp_path)
    for given in ("start.safetensors", f"run:{Path('..') / first.name}"):
        shutil.copytree(first, tmp_path / first.name, dirs_exist_ok=True)
        (study / "a.toml").write_text(text.format(given))
        run = Experiment.load("study/a.toml").run(tmp_path / f"run-{len(given)}").directory
        assert evaluated(run)[0] == evaluated(first)[-1]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"weights": "none.pt"}, "weights file not found"),
        ({"weights": "."}, "it is a directory"),
        ({"weights": "run:none"}, "run directory not found"),
        ({"weights": "imagenet"}, "no ImageNet weights are known for this model"),
        ({"weights": ""}, "weights"),
        ({"weights": 3}, "weights"),
        ({"weights_sha256": "abc"}, "weights_sha256"),
        ({"weights_partial": "yes"}, "weights_partial"),
        ({"weights_partial": True}, "needs model.weights"),
        ({"weight": "a.pt"}, "did you mean 'weights'"),
    ],
)
def test_wrong_weights_start_nothing(
    tmp_path: Path, model: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedlensError) as error:
        experiment({**SMALL, **model}).run(tmp_path / "run")
    assert says in str(error.value)
    assert "model.w" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_wrong_file_is_an_error_before_the_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_data, "loaded", lambda *_: pytest.fail("the data were read"))
    (tmp_path / "a.safetensors").write_bytes(b"\x08")
    with pytest.raises(FedlensError, match="truncated or corrupt"):
        experiment({**SMALL, "weights": str(tmp_path / "a.safetensors")}).run(tmp_path / "run")


def test_a_pickle_with_code_starts_nothing_on_the_command_line(first: Path, tmp_path: Path) -> None:
    import os

    class Planted:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "it-ran"),)

    torch.save({"w": Planted()}, tmp_path / "evil.pth")
    arguments = ["run", str(first / "config.toml"), "--out", str(tmp_path / "run")]
    answer = CliRunner().invoke(app, [*arguments, "--set", f"model.weights={tmp_path / 'evil.pth'}"])
    assert answer.exit_code == 2
    assert "ran nothing of it" in answer.stderr
    assert not (tmp_path / "it-ran").exists()
    assert not (tmp_path / "run").exists()


def test_none_on_the_command_line_starts_from_random_weights(first: Path, tmp_path: Path) -> None:
    (tmp_path / "from.toml").write_text(
        (first / "config.toml").read_text().replace("[model]", f"[model]\nweights = 'run:{first}'")
    )
    for name, more in (("file", []), ("none", ["--set", "model.weights=none"])):
        arguments = ["run", str(tmp_path / "from.toml"), "--out", str(tmp_path / name), *more]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (tmp_path / "file/initial.safetensors").exists()
    assert not (tmp_path / "none/initial.safetensors").exists()
    assert (
        "weights" not in (tmp_path / "none/config.toml").read_text().partition("[model]")[2].partition("[")[0]
    )
    drawn, same = (read_model(run / "model.safetensors")[0] for run in (first, tmp_path / "none"))
    assert all(torch.equal(value, same[name]) for name, value in drawn.items())


class Own(nn.Module):
    """A user's network, which has a setting `weights` of its own."""

    def __init__(self, classes: int, weights: str | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(64, classes)
        if weights == "ones":
            nn.init.ones_(self.fc.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(images.flatten(1))


def made_with(classes: int, **settings: Any) -> nn.Module:
    """A user's function that passes settings on."""
    return Own(classes, **settings)


@pytest.mark.parametrize("name", [Own, made_with])
def test_a_model_s_own_setting_comes_first_unless_the_value_names_a_file(tmp_path: Path, name: Any) -> None:
    own = experiment({"name": name, "weights": "ones"}, rounds=1).run(tmp_path / "own")
    assert not (own.directory / "initial.safetensors").exists()
    save_file(
        {"fc.weight": torch.full((10, 64), 2.0), "fc.bias": torch.zeros(10)}, tmp_path / "a.safetensors"
    )
    run = experiment({"name": name, "weights": f"{tmp_path}/a.safetensors"}, rounds=1).run(tmp_path / "file")
    initial = read_model(run.directory / "initial.safetensors")[0]
    assert initial["fc.weight"].unique().tolist() == [2.0]
    assert load_result(run.directory).model.fc.weight.shape == (10, 64)


def test_a_model_that_was_given_as_an_object_takes_a_file(tmp_path: Path) -> None:
    save_file(
        {"fc.weight": torch.full((10, 64), 2.0), "fc.bias": torch.zeros(10)}, tmp_path / "a.safetensors"
    )
    run = experiment({"name": Own(10), "weights": str(tmp_path / "a.safetensors")}, rounds=1).run(
        tmp_path / "run"
    )
    assert read_model(run.directory / "initial.safetensors")[0]["fc.weight"].unique().tolist() == [2.0]
