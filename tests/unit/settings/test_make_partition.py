from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.shell_command import shell_command
from fedlens.data.partition.partition import Partition
from fedlens.run.build import build
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source, override
from fedlens.settings.make_partition import check_free, make_partition, run_settings
from fedlens.settings.plan import plan

SMALL = ("dataset.train=60", "dataset.test=20", "dataset.shape=[1,4,4]")


def made(*changes: str, dataset: str = "synthetic", partition: str = "iid", **more: Any) -> Partition:
    given = SMALL if dataset == "synthetic" else ()
    return make_partition(dataset, partition, [*given, *changes], root=Path("nowhere"), **more).partition


SYNTHETIC = {"name": "synthetic", "train": 60, "test": 20, "shape": [1, 4, 4]}


def of_a_run(
    *changes: str, partition: dict[str, Any], seeds: dict[str, int] | None = None, dataset: Any = SYNTHETIC
) -> Partition:
    values: dict[str, Any] = {
        "rounds": 1,
        "model": "linear",
        "local": {"lr": 0.1},
        "seeds": seeds or {},
        "data": {"dataset": dataset, "partition": partition},
    }
    source = override(Source(values), changes)
    return build(plan(read_config(source.values, source.locate), source), Path("nowhere"), False).partition


@pytest.mark.parametrize(
    "partition",
    [
        {"name": "iid", "clients": 7},
        {"name": "dirichlet", "clients": 5, "alpha": 0.3, "prior": "data"},
        {"name": "shards", "clients": 6},
    ],
    ids=lambda table: table["name"],
)
@pytest.mark.parametrize("seed", [0, 5])
def test_it_is_the_partition_of_a_run(partition: dict[str, Any], seed: int) -> None:
    changes = [f"{key}={value}" for key, value in partition.items() if key != "name"]
    alone = made(*changes, partition=partition["name"], seed=seed)
    run = of_a_run(partition=partition, seeds={"partition": seed})
    assert alone.digest == run.digest
    assert alone.spec == run.spec
    assert alone.census is not None
    assert run.census is not None
    assert np.array_equal(alone.census.dense(), run.census.dense())
    assert alone.digest != made(*changes, partition=partition["name"], seed=seed + 1).digest


def test_data_that_are_drawn_come_from_the_seed_of_the_data() -> None:
    partition = {"name": "dirichlet", "clients": 4, "alpha": 0.1}
    changes = ("clients=4", "alpha=0.1")
    run = of_a_run(partition=partition, seeds={"partition": 3, "data": 9})
    assert made(*changes, partition="dirichlet", seed=3, data_seed=9).digest == run.digest
    assert made(*changes, partition="dirichlet", seed=3).digest != run.digest


def test_a_run_takes_the_file_with_the_options_that_are_printed(tmp_path: Path) -> None:
    p = made("clients=5", "alpha=0.2", partition="dirichlet", seed=4, data_seed=9)
    path = tmp_path / 'it\'s my "split" of ünïcode 🩻 & $HOME.npz'
    p.save(path)
    words = shlex.split(shell_command("run", "RECIPE", changes=run_settings(path, data_seed=9)))
    assert words[3::2] == ["--set", "--set"]
    run = of_a_run(*words[4::2], partition={"name": "iid", "clients": 2})
    assert run.digest == p.digest
    assert run.spec["of"] == p.spec


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset": "synthetik"}, "unknown dataset 'synthetik' (DATASET); did you mean 'synthetic'."),
        ({"partition": "idd"}, "unknown partition 'idd' (PARTITION); did you mean 'iid'."),
        ({"changes": ["client=3"]}, "has no setting 'client' (--set client); did you mean 'clients'."),
        ({"changes": ["clients=x"]}, "'clients' is 'x', but must be a whole number (--set clients)."),
        (
            {"changes": ["clients=99"]},
            "99 clients are more than the 60 examples (--set clients); set clients to at most 60",
        ),
        (
            {"changes": ["clients=2", "dataset.trein=5"]},
            "no setting 'trein' (--set dataset.trein); did you mean 'train'",
        ),
        ({"changes": ["clients=2", "name=shards"]}, "name it as the argument PARTITION"),
        ({"changes": ["clients=2", "dataset.name=mnist"]}, "name it as the argument DATASET"),
        ({"changes": ["clients"]}, "'clients' is not key=value (--set)"),
        (
            {"partition": "dirichlet", "changes": []},
            "the partition 'dirichlet' needs 'clients' (number of clients) and 'alpha' (concentration: 0 gives "
            "one class per client, inf gives the prior); add --set clients=VALUE --set alpha=VALUE.",
        ),
        ({"partition": "nowhere.py:f", "changes": []}, "the file nowhere.py does not exist (PARTITION)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said_with_its_place(arguments: dict[str, Any], said: str) -> None:
    given = {"changes": ["clients=3"], **arguments}
    with pytest.raises(ConfigError) as caught:
        made(*given.pop("changes"), **given)
    assert said in str(caught.value)


def test_the_dataset_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="the first argument names the dataset"):
        make_partition("digits", "iid", ["clients=2", "dataset=mnist"], root=Path())


OWN = """
import numpy as np
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.partition.partition import Partition

def scans(root, download, seed, *, size: int = 12):
    half = Examples(np.zeros((size, 1, 2, 2), np.uint8), np.arange(size) % 3,
                    {"client": np.array([f"h{k % 2}" for k in range(size)])})
    return Dataset("scans", half, half, ("a", "b", "c"), (0.5,), (0.5,), "", str(root))

def halves(table, seed, *, flip: bool = False):
    owners = np.arange(len(table)) % 2
    return Partition.of_owners(1 - owners if flip else owners, ["left", "right"], spec={"name": "halves"})

def broken(table, seed):
    return 1 / 0

def needs(table, seed, *, depth: int):
    return None

def plain(table, seed, *, what):
    return None
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "own.py")


def test_ones_own_dataset_and_partition(own: str) -> None:
    p = make_partition(
        f"{own}:scans", f"{own}:halves", ["flip=true", "dataset.size=10"], root=Path()
    ).partition
    assert (p.ids, p[0].tolist(), p.dataset) == (("left", "right"), [1, 3, 5, 7, 9], "scans")
    assert p.census is not None
    assert p.census.classes == ("a", "b", "c")
    assert make_partition(f"{own}:scans", "natural", root=Path()).partition.ids == ("h0", "h1")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "failed: ZeroDivisionError: division by zero (own.py, line 16) (PARTITION)"),
        ("needs", "needs 'depth' (not described); add --set depth=VALUE"),
        ("plain", "cannot be read from its signature"),
        ("nothing", "does not define 'nothing' (PARTITION)"),
    ],
)
def test_ones_own_that_is_wrong(own: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_partition(f"{own}:scans", f"{own}:{name}", root=Path())
    assert said in str(caught.value)


def test_images_that_a_run_leaves_out_are_left_out(tmp_path: Path) -> None:
    """So the positions are those of the run. Here files look sound until they are decoded."""
    noise = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for k in range(20):
            pixels = noise.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{k:02d}.png")
    for k in range(5):
        path = tmp_path / "cat" / f"{k:02d}.png"
        whole = path.read_bytes()
        path.write_bytes(whole[:1000] + bytes(500) + whole[1500:])
    changes = ["clients=3", f"dataset.path={tmp_path}", "dataset.on_error=skip", "dataset.size=8"]
    p = make_partition("image-folder", "iid", changes, root=Path()).partition
    dataset = {"name": "image-folder", "path": str(tmp_path), "on_error": "skip", "size": 8}
    run = of_a_run(partition={"name": "iid", "clients": 3}, dataset=dataset, seeds={"partition": 0})
    assert p.digest == run.digest
    assert p.indices.max() < 35


def test_a_free_place(tmp_path: Path) -> None:
    check_free(tmp_path / "p.npz", force=False)
    (tmp_path / "p.npz").touch()
    check_free(tmp_path / "p.npz", force=True)
    with pytest.raises(ConfigError, match=r"the file already exists.*--force"):
        check_free(tmp_path / "p.npz", force=False)
    with pytest.raises(ConfigError, match="the path is a directory"):
        check_free(tmp_path, force=True)


def test_missing_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="MNIST not found in"):
        make_partition("mnist", "iid", ["clients=2"], root=tmp_path)
