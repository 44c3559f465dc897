"""Analyses of runs: the two gains of a round, repeated rounds, the page, and what users get wrong."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape
from torch import Tensor, nn
from typer.testing import CliRunner

from fedlens.analyses import repeat_rounds as repeat
from fedlens.analyses.analyze import Analyses, analyze
from fedlens.analyses.calibration import reliability_of
from fedlens.analyses.dynamics import dynamics
from fedlens.analyses.opened_run import open_run
from fedlens.analyses.registry import ANALYSES
from fedlens.analyses.repeat_rounds import repeat_rounds
from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError, HookError, RunDirectoryError
from fedlens.cli.analyze import analysis_settings, round_list
from fedlens.cli.main import app
from fedlens.data.arrays import dataset
from fedlens.data.dataset import Dataset
from fedlens.engines import devices
from fedlens.engines.hardware import Hardware
from fedlens.pages.analysis_page import INDEX
from fedlens.results.figures.analysis_figures import analysis_figures, shown
from fedlens.run.rundir import RunDir
from tests.unit.cli.printed import parsed


def experiment(*changes: str, **tables: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 3,
        "data": {"dataset": "digits", "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.5}},
        "model": {"name": "mlp", "hidden": 8},
        "select": {"name": "uniform", "clients_per_round": 3},
        "local": {"lr": 0.1, "steps": 2, "batch_size": 16},
        "engine": {"name": "inline"},
    }
    return Experiment(**{**settings, **tables}).with_settings(*changes)


def scenes() -> Dataset:
    """Images of noise with the masks of their bright pixels."""
    images = np.random.default_rng(0).integers(0, 256, (48, 32, 32, 3)).astype(np.uint8)
    masks = (images[..., 0] > 128).astype(np.uint8)
    return dataset(images[:40], masks[:40], images[40:], masks[40:], classes=["dark", "bright"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "recorded"
    experiment("record.local_models={every=1}", "record.updates={every=1}").run(path, report=False)
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    experiment().run(tmp_path / "plain", report=False)
    return tmp_path / "plain"


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["round"]: line for line in lines}


def test_the_two_gains_add_up_to_the_change_that_the_run_recorded(recorded: Path) -> None:
    lines, rows = metrics(recorded), dynamics(open_run(recorded))
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["before"] == lines[row["round"] - 1]["test_accuracy"]
        assert row["after"] == lines[row["round"]]["test_accuracy"]
        assert row["loss_after"] == lines[row["round"]]["test_loss"]
        change = lines[row["round"]]["test_accuracy"] - lines[row["round"] - 1]["test_accuracy"]
        assert row["local_gain"] + row["aggregation_gain"] == pytest.approx(change, abs=1e-15)


def test_the_local_value_is_the_mean_over_the_clients_models(recorded: Path) -> None:
    run = open_run(recorded, rounds=[2])
    (row,) = dynamics(run)
    (found,) = run.recorded
    values = [run.evaluator.metrics(found.local_model(reply))["accuracy"] for reply in found.replies]
    assert row["local"] == pytest.approx(sum(values) / 3, abs=1e-15)
    assert [client["value"] for client in row["clients"]] == values
    assert [client["client"] for client in row["clients"]] == [reply.client for reply in found.replies]


@pytest.mark.parametrize("seconds", [0, 30], ids=["from-a-checkpoint", "from-the-start"])
def test_repeated_rounds_are_those_of_the_run(seconds: int, recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    experiment(f"checkpoint.seconds={seconds}").run(path, report=False)
    said: list[str] = []
    repeat_rounds(path, [3], say=said.append)
    repeat_rounds(path, [3], say=said.append)
    assert said == [f"repeating rounds {3 if seconds == 0 else 1} to 3 to record 3"]
    names = sorted(file.name for file in (path / "recordings" / "round-000003").iterdir())
    assert len(names) == 6
    for name in names:
        files = [run / "recordings" / "round-000003" / name for run in (path, recorded)]
        if name.endswith(".json"):
            contents = [json.loads(file.read_text()) | {"run": None} for file in files]
            assert contents[0] == contents[1]
        else:
            assert files[0].read_bytes() == files[1].read_bytes()
    assert not list(path.glob(".repeated*"))


def test_rounds_that_come_out_differently_are_refused(plain: Path) -> None:
    lines = (plain / "metrics.jsonl").read_text().splitlines(keepends=True)
    changed = json.loads(lines[1])
    changed["test_loss"] += 1e-12
    (plain / "metrics.jsonl").write_text("".join([lines[0], json.dumps(changed) + "\n", *lines[2:]]))
    with pytest.raises(
        RunDirectoryError, match="round 1 came out differently when it was repeated: test_loss is"
    ):
        repeat_rounds(plain, [2])
    assert not (plain / "recordings").exists()


def test_a_round_that_is_not_done_cannot_be_repeated(plain: Path) -> None:
    with pytest.raises(
        RunDirectoryError, match="round 9 cannot be repeated, because the run has 3 rounds so far"
    ):
        repeat_rounds(plain, [1, 9])


def on_a_gpu(run: Path, device: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the run have trained on this device, and this machine have so many GPUs."""
    config = run / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', f'device = "{device}"'))
    for each in (devices, repeat):
        monkeypatch.setattr(each, "hardware", lambda: Hardware(("H100",) * gpus))


def test_rounds_of_a_gpu_are_not_repeated_without_one(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(plain, "cuda", 0, monkeypatch)
    what = "trained on a GPU and this machine has none, so its rounds cannot be repeated"
    with pytest.raises(RunDirectoryError, match=what) as caught:
        repeat_rounds(plain, [2])
    assert caught.value.where == str(plain)  # and no folder that is removed


@pytest.mark.parametrize(("device", "taken"), [("cuda:3", "cuda"), ("cuda:0", "cuda:0"), ("cuda", "cuda")])
def test_rounds_are_repeated_on_a_gpu_that_is_there(
    device: str, taken: str, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(plain, device, 1, monkeypatch)

    def resumed(path: Path, **how: Any) -> None:
        raise HookError(RunDir(path).read_config()["engine"]["device"])

    monkeypatch.setattr(repeat, "resume", resumed)
    with pytest.raises(HookError, match=rf"^{taken}\.$"):
        repeat_rounds(plain, [2])


def test_updates_are_recorded_where_no_local_models_are_sent(tmp_path: Path) -> None:
    local = {"lr": 0.1, "epochs": 1, "batch_size": 16}
    experiment("algorithm=iceadmm", local=local).run(tmp_path / "run", report=False)
    said: list[str] = []
    repeat_rounds(tmp_path / "run", [1], say=said.append)
    assert "hold no local models" in said[1]
    (found,) = open_run(tmp_path / "run").recorded
    assert found.updates
    assert not found.trained


SMALL = {
    "optimal-aggregation": {"epochs": 1, "starts": 1},
    "loss-surface": {"count": 10},
    "loss-plane": {"points": 3},
    "representation": {"examples": 60, "k": 3},
    "line": {"points": 3},
}


@pytest.fixture(scope="module")
def made(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Analyses:
    return analyze(recorded, rounds=[1, 3], settings=SMALL, out=tmp_path_factory.mktemp("analyses"))


@pytest.mark.nightly
def test_every_analysis_is_made_with_its_usual_settings(recorded: Path, tmp_path: Path) -> None:
    assert set(analyze(recorded, rounds=[3], out=tmp_path / "page").rows) == set(ANALYSES)


def test_all_analyses_that_the_recordings_allow_are_on_one_page(made: Analyses) -> None:
    assert set(made.rows) == set(ANALYSES)
    page = made.page.read_text()
    assert "Training dynamics" in page
    assert "Eq. 4" in page
    index = json.loads((made.folder / INDEX).read_text())
    assert index["dynamics"]["on"] == "test"
    assert index["dynamics"]["figures"] == [["dynamics.svg", "dynamics.pdf"]]
    assert all((made.folder / name).exists() for name in index["dynamics"]["figures"][0])
    assert "dynamics.pdf" in page


def test_every_analysis_has_rows_figures_and_a_text(made: Analyses) -> None:
    assert set(made.rows) == set(ANALYSES)
    assert made.left_out == {}
    page = made.page.read_text()
    for name, rows in made.rows.items():
        described = shown(name)
        assert described is not None
        assert all(str(escape(sentence)) in page for sentence in described.reading)
        assert analysis_figures(name, rows)
        lines = (made.folder / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == [row["round"] for row in rows]


def test_analyses_agree_with_each_other_and_with_the_run(made: Analyses, recorded: Path) -> None:
    """The average is the next global model; ends of lines are local models; the mean update is the step."""
    lines, run = metrics(recorded), open_run(recorded, rounds=[1, 3])
    for place, found in enumerate(run.recorded):
        line = lines[found.round]
        optimal, surface = (made.rows[name][place] for name in ("optimal-aggregation", "loss-surface"))
        assert optimal["average"] == pytest.approx(line["test_accuracy"], abs=2 / 360)
        assert optimal["loss_average"] == pytest.approx(line["test_loss"], rel=1e-5)
        assert optimal["optimal"] >= optimal["average"]
        assert optimal["gap"] == pytest.approx(optimal["optimal"] - optimal["average"])
        assert surface["average"] == pytest.approx(line["test_loss"], rel=1e-5)
        assert surface["low"] <= surface["mean"] <= surface["high"]
        before, after = found.before(), found.after()
        step = sum((after[name] - before[name]).double().square().sum().item() for name in after) ** 0.5
        total = next(
            row for row in made.rows["drift"] if row["round"] == found.round and row["layer"] == "all"
        )
        assert total["mean_norm"] == pytest.approx(step, rel=1e-4)
        calibrated = [row for row in made.rows["calibration"] if row["round"] == found.round]
        assert [row["model"] for row in calibrated] == ["before", "local", "local", "local", "after"]
        assert calibrated[-1]["accuracy"] == pytest.approx(line["test_accuracy"])
        assert calibrated[-1]["error"] == pytest.approx(line["test_calibration_error"])
        assert calibrated[-1]["nll"] == pytest.approx(line["test_loss"])
        points = [row for row in made.rows["line"] if row["round"] == found.round]
        losses = {client["client"]: client["loss"] for client in made.rows["dynamics"][place]["clients"]}
        for point in (points[0], points[-1]):
            name = point["from"] if point["t"] == 0 else point["to"]
            assert point["loss"] == pytest.approx(losses[name.removeprefix("client ")])
    layers = {row["layer"] for row in made.rows["representation"]}
    assert layers == {"1", "3", "5", "last layer"}
    corners = [row for row in made.rows["loss-plane"] if "client" in row]
    assert len(made.rows["loss-plane"]) == 9 + 3 + 1
    average = made.rows["loss-plane"][-1]
    assert average["model"] == "average"
    by = {client["client"]: client["weight"] for client in made.rows["dynamics"][-1]["clients"]}
    assert average["x"] == pytest.approx(
        sum(by[row["client"]] * row["x"] for row in corners) / sum(by.values())
    )
    assert average["loss"] == pytest.approx(made.rows["dynamics"][-1]["loss_after"])
    assert {row["layer"]: row["kind"] for row in made.rows["drift"]} == {
        "all": "",
        "1": "Linear",
        "3": "Linear",
        "5": "Linear",
    }
    assert [row["loss"] for row in corners] == pytest.approx([losses[row["client"]] for row in corners])


def test_updates_alone_show_the_same_drift_as_local_models(
    recorded: Path, made: Analyses, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    experiment("record.updates={rounds=[3]}").run(path, report=False)
    only = analyze(path)
    assert set(only.rows) == {"drift"}
    assert "no recordings of local models" in only.left_out["dynamics"]
    models = [row for row in made.rows["drift"] if row["round"] == 3]
    for row, other in zip(only.rows["drift"], models, strict=True):
        assert row["layer"] == other["layer"]
        for key in ("norm", "distance", "cosine", "cosine_low", "mean_norm", "diversity", "agreeing"):
            assert row[key] == pytest.approx(other[key], rel=1e-3), key


def test_the_normalized_updates_of_fednova_show_the_drift_of_its_local_models(tmp_path: Path) -> None:
    """They are for one step; each client takes as many as it has batches."""
    found = []
    for kind in ("local_models", "updates"):
        path = tmp_path / kind
        local = {"lr": 0.1, "epochs": 1, "batch_size": 16}
        experiment("algorithm=fednova", f"record.{kind}={{rounds=[2]}}", local=local).run(path, report=False)
        found.append(analyze(path, ["drift"]).rows["drift"])
    for row, other in zip(*found, strict=True):
        for key in ("norm", "distance", "cosine", "mean_norm", "agreeing"):
            assert row[key] == pytest.approx(other[key], rel=1e-3), key


class Pixels(nn.Sequential):
    """The class of each pixel from its neighbours, normalized over the batch."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, num_classes, 1)
        )


def test_the_average_of_optimal_aggregation_has_the_run_s_numbers_at_another_evaluation_size(
    tmp_path: Path,
) -> None:
    run = experiment(
        "record.local_models.every=3",
        "evaluation.size=[16, 16]",
        data={"dataset": scenes, "partition": {"name": "iid", "clients": 3}},
        model=Pixels,
        local={"lr": 0.01, "steps": 1, "batch_size": 8},
    )
    run.run(tmp_path / "run", report=False)
    (row,) = analyze(
        tmp_path / "run",
        ["optimal-aggregation"],
        settings={"optimal-aggregation": {"epochs": 1, "starts": 1, "batch_size": 8}},
    ).rows["optimal-aggregation"]
    last = metrics(tmp_path / "run")[3]
    assert row["loss_average"] == pytest.approx(last["test_loss"], rel=1e-4)
    assert row["average"] == pytest.approx(last[f"test_{row['metric']}"], rel=1e-4)


class Attention(nn.Module):
    """A transformer layer on the rows of an image, whose output projection is never called as a layer."""

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.rows = nn.TransformerEncoderLayer(input_shape[-1], 2, 16, batch_first=True)
        self.top = nn.Linear(input_shape[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.rows(images[:, 0]).mean(1)
        return self.top(pooled)


def test_layers_that_are_never_called_are_left_out_of_the_representation(tmp_path: Path) -> None:
    experiment("record.local_models.every=3", model=Attention).run(tmp_path / "run", report=False)
    rows = analyze(tmp_path / "run", ["representation"]).rows["representation"]
    layers = [row["layer"] for row in rows]
    assert "rows.linear1" in layers
    assert "rows.self_attn.out_proj" not in layers


def test_a_plane_needs_three_clients_and_a_line_two(tmp_path: Path) -> None:
    experiment("select.clients_per_round=1", "record.local_models.every=3").run(
        tmp_path / "run", report=False
    )
    for name, message in (
        ("loss-plane", "goes through 3 local models, and round 3 has 1"),
        ("line", "no recorded round has two"),
        ("loss-surface", "no recorded round has the local models of two"),
        ("optimal-aggregation", "no recorded round has the local models of two"),
    ):
        with pytest.raises(ConfigError, match=message):
            analyze(tmp_path / "run", [name])
    rows = analyze(tmp_path / "run", ["line"], settings={"line": {"between": "rounds", "points": 3}}).rows[
        "line"
    ]
    assert [(row["from"], row["to"]) for row in rows] == [("before", "after")] * 3


def test_an_analysis_of_ones_own(recorded: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def sizes(run, *, power: float = 1.0):\n"
        "    return [{'round': each.round, 'clients': len(each.replies) ** power} for each in run.recorded]\n"
    )
    made = analyze(
        recorded,
        [f"{own}:sizes"],
        rounds=[1, 2, 3],
        settings={f"{own}:sizes": {"power": 2.0}},
        out=tmp_path / "page",
    )
    assert list(made.rows.values()) == [[{"round": r, "clients": 9.0} for r in (1, 2, 3)]]
    assert (tmp_path / "page" / "own-sizes.jsonl").exists()
    assert "sizes" in made.page.read_text()
    (index,) = json.loads((tmp_path / "page" / INDEX).read_text()).values()
    assert escape(index["command"]) in made.page.read_text()
    verbs, given = parsed(index["command"])
    assert (verbs, given["directory"], given["names"]) == ("analyze", recorded, [f"{own}:sizes"])
    assert (analysis_settings(given["changes"]), given["out"]) == (
        {f"{own}:sizes": {"power": 2.0}}, str(tmp_path / "page")
    )  # fmt: skip
    assert round_list(given["rounds"]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("names", "how", "message"),
    [
        (["dynamic"], {}, "did you mean 'dynamics'"),
        (["dynamics"], {"settings": {"dynamics": {"count": 3}}}, "has no setting 'count'"),
        (["dynamics"], {"settings": {"drift": {}}}, "settings are given for 'drift', which is not made"),
        (["dynamics"], {"settings": {"norms": {}}}, "the name of an analysis that is made: dynamics"),
        (["dynamics"], {"on": "validation"}, "no validation data"),
        (["dynamics"], {"rounds": [7]}, "recorded are: 1, 2, 3 .*; the run has 3 rounds so far"),
        (["dynamic"], {}, r"\(dynamic\)"),
        (["own.py:norms"], {"settings": {"norms": {"power": 1}}}, r"write --set own.py:norms.KEY=VALUE"),
    ],
)
def test_wrong_requests_are_refused(
    names: list[str], how: dict[str, Any], message: str, recorded: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, RunDirectoryError), match=message):
        analyze(recorded, names, out=tmp_path / "page", **how)


def test_missing_recordings_name_the_command_that_makes_them(plain: Path) -> None:
    for names in ([], ["dynamics"]):
        with pytest.raises(RunDirectoryError, match=r"no recordings of .* --record 1,3' records them"):
            analyze(plain, names)


@pytest.mark.parametrize(
    ("algorithm", "analyses", "message"),
    [
        ("centralized", ["dynamics"], "'centralized' trains on the pooled data and has no clients to record"),
        ("centralized", [], "'centralized' trains on the pooled data and has no clients to record"),
        ("iceadmm", ["dynamics"], "'iceadmm' hold no local models: clients send something else"),
    ],
)
def test_local_models_that_no_reply_holds_are_refused_before_the_rounds_are_repeated(
    algorithm: str, analyses: list[str], message: str, tmp_path: Path
) -> None:
    tables: dict[str, Any] = {"select": None} if algorithm == "centralized" else {}
    local = {"lr": 0.1, "epochs": 1, "batch_size": 16}
    made = experiment(f"algorithm={algorithm}", local=local, **tables)
    run = made.run(tmp_path / "run", report=False).directory
    done = CliRunner().invoke(app, ["analyze", str(run), *analyses, "--record", "1"])
    assert done.exit_code == 2
    assert message in done.output
    assert ".repeated" not in done.output
    assert not (run / "recordings").exists()
    with pytest.raises(RunDirectoryError, match=message.partition(":")[0] if analyses else message):
        analyze(run, analyses)


@pytest.mark.pictures
def test_the_command_records_analyzes_and_prints_the_page(plain: Path) -> None:
    done = CliRunner().invoke(app, ["analyze", str(plain), "dynamics", "--record", "2-3", "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["page"] == str(plain / "analysis" / "analysis.html")
    assert (plain / "analysis" / "dynamics.svg").read_bytes().startswith(b"<?xml")
    assert (plain / "analysis" / "dynamics.pdf").read_bytes().startswith(b"%PDF")
    assert [row["round"] for row in printed["rows"]["dynamics"]] == [2, 3]
    for wrong, message in (
        ("2-x", "the list of rounds is"),
        ("0", "the list of rounds is"),
        ("3-2", "write 2-3"),
    ):
        failed = CliRunner().invoke(app, ["analyze", str(plain), "--rounds", wrong])
        assert failed.exit_code == 2
        assert message in failed.output
    failed = CliRunner().invoke(app, ["analyze", str(plain), "dynamics", "--set", "count=3"])
    assert "is no setting of an analysis" in failed.output


def test_what_fails_in_an_analysis_of_ones_own_names_its_line(recorded: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def fails(run):\n    return run.nothing\n\n\ndef nothing(run):\n    pass\n")
    with pytest.raises(HookError, match=r"failed: AttributeError.*own.py, line 1"):
        analyze(recorded, [f"{own}:fails"], out=tmp_path / "page")
    sets = tmp_path / "sets.py"
    sets.write_text("def sets(run):\n    return [{'round': 1, 'x': 1j}]\n")
    with pytest.raises(HookError, match=r"a row that is no JSON: .* array\.tolist\(\) makes a list"):
        analyze(recorded, [f"{sets}:sets"], out=tmp_path / "page")
    tensors = tmp_path / "tensors.py"
    tensors.write_text("import torch\n\ndef several(run):\n    return [{'round': 1, 'x': torch.ones(2)}]\n")
    with pytest.raises(HookError, match=r"a row that is no JSON: .* array\.tolist\(\) makes a list"):
        analyze(recorded, [f"{tensors}:several"], out=tmp_path / "page")
    with pytest.raises(HookError, match=r"returned a NoneType .*own.py, line 5.* return a list of rows"):
        analyze(recorded, [f"{own}:nothing"], out=tmp_path / "page")


def test_two_analyses_never_share_a_file(recorded: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text("def drift(run):\n    return [{'round': 1}]\n")
    analyze(recorded, ["drift"], out=tmp_path / "page")
    made = analyze(recorded, [f"{tmp_path / 'a' / 'own.py'}:drift"], out=tmp_path / "page")
    assert (tmp_path / "page" / "drift.jsonl").stat().st_size > 1000
    assert "Client drift" in made.page.read_text()
    with pytest.raises(ConfigError, match=r"another analysis with the file own-drift\.jsonl"):
        analyze(recorded, [f"{tmp_path / 'b' / 'own.py'}:drift"], out=tmp_path / "page")


def test_a_corrupt_recording_is_made_again(tmp_path: Path) -> None:
    experiment("record.local_models={every=1}").run(tmp_path / "run", report=False)
    folder = tmp_path / "run" / "recordings" / "round-000002"
    said: list[str] = []
    repeat_rounds(tmp_path / "run", [2], say=said.append)
    assert said == []  # its local models are recorded
    for name in ("after.safetensors", "recording.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-9])
        with pytest.raises(RunDirectoryError, match="--record 2'"):
            analyze(tmp_path / "run", ["dynamics"])
        repeat_rounds(tmp_path / "run", [2])
        assert analyze(tmp_path / "run", ["dynamics"]).rows["dynamics"]


def test_a_longer_run_is_repeated_although_its_old_end_was_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "run"
    experiment("evaluation.every=2").run(path, report=False)
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(config.replace("rounds = 3", "rounds = 4", 1))
    resume(path, report=False, accept_changes=True)
    repeat_rounds(path, [3])
    assert [found.round for found in open_run(path).recorded] == [3]


def test_recordings_of_rounds_that_are_trained_again_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    experiment("record.local_models={every=1}", "checkpoint.seconds=1000").run(path, report=False, until=2)
    later = path / "recordings" / "round-000003"
    shutil.copytree(path / "recordings" / "round-000002", later)
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(config.replace("[record.local_models]\nevery = 1\n", ""))
    resume(path, report=False)
    assert not later.exists()
    assert (path / "recordings" / "round-000002").exists()


def test_personal_models_point_to_the_drift_of_updates(tmp_path: Path) -> None:
    held = {"validation": 0.2, "validation_from": "client"}
    data = {"dataset": "digits", "partition": {"name": "iid", "clients": 4}, **held}
    model = {"name": "small-cnn", "norm": "batch"}
    made = experiment("algorithm=fedbn", "rounds=1", data=data, model=model)
    made.run(tmp_path / "run", report=False)
    repeat_rounds(tmp_path / "run", [1])
    with pytest.raises(
        RunDirectoryError, match=r"'fedbn' hold no local models: each client .* analyze 'drift'"
    ):
        analyze(tmp_path / "run", ["dynamics"])
    assert analyze(tmp_path / "run", ["drift"]).rows["drift"]


def test_the_task_that_keeps_a_part_of_the_model_is_named(tmp_path: Path) -> None:
    data = {"dataset": {"name": "digits"}, "partition": {"name": "iid", "clients": 4}, "augment": ["flip"]}
    made = experiment(
        "rounds=1", "record.updates.every=1", data=data, task={"name": "moco-v2", "queue": 64}, model="mlp"
    )
    run = made.run(tmp_path / "run", report=False).directory
    with pytest.raises(
        RunDirectoryError, match="local models: with the task 'moco-v2', each client keeps a part"
    ):
        analyze(run, ["dynamics"])
    with pytest.raises(ConfigError, match="which moco-v2 does not have"):
        reliability_of({}, open_run(run).evaluator)


def test_more_neighbours_than_examples_that_vote_are_refused(recorded: Path, tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {"representation": {"examples": 30, "layers": ["5"]}}
    rows = analyze(recorded, ["representation"], rounds=[1], settings=settings, out=tmp_path / "page").rows
    assert rows["representation"][-1]["knn_accuracy"] is None  # the default of 20 is more than 15
    settings["representation"]["k"] = 16
    with pytest.raises(
        ConfigError, match=r"15 examples vote, fewer than the 16 neighbours \(representation.k\)"
    ):
        analyze(recorded, ["representation"], rounds=[1], settings=settings, out=tmp_path / "page")


def test_wrong_names_are_refused_before_rounds_are_repeated(plain: Path) -> None:
    failed = CliRunner().invoke(app, ["analyze", str(plain), "dynamix", "--record", "1"])
    assert failed.exit_code == 2
    assert "did you mean 'dynamics'" in failed.output
    assert not (plain / "recordings").exists()


def test_more_examples_than_the_usual_thousand(recorded: Path, tmp_path: Path) -> None:
    settings = {"representation": {"examples": 2000, "layers": ["5"], "k": 3}}
    rows = analyze(recorded, ["representation"], rounds=[1], settings=settings, out=tmp_path / "page").rows
    assert {row["layer"] for row in rows["representation"]} == {"5", "last layer"}
