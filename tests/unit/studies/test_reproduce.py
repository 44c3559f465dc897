"""Lists, costs, documents and refusals of the studies that reproduce figures."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens.base.errors import ConfigError, DataError
from fedlens.cli.display.output import CommandOutput
from fedlens.cli.main import app
from fedlens.cli.sweep import show
from fedlens.pages.study_page import write_study_page
from fedlens.results.claims import claim_verdicts
from fedlens.results.figures.chart import Axis, Chart, Panel, Series
from fedlens.results.figures.picture import draw_chart
from fedlens.results.figures.study_figures import study_figures
from fedlens.results.frames import cells_table
from fedlens.results.rows import (
    Results,
    Row,
    StudyInfo,
    write_info,
    write_lines,
)
from fedlens.results.stated import StatedValue
from fedlens.results.tables import study_tables
from fedlens.results.words import tuning_words
from fedlens.settings.config import read_config
from fedlens.studies import reproduce, reproductions
from fedlens.studies.reproduce import StudyCost, StudyRecord, listed_studies, records, refuse_absent
from fedlens.studies.reproductions import of_stand_ins, read_document, reproduction
from fedlens.studies.study import Study, StudyResult
from fedlens.studies.study_file import read_study
from fedlens.studies.study_plan import StudyPlan
from tests.unit.results.study_fake import results_of
from tools.reproduce_table import study_cost, trained_images

BASE: dict[str, Any] = {
    "rounds": 10,
    "model": "mlp",
    "local": {"lr": 0.1, "epochs": 2, "batch_size": 20},
    "data": {"dataset": "fashion-mnist", "partition": {"name": "iid", "clients": 100}},
    "select": {"name": "uniform", "fraction": 0.1},
    "evaluation": {"every": 5},
}


def cost_of(**study: object) -> StudyCost:
    return study_cost(StudyPlan.load({"base": BASE, **study}))


def test_a_study_trains_on_the_images_that_its_rounds_clients_and_epochs_make() -> None:
    cost = cost_of(seeds=[0, 1, 2])
    assert (cost.runs, cost.images) == (3, 3 * 10 * 10 * 600 * 2)
    assert cost.datasets == ["fashion-mnist"]


def test_tuning_is_counted_by_points_and_seeds_and_held_out_images_are_not_trained_on() -> None:
    methods = {"fedavg": {"grid": {"local.lr": [0.1, 0.2, 0.3]}}}
    tuned = cost_of(seeds=[0, 1], methods=methods, tune={"seeds": [7], "share": 0.1})
    assert tuned.runs == 3 + 2
    shared = cost_of(seeds=[0, 1], methods=methods, tune={"share": 0.1, "refit": False})
    assert shared.runs == 3 * 2
    assert shared.images == pytest.approx(6 * 0.9 * 120_000)


def test_the_server_holds_out_of_all_images_before_clients_of_a_size_get_theirs() -> None:
    """Held out are 6,000 of 60,000 images; the 100 clients of 50 images have their size all the same."""
    sized = {"data.partition": {"name": "dirichlet", "clients": 100, "alpha": 1.0, "size": 50}}
    methods = {"fedavg": {"grid": {"local.lr": [0.1, 0.2]}}}
    cost = cost_of(set=sized, methods=methods, tune={"share": 0.1, "refit": False})
    assert cost.images == 2 * 10 * 10 * 50 * 2


def test_a_setting_that_changes_the_work_is_counted_for_each_of_its_values() -> None:
    assert cost_of(grid={"local.epochs": [1, 5]}).images == 60_000 + 300_000
    methods = {"fedavg": {"grid": {"local.epochs": [1, 5]}}}
    tuned = cost_of(methods=methods, tune={"seeds": [7], "share": 0.5})
    assert tuned.images == pytest.approx(
        180_000 + 180_000
    )  # half of each, and the mean of the two at the end


def test_centralized_virtual_and_gradient_clients_do_their_own_work() -> None:
    central = cost_of(methods={"c": {"set": {"algorithm.name": "centralized"}}})
    assert central.images == 10 * 60_000 * 2
    virtual = {"algorithm.name": "fedvc", "algorithm.examples": 40, "local.epochs": 1}
    assert cost_of(methods={"v": {"set": virtual}}).images == 10 * 10 * 40
    gradient = cost_of(methods={"l": {"set": {"algorithm.name": "liadmm", "local.epochs": 1}}})
    assert gradient.images == 10 * 10 * 600


def test_a_scale_says_what_it_leaves_out() -> None:
    study = {
        "base": BASE,
        "seeds": [0, 1, 2],
        "set": {"rounds": 10_000},
        "cases": {"a": {}, "b": {"set": {"data.partition.clients": 50}}},
        "methods": {"fedavg": {"label": "FedAvg", "grid": {"local.lr": [0.1, 0.2]}}},
        "tune": {"budget": 6},
        "scales": {
            "smoke": {
                "seeds": [0],
                "set": {"rounds": 1, "evaluation.every": 1},
                "cases": {"b": {"set": {"data.partition.clients": 20}}},
                "methods": {
                    "fedavg": {"label": "FedAvg", "set": {"local.lr": 0.1}, "grid": {"local.momentum": [0.5]}}
                },
                "tune": {"budget": 1, "refit": False},
            },
            "full": {"set": {"evaluation.every": 50}},
        },
    }
    assert StudyPlan.load(study, "smoke").differences == [
        ("rounds", "10,000", "1"),
        ("local.lr", "0.1, 0.2", "0.1"),
        ("clients", "50, 100", "20, 100"),
        ("local.momentum", "0", "0.5"),
        ("seeds", "3", "1"),
        ("tuning: budget", "6", "1"),
        ("tuning: refit", "yes", "no"),
    ]
    assert StudyPlan.load(study, "full").differences == []
    assert StudyPlan.load(study, "paper").differences == []


SCALED = """
base = "digits"
seeds = [0]
set = { "rounds" = 60, "data.partition" = { name = "dirichlet", clients = 10 } }
methods.fedavg = {}
methods.fedprox = { set = { "algorithm.name" = "fedprox", "algorithm.mu" = 0.1 } }
grid = { "data.partition.alpha" = [0.05, 0.4], "local.epochs" = [1, 5] }
[scales.smoke]
set = { "rounds" = 2 }
grid = { "data.partition.alpha" = [0.05, 0.1], "local.epochs" = [1] }
"""


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    path = tmp_path / "fig0.toml"
    path.write_text(SCALED, encoding="utf-8")
    return path


def test_a_changed_setting_is_a_difference_to_the_paper_at_every_scale(scaled: Path) -> None:
    differences = Study.load(scaled, "smoke", overrides=["rounds=3"]).plan().differences
    assert ("rounds", "60", "3") in differences
    assert ("data.partition.alpha", "0.05, 0.4", "0.05, 0.1") in differences
    full = Study.load(scaled, "paper", overrides=["rounds=3"]).plan()
    assert full.differences == [("rounds", "60", "3")]
    assert full.info({}).smaller == [["rounds", "60", "3"]]
    assert full.caveats == ["At most 3 rounds, not the paper's 60."]
    assert Study.load(scaled, "paper").plan().differences == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "data.partition.alpha=0.3",
            r"varies 'data.partition.alpha' \(0.05, 0.1\), so --set cannot change it",
        ),
        ("data.partition=iid", r"varies 'data.partition.alpha'"),
        ("algorithm.mu=0.2", r"sets 'algorithm.mu' for a part of its runs \(0.1\)"),
        ("algorithm=scaffold", r"sets 'algorithm.name' for a part"),
        ("local.epochs=2", r"line 10: \[grid\] local.epochs.*remove --set local.epochs"),
    ],
)
def test_a_setting_that_the_figure_varies_cannot_be_changed(scaled: Path, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Study.load(scaled, "smoke", overrides=[change]).plan()


def test_a_wrong_change_is_placed_at_its_option(scaled: Path) -> None:
    for change, words in (("rouns=3", "--set rouns.*'rounds'"), ("local.lr=-1", "--set local.lr")):
        with pytest.raises(ConfigError, match=words):
            Study.load(scaled, "smoke", overrides=[change]).plan()


def test_changed_settings_are_part_of_what_a_folder_holds(scaled: Path, tmp_path: Path) -> None:
    changed = Study.load(scaled, "smoke", overrides=["rounds=1"])
    result = changed.run(tmp_path / "out", jobs=0, report=False)
    assert {line.rounds for line in result.results.lines.values()} == {1}
    copied = StudyPlan.load(tmp_path / "out" / "study.toml", "smoke")
    assert {run.digest for run in copied.runs} == set(result.results.lines), "the copy has the change"
    full = [StudyPlan.load(path, "paper").runs for path in (scaled, tmp_path / "out" / "study.toml")]
    assert len({frozenset(run.digest for run in runs) for runs in full}) == 1, "at its own scale alone"
    with pytest.raises(ConfigError, match="Changed: rounds: 2 instead of 1"):
        Study.load(scaled, "smoke").run(tmp_path / "out", jobs=0, report=False)


def test_reproduce_set_has_a_folder_of_its_own_and_lists_the_change(
    scaled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproductions, "FOLDER", scaled.parent)
    monkeypatch.setattr(reproductions, "reproductions", lambda: {"fig0": scaled})
    monkeypatch.setattr(reproduce, "costs", lambda: {"fig0": {"smoke": StudyCost(4, 100, ("digits",))}})
    options = ["--scale", "smoke", "--set", "rounds=1", "--jobs", "0"]
    done = CliRunner().invoke(app, ["reproduce", "fig0", *options])
    assert done.exit_code == 0, done.output
    assert "rounds: 60 in the paper; 1 here" in done.output
    assert "data.partition.alpha: 0.05, 0.4 in the paper; 0.05, 0.1 here" in done.output
    assert "100 training images" not in done.output, "that is the cost without the change"
    folder = tmp_path / "studies" / "fig0" / "smoke-rounds-1"
    page = (folder / "study.html").read_text("utf-8")
    assert "fedlens reproduce fig0 --set rounds=1 --scale smoke" in page
    assert re.search(r"<td[^>]*>rounds</td>\s*<td[^>]*>60</td>\s*<td[^>]*>1</td>", page)
    again = CliRunner().invoke(app, ["reproduce", "fig0", *options, "--quiet"])
    assert again.exit_code == 0, again.output


def test_every_study_of_fedlens_has_a_paper_with_a_title_and_a_link() -> None:
    for name, path in reproductions.reproductions().items():
        paper = reproductions.paper_of(path)
        assert paper is reproductions.PAPERS[name.partition("/")[0]]
    for paper in reproductions.PAPERS.values():
        assert paper.title
        assert paper.link.startswith("https://")
    assert StudyPlan.load(reproduction("hsu2019/fig1"), "smoke", check=False).info({}).paper == {
        "authors": "Hsu et al. 2019",
        "title": reproductions.PAPERS["hsu2019"].title,
        "link": "https://arxiv.org/abs/1909.06335",
    }
    assert StudyPlan.load({"base": "digits"}).info({}).paper == {}


STAND_INS = """
base = "digits"
same_data = false
tables = [{ kind = "summary", document = "s.document.toml" }]
[scales.paper.methods.net]
label = "CIFAR-100, ResNet-20"
base = "fedcv/cifar100-laptop"
[scales.paper.methods.pooled]
label = "CIFAR-100, centralized"
base = "fedcv/cifar100-laptop"
set = { "algorithm.name" = "centralized" }
[scales.laptop]
set = { rounds = 3 }
[scales.laptop.methods.digits-net]
label = "digits, perceptron"
stands_for = "net"
set = { "model.name" = "mlp" }
"""
STATED = """
source = "a report"
[[values]]
method = "net"
metric = "test_accuracy"
where = "table 1"
value = 0.5
"""


def test_a_stand_in_has_the_papers_number_beside_it_and_says_what_it_stands_for(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(STAND_INS, encoding="utf-8")
    (tmp_path / "s.document.toml").write_text(STATED, encoding="utf-8")
    plan = StudyPlan.load(tmp_path / "s.toml", "laptop")
    info = plan.info({})
    model = plan.paper.method("net") if plan.paper else None
    assert model is not None
    [table] = study_tables(Results(info, {}))
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["digits, perceptron", "unfinished (0 of 1)", "50.0 (CIFAR-100, ResNet-20)"]
    ]
    assert plan.runs[0].key == "digits-net-seed0"
    assert "Stand-ins: digits for CIFAR-100; perceptron for " in info.caveats[-1]
    assert ["method", "CIFAR-100, ResNet-20", "digits, perceptron"] in info.smaller
    assert ["1 method", "CIFAR-100, centralized", "not run"] in info.smaller
    words = "Stand-ins: digits for CIFAR-100"
    for text in (table.to_markdown(), table.to_latex(), table.to_csv()):
        assert words in text
    assert len(table.to_latex().partition(r"\label")[0]) < 600
    whole = StudyPlan.load(tmp_path / "s.toml").info({})
    assert not whole.caveats
    assert [value["method"] for value in whole.document["values"]] == ["net"]


def test_the_case_of_a_stated_value_is_the_one_that_stands_for_it() -> None:
    study = {
        "base": "digits",
        "methods": {"a": {}},
        "scales": {
            "paper": {"cases": {"large": {}}},
            "smoke": {"cases": {"small": {"stands_for": "large", "set": {"rounds": 2}}}},
        },
    }
    source = read_study(study, "smoke").settings
    value = {"method": "a", "case": {"case": "large", "x": 1}, "value": 1}
    assert of_stand_ins(value, source) == [{**value, "case": {"case": "small", "x": 1}}]


@pytest.mark.parametrize(
    ("table", "word"),
    [
        (
            '[scales.laptop.methods.other]\nstands_for = "nett"\n',
            r"'nett', which is not among the methods .*'net'",
        ),
        (
            '[scales.laptop.methods.net]\nstands_for = "pooled"\n',
            "has a name of the scale paper .*line 19.*name it",
        ),
    ],
)
def test_a_wrong_stand_in_is_refused_with_its_line(tmp_path: Path, table: str, word: str) -> None:
    (tmp_path / "s.toml").write_text(f"{STAND_INS}{table}", encoding="utf-8")
    with pytest.raises(ConfigError, match=word):
        read_study(tmp_path / "s.toml", "laptop")


def test_pictures_say_what_stands_in(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    caveats = ("Two rounds, nothing learned.",)
    panel = Panel(
        "", "c", Axis("x", limits=(0, 1)), Axis("y"), [Series([0.0, 1.0], [0.0, 1.0], "a", "line", "#000")]
    )
    figure = replace(Chart("t", "c", [panel]), caveats=caveats)
    assert caveats[0] in draw_chart(figure, tmp_path / "a.svg").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('source = "x"\n[[values]]\nmethod = "a"\nmetric = "m"\nwhere = "t"\n', "exactly one"),
        (
            'source = "x"\n[[values]]\nmethod = "a"\nmetric = "m"\nwhere = "t"\nlow = 1\nhigh = 2\n',
            "exactly one",
        ),
        ('source = "x"\n[[values]]\nmethod = "a"\nmetric = "m"\nvalue = 1\n', "where"),
        ('[[values]]\nmethod = "a"\nmetric = "m"\nwhere = "t"\nvalue = 1\n', "source"),
        ("source = ", "not valid TOML"),
        ('source = "x"\nclaims = ["A sentence."]\n', "keys of .*claims.* are text, where"),
        ('source = "x"\n[[claims]]\ntext = "a"\nwhere = "t"\n', "exactly one of holds and why"),
        (
            'source = "x"\n[[claims]]\ntext = "a"\nwhere = "t"\nholds = "a > 1"\nwhy = "no number"\n',
            "exactly one of holds and why",
        ),
        (
            'source = "x"\n[[claims]]\ntext = "a"\nwhere = "t"\nholds = "a > 1"\nat = { epochs = 1 }\n',
            "rounds",
        ),
    ],
)
def test_a_wrong_entry_of_a_document_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "x.document.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_document(path)


CLAIMED = """
base = "digits"
set = { "rounds" = 2, "data.partition" = { name = "dirichlet", clients = 4 } }
seeds = [0, 1]
methods.fedavg = {}
methods.fedprox = { set = { "algorithm.name" = "fedprox", "algorithm.mu" = 0.1 } }
grid = { "data.partition.alpha" = [0.1, 100.0] }
tables = [{ kind = "summary", document = "s.document.toml" }]
scales.smoke.grid = { "data.partition.alpha" = [100.0] }
"""


def claimed(folder: Path, holds: str, more: str = "") -> Path:
    """A study with one claim."""
    claim = f"[[claims]]\ntext = 'It is better.'\nwhere = 'table 1'\nholds = '{holds}'\n{more}"
    (folder / "s.document.toml").write_text(f'source = "a report"\n{claim}', encoding="utf-8")
    (folder / "s.toml").write_text(CLAIMED, encoding="utf-8")
    return folder / "s.toml"


@pytest.mark.parametrize(
    ("holds", "problem", "character"),
    [
        ("fedproxx > fedavg", "no method 'fedproxx'.*did you mean 'fedprox'", 1),
        ("fedprox > fedavg where alfa < 1", "no dimension 'alfa'.*did you mean 'alpha'", 24),
        ("fedprox(alpha=0.2) > fedavg", "no case 'alpha = 0.2'.*did you mean 'alpha 0.1'", 9),
        ("fedprox > fedavg and", "expected a method.*", 21),
    ],
)
@pytest.mark.parametrize("scale", ["smoke", "paper"])
def test_a_claim_with_an_unknown_name_is_refused_when_the_study_is_loaded(
    tmp_path: Path, holds: str, problem: str, character: int, scale: str
) -> None:
    study = claimed(tmp_path, holds)
    with pytest.raises(ConfigError, match=problem) as error:
        StudyPlan.load(study, scale)
    assert str(error.value.where).endswith(f"s.document.toml: claim 1, character {character}")


def test_a_claim_may_name_what_only_the_paper_has(tmp_path: Path) -> None:
    study = claimed(tmp_path, "fedprox(alpha=0.1) > fedavg", 'metric = "test_loss"\nat = { rounds = 2 }\n')
    info = StudyPlan.load(study, "smoke").info({})
    [claim] = info.document["claims"]  # all that a verdict needs is in study.json
    assert claim.keys() == {"text", "where", "holds", "metric", "at"}
    [verdict] = claim_verdicts(Results(info, {}))
    assert (verdict.answer, verdict.reason) == ("not run at this scale", "no case 'alpha = 0.1'")


def test_a_claim_finds_what_stands_for_its_methods_and_cases(tmp_path: Path) -> None:
    study = claimed(tmp_path, 'large > fedavg where case = "many"')
    study.write_text(
        """
base = "digits"
set = { "rounds" = 2, "data.partition" = { name = "iid", clients = 4 } }
methods.fedavg = {}
tables = [{ kind = "summary", document = "s.document.toml" }]
scales.paper.methods.large = { set = { "model.name" = "mlp" } }
scales.paper.cases.many = { set = { "data.partition.clients" = 40 } }
scales.smoke.methods.small = { set = { "local.lr" = 0.3 }, stands_for = "large" }
scales.smoke.cases.few = { set = { "data.partition.clients" = 3 }, stands_for = "many" }
""",
        encoding="utf-8",
    )
    info = StudyPlan.load(study, "smoke").info({})
    [verdict] = claim_verdicts(Results(info, {}))
    assert (verdict.answer, verdict.reason) == ("cannot tell", "not run: small at few (not finished)")
    assert "stand_ins" not in StudyPlan.load(study, "paper").info({}).document


def test_the_commands_and_python_give_the_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = results_of(
        {"a": [0.9, 0.92, 0.91], "b": [0.1, 0.12, 0.13]},
        document={"claims": [{"text": "A is better.", "where": "table 1", "holds": "a > b"}]},
    )
    write_info(tmp_path, results.info)
    write_lines(tmp_path / "results.jsonl", results.lines.values())
    result = StudyResult(tmp_path)
    [verdict] = result.verdicts
    assert verdict.answer == "shows"
    show(result, CommandOutput(), quiet=False)
    line, _ = capsys.readouterr().out.splitlines()
    assert line == "shows: A is better. (a > b: 79.3 [76.5, 82.2])"
    show(result, CommandOutput(as_json=True), quiet=False)
    [printed] = json.loads(capsys.readouterr().out)["verdicts"]
    assert (printed["answer"], printed["holds"], printed["compared"][0]["holds"]) == ("shows", "a > b", True)


def test_a_stated_value_holds_for_the_cases_that_agree_with_it() -> None:
    value = StatedValue("fedavg", "test_accuracy", "table", {"E": 1}, high=0.4)
    assert (value.text, value.number) == ("below 0.4", 0.4)
    assert value.holds_for({"E": 1, "alpha": 0.0})
    assert not value.holds_for({"E": 5, "alpha": 0.0})
    assert not value.holds_for({"alpha": 0.0})


def test_missing_data_are_refused_with_the_way_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs inaturalist-user-120k, which is not in .*train_val_images"):
        refuse_absent(["digits", "inaturalist-user-120k"], tmp_path, download=False)
    refuse_absent(["digits", "cifar10"], tmp_path, download=True)
    with pytest.raises(DataError, match="cifar10"):
        refuse_absent(["cifar10"], tmp_path, download=False)


def test_a_study_starts_at_minutes_where_it_has_the_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fig0.toml"
    monkeypatch.setattr(reproduce, "reproduction", lambda name: path)
    path.write_text('base = "digits"\n[scales.laptop]\n[scales.smoke]\n')
    assert reproduce.study_scales("fig0") == ["smoke", "laptop", "paper"]
    assert reproduce.chosen_scale("fig0") == "smoke"
    with pytest.raises(ConfigError, match=r"fig0 has no scale 'minutes'; choose .* smoke, laptop, paper"):
        reproduce.chosen_scale("fig0", "minutes")
    path.write_text('base = "digits"\n[scales.laptop]\n[scales.smoke]\n[scales.minutes]\n')
    assert reproduce.study_scales("fig0") == [*reproduce.SCALES]
    assert reproduce.chosen_scale("fig0") == "minutes"
    assert reproduce.chosen_scale("fig0", "laptop") == "laptop"


def test_every_writer_says_that_two_rounds_learn_nothing(tmp_path: Path) -> None:
    smoke = {"set": {"rounds": 2}}
    study = {"base": "digits", "seeds": [0, 1], "scales": {"smoke": smoke, "laptop": {"set": {"rounds": 2}}}}
    info = StudyPlan.load(study, "smoke").info({})
    assert info.caveats == ["Two rounds, nothing learned."]
    assert StudyPlan.load(study, "laptop").info({}).caveats == ["At most 2 rounds, not the paper's 60."]
    curve = {"round": [2], "test_accuracy": [0.5]}
    lines = {entry.digest: Row(entry.digest, entry.run, "finished", None, 2, "test_accuracy", curve)
             for entry in info.entries}  # fmt: skip
    results = Results(info, lines)
    write_info(tmp_path, info)
    write_lines(tmp_path / "results.jsonl", lines.values())
    page = write_study_page(tmp_path).read_text("utf-8")
    [table] = study_tables(results)
    [curves] = study_figures(results)
    written = [table.to_markdown(), table.to_latex(), table.to_csv()]
    assert curves.figure
    for text in (*written, cells_table(results).to_latex(), *curves.figure.caveats, page):
        assert info.caveats[0] in text
    assert curves.figure.caveats


def test_a_wrong_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.toml"
    entry = '[["hsu2019/fig5"]]\nscale = "smoke"\nversion = "1"\ncpu_hours = 0.1\n'
    path.write_text(f'{entry}outcome = "It ran."\n')
    assert records(path)["hsu2019/fig5"][0].outcome == "It ran."
    path.write_text(entry)
    with pytest.raises(ConfigError, match="an entry is wrong"):
        records(path)


RECORDED = StudyRecord(
    scale="laptop",
    version="0.1.0",
    cpu_hours=0.5,
    outcome="Test accuracy from 40.0 % (FedVC) to 50.0 % (FedVC + FedIR), one seed (0).",
    date="2026-11-24",
    folder="docs/atlas/hsu2020/table3/laptop",
    metric="Test accuracy (%)",
    numbers=[
        {"of": "FedVC", "here": "40.0", "paper": "53.0"},
        {"of": "FedVC + FedIR", "here": "50.0", "paper": ""},
    ],
    verdicts=[{"claim": "FedIR helps", "where": "table 3", "verdict": "cannot tell"}],
)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[StudyRecord]]:
    """The recorded runs that the command reads."""
    found = {"hsu2020/table3": [RECORDED]}
    monkeypatch.setattr("fedlens.studies.reproduce.records", lambda path=None: found)
    return found


def test_the_command_opens_with_what_was_recorded(
    recorded: dict[str, list[StudyRecord]], tmp_path: Path
) -> None:
    run, study = CliRunner().invoke, ["reproduce", "hsu2020/table3", "--dry-run", "--data-dir", str(tmp_path)]
    shown = run(app, [*study, "--scale", "smoke"]).stdout
    assert shown.startswith(
        "recorded: scale laptop, 2026-11-24, fedlens 0.1.0, 30 min of one core\n"
        "Test accuracy from 40.0 % (FedVC) to 50.0 % (FedVC + FedIR), one seed (0).\n"
    )
    lines = [line.split() for line in shown.splitlines()]
    assert ["FedVC", "40.0", "53.0"] in lines
    assert ["FedVC", "+", "FedIR", "50.0", "-"] in lines
    assert "cannot tell: FedIR helps (table 3)" in shown
    assert "made by: fedlens reproduce hsu2020/table3 --scale laptop\n" in shown
    assert shown.index("made by") < shown.index("at most"), "before the cost of what runs now"
    assert "recorded" not in run(app, [*study, "--quiet"]).stdout
    [entry] = json.loads(run(app, [*study, "--json"]).stdout)["records"]
    assert entry["numbers"][0] == {"of": "FedVC", "here": "40.0", "paper": "53.0"}
    assert (entry["scale"], entry["verdicts"][0]["verdict"]) == ("laptop", "cannot tell")


def test_the_command_prefers_the_record_of_the_scale_and_says_what_changed_since(
    recorded: dict[str, list[StudyRecord]], tmp_path: Path
) -> None:
    recorded["hsu2020/table3"].insert(
        0, replace(RECORDED, scale="smoke", stale="Changed: rounds: 3 instead of 2.")
    )
    run, study = CliRunner().invoke, ["reproduce", "hsu2020/table3", "--dry-run", "--data-dir", str(tmp_path)]
    shown = run(app, [*study, "--scale", "smoke"]).stdout
    assert shown.startswith("recorded: scale smoke")
    assert "the study has changed since: Changed: rounds: 3 instead of 2.\n" in shown
    assert "recorded too: laptop\n" in shown
    listed = run(app, ["reproduce", "--list", "--data-dir", str(tmp_path)]).stdout
    assert "smoke by us (0.1.0, before a change), laptop by us (0.1.0)" in listed


def test_a_cell_of_the_sphere_counts_with_its_mean_size() -> None:
    places = {"dataset": {"name": "cifar100", "places": "drawn"}, "partition": {"name": "s2", "n_max": 1000}}
    select = {"name": "uniform", "clients_per_round": 10}
    config = read_config(
        {"rounds": 3, "model": "linear", "local": {"lr": 0.1}, "data": places, "select": select}
    )
    assert trained_images(config) == pytest.approx(3 * 10 * 400)  # 0.4 of a full cell


def test_the_list_has_what_was_run_here(tmp_path: Path) -> None:
    folder = tmp_path / "hsu2019" / "fig4" / "smoke"
    folder.mkdir(parents=True)
    entries = [Row.planned(digest, digest, "fedavg", {}, {}, "final", 0) for digest in ("a", "b")]
    info = StudyInfo("f", "", [0], None, 1, [], "fedavg", {"fedavg": "FedAvg"}, {}, [{}], entries=entries)
    write_info(folder, info)
    line = Row("a", "a", "finished", None, 2, "test_accuracy", {"round": [2], "test_accuracy": [0.5]})
    write_lines(folder / "results.jsonl", [line])

    def found() -> dict[str, tuple[int, int]]:
        return {study.name: dict(study.local) for study in listed_studies(tmp_path, tmp_path)}["hsu2019/fig4"]

    assert found() == {"smoke": (1, 4)}  # one of the four runs that the scale costs
    write_lines(folder / "results.jsonl", [line, Row("b", "b", "failed", "why", 0, "", {})])
    assert found() == {"smoke": (1, 2)}


def test_the_command_lists_studies_and_refuses_unknown_ones(tmp_path: Path) -> None:
    run = CliRunner().invoke
    listed = run(app, ["reproduce", "--list", "--json", "--data-dir", str(tmp_path)])
    studies = {study["name"]: study for study in json.loads(listed.stdout)}
    assert studies["hsu2020/table3"]["absent"] == ["cifar100", "cifar10", "inaturalist-user-120k"]
    assert studies["hsu2019/fig5"]["costs"]["paper"]["runs"] == 128 * (40 * 5 + 5)
    shown = run(app, ["reproduce", "--list", "--data-dir", str(tmp_path)]).stdout
    assert "hsu2019/fig5" in shown
    assert "costs: core time of a recorded run, else training images" in shown
    wrong = run(app, ["reproduce", "hsu2019/fig55"])
    assert wrong.exit_code == 2
    assert "did you mean 'hsu2019/fig5'" in wrong.stderr
    parts = run(app, ["reproduce", "hsu2020/fig4"])
    assert "hsu2020/fig4a, hsu2020/fig4b" in parts.stderr
    assert "--list" in run(app, ["reproduce"]).stderr


def test_the_command_refuses_a_study_without_its_data_and_can_still_say_what_it_costs(tmp_path: Path) -> None:
    run = CliRunner().invoke
    arguments = ["reproduce", "hsu2020/table3", "--scale", "laptop", "--data-dir", str(tmp_path)]
    refused = run(app, [*arguments, "--out", str(tmp_path / "out")])
    assert refused.exit_code == 2
    assert "the study needs cifar100" in refused.stderr
    assert not (tmp_path / "out").exists()
    dry = run(app, [*arguments, "--dry-run"])
    assert dry.exit_code == 0
    head = next(line.split() for line in dry.stdout.splitlines() if line.startswith("setting"))
    assert head == ["setting", "paper", "here"]
    assert "instead of" not in dry.stdout
    assert "24 runs at most" in dry.stdout
    assert "missing data: cifar100" in dry.stdout


def test_the_commands_of_the_page_copy_a_study_that_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reproduce.md").read_text("utf-8")
    section = page.partition("## A study of your own figure")[2]
    copy, run = (line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ "))
    python = shlex.quote(sys.executable)
    subprocess.run(["sh", "-c", copy.replace("$(python", f"$({python}")], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    name = run.split()[2]
    assert StudyPlan.load(name, "smoke", check=False).info({}).document["values"]
    Path("fig5.document.toml").unlink()
    with pytest.raises(ConfigError, match=rf"{name}, line \d+: \[\[(tables|figures)"):
        StudyPlan.load(name, "smoke", check=False).info({})


def test_the_labels_of_the_document_are_those_of_its_scale(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        """
base = "digits"
methods.small = { label = "K = 10", set = { "rounds" = 3 } }
methods.large = { label = "K = 100" }
tables = [{ kind = "summary", document = "s.document.toml" }]
scales.smoke.methods.large = { label = "K = 20" }
""",
        encoding="utf-8",
    )
    (tmp_path / "s.document.toml").write_text('source = "a report"\n', encoding="utf-8")
    assert StudyPlan.load(tmp_path / "s.toml", "smoke").info({}).document["labels"] == {"large": "K = 100"}
    assert "labels" not in StudyPlan.load(tmp_path / "s.toml").info({}).document


def test_a_label_says_how_many_clients_a_round_has() -> None:
    """The K of a case or a method is that of its runs, at every scale."""
    for name in ("hsu2020/fig9", "hsu2020/table5"):
        for scale in ("smoke", "laptop", "paper"):
            plan = StudyPlan.load(reproduction(name), scale)
            methods = plan.info({}).methods
            for run in plan.runs:
                label = f"{methods[run.method]} {run.case.get('case')}"
                stated = re.search(r"K = (\d+)", label)
                if stated:
                    assert run.settings["select"]["clients_per_round"] == int(stated[1]), (
                        name,
                        scale,
                        run.key,
                    )


def test_a_study_with_one_point_a_method_says_that_nothing_was_chosen() -> None:
    info = StudyPlan.load(reproduction("hsu2020/fig4a"), "smoke").info({})
    assert tuning_words(info) == ["Every method has a single point, so no settings were chosen."]
    assert not any(entry.role == "tune" for entry in info.entries)
