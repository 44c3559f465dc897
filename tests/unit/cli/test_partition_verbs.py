"""`fedlens partition make`, `show` and `plot`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedlens.cli.main import app
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.registry import PARTITIONS
from fedlens.data.table import Table
from fedlens.data.vertical.feature_partition import partition_features
from fedlens.results.figures.partition_figures import places_map, read_places_map
from tests.unit.results.fake_run import class_counts, make_partition, make_run

Process = Callable[..., subprocess.CompletedProcess[str]]
DIGITS = ("digits", "dirichlet", "--set", "clients=5", "--set", "alpha=0.1")


def partition(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["partition", *map(str, arguments)])


TEXTS = """
import numpy as np
from fedlens.data.dataset import Dataset, Examples

def texts(root, download, seed):
    split = Examples(np.zeros((6, 3), np.int16), np.array([0, 1, 0, 1, 0, 1]))
    return Dataset("letters", split, split, ("a", "b"), (), (), "none", "made up")
"""


def rows(answer: Result) -> dict[str, str]:
    """The table that was printed."""
    pairs = (re.split(r"  +", line, maxsplit=1) for line in answer.stdout.splitlines() if "  " in line)
    return dict(pair for pair in pairs if len(pair) == 2)


def test_make_saves_it_and_says_what_it_made(tmp_path: Path) -> None:
    out = tmp_path / "new" / "split.npz"
    answer = partition("make", *DIGITS, "--seed", 3, "--out", out)
    assert answer.exit_code == 0, answer.output
    p = Partition.load(out)
    assert (len(p), p.dataset, p.spec["alpha"], p.spec["seed"]) == (5, "digits", 0.1, 3)
    assert p.census is not None
    told = rows(answer)
    assert (told["Clients"], told["Digest"]) == ("5", p.digest)
    assert told["EMD, weighted mean"] == f"{round(p.census.emd(), 4):.4g}"
    assert answer.stdout.splitlines()[-2] == f"saved: {out}"


def test_the_last_line_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a shell, after the name of a recipe: the run has the partition."""
    monkeypatch.chdir(tmp_path)
    last = partition("make", *DIGITS, "--set", "clients=20", "--out", "my split.npz").stdout.splitlines()[-1]
    words = shlex.split(last.rpartition("same dataset: ")[2])
    assert words[:3] == ["fedlens", "run", "RECIPE"]
    run = CliRunner().invoke(app, ["run", "digits", *words[3:], "--rounds", "1", "--out", "run", "-q"])
    assert run.exit_code == 0, run.output
    digest = json.loads((tmp_path / "run" / "summary.json").read_text())["partition"]["digest"]
    assert digest == Partition.load("my split.npz").digest == rows(partition("show", "run"))["Digest"]


def test_the_line_names_the_seed_of_data_that_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed would draw other images, and the partition would be of none of them."""
    monkeypatch.chdir(tmp_path)
    small = ["--set", "dataset.train=60", "--set", "dataset.test=20", "--set", "dataset.shape=[1, 8, 8]"]
    answer = partition("make", "synthetic", "iid", *small, "--set", "clients=3", "--out", "p.npz")
    words = shlex.split(answer.stdout.splitlines()[-1].rpartition("same dataset: ")[2])[3:]
    assert words[-1].startswith("seeds.data=")
    data = "data.dataset={name='synthetic', train=60, test=20, shape=[1, 8, 8]}"
    settings = [
        "--set",
        data,
        "--set",
        "model=linear",
        "--set",
        "seed=5",
        "--set",
        "select.clients_per_round=3",
        "--rounds",
        "1",
        "-q",
    ]
    run = CliRunner().invoke(app, ["run", "digits", *settings, *words, "--out", "run"])
    assert run.exit_code == 0, run.output
    other = CliRunner().invoke(app, ["run", "digits", *settings, *words[:-2], "--out", "other"])
    assert other.exit_code == 2
    assert "the training examples differ from those that the partition was made from" in other.stderr
    assert not (tmp_path / "other").exists()


def test_a_partition_of_texts_is_offered_for_training_and_has_no_shifts_of_images(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(TEXTS)
    answer = partition("make", f"{own}:texts", "iid", "--set", "clients=2", "--out", tmp_path / "p.npz")
    assert answer.exit_code == 0, answer.output
    assert "to train on it, use a recipe with the same dataset: fedlens run RECIPE" in " ".join(
        answer.stdout.split()
    )
    told = partition("make", f"{own}:texts", "feature", "--set", "clients=2", "--out", tmp_path / "q.npz")
    assert told.exit_code == 2
    assert "'letters' is text, which has no brightness" in " ".join(told.stderr.split())
    assert not (tmp_path / "q.npz").exists()


def test_make_as_json(tmp_path: Path) -> None:
    out = tmp_path / "p.npz"
    answer = partition("make", *DIGITS, "--data-seed", 4, "--out", out, "--json")
    told = json.loads(answer.stdout)
    assert (told["clients"], told["file"], told["digest"]) == (5, str(out), Partition.load(out).digest)
    assert told["run"].endswith("--set seeds.data=4")


def test_make_replaces_nothing_unless_told_to(tmp_path: Path) -> None:
    out = tmp_path / "p.npz"
    assert partition("make", *DIGITS, "--out", out).exit_code == 0
    before = out.read_bytes()
    answer = partition("make", *DIGITS, "--seed", 1, "--out", out)
    assert answer.exit_code == 2
    assert (
        answer.stderr
        == f"error: the file already exists ({out}); choose another name, or pass --force to replace it.\n"
    )
    assert out.read_bytes() == before
    assert partition("make", *DIGITS, "--seed", 1, "--out", out, "--force").exit_code == 0
    assert out.read_bytes() != before


def test_a_make_that_fails_leaves_nothing(tmp_path: Path) -> None:
    answer = partition("make", "digits", "dirichlet", "--set", "client=5", "--out", tmp_path / "p.npz")
    assert answer.exit_code == 2
    assert "has no setting 'client' (--set client); did you mean 'clients'." in answer.stderr
    assert not list(tmp_path.iterdir())


def test_show_as_json_has_the_agreed_keys(tmp_path: Path) -> None:
    p = make_partition(np.array([[3, 1], [0, 0], [0, 4]]), spec={"name": "own", "alpha": float("inf")})
    p.save(tmp_path / "p.npz")
    answer = partition("show", tmp_path / "p.npz", "--json")
    told = json.loads(answer.stdout, parse_constant=lambda word: pytest.fail(word))
    assert told == {
        "dataset": "digits",
        "spec": {"name": "own", "alpha": "inf"},
        "digest": p.digest,
        "clients": 3,
        "examples": 8,
        "sizes": [4, 0, 4],
        "classes_per_client": [2, 0, 1],
        "emd": 0.75,
        "client_emds": [0.75, None, 0.75],
        "imbalance": {
            "largest_over_mean": 1.5,
            "coefficient_of_variation": pytest.approx(0.5**0.5),
            "gini": pytest.approx(1 / 3),
        },
        "features": {},
    }


def test_show_without_a_census(tmp_path: Path) -> None:
    Partition.of_owners([0, 0, 1], 2).save(tmp_path / "p.npz")
    told = json.loads(partition("show", tmp_path / "p.npz", "--json").stdout)
    assert (told["emd"], told["classes_per_client"], told["client_emds"]) == (None, None, None)
    answer = partition("show", tmp_path / "p.npz")
    assert answer.exit_code == 0
    assert rows(answer)["Examples per client"] == "min 1, 25% 1.25, median 1.5, 75% 1.75, max 2"
    assert "EMD" not in answer.stdout


def test_show_takes_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, counts=class_counts(7))
    assert rows(partition("show", run))["Clients"] == "7"
    (run / "partition.npz").unlink()
    answer = partition("show", run)
    assert answer.exit_code == 2
    assert f"start it with 'fedlens resume {run}'" in answer.stderr


@pytest.mark.parametrize("verb", [("show",), ("show", "--json"), ("plot", "--out", "pictures")])
def test_no_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("no archive", encoding="utf-8")
    for name, said in {
        "nowhere.npz": "the partition file does not exist (nowhere.npz)",
        "text.npz": "not a readable partition file",
        ".": "this is not a run directory",
    }.items():
        answer = partition(verb[0], name, *verb[1:])
        assert (answer.exit_code, bool(answer.stdout)) == (2, "--json" in verb)
        assert said in answer.stderr
    assert not (tmp_path / "pictures").exists()


def test_a_hundred_thousand_clients_are_shown_at_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(100_000), rng.integers(1, 20, 100_000))
    Partition.of_owners(owners, 100_000).counted(rng.integers(0, 100, len(owners))).save(tmp_path / "p.npz")
    for arguments in ((), ("--json",)):
        began = time.process_time()
        assert partition("show", tmp_path / "p.npz", *arguments).exit_code == 0
        assert time.process_time() - began < 2


def test_plot_writes_pictures_captions_and_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'fedlens[plot]'")
    make_partition(class_counts(3, 3)).save(tmp_path / "p.npz")
    out = tmp_path / "new" / "pictures"
    answer = partition("plot", tmp_path / "p.npz", "--out", out, "--format", "svg", "--format", "svg")
    assert answer.exit_code == 0, answer.output
    wanted = ["class-bars.svg", "emd.svg", "matrix.svg", "ranks.svg", "captions.txt", "partition.html"]
    assert answer.stdout.split() == [str(out / name) for name in wanted]
    assert {path.name for path in out.iterdir()} == set(wanted)
    assert all((out / name).stat().st_size > 100 for name in wanted)


PLACES = """
import numpy as np
from fedlens.data.dataset import Dataset, Examples

def places(root, download, seed, *, shift: int = 0):
    labels = (np.arange(24) + shift) % 12 % 11  # class 0 is the largest
    columns = {"Latitude": np.linspace(-60, 60, 24), "lng": np.where(np.arange(24) == 5, np.nan, labels * 10.0)}
    split = Examples(np.zeros((24, 1, 4, 4), np.uint8), labels, columns)
    return Dataset("here", split, split, tuple("abcdefghijk"), (0.0,), (1.0,), "none", "made up")
"""


def test_a_map_shows_places_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'fedlens[plot]'")
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(PLACES)
    assert partition("make", "own.py:places", "iid", "--set", "clients=2", "--out", "p.npz").exit_code == 0
    answer = partition(
        "plot", "p.npz", "--map", "--out", "out", "--format", "svg", "--set", "name=own.py:places"
    )
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "out" / "map.svg").stat().st_size > 1000
    assert "map: Places of the examples" in (tmp_path / "out" / "captions.txt").read_text()
    assert "The place and the class of examples." in (tmp_path / "out" / "partition.html").read_text()
    shown = read_places_map(Partition.load("p.npz"), Path("p.npz"), ["name=own.py:places"], None)
    assert shown.note == "1 example without coordinates not shown"
    names = [series.name for series in shown.series]
    assert names == ["2 other classes", *"abcdeghij"]  # class f has lost an example
    assert shown.series[1].x == [0.0] * 4
    assert len(set(shown.series[1].y)) == 4
    other = partition(
        "plot", "p.npz", "--map", "--out", "o", "--set", "name=own.py:places", "--set", "shift=1"
    )
    assert "the training examples differ" in " ".join(other.stderr.split())


def test_cells_of_s2_are_drawn_on_the_map() -> None:
    pytest.importorskip("s2cell")
    table = Table.of([0, 1, 0, 1], {"lat": [52.5, 52.5, 48.1, -33.9], "lon": [13.4, 13.4, 11.6, 151.2]})
    made = PARTITIONS.find("s2")(table, 0, n_max=2)
    cells, *dots = places_map(made, table).series
    assert (cells.kind, [series.kind for series in dots]) == ("level", ["dots", "dots"])
    assert cells.y.count(None) >= len(made)


def test_a_map_without_coordinates_is_refused_also_of_a_run(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["run", "digits", "--rounds", "1", "--out", str(tmp_path / "run"), "-q"])
    assert run.exit_code == 0, run.output
    answer = partition("plot", tmp_path / "run", "--map", "--out", tmp_path / "out")
    assert answer.exit_code == 2
    assert "'digits' has no coordinates, so its examples have no places" in " ".join(answer.stderr.split())
    assert not (tmp_path / "out").exists()


def test_plot_draws_png_and_pdf_unless_told_otherwise(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'fedlens[plot]'")
    Partition.of_owners([0, 0, 1], 2).save(tmp_path / "p.npz")
    assert partition("plot", tmp_path / "p.npz", "--out", tmp_path / "out").exit_code == 0
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".png", ".pdf", ".txt", ".html"}


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ("torch", "numpy", "plotly", "matplotlib", "pydantic")),
        (["partition", "--help"], ("torch", "numpy", "plotly", "matplotlib")),
        (["partition", "make", "--help"], ("torch", "numpy", "plotly", "matplotlib")),
        (["partition", "make", *DIGITS, "--out", "new.npz"], ("torch", "plotly", "matplotlib")),
        (["partition", "show", "p.npz"], ("torch", "plotly", "matplotlib", "sklearn")),
        (["partition", "plot", "p.npz", "--out", "d", "--format", "svg"], ("torch", "sklearn")),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_nothing_heavy_is_imported(
    tmp_path: Path,
    arguments: list[str],
    absent: tuple[str, ...],
    imported: Callable[[list[str], Path], set[str]],
) -> None:
    Partition.of_owners([0, 0, 1], 2).save(tmp_path / "p.npz")
    assert not imported(arguments, tmp_path) & {*absent}


def test_show_prints_parties_and_plot_says_that_there_are_no_clients(tmp_path: Path) -> None:
    p = partition_features(10, (1, 8, 8), seed=0, split="halves", overlap=0.8, labels_at=1, dataset="toy")
    p.save(tmp_path / "p.npz")
    told = rows(partition("show", tmp_path / "p.npz"))
    assert (told["Parties"], told["Examples of a party"]) == ("2", "9")
    assert told["Examples that all parties hold"] == "8"
    assert (told["Recipe"], told["Labels at"], told["Digest"]) == ("parties", "party 1", p.digest)
    as_json = json.loads(partition("show", tmp_path / "p.npz", "--json").stdout)
    assert as_json["shared"] == 8
    assert as_json["windows"] == [[0, 0, 8, 4], [0, 4, 8, 4]]
    answer = partition("plot", tmp_path / "p.npz", "--out", tmp_path / "figures")
    assert answer.exit_code != 0
    assert "the file has the parties of vertical learning, and no clients to plot" in answer.output
    assert not (tmp_path / "figures").exists()


def test_import_saves_the_partition_of_another_program(tmp_path: Path) -> None:
    file, out = tmp_path / "flower.json", tmp_path / "flower.npz"
    file.write_text('{"0": [7, 3], "1": [5]}')
    answer = partition("import", "digits", file, "--out", out)
    assert answer.exit_code == 0, answer.output
    p = Partition.load(out)
    assert (p.ids, p.indices.tolist(), p.dataset) == (("0", "1"), [7, 3, 5], "digits")
    assert rows(answer)["Digest"] == p.digest
    file.write_text('{"0": [7, 3], "1": [7]}')
    refused = partition("import", "digits", file, "--out", out, "--force")
    assert refused.exit_code == 2
    assert "the example 7 belongs to client '0' and to client '1'" in refused.output
    assert len(Partition.load(out)) == 2
