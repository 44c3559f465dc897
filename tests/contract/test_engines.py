"""What an engine must not change: weights, metrics and client states are those of `inline`, to the bit."""

import os
import subprocess
import sys
import textwrap
from itertools import product
from pathlib import Path

import pytest
import torch

from fedlens.api import Experiment, Result, resume
from fedlens.run import checkpoint
from tests.contract.contract_kit import (
    ALGORITHMS,
    CHOSEN,
    DATASET,
    HELD_OUT,
    INLINE,
    LOCAL,
    PARTITION_OF,
    PARTITIONS,
    USERS,
    Baseline,
    Stopping,
    experiment,
    failures,
    lines,
    nightly_but,
    outcome,
    settings,
    weights,
)

pytestmark = pytest.mark.usefixtures("quick_workers")

MANY = {"select": {"name": "uniform"}}  # everyone: more clients than workers


def workers(count: int, threads: int = 1) -> dict:
    return {"name": "processes", "workers": count, "threads": threads}


# In ci those of CHOSEN whose bits on two workers no other test of this file compares; of the solvers, liadmm's.
ELSEWHERE = {"scaffold", "feddane", "fedbn", "remembering", "centralized", "ceadmm"}
PAIRS = [
    pytest.param(
        algorithm, partition, marks=[] if algorithm in {*CHOSEN} - ELSEWHERE else [pytest.mark.nightly]
    )
    for algorithm, partition in PARTITION_OF.items()
]


@pytest.mark.parametrize(("algorithm", "partition"), PAIRS)
def test_processes_give_the_bits_of_inline(
    algorithm: str, partition: str, baseline: Baseline, tmp_path
) -> None:
    """With dropout, batch normalization, augmentation, a frozen layer and momentum in one."""
    inline = baseline(algorithm, partition, rounds=2)
    shared = experiment(algorithm, partition, rounds=2, engine=workers(2)).run(tmp_path / "processes")
    assert outcome(inline) == outcome(shared)


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_workers_does_not_show(count: int, tmp_path) -> None:
    inline = experiment("fedavgm", "dirichlet", rounds=2, **MANY).run(tmp_path / "inline")
    shared = experiment("fedavgm", "dirichlet", rounds=2, engine=workers(count), **MANY).run(
        tmp_path / "shared"
    )
    assert outcome(inline) == outcome(shared)


@pytest.mark.parametrize(("told", "drivers"), [pytest.param(1, 2, marks=pytest.mark.nightly), (2, 1)])
def test_the_servers_sums_have_the_threads_that_the_engine_says(told: int, drivers: int, tmp_path) -> None:
    """`centred` sums many numbers at the server, where the driver's own threads would show."""
    torch.set_num_threads(drivers)  # the fixture of tests/conftest.py sets it back
    runs = [
        experiment("centred", engine=engine, model="mlp", rounds=1).run(tmp_path / str(engine["name"]))
        for engine in ({"name": "inline", "threads": told}, workers(1, told))
    ]
    assert torch.get_num_threads() == drivers
    assert outcome(runs[0]) == outcome(runs[1])


@pytest.mark.parametrize(
    "algorithm",
    nightly_but(
        {"fednova", "scaffold", "feddane", "liadmm"},
        ["fedavg", "fednova", "scaffold", "feddyn", "mime", "feddane", "liadmm"],
    ),
)
def test_a_cohort_that_is_reduced_at_the_workers_gives_the_same_bits(algorithm: str, tmp_path) -> None:
    """Blocks of two; client 0 holds nothing and client 1, in the same block, one example."""
    changes = {
        "data": {"dataset": DATASET, "partition": {"name": f"{USERS}:uneven", "clients": 66}},
        "select": {"name": "fixed", "clients": list(range(64))},
        "rounds": 2,
    }
    runs = [
        experiment(algorithm, engine=engine, **changes).run(tmp_path / str(at))
        for at, engine in enumerate([INLINE, workers(2)])
    ]
    assert outcome(runs[0]) == outcome(runs[1])
    assert runs[0].metrics[-1]["clients"] == 63


VECTORIZED = {"name": "vectorized"}


TOGETHER = product(["fedavg", "fedvc", "scaffold", "fedir", "finetune"], ["none", "pad-crop-flip"])


@pytest.mark.parametrize(
    ("algorithm", "augment"),
    [
        pytest.param(*pair, marks=[pytest.mark.nightly] * (at % 4 in (1, 2)))
        for at, pair in enumerate(TOGETHER)
    ],
)
def test_clients_together_agree_with_one_after_the_other(algorithm: str, augment: str, tmp_path) -> None:
    """To rounding, over a whole run; what is counted is equal. One client holds nothing, one a single example."""
    data = {"dataset": DATASET, "partition": PARTITIONS["uneven"], "augment": augment}
    changes = {"rounds": 2, "model": "mlp", "data": data | (HELD_OUT if algorithm == "finetune" else {})}
    if algorithm == "finetune":
        changes["data"] |= {"partition": PARTITIONS["dirichlet"]}
    inline = experiment(algorithm, engine=INLINE, **changes).run(tmp_path / "inline")
    runs = [experiment(algorithm, engine=VECTORIZED, **changes).run(tmp_path / str(k)) for k in range(2)]
    assert outcome(runs[0]) == outcome(runs[1])  # with itself, to the bit
    assert failures(inline) == failures(runs[0])
    for one, many in zip(lines(inline), lines(runs[0]), strict=True):
        assert {k for k, v in many.items() if v is None} == {k for k, v in one.items() if v is None}
        known = {k: v for k, v in one.items() if v is not None}
        assert {k: many[k] for k in known} == pytest.approx(known, rel=1e-4, abs=1e-6)
    trees = [checkpoint.read_model(run.directory / "model.safetensors")[0] for run in (inline, runs[0])]
    torch.testing.assert_close(trees[1], trees[0], rtol=1e-4, atol=1e-6)


def test_clients_together_resume_exactly(tmp_path) -> None:
    made = experiment("scaffold", "shards", engine=VECTORIZED, model="mlp")
    whole = outcome(made.run(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "stopped", progress=Stopping(2))
    assert outcome(resume(tmp_path / "stopped")) == whole


@pytest.mark.parametrize("algorithm", ["centralized", "remembering"])
def test_processes_resume_exactly_also_on_the_other_engine(algorithm: str, tmp_path) -> None:
    """Both keep a state at a client, which crosses rounds, workers and the interruption."""
    whole = outcome(experiment(algorithm, "shards").run(tmp_path / "whole"))
    directory = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        experiment(algorithm, "shards", engine=workers(2)).run(directory, progress=Stopping(2))
    assert outcome(resume(directory)) == whole


HALF = {"precision": "bf16", "channels_last": True}


@pytest.mark.parametrize("algorithm", nightly_but({"fedavg", "scaffold"}, ALGORITHMS))
def test_16_bits_and_another_layout_are_the_same_algorithm(
    algorithm: str, baseline: Baseline, tmp_path
) -> None:
    """Near the numbers of fp32, and none of them; weights stay fp32, and a run repeats to the bit."""
    made = experiment(algorithm, PARTITION_OF[algorithm], rounds=2, engine=INLINE | HALF)
    plain = baseline(algorithm, PARTITION_OF[algorithm], rounds=2)
    half = made.run(tmp_path / "half")
    assert outcome(half) != outcome(plain)
    assert failures(half) == failures(plain)
    trees = [checkpoint.read_model(run.directory / "model.safetensors")[0] for run in (plain, half)]
    assert all(value.dtype == trees[0][name].dtype for name, value in trees[1].items())
    moved = sum(float((v.double() - trees[0][n].double()).square().sum()) for n, v in trees[1].items()) ** 0.5
    size = sum(float(v.double().square().sum()) for v in trees[0].values()) ** 0.5
    assert moved < 0.3 * size


def test_16_bits_are_the_same_bits_on_every_engine(tmp_path) -> None:
    runs = [
        experiment("scaffold", "shards", engine=engine | HALF, rounds=2).run(tmp_path / str(at))
        for at, engine in enumerate([INLINE, workers(2), INLINE])
    ]
    assert outcome(runs[0]) == outcome(runs[1]) == outcome(runs[2])


@pytest.mark.parametrize("model", nightly_but({"small-cnn"}, ["mlp", "small-cnn"]))
def test_clients_together_compute_in_16_bits_too(model: str, tmp_path) -> None:
    """What the rounds come to differs from one after the other by little of itself, and repeats to the bit."""
    changes = {"model": model, "rounds": 2}

    def run(at: int, engine: dict, lr: float = LOCAL["lr"]) -> Result:
        local, table = LOCAL | {"lr": lr}, engine | {"precision": "bf16"}
        made = experiment("scaffold", "shards", engine=table, local=local, **changes)
        return made.run(tmp_path / str(at))

    runs = [run(at, engine) for at, engine in enumerate([INLINE, VECTORIZED, VECTORIZED])]
    assert outcome(runs[1]) == outcome(runs[2])
    trees = [
        checkpoint.read_model(result.directory / "model.safetensors")[0]
        for result in (*runs[:2], run(3, INLINE, lr=1e-12))
    ]
    one, many, untrained = (torch.cat([v.flatten().double() for v in tree.values()]) for tree in trees)
    assert (many - one).norm() < 0.02 * (one - untrained).norm()


@pytest.mark.parametrize("algorithm", nightly_but({"fedbn"}, ["scaffold", "fedbn"]))
def test_evaluating_beside_the_next_round_changes_no_number(algorithm: str, tmp_path) -> None:
    """Client states move on in the next round; those that are measured are the ones before it."""
    plain = experiment(algorithm, "shards", evaluation={"every": 2}).run(tmp_path / "plain")
    changes = {"engine": workers(2), "evaluation": {"every": 2, "overlap": True}}
    beside = experiment(algorithm, "shards", **changes).run(tmp_path / "beside")
    assert outcome(beside) == outcome(plain)
    with pytest.raises(KeyboardInterrupt):
        experiment(algorithm, "shards", **changes).run(tmp_path / "stopped", progress=Stopping(2))
    assert outcome(resume(tmp_path / "stopped")) == outcome(plain)


def test_a_missing_client_is_the_same_on_both(tmp_path) -> None:
    flaky = settings(rounds=2, **MANY) | {"algorithm": {"name": f"{USERS}:flaky", "client": 4}}
    inline = Experiment(**flaky).run(tmp_path / "inline")
    shared = Experiment(**flaky | {"engine": workers(2)}).run(tmp_path / "shared")
    assert outcome(inline) == outcome(shared)
    assert failures(shared) == {"4": {"ConnectionError: no answer": 2}}


SCRIPT = """
    import sys
    from dataclasses import dataclass, field
    from functools import partial
    from pathlib import Path

    import torch

    import fedlens
    from fedlens.algorithms.averaging import averaging
    from fedlens.local.rules import ClientRule

    ANCHOR = torch.tensor(0.25)


    @dataclass(frozen=True)
    class Shrinking:
        lr: float
        seen: list = field(default_factory=list)

        def init(self, weights):
            return {}

        def step(self, weights, update, state):
            return {n: (1 - 1e-3) * weights[n] - self.lr * update[n] for n in weights}, state


    def mine(parts, *, pull: float = 0.1):
        def grad(gradients, parameters, context):
            return [g + pull * ANCHOR * (p - a) for g, p, a in zip(gradients, parameters, context.anchor)]

        return averaging(parts, client=ClientRule(grad=grad), server=Shrinking(0.9))


    if __name__ == "__main__":
        for engine in ({"name": "inline"}, {"name": "processes", "workers": 2}):
            experiment = fedlens.Experiment(
                rounds=2,
                data={"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
                model="small-cnn",
                local={"lr": 0.1, "momentum": 0.9},
                algorithm={"name": mine, "pull": 0.5},
                engine=engine,
            )
            result = experiment.run(Path(sys.argv[1]) / engine["name"])
            assert result.summary["status"] == "finished"
"""


def test_an_algorithm_of_a_script_runs_on_both_engines(tmp_path: Path) -> None:
    """It is defined in `__main__`, closes over a tensor, and no worker runs the script again."""
    from fedlens.api import load_result

    script = tmp_path / "mine.py"
    script.write_text(textwrap.dedent(SCRIPT))
    path = os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    inline, shared = (load_result(tmp_path / name) for name in ("inline", "processes"))
    assert weights(inline) == weights(shared)
    assert [m["test_loss"] for m in inline.metrics] == [m["test_loss"] for m in shared.metrics]
