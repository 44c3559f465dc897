"""Commands that fedlens prints do what their page or message says: they are read back, and run where that is cheap."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fedlens
from fedlens.base.errors import DataError
from fedlens.cli.main import app
from fedlens.cli.sweep import parsed_seeds
from fedlens.pages.cost.next_steps import next_steps
from fedlens.pages.run_page import images_command, measuring_command, repeating_command, resuming_command
from fedlens.results.run import read_run
from fedlens.settings.config_source import Source
from fedlens.studies.cost_study import federated_work
from fedlens.studies.reproductions import reproduction, study_command
from tests.unit.cli.printed import parsed

EXPERIMENT: dict[str, Any] = {
    "rounds": 1,
    "model": "linear",
    "local": {"lr": 0.1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 2}},
    "engine": "inline",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def experiment_of(command: str) -> dict[str, Any]:
    """The settings of the run that `fedlens run` of a command would start."""
    verbs, given = parsed(command)
    assert verbs == "run"
    return fedlens.Experiment.load(given["recipe"], given["changes"] or ()).config.model_dump()


def test_the_commands_of_a_run_give_the_same_run(here: Path) -> None:
    result = fedlens.Experiment(**EXPERIMENT).run(Path("my runs/it's"), data_dir="my data", report=False)
    run = read_run(Path(result.directory))
    settings = experiment_of(repeating_command(run))
    assert settings == fedlens.Experiment.load("my runs/it's/config.toml").config.model_dump()
    assert parsed(repeating_command(run))[1]["data_dir"] == here / "my data"
    assert experiment_of(measuring_command(run))["evaluation"] | {"clients": "all"} == {
        **settings["evaluation"],
        "clients": "all",
    }
    assert experiment_of(images_command(run))["record"]["images"] is True
    verbs, given = parsed(resuming_command(run))
    assert (verbs, given["directory"]) == ("resume", Path("my runs/it's"))


STUDY = """
base = "base file.toml"
seeds = [0]
[grid]
"local.lr" = [0.1, 0.3]
[scales.smoke.set]
rounds = 2
"""


def lines_of(folder: Path) -> list[str]:
    return (folder / "results.jsonl").read_text().splitlines()


def test_the_page_of_a_study_says_what_made_this_study(here: Path) -> None:
    """Not the study of the file alone: its --scale, --set, --seeds and --out are part of the command."""
    base = 'rounds = 9\nmodel = "linear"\nlocal.lr = 1.0\ndata.dataset = "digits"\nengine.name = "inline"\n'
    Path("base file.toml").write_text(f'{base}data.partition = {{ name = "iid", clients = 2 }}\n')
    Path("my study.toml").write_text(STUDY)
    changes = ["local.batch_size=64", 'data.partition={name="dirichlet", clients=2, alpha=9.0}']
    study = fedlens.Study.load("my study.toml", "smoke", overrides=changes, seeds=[3])
    result = study.run("my results", jobs=0, data_dir="my data", report=False)
    command = result.results.info.command  # which the page shows
    verbs, given = parsed(command)
    assert (verbs, given["out"], given["data_dir"]) == ("sweep", Path("my results"), Path("my data"))
    again = fedlens.Study.load(
        given["file"], given["scale"], overrides=given["changes"], seeds=parsed_seeds(given["seeds"])
    )
    assert {run.digest for run in again.plan().runs} == set(result.results.lines)
    assert {run.settings["seed"] for run in again.plan().runs} == {3}
    before = lines_of(Path("my results"))
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], "--quiet", "--jobs", "0", "--no-report"])
    assert done.exit_code == 0, done.output
    assert lines_of(Path("my results")) == before  # the same study, of which nothing is left to do


def test_a_study_in_python_is_made_again_from_its_copy(here: Path) -> None:
    study = fedlens.Study(base=EXPERIMENT, seeds=[0], grid={"local.lr": [0.1]})
    result = study.run("my results", jobs=0, report=False)
    verbs, given = parsed(result.results.info.command)
    assert (verbs, given["out"]) == ("sweep", Path("my results"))
    assert {run.digest for run in fedlens.Study.load(given["file"]).plan().runs} == set(result.results.lines)


def test_a_reproduction_is_reproduced_in_its_folder() -> None:
    path, usual = reproduction("hsu2019/fig5"), Path("studies/fig5/smoke")
    verbs, given = parsed(study_command(path, "smoke", Path("my results"), usual))
    assert (verbs, given["name"], given["scale"].value) == ("reproduce", "hsu2019/fig5", "smoke")
    assert given["out"] == Path("my results")
    usual = Path("studies/hsu2019/fig5/smoke")
    assert parsed(study_command(path, "smoke", usual, Path("studies/fig5/smoke")))[1]["out"] is None
    verbs, given = parsed(
        study_command(path, "smoke", usual, Path("studies/fig5/smoke"), changes=["rounds=1"])
    )
    assert (verbs, given["name"], given["changes"]) == ("reproduce", "hsu2019/fig5", ["rounds=1"])
    assert given["out"] == usual, "changed settings have another folder of their own"
    changed = Path("studies/hsu2019/fig5/smoke-rounds-1")
    assert parsed(study_command(path, "smoke", changed, changes=["rounds=1"]))[1]["out"] is None


@pytest.fixture
def scans(here: Path) -> dict[str, Any]:
    """A table of images with names of its own for its columns, and its `data.dataset`."""
    folder = Path("my scans")
    folder.mkdir()
    rng, rows = np.random.default_rng(0), ["scan,what is it,site,label"]
    for k in range(12):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{k}.png")
        rows.append(f"{k}.png,{'7' if k % 2 else 'it is'},{'Ulm' if k % 3 else 'Bonn'},{k}")
    (folder / "t.csv").write_text("\n".join(rows) + "\n")
    return {
        "name": "image-folder",
        "path": "my scans",
        "table": "t.csv",
        "path_column": "scan",
        "label_column": "what is it",
        "client_column": "site",
        "classes": ["it is", "7"],
    }


def test_cost_knows_whether_the_test_images_are_the_clients_own(scans: dict[str, Any]) -> None:
    def drawn(dataset: Any) -> bool:
        settings = {**EXPERIMENT, "data": {"dataset": dataset, "partition": {"name": "natural"}}}
        return bool(federated_work(Source(settings), Path("."), download=False)["test_drawn"])

    assert drawn(scans)
    table = Path("my scans/t.csv")
    head, *rows = table.read_text().splitlines()
    split = [f"{row},{'test' if k % 4 == 1 else 'train'}" for k, row in enumerate(rows)]
    table.write_text("\n".join([f"{head},split", *split]))
    assert not drawn(scans)


def test_the_check_that_an_error_names_lists_its_faults(scans: dict[str, Any]) -> None:
    Path("my scans/3.png").write_bytes(b"")
    Path("my scans/4.png").write_bytes(b"")
    settings = {**EXPERIMENT, "data": {"dataset": scans, "partition": {"name": "iid", "clients": 2}}}
    with pytest.raises(DataError) as refused:
        fedlens.Experiment(**settings).run("run", report=False)
    command = str(refused.value).partition("This lists all: ")[2].partition("; or ")[0]
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 1, (command, done.output)
    assert "3.png" in done.stdout
    assert "4.png" in done.stdout


def test_what_cost_suggests_keeps_what_was_given() -> None:
    answer: dict[str, Any] = {
        "name": "scans",
        "seeds": [0, 1, 2, 3],
        "command": {
            "recipe": "my file.toml",
            "changes": ["rounds=9"],
            "out": "my cost",
            "data_dir": "my data",
        },
        "warnings": ["more rounds"],
        "work": {"rounds": 9, "lr": 0.1},
        "clients": [],
        "low_clients": [],
        "differences": {"partition": None, "federation": None},
        "metric": "accuracy",
    }
    (step,) = next_steps(answer)
    verbs, given = parsed(step["command"])
    assert (verbs, given["recipe"], given["changes"]) == ("cost", "my file.toml", ["rounds=18"])
    assert (given["seeds"], given["out"]) == (4, Path("my cost-rounds"))
    assert given["data_dir"] == Path("my data")
    (step, _) = next_steps({**answer, "low_clients": [{"client": "Bonn"}]})
    assert step["why"].startswith("Bonn is clearly lower with every model: look at its images.")
    verbs, given = parsed(step["command"])
    assert (verbs, given["changes"]) == ("cost", ["rounds=9", "record.images=true"])
    assert given["out"] == Path("my cost-images")
    kept = {**answer, "low_clients": [{"client": "Bonn"}], "work": {**answer["work"], "keeps_images": True}}
    assert len(next_steps(kept)) == 1


def test_hints_of_runs_name_them_so_that_a_shell_finds_them(here: Path) -> None:
    directory = Path("my runs/one")
    fedlens.Experiment(**EXPERIMENT).run(directory, report=False)
    config = directory / "config.toml"
    config.write_text(
        config.read_text().replace("rounds = 1\n", "rounds = 2\n").replace("lr = 0.1", "lr = 0.2")
    )
    refused = CliRunner().invoke(app, ["resume", str(directory)])
    assert refused.exit_code == 2, refused.output
    command = refused.stderr[refused.stderr.index("fedlens resume") :].strip().removesuffix(".")
    done = CliRunner().invoke(app, [*shlex.split(" ".join(command.split()))[1:], "--no-report", "--quiet"])
    assert done.exit_code == 0, done.output
