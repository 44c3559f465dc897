"""One workload from arrangement to rows, and the command around it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import peer as peers
from benchmarks import speed as with_peers
from benchmarks.goals import goals_of
from benchmarks.peer import Peer, candidates
from fedlens.base.errors import ConfigError, RunDirectoryError, RunFailed
from fedlens.benchmark import arrangements, speed
from fedlens.benchmark.arrangements import best_of_engine, engine_table, trial
from fedlens.benchmark.comparison import ComparisonRow
from fedlens.benchmark.federation import Federation
from fedlens.benchmark.limit import WORKLOADS, BareLimit, BatchedLinear, Workload, mnist_cnn
from fedlens.benchmark.speed import BenchmarkPlan, measure
from fedlens.cli.main import app
from tests.unit.benchmark.fakes import GOOD, TINY, Fake, peer


def test_a_round_of_fedlens_is_a_round_of_the_limit_on_the_same_data() -> None:
    # Every client, one full batch: neither the cohort nor the order of the images is left to chance.
    whole = Workload(**{**vars(TINY), "cohort": TINY.clients, "batch": TINY.examples, "lr": 0.5})
    ours, limit = Federation(whole, {"name": "inline"}), BareLimit(whole)
    holders = [ours.built.client_data.data_of(client) for client in range(whole.clients)]
    data = [holder.stretch(0, len(holder)) for holder in holders]
    limit._learner.images = torch.stack([images for images, _ in data])
    limit._learner.labels = torch.stack([labels for _, labels in data])
    for weight, own in zip(limit.weights, ours.state["model"].values(), strict=True):
        weight.copy_(own)
    before = [weight.clone() for weight in limit.weights]
    for _ in range(2):
        limit.round(), ours.round()
    for weight, own, old in zip(limit.weights, ours.state["model"].values(), before, strict=True):
        torch.testing.assert_close(weight, own)
        assert not torch.allclose(weight, old, atol=1e-3)
    ours.close(), limit.close()


def test_the_batched_product_is_the_limit() -> None:
    one, batched = BareLimit(TINY), BatchedLinear(TINY)
    for _ in range(2):
        one.round(), batched.round()
    for mine, theirs in zip(one.weights, batched.weights, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_federation_tells_what_its_engine_chooses_during_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlens.engines import default

    monkeypatch.setattr(default.Default, "_seconds", 1e6)
    monkeypatch.setattr(default, "free_memory", lambda: 2**40)
    by_default = Federation(TINY, {"workers": 2})
    assert by_default.about["processes"] == 1
    while by_default.about["processes"] == 1 and by_default.number < 50:
        by_default.round()
    assert by_default.about["processes"] == 2
    assert by_default.about["chosen"] == {"name": "processes", "workers": 2}
    by_default.close()


def test_threads_stay_as_each_engine_wants_them() -> None:
    one, two = Federation(TINY, {"name": "inline"}), Federation(TINY, {"name": "inline", "threads": 2})
    seen = []

    def clock() -> float:
        seen.append(torch.get_num_threads())
        return 0.0

    for federation in (one, two, one):
        federation.round(clock)
    two.close(), one.close()
    assert seen == [1, 1, 2, 2, 1, 1]


def test_engines_are_told_by_name_and_settings() -> None:
    assert engine_table("default") == {}
    assert engine_table("inline") == {"name": "inline"}
    assert engine_table("processes:workers=2:threads=1") == {"name": "processes", "workers": 2, "threads": 1}
    with pytest.raises(ConfigError, match="inlien"):
        engine_table("inlien")
    with pytest.raises(ConfigError, match=r"unknown setting 'wrokers'.*known: .*threads"):
        engine_table("inline:wrokers=2")
    with pytest.raises(ConfigError, match=r"--engines.threads"):
        engine_table("vectorized:threads=banana")
    assert engine_table("ray:address=10.0.0.7:6379:cpus=2") == {
        "name": "ray",
        "address": "10.0.0.7:6379",
        "cpus": 2,
    }


def test_what_is_not_set_is_tried_and_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, object]] = []

    def last(choices: list[dict[str, object]], start: object) -> dict[str, object]:
        tried[:] = choices
        return choices[-1]

    monkeypatch.setattr(arrangements, "fastest", last)
    assert best_of_engine(TINY, {"name": "inline"}, 4) == {"name": "inline", "threads": 4}
    assert tried == [{"name": "inline", "threads": n} for n in (1, 2, 4)]
    best_of_engine(TINY, {"name": "processes"}, 2)
    assert [(table["workers"], table["threads"]) for table in tried] == [(1, 1), (1, 2), (2, 1)]
    best_of_engine(TINY, {"name": "processes", "workers": 2}, 2)
    assert tried == [{"name": "processes", "workers": 2, "threads": n} for n in (1, 2)]
    assert best_of_engine(TINY, {"name": "auto"}, 2) == {"name": "auto"}


def test_a_trial_is_short_and_shared_out_as_a_round_is() -> None:
    for load in WORKLOADS.values():
        small = trial(load)
        assert small.cohort == load.cohort
        assert small.batch <= small.examples <= load.examples
        assert small.images <= max(2_000, load.cohort * load.batch)


def test_who_does_not_run_has_a_row_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = peer(tmp_path / "good.py", GOOD)
    bad = peer(tmp_path / "bad.py", "raise SystemExit('out of luck')")

    def python(one: object, *_: object) -> Path:
        return Path(sys.executable)

    monkeypatch.setattr(peers, "installed", python)
    # Starting a process takes seconds; test_limit.py has the limit in processes of its own.
    monkeypatch.setattr(speed, "BareLimit", lambda load, processes, threads, apart: BareLimit(load))
    said: list[str] = []
    tables = [{"name": "inline"}, {"name": "processes", "workers": -1}]
    rows = measure(
        TINY, BenchmarkPlan(tables, 2, others=candidates([good, bad], tmp_path)), said.append, cores=1
    )
    assert [row.kind for row in rows] == ["limit", "by hand", "fedlens", "fedlens", "peer", "peer"]
    limit, by_hand, inline, wrong, toy, broken = rows
    assert all(len(row.seconds) == 2 for row in (limit, by_hand, inline, toy))
    assert toy.seconds == (0.5, 0.75)
    assert wrong.reason is not None
    assert "workers" in wrong.reason
    assert broken.reason == "it ended with code 1: out of luck"
    assert inline.about["engine"].items() >= {"name": "inline", "threads": 1, "precision": "fp32"}.items()
    assert "tiny: turn 2 of 2" in said

    def impossible(*_: object) -> Path:
        raise RunFailed("it cannot be installed: no such version")

    monkeypatch.setattr(peers, "installed", impossible)
    rows = measure(TINY, BenchmarkPlan([], 1, others=candidates([good], tmp_path)), cores=1)
    assert rows[-1].reason == "it cannot be installed: no such version"
    assert rows[0].images_per_s


def test_of_a_convolutional_model_both_layouts_of_the_limit_and_of_peers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A driver whose rounds take 2 seconds in channels last and 3 else, as it says.
    driver = """
import json, sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    print('{"seconds": %d}' % (2 if json.loads(sys.argv[1])["channels_last"] else 3), flush=True)
"""
    both = replace(peer(tmp_path / "both.py", driver), channels_last=True)
    one = replace(peer(tmp_path / "one.py", driver), title="Plain 1", channels_last=False)
    monkeypatch.setattr(peers, "installed", lambda *_: Path(sys.executable))
    monkeypatch.setattr(
        speed,
        "BareLimit",
        lambda load, *_, **__: Fake("limit", itertools.repeat(1.0 if load.channels_last else 1.5), []),
    )
    load = replace(TINY, model=mnist_cnn, clients=2, cohort=2, examples=10)
    rows = measure(load, BenchmarkPlan([{}], 2, others=candidates([both, one], tmp_path)), cores=1)
    assert [row.reason for row in rows] == [None] * 6
    names = ["limit, contiguous", "limit", "fedlens by default", "Toy 1", "Toy 1, channels last", "Plain 1"]
    assert [row.name for row in rows] == names
    assert [row.seconds[0] for row in rows if row.kind != "fedlens"] == [1.5, 1.0, 3.0, 2.0, 3.0]
    references = ["limit", "limit, contiguous"]
    references += ["Toy 1, as documented", "Toy 1, in its best layout"]
    references += ["Plain 1, as documented", "Plain 1, in its best layout"]
    assert [goal.reference for goal in goals_of(rows)] == references


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BenchmarkPlan]:
    """What the command asks for, instead of measuring it."""
    monkeypatch.chdir(tmp_path)
    asked: list[BenchmarkPlan] = []

    def fake(load: Workload, wanted: BenchmarkPlan, say: object) -> list[ComparisonRow]:
        asked.append(wanted)
        about = {"processes": 2, "threads": 1}
        ran = ComparisonRow(load.name, "bare PyTorch", "limit", about, 1.0, (2.0, 2.0), 1234.5)
        return [ran, ComparisonRow(load.name, "Toy 1", "peer", reason="it cannot be installed")]

    monkeypatch.setattr(speed, "measure", fake)
    return asked


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", *arguments])
    return done.exit_code, done.output


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Path]]:
    """The other libraries that are asked for, and the directory of their environments."""
    asked: list[tuple[list[str], Path]] = []

    def fake(some: list[Peer], directory: Path) -> object:
        asked.append(([one.name for one in some], directory))
        return candidates([], directory)

    monkeypatch.setattr(with_peers, "candidates", fake)
    return asked


def run_with_peers(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(with_peers.app, [*arguments])
    return done.exit_code, done.output


def test_the_command_measures_writes_and_says_where(bench: list[BenchmarkPlan], tmp_path: Path) -> None:
    code, said = run("linear", "--engines", "inline:threads=1,processes", "--pairs", "3", "--seconds", "9")
    assert code == 0
    assert bench[0].engines == [{"name": "inline", "threads": 1}, {"name": "processes"}]
    assert (bench[0].turns, bench[0].budget, bench[0].others(TINY, 1, print)) == (3, 9.0, ())
    assert "1,234" in said
    assert "did not run: it cannot be installed" in said
    assert "pairs: 2 of linear" in said
    assert "results: fedlens-bench.json" in said
    assert "picture: fedlens-bench.png" in said
    read = json.loads((tmp_path / "fedlens-bench.json").read_text())
    assert list(read["workloads"]) == ["linear"]
    assert (tmp_path / "fedlens-bench.png").is_file()


def test_it_is_what_bench_does_unless_told_otherwise(bench: list[BenchmarkPlan]) -> None:
    assert run("speed", "mnist-cnn")[0] == 0
    assert run("mnist-cnn")[0] == 0
    assert len(bench) == 2
    code, said = run("--help")
    assert code == 0
    assert "speed" in said
    assert len(bench) == 2


def test_by_default_all_workloads_and_engines_and_the_files_where_they_are_wanted(
    bench: list[BenchmarkPlan], tmp_path: Path
) -> None:
    code, _ = run("--out", "here", "--json", "there.json")
    assert code == 0
    assert len(bench) == 3
    assert [table.get("name") for table in bench[0].engines] == [None, "inline", "vectorized", "processes"]
    assert bench[0].turns == 12
    assert list(json.loads((tmp_path / "there.json").read_text())["workloads"]) == list(WORKLOADS)
    assert (tmp_path / "here" / "fedlens-bench.png").is_file()
    assert not (tmp_path / "here" / "fedlens-bench.json").exists()


def test_sigterm_ends_what_was_started(bench: list[BenchmarkPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> list[ComparisonRow]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("it goes on")
        finally:
            bench.append(BenchmarkPlan([]))  # as what was started is ended on the way out

    monkeypatch.setattr(speed, "measure", killed)
    code, said = run("linear")
    assert (code, len(bench)) == (130, 1)
    assert "interrupted" in said
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lineer"], "unknown workload 'lineer'"),
        (["--engines", "fast"], "fast"),
        (["--pairs", "0"], "--pairs"),
        (["linear", "--picture", "p.txt"], "--picture"),
        (["linear", "--engines", " , "], "no engine to measure"),
        (["linear", "--engines", "vectorized:threads=banana"], "threads"),
        (["linear", "--peers"], "run python -m benchmarks.speed"),
        (["linear", "--peer", "flower"], "run python -m benchmarks.speed"),
        (["linear", "--out", "taken/here"], "taken"),
        (["profil"], "did you mean 'profile'"),
    ],
)
def test_what_cannot_be_meant_is_refused(bench: list[BenchmarkPlan], arguments: list[str], says: str) -> None:
    Path("taken").touch()
    code, said = run(*arguments)
    assert code == 2
    assert says in said
    assert not bench, "and nothing was measured before it was told"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["linear", "--peers-dir", "envs"], "--peers-dir"),
        (["linear", "--peer", "flowr"], "did you mean 'flower'"),
        (["linear", "--peers", "--device", "cuda"], "other libraries are measured on the processor"),
    ],
)
def test_of_other_libraries_too(bench: list[BenchmarkPlan], arguments: list[str], says: str) -> None:
    code, said = run_with_peers(*arguments)
    assert code == 2
    assert says in said
    assert not bench


def test_all_peers_or_some_alone(
    bench: list[BenchmarkPlan], libraries: list[tuple[list[str], Path]], tmp_path: Path
) -> None:
    assert run_with_peers("linear", "--peers", "--peers-dir", "envs", "--json", "there.json")[0] == 0
    assert run_with_peers("linear", "--peer", "pfl", "--peer", "flower")[0] == 0
    assert run_with_peers("linear")[0] == 0
    (everyone, directory), (some, usual) = libraries
    assert {"flower", "pfl"} <= {*everyone}
    assert (some, directory, usual) == (["pfl", "flower"], Path("envs"), peers.usual_directory())
    read = json.loads((tmp_path / "there.json").read_text())
    assert read["environment"]["command"].startswith("python -m benchmarks.speed")


def test_the_goals_are_told_though_an_engine_did_not_run(
    bench: list[BenchmarkPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        ComparisonRow("linear", "bmm by hand", "by hand", seconds=(1.0,) * 6, images_per_s=1.0),
        ComparisonRow("linear", "fedlens inline", "fedlens", seconds=(2.0,) * 6, images_per_s=0.5),
        ComparisonRow("linear", "fedlens ray", "fedlens", reason="it is not installed"),
    ]
    monkeypatch.setattr(speed, "measure", lambda *given: rows)
    code, said = run_with_peers("linear")
    assert code == 1
    assert "fedlens inline to bmm by hand" in said
    assert said.index("results:") < said.index("goal")


def test_an_engine_that_did_not_run_ends_it_with_1(
    bench: list[BenchmarkPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ComparisonRow("linear", "fedlens ray", "fedlens", reason="it is not installed")
    monkeypatch.setattr(speed, "measure", lambda *given: [lost])
    code, said = run("linear", "--engines", "ray")
    assert code == 1
    assert "did not run: it is not installed" in said


def test_what_was_measured_is_shown_where_it_cannot_be_written_in_the_end(
    bench: list[BenchmarkPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RunDirectoryError("the file cannot be written: No space left on device")

    monkeypatch.setattr("fedlens.benchmark.results_file.write", full)
    code, said = run("linear")
    assert code == 2
    assert "1,234" in said
    assert "No space left" in said


def test_without_matplotlib_there_is_no_picture_unless_it_was_asked_for(
    bench: list[BenchmarkPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, said = run("linear")
    assert code == 0
    assert "no picture" in said
    assert "fedlens[plot]" in said
    code, said = run("linear", "--picture", "p.png")
    assert code == 2
    assert "fedlens[plot]" in said
