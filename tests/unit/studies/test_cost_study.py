"""`fedlens.cost`: which runs it makes, that they can be compared, and that it continues where it stopped."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedlens
from fedlens.base.errors import ConfigError, RunDirectoryError, RunFailed
from fedlens.cli.cost import _outcome
from fedlens.cli.main import app
from fedlens.pages.cost.answer import cost_answer
from fedlens.pages.cost.measures import measure_notes
from fedlens.pages.cost.parties import write_party_page
from fedlens.results.rows import Row, row_of_run
from fedlens.results.run import Run, read_run
from fedlens.run.rundir import RunDir
from fedlens.run.session import Session
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.studies import carry_out, cost_study
from fedlens.studies.cost_study import CostResult, cost, of_role, planned_runs
from fedlens.studies.planned import DueRun, PlannedRun
from fedlens.studies.progress import StudyProgress

SETTINGS: dict[str, Any] = {
    "name": "small",
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1, "batch_size": 10, "epochs": 2},
    "select": {"name": "uniform", "clients_per_round": 2},
    "data": {
        "dataset": "digits",
        "partition": {"name": "shards", "clients": 4, "classes_per_client": 3},
        "normalize": "unit",
    },
    "engine": "inline",
}


def experiment(**more: Any) -> fedlens.Experiment:
    return fedlens.Experiment(**{**SETTINGS, **more})


@pytest.fixture(scope="module")
def result(lasting: Callable[[int], Any], tmp_path_factory: pytest.TempPathFactory) -> CostResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedlens.studies.jobs.WorkerPool", lasting)
        return cost(experiment(), seeds=2, jobs=2, out=tmp_path_factory.mktemp("cost") / "c")


def runs(result: CostResult, seed: int = 0) -> dict[str, Run]:
    return {role: read_run(result.directory / f"{role}-seed{seed}") for role in cost_study.ROLES}


def test_every_seed_has_four_finished_runs_and_a_page(result: CostResult) -> None:
    names = [f"{role}-seed{seed}" for seed in (0, 1) for role in cost_study.ROLES]
    assert [run["name"] for run in result.answer["runs"]] == names
    assert {run["status"] for run in result.answer["runs"]} == {"finished"}
    assert json.loads((result.directory / "cost.json").read_text("utf-8"))["sentences"]
    assert result.answer["sentences"][0] in result.page.read_text("utf-8")


def test_federated_centralized_and_local_only_share_images_and_the_twin_has_the_sizes(
    result: CostResult,
) -> None:
    made = runs(result)
    for key in ("digest", "held_out_digest"):
        shared = {
            made[role].recorded("partition", key) for role in ("federated", "centralized", "local-only")
        }
        assert len(shared) == 1
        assert made["iid"].recorded("partition", key) not in shared
    ours, twin = made["federated"].partition, made["iid"].partition
    assert ours is not None
    assert twin is not None
    assert ours.sizes().tolist() == twin.sizes().tolist()
    assert made["iid"].emd() < made["federated"].emd() / 2


def test_seeds_change_weights_and_cohorts_but_neither_partition_nor_held_out_images(
    result: CostResult,
) -> None:
    first, second = runs(result)["federated"], runs(result, 1)["federated"]
    for key in ("digest", "held_out_digest"):
        assert first.recorded("partition", key) == second.recorded("partition", key)
    seeds, others = first.config["seeds"], second.config["seeds"]
    assert {key for key in seeds if seeds[key] == others[key]} == {"data", "partition"}
    assert runs(result, 1)["centralized"].config["seeds"] == others


def test_a_centralized_round_trains_on_as_many_images_as_a_federated_one(result: CostResult) -> None:
    made = runs(result)
    work = result.answer["work"]
    # 2 of 4 clients train 2 epochs on a quarter of the images each.
    assert work["passes"] == pytest.approx(2.0)
    federated, centralized = (made[role].total("examples") or 0 for role in ("federated", "centralized"))
    assert centralized == pytest.approx(federated, rel=0.02)
    assert made["centralized"].rounds_done == made["federated"].rounds_done


def test_the_clients_are_measured_although_the_experiment_measures_none(result: CostResult) -> None:
    assert "holds out 20 % of its images" in result.answer["notes"][0]
    assert sorted(row["client"] for row in result.answer["clients"]) == ["0", "1", "2", "3"]
    for row in result.answer["clients"]:
        assert None not in (row["federated"], row["centralized"], row["local-only"])
        assert row["vs_local_only"]["seeds"] == 2


def test_a_share_that_the_experiment_holds_out_stays() -> None:
    settings = {**SETTINGS, "data": {**SETTINGS["data"], "validation": 0.3, "validation_from": "client"}}
    source, notes = cost_study.measured_at_clients(Source(settings), read_config(settings))
    assert notes == []
    assert source.values["data"]["validation"] == 0.3
    assert source.values["evaluation"] == {"clients": "all"}


class Watching(StudyProgress):
    """Collects the runs that train a round, and stops in the middle of one."""

    def __init__(self, stop_in: str = "") -> None:
        self.trained: list[str] = []
        self.stop_in = stop_in

    def round_done(self, run: PlannedRun, round: int, rounds: int) -> None:
        if round and run.key not in self.trained:
            self.trained.append(run.key)
        if run.key == self.stop_in and round == 1:
            raise KeyboardInterrupt


def test_an_answer_stays_until_the_next_one_replaces_it(result: CostResult, tmp_path: Path) -> None:
    class Stops(StudyProgress):
        def run_ended(self, run: PlannedRun, line: Row) -> None:
            raise KeyboardInterrupt

    answer = result.directory / "cost.json"
    before = answer.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        cost(experiment(), seeds=2, jobs=0, out=result.directory, progress=Stops(), report=False)
    assert answer.read_bytes() == before
    # A first call leaves its runs so far, and so does one that finds a damaged file.
    for damaged in (None, b"{"):
        if damaged is not None:
            (tmp_path / "c/cost.json").write_bytes(damaged)
        with pytest.raises(KeyboardInterrupt):
            cost(experiment(), seeds=1, jobs=0, out=tmp_path / "c", progress=Stops(), report=False)
        begun = json.loads((tmp_path / "c/cost.json").read_bytes())
        assert "sentences" not in begun
        assert len(begun["runs"]) == 4


class Listening(StudyProgress):
    """Collects what is said, with the number of runs that were due by then."""

    def __init__(self) -> None:
        self.due = 0
        self.said: list[tuple[int, str]] = []

    def note(self, text: str) -> None:
        self.said.append((self.due, text))

    def runs_due(self, due: int, done: int, total: int) -> None:
        self.due = due


def test_two_seeds_are_told_before_the_runs_what_they_cannot_answer(result: CostResult) -> None:
    listening = Listening()
    cost(experiment(), seeds=2, jobs=0, out=result.directory, progress=listening, report=False)
    ((due, said),) = [(due, said) for due, said in listening.said if "interval" in said]
    assert (due, listening.due) == (0, 8)
    assert said.startswith("2 seeds give differences without an interval")
    assert "--seeds 3 or more for that (12 runs instead of 8;" in said
    assert cost_study.few_seeds(3, 12) == []


def test_a_line_of_the_log_has_the_measure_of_the_page(result: CostResult) -> None:
    for run in result.answer["runs"]:
        said = _outcome(row_of_run(read_run(result.directory / run["name"])), "final")
        assert said == f"the clients' mean accuracy on held-out images {100 * run['clients']:.1f} %"


def test_the_bytes_of_a_client_are_those_of_the_messages_of_its_runs(result: CostResult) -> None:
    """Each of the two clients of a round receives and sends a model of 650 values, four bytes each."""
    sent, model = result.answer["bytes_per_client"], 4 * 650
    for role in ("federated", "iid"):
        of = sent[role]
        assert (
            model
            <= min(of["down_round"], of["up_round"])
            <= max(of["down_round"], of["up_round"])
            < 1.1 * model
        )
        rounds = runs(result)[role].rounds_done
        assert of["down"] == pytest.approx(of["down_round"] * 2 * rounds / 4)
        assert of["measuring_down"] >= model
    assert sent["local-only"]["down_round"] < 100  # no model leaves or reaches a client
    assert sent["centralized"] is None


def test_each_own_model_is_tested_on_the_images_that_belong_to_no_client(result: CostResult) -> None:
    """It knows the three classes of its client, so it can be right for no more images than these have."""
    for seed in (0, 1):
        run = runs(result, seed)["local-only"]
        tests = run.read_client_tests()
        assert tests is not None
        assert (tests["round"], tests["examples"]) == (2, result.answer["work"]["test_images"])
        assert sorted(tests["clients"]) == ["0", "1", "2", "3"]
        values = [each["accuracy"] for each in tests["clients"].values()]
        assert len(set(values)) >= 3, "a client that took part in no round has the initial model"
        assert max(values) < 0.35
        row = next(row for row in result.answer["runs"] if row["name"] == f"local-only-seed{seed}")
        assert row["test"] == pytest.approx(sum(values) / 4)


def test_with_one_client_its_own_model_has_the_test_accuracy_of_the_federated_one(tmp_path: Path) -> None:
    data = {**SETTINGS["data"], "partition": {"name": "iid", "clients": 1}, "reassign": True}
    made = cost(experiment(data=data, select="all"), seeds=1, jobs=0, out=tmp_path / "c", report=False)
    overall = made.answer["overall"]
    assert overall["local-only"]["models"] == "own"
    assert overall["local-only"]["test"] == pytest.approx(overall["federated"]["test"])
    assert made.answer["measured_on"] == "test"
    # A test that another round left is of other models.
    run = RunDir(tmp_path / "c" / "local-only-seed0")
    run.write_client_tests({**(run.read_client_tests() or {}), "round": 1})
    stale = cost_answer(
        tmp_path / "c", {**made.answer, "runs": [{**made.answer["runs"][2], "untested": "no time"}]}
    )
    assert stale["overall"]["local-only"]["test"] is None
    assert "Not measured: test accuracy of local-only: no time." in measure_notes(stale)


def raising(error: Exception) -> Callable[..., None]:
    def write(*given: Any) -> None:
        raise error

    return write


def test_models_that_would_take_longer_to_test_than_to_train_are_not_tested(
    result: CostResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = next(
        run
        for run in planned_runs(Source({**SETTINGS, "evaluation": {}}), 1, {"steps": 1})
        if run.method == "local-only"
    )
    directory = result.directory / run.key
    monkeypatch.setattr(RunDir, "read_client_tests", lambda self: None)
    work = {**result.answer["work"], "clients": 10**6}
    why = cost_study.why_untested(run, directory, Session(), root=Path(), work=work)
    assert why == "testing 1,000,000 models on 360 images would take longer than the run's training"
    work = result.answer["work"]
    for error in (RuntimeError("out of memory"), OSError(errno.ENOSPC, "No space left on device")):
        monkeypatch.setattr(cost_study, "write_client_tests", raising(error))
        if isinstance(error, OSError):
            with pytest.raises(OSError, match="No space"):
                cost_study.why_untested(run, directory, Session(), root=Path(), work=work)
        else:  # the run itself is finished
            why = cost_study.why_untested(run, directory, Session(), root=Path(), work=work)
            assert str(why).startswith("RuntimeError: out of memory")
    federated = result.directory / "federated-seed0"
    assert cost_study.why_untested(run, federated, Session(), root=Path(), work=work) is None


def test_it_continues_where_it_was_interrupted_and_adds_seeds(tmp_path: Path, result: CostResult) -> None:
    out = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        cost(experiment(), seeds=1, jobs=0, out=out, progress=Watching("centralized-seed0"), report=False)
    watching = Watching()
    cost(experiment(), seeds=1, jobs=0, out=out, progress=watching, report=False)
    assert watching.trained == ["centralized-seed0", "local-only-seed0"]
    watching = Watching()
    again = cost(experiment(), seeds=2, jobs=0, out=out, progress=watching, report=False)
    assert watching.trained == [f"{role}-seed1" for role in cost_study.ROLES]
    for key in ("overall", "differences", "clients", "sentences"):
        assert again.answer[key] == result.answer[key]


def test_a_directory_with_other_settings_is_refused_with_the_key(result: CostResult) -> None:
    with pytest.raises(RunDirectoryError, match=r"local.lr is 0.1 there and 0.2 now") as refused:
        cost(experiment(), ["local.lr=0.2"], seeds=1, jobs=0, out=result.directory)
    assert "--out" in str(refused.value)
    for change in ("engine.threads=1", "record.images=false"):  # change no result
        cost(experiment(), [change], seeds=2, jobs=0, out=result.directory, report=False)


def test_a_run_that_fails_is_a_row_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = carry_out._start_or_resume

    def failing(due: DueRun, *rest: Any) -> None:
        if due.run.method == "local-only":
            raise RunFailed("the disk is full")
        begin(due, *rest)

    monkeypatch.setattr(carry_out, "_start_or_resume", failing)
    answer = cost(experiment(), seeds=1, jobs=0, out=tmp_path / "c").answer
    assert [run["error"] for run in answer["runs"]] == [None, None, None, "the disk is full."]
    assert answer["runs"][-1]["status"] == "failed"
    assert answer["differences"]["joining"] is None
    assert answer["differences"]["partition"] is not None
    assert "local-only-seed0: the disk is full." in (tmp_path / "c" / "cost.html").read_text("utf-8")


def test_a_function_that_workers_cannot_import_is_refused_or_used_in_this_process(tmp_path: Path) -> None:
    def unchanged() -> Any:
        return lambda images, targets, generator: (images, targets)

    made = experiment(data={**SETTINGS["data"], "augment": [{"name": unchanged}]})
    with pytest.raises(ConfigError, match="cannot be imported by the processes"):
        cost(made, seeds=1, jobs=2, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()
    answer = cost(made, seeds=1, out=tmp_path / "c", report=False).answer
    assert [run["error"] for run in answer["runs"]] == [None] * 4


def test_a_damaged_run_is_a_row_with_its_reason(tmp_path: Path) -> None:
    made = cost(experiment(rounds=1), seeds=1, jobs=0, out=tmp_path / "c", report=False)
    (made.directory / "iid-seed0" / "summary.json").write_text("{")
    answer = cost(experiment(rounds=1), seeds=1, jobs=0, out=made.directory, report=False).answer
    assert [bool(run["error"]) for run in answer["runs"]] == [False, True, False, False]


def test_a_baseline_is_refused_as_the_experiment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'centralized' is a baseline"):
        cost("digits-centralized", out=tmp_path / "c")
    with pytest.raises(ConfigError, match="must be at least 1"):
        cost(experiment(), seeds=0, jobs=0, out=tmp_path / "c")
    with pytest.raises(ConfigError, match="the number of jobs is -1"):
        cost(experiment(), seeds=1, jobs=-1, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_the_features_of_parties_add(tmp_path: Path) -> None:
    made = fedlens.Experiment(
        rounds=2, model="linear", local={"lr": 0.1}, algorithm="vertical", evaluation={"every": 2},
        data={"dataset": "digits", "parties": {"split": "columns:3", "labels_at": 1, "overlap": 0.5}},
    )  # fmt: skip
    answer = cost(made, seeds=2, jobs=0, out=tmp_path / "cost", report=False).answer
    roles = ["parties-1", "parties-0-1", "parties-1-2", "parties-0-1-2", "pooled"]
    assert list(answer["parties"]) == roles
    assert [run["status"] for run in answer["runs"]] == ["finished"] * 10
    for role, found in answer["parties"].items():
        for seed in (0, 1):
            last = fedlens.load_result(tmp_path / "cost" / f"{role}-seed{seed}").metrics[-1]
            assert found["values"][seed] == last["test_accuracy"]
    alone, every = (answer["parties"][role] for role in ("parties-1", "parties-0-1-2"))
    gained = [every["values"][seed] - alone["values"][seed] for seed in (0, 1)]
    assert every["added"]["mean"] == pytest.approx(sum(gained) / 2)
    assert every["added"]["mean"] > 0.01
    assert alone["added"] is None
    pooled = fedlens.load_result(tmp_path / "cost/pooled-seed0").summary["partition"]
    trained = fedlens.load_result(tmp_path / "cost/parties-0-1-2-seed0").metrics[-1]["examples"]
    assert pooled["examples"] == trained
    page = write_party_page(tmp_path, answer).read_text("utf-8")
    assert "parties 0, 1, 2" in page
    assert "party 1, which has the labels" in page


def test_baselines_train_plainly_with_the_cohorts_of_the_federated_run() -> None:
    settings = {
        **SETTINGS,
        "algorithm": {"name": "fedprox", "mu": 1.0},
        "client": "reweighted",
        "server": {"name": "momentum", "momentum": 0.9},
        "local": {**SETTINGS["local"], "stragglers": 0.5},
        "evaluation": {"clients": "all"},
    }
    config = read_config(settings)
    alone = of_role(settings, config, "local-only", {"steps": 7})
    assert alone["algorithm"] == {"name": "local-only"}
    assert alone["select"] == {"name": "uniform", "clients_per_round": 2}
    assert alone["local"] == settings["local"]
    assert not {"client", "server", "aggregate"} & set(alone)
    pooled = of_role(settings, config, "centralized", {"steps": 7})
    assert pooled["local"] == {"lr": 0.1, "batch_size": 10, "steps": 7}
    assert "select" not in pooled
    assert of_role(settings, config, "federated", {}) == {**settings, "name": "small-federated"}


def test_the_usual_selection_of_an_algorithm_goes_to_local_only() -> None:
    settings = {key: value for key, value in SETTINGS.items() if key != "select"} | {
        "algorithm": "fedvc",
        "evaluation": {},
    }
    alone = of_role(settings, read_config(settings), "local-only", {"steps": 1})
    assert alone["select"] == {"name": "by-size"}


def test_an_experiment_that_is_its_own_twin_has_no_other() -> None:
    settings = {**SETTINGS, "data": {**SETTINGS["data"], "reassign": True}, "evaluation": {}}
    roles = [run.method for run in planned_runs(Source(settings), 1, {"steps": 1})]
    assert roles == ["federated", "centralized", "local-only"]


def test_the_command_answers_prints_json_and_says_by_its_exit_code_that_a_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: CostResult
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[tuple[Any, ...]] = []

    def answered(recipe: str, overrides: list[str], **more: Any) -> CostResult:
        calls.append((recipe, overrides, more["seeds"], more["out"]))
        more["progress"].note("said first")
        more["progress"].runs_due(8, 0, 8)
        for run in result.answer["runs"]:
            row = row_of_run(read_run(result.directory / run["name"]))
            more["progress"].run_ended(PlannedRun(run["role"], {}, {}, "final", 0, {}, run["name"]), row)
        return result

    monkeypatch.setattr(cost_study, "cost", answered)
    arguments = [
        "cost",
        "digits",
        "--seeds",
        "2",
        "--set",
        "local.lr=0.2",
        "--engine",
        "inline",
        "--out",
        "x",
    ]
    said = CliRunner().invoke(app, arguments)
    assert (said.exit_code, calls) == (0, [("digits", ["local.lr=0.2", "engine.name=inline"], 2, Path("x"))])
    assert "[3/8] centralized-seed0: finished before" in said.stdout
    for sentence in result.answer["sentences"]:
        assert sentence in said.stdout
    assert said.stdout.rstrip().endswith(f"result page: {result.page}")
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(as_json.stdout)["clients"] == json.loads(json.dumps(result.answer["clients"]))
    assert "said first" in as_json.stderr
    quiet = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert quiet.stdout.strip() == str(result.page)
    row = {**result.answer["runs"][0], "status": "failed", "error": "no space"}
    failed = CostResult(result.directory, {**result.answer, "runs": [row]})
    monkeypatch.setattr(cost_study, "cost", lambda *a, **k: failed)
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 1
    assert "federated-seed0: no space" in said.stdout


def test_it_is_there_by_name_in_python() -> None:
    assert fedlens.cost is cost
