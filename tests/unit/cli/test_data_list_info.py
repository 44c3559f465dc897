"""`fedlens data list` and `fedlens data info`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field
from typer.testing import CliRunner

from fedlens.base.registry import settings_model
from fedlens.cli.data import data, describe, type_name
from fedlens.data.catalogue import CATALOGUE
from tests.unit.cli.conftest import ROOT

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with all of CIFAR-10 (its names, at least) and the test list of Landmarks-User-160k."""
    monkeypatch.delenv("FEDLENS_DATA", raising=False)
    for name in (
        *(f"cifar-10-batches-bin/data_batch_{k}.bin" for k in range(1, 6)),
        "cifar-10-batches-bin/test_batch.bin",
        "federated_vision_datasets/landmarks-user-160k/test.csv",
    ):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path / "data"


def ask(*arguments: object) -> str:
    answer = runner.invoke(data, [str(one) for one in arguments])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_list_says_what_is_here_by_task(folder: Path) -> None:
    told = ask("list", "--data-dir", folder)
    assert told.splitlines()[0] == f"data directory: {folder}"
    assert row(told, "cifar10")[:5] == ["cifar10", "yes", "50,000", "10,000", "10"]
    assert row(told, "cifar100")[:2] == ["cifar100", "no"]
    assert row(told, "landmarks-user-160k")[1:7] == ["in", "part", "164,172", "19,526", "2,028", "1,262"]
    assert row(told, "digits")[1:3] == ["built", "in"]
    assert "CC BY-NC 4.0" in told
    heads = [
        line
        for line in told.splitlines()
        if line in ("classification", "segmentation", "detection", "language", "your own data")
    ]
    assert heads == ["classification", "segmentation", "detection", "language", "your own data"]
    own = told[told.index("your own data") : told.index("how to get")]
    assert row(own, "voc-xml")[1] == "detection"
    for name in CATALOGUE:
        assert row(told, name)


def test_list_says_unknown_where_it_is_not_known(folder: Path) -> None:
    told = ask("list", "--data-dir", folder)
    assert row(told, "femnist")[2:7] == ["unknown", "unknown", "62", "3,550", "unknown"]
    assert row(told, "cifar10")[5] == "none"
    assert row(told, "inaturalist-2017")[5] == "unknown"
    assert row(told, "digits")[6:8] == ["none", "nothing"]
    assert "Places' terms of use" in next(line for line in told.splitlines() if line.startswith("places365"))


def test_list_says_how_to_get_what_is_not_here(folder: Path) -> None:
    told = ask("list", "--data-dir", folder)
    how = told[told.index("how to get the missing datasets") :]
    fetched = next(line for line in how.splitlines() if "--download" in line)
    assert fetched.startswith("- mnist, fashion-mnist, cifar100, emnist, ")
    assert "cifar10," not in how
    assert "- imagenet: register at image-net.org" in how
    assert "- landmarks-user-160k: fetch images_000.tar" in how
    assert "- gld23k: fetch images_000.tar" in how
    assert "digits" not in how
    assert "image-folder" not in how


def test_the_data_folder_is_the_usual_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLENS_DATA", str(folder))
    assert row(ask("list"), "cifar10")[1] == "yes"
    assert row(ask("list", "--data-dir", folder / "nowhere"), "cifar10")[1] == "no"


def test_list_as_json(folder: Path) -> None:
    told = json.loads(ask("list", "--data-dir", folder, "--json"))
    assert told["data_dir"] == str(folder)
    assert [one["name"] for one in told["datasets"]] == list(CATALOGUE)
    found = {one["name"]: one for one in told["datasets"]}
    assert found["cifar10"]["here"]["state"] == "here"
    assert found["cifar10"]["train"] == 50_000
    landmarks = found["landmarks-user-160k"]
    path = folder / "federated_vision_datasets/landmarks-user-160k/test.csv"
    assert landmarks["here"]["state"] == "partly"
    assert landmarks["here"]["found"] == [str(path)]
    assert "federated_vision_datasets/landmarks-user-160k/federated_train.csv" in landmarks["here"]["lacking"]
    assert (landmarks["clients"], landmarks["unit"]) == (1_262, "user")


def test_info_says_all_of_one_dataset(folder: Path) -> None:
    told = ask("info", "cifar10", "--data-dir", folder)
    for part in (
        "cifar10: small photographs, 32x32 colour",
        "none stated; the author asks for a citation",
        "Krizhevsky 2009",
        "170 MB",
        f"on this machine: yes; looked in {folder}",
        "cifar-10-batches-bin/test_batch.bin",
    ):
        assert part in told
    assert row(told, "training")[-1] == "50,000"
    assert "missing  " not in told


def test_info_says_what_is_not_there(folder: Path) -> None:
    told = ask("info", "mnist", "--data-dir", folder)
    assert f"on this machine: no; looked in {folder}" in told
    assert told.count("missing  ") == 4
    assert "MNIST/raw/train-images-idx3-ubyte or MNIST/raw/train-images-idx3-ubyte.gz" in told


def test_info_shows_the_settings_of_the_reader(folder: Path) -> None:
    told = ask("info", "synthetic", "--data-dir", folder)
    rows = told[told.index("settings in data.dataset") :].splitlines()
    assert rows[1].split()[:3] == ["setting", "type", "default"]
    names = list(settings_model_of("synthetic").model_fields)
    assert [line.split()[0] for line in rows[2:]] == names
    assert "on this machine" not in told
    assert ask("info", "digits", "--data-dir", folder).endswith('name = "digits"\nnone\n')


def settings_model_of(name: str):
    from fedlens.data.datasets.registry import DATASETS

    return settings_model(DATASETS.find(name))


def test_info_as_json(folder: Path) -> None:
    told = json.loads(ask("info", "synthetic", "--data-dir", folder, "--json"))
    assert told["name"] == "synthetic"
    assert told["here"] == {"state": "built in", "found": [], "lacking": []}
    settings = {one["name"]: one for one in told["settings"]}
    fields = settings_model_of("synthetic").model_fields
    assert list(settings) == list(fields)
    for name, field in fields.items():
        assert settings[name]["default"] == str(field.default)
        assert settings[name]["description"] == field.description


@pytest.mark.parametrize(
    ("wrong", "right"), [("cifar-10", "cifar10"), ("landmark-user-160k", "landmarks-user-160k")]
)
def test_a_wrong_name_is_answered_with_the_nearest_right_one(wrong: str, right: str) -> None:
    answer = runner.invoke(data, ["info", wrong])
    assert answer.exit_code == 2
    assert f"unknown dataset '{wrong}'; did you mean '{right}'" in answer.stderr.replace("\n", "")


def test_a_reader_of_ones_own_is_described_too(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def birds(root, download, seed, *, size: int = 32): ...\n")
    told = ask("info", f"{path}:birds", "--data-dir", folder)
    assert "a reader of your own" in told
    assert row(told, "size")[1:3] == ["int", "32"]


def test_types_are_written_for_a_person() -> None:
    def factory(
        *,
        kind: Literal["a", "b"] = "a",
        share: Annotated[float, Field(gt=0, le=1, description="how much")] = 0.5,
        many: Annotated[int, Field(ge=1)],
        side: Annotated[int, Field(ge=1, le=9)] | tuple[int, int] | None = None,
        names: list[str] | None = None,
        flag: bool = False,
        path: Annotated[str, Field(min_length=1)] = "x",
    ) -> None: ...

    found = {one.name: (one.type, one.default, one.description) for one in describe(settings_model, factory)}
    assert found == {
        "kind": ("a | b", "a", ""),
        "share": ("float (> 0, <= 1)", "0.5", "how much"),
        "many": ("int (>= 1)", None, ""),
        "side": ("int (>= 1, <= 9) | [int, int] | none", "none", ""),
        "names": ("[text] | none", "none", ""),
        "flag": ("bool", "false", ""),
        "path": ("text (length >= 1)", "x", ""),
    }
    assert type_name(tuple[int, ...]) == "[int, ...]"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["list"], ["list", "--json"], ["info", "cifar10"], ["info", "synthetic", "--json"]],
    ids=" ".join,
)
def test_looking_at_data_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom fedlens.cli.data import data\n"
        "try: data()\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "FEDLENS_DATA": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split())
    assert "fedlens.cli.data" in loaded
    heavy = {"torch", "torchvision", "plotly", "pandas", "sklearn", "scipy"}
    if arguments[0] != "info":
        heavy |= {"numpy", "PIL"}
    assert not loaded & heavy
