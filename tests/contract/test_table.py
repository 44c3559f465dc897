"""Every algorithm with every kind of partition: what has to hold for all of them."""

import math
from dataclasses import replace

import pytest
import torch

from fedlens.algorithms.registry import ALGORITHMS as REGISTERED
from fedlens.api import Experiment, resume
from fedlens.core.driver import Driver
from fedlens.core.protocol import ClientStates, Program, RoundContext
from fedlens.core.random import Rng
from fedlens.core.schema import tensors_in
from fedlens.core.tree import digest
from fedlens.data.partition.iid import iid
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.registry import PARTITIONS as REGISTERED_PARTITIONS
from fedlens.run.build import build
from fedlens.settings.plan import plan
from tests.contract.contract_kit import (
    ALGORITHMS,
    CHOSEN,
    MORE_PARTITIONS,
    ON_PARTIES,
    PARTITION_OF,
    PARTITIONS,
    PEERS,
    PERSONAL,
    SCATTERED,
    SERVER_TRAINS,
    SOLVERS,
    STEP_BY_STEP,
    TWO_EXCHANGES,
    USERS,
    WITHOUT_SELECT,
    Baseline,
    Stopping,
    experiment,
    failures,
    judged,
    lines,
    nightly_but,
    outcome,
    separable,
    settings,
)
from tests.contract.users import scattered

pytestmark = pytest.mark.usefixtures("quick_workers")
NIGHTLY = [pytest.mark.nightly]
# Other settings of the same algorithm run nightly, but those of another make.
NAMED = {*REGISTERED, *CHOSEN, "centred"}
EACH = pytest.mark.parametrize("algorithm", nightly_but(NAMED, ALGORITHMS))
# CHOSEN, and one of each other kind: a state of the server's, a solver of one step, a server that trains, models that
# grow or are searched, parties, and peers that step by step exchange more than models.
KINDS = {*CHOSEN, "feddyn", "liadmm", "fedgkt", "fedma", "fednas", "vertical", "push-sum"}
# For seeds, and where a client is not heard, one solver is as good as another, and this one is quick.
HEARD = {*CHOSEN, "liadmm"} - {"ceadmm"}


def test_the_table_has_every_algorithm_and_every_partition() -> None:
    assert {row["name"] for row in ALGORITHMS.values()} >= set(REGISTERED)
    partitions = PARTITIONS | MORE_PARTITIONS
    assert {row["name"] for row in partitions.values()} >= set(REGISTERED_PARTITIONS)


@pytest.fixture
def with_lists(tmp_path, monkeypatch) -> None:
    """A saved partition and a published list of the scattered dataset, where MORE_PARTITIONS looks for them."""
    monkeypatch.chdir(tmp_path)
    table = scattered(tmp_path, False, 0).table()
    saved = iid(table, 0, clients=4)
    replace(saved, dataset="scattered").counted(table).save("saved.npz")
    rows = [f"{k % 5},{k},{label}" for k, label in enumerate(table.labels)]
    (tmp_path / "list.csv").write_text("\n".join(["user_id,image_id,class", *rows]) + "\n")


def easy(partition: str) -> Experiment:
    data = {"dataset": SCATTERED, "partition": MORE_PARTITIONS[partition]}
    local = {"lr": 0.1, "epochs": 2, "batch_size": 10}
    return Experiment(
        **settings(rounds=6, model="small-cnn", data=data, local=local, select={"fraction": 1.0})
    )


@pytest.mark.parametrize("partition", MORE_PARTITIONS)
def test_every_partition_can_be_learned_from(partition: str, with_lists, tmp_path) -> None:
    result = easy(partition).run(tmp_path / "run")
    first, last = result.metrics[0], result.metrics[-1]
    assert last["test_accuracy"] >= 0.9
    assert last["test_loss"] < first["test_loss"] / 2
    assert last["failed"] == 0


@pytest.mark.parametrize("partition", nightly_but({"feature", "multilabel"}, MORE_PARTITIONS))
def test_every_partition_gives_the_same_bits_on_both_engines(partition: str, with_lists, tmp_path) -> None:
    result = easy(partition).run(tmp_path / "run")
    shared = (
        easy(partition).with_settings("engine.name=processes", "engine.workers=2").run(tmp_path / "processes")
    )
    assert outcome(shared) == outcome(result)


def daily(algorithm: str, partition: str) -> bool:
    """Whether this row runs in ci: one algorithm over every partition, the others, which share its loop, over one.

    The search of FedNAS takes 20 rounds.
    """
    return algorithm == "fedavg" or (algorithm in NAMED - {"fednas"} and partition == PARTITION_OF[algorithm])


# Nightly each over two, the basic ones over all, and also other settings of the same algorithm.
BASIC = ("fedavg", "fedavgm", "fedprox", "centralized", "remembering")
LEARNED = [
    pytest.param(
        algorithm,
        partition,
        marks=[] if daily(algorithm, partition) else NIGHTLY,
    )
    for k, algorithm in enumerate(ALGORITHMS)
    for at, partition in enumerate(PARTITIONS)
    if partition == PARTITION_OF[algorithm] or algorithm in BASIC or at == (k + 2) % len(PARTITIONS)
    if algorithm not in PEERS or partition != "uneven"  # has a client without examples
    # Parties have no partition of examples.
    if algorithm not in ON_PARTIES or partition == PARTITION_OF[algorithm]
]
# The rounds of a row in ci: more where clients hold few classes. All others take eight, or as many as they need.
ROUNDS = {"iid": 4, "uneven": 4, "shards": 5, "mcmahan": 6, "dirichlet": 7}
SLOW = {"iceadmm", "liadmm", "fedma"}


@pytest.mark.parametrize(("algorithm", "partition"), LEARNED)
def test_it_learns_a_separable_problem(algorithm: str, partition: str, tmp_path) -> None:
    fewer = daily(algorithm, partition) and algorithm not in SLOW
    changes = {"rounds": ROUNDS[partition]} if fewer else {}
    result = separable(algorithm, partition, **changes).run(tmp_path / "run")
    assert all(math.isfinite(judged(line)[0]) for line in result.metrics)
    assert all(math.isfinite(line["local_loss"]) for line in result.metrics[1:])
    (first_loss, _), (last_loss, last_accuracy) = judged(result.metrics[0]), judged(result.metrics[-1])
    assert result.summary["status"] == "finished"
    assert last_accuracy >= 0.9
    assert last_loss < first_loss / 2


@pytest.mark.parametrize("algorithm", nightly_but(HEARD, ALGORITHMS))
def test_the_seed_decides_everything(algorithm: str, baseline: Baseline, tmp_path) -> None:
    made = experiment(algorithm, PARTITION_OF[algorithm], rounds=2)
    first = outcome(baseline(algorithm, PARTITION_OF[algorithm], rounds=2))
    torch.manual_seed(1234)  # the state of the process has no say
    assert outcome(made.run(tmp_path / "second")) == first
    other = outcome(made.with_settings("seed=1").run(tmp_path / "other"))
    assert other[0] != first[0]


@pytest.mark.parametrize("seed", ["initialization", "selection", "training", "partition"])
def test_each_seed_has_its_own_say(seed: str, baseline: Baseline, tmp_path) -> None:
    base = experiment("fedavg", "dirichlet", rounds=1)
    first = baseline("fedavg", "dirichlet", rounds=1)
    other = base.with_settings(f"seeds.{seed}=7").run(tmp_path / "other")
    assert outcome(other)[0] != outcome(first)[0]
    same_start = lines(other)[0] == lines(first)[0]
    assert same_start == (seed != "initialization")
    digests = [r.summary["partition"]["digest"] for r in (first, other)]
    assert (digests[0] == digests[1]) == (seed != "partition")


@EACH
def test_it_resumes_exactly(algorithm: str, baseline: Baseline, tmp_path) -> None:
    made = experiment(algorithm, PARTITION_OF[algorithm], rounds=2)
    whole = outcome(baseline(algorithm, PARTITION_OF[algorithm], rounds=2))
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "stopped", progress=Stopping(1))
    assert outcome(resume(tmp_path / "stopped")) == whole


@pytest.mark.parametrize("stop", [0, 3])
def test_it_resumes_exactly_from_before_the_first_and_after_the_last_round(
    stop: int, baseline: Baseline, tmp_path
) -> None:
    made = experiment("remembering", "shards", rounds=3)
    whole = outcome(baseline("remembering", "shards", rounds=3))
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "stopped", progress=Stopping(stop))
    assert outcome(resume(tmp_path / "stopped")) == whole


def test_it_resumes_exactly_when_it_is_interrupted_again_and_again(tmp_path) -> None:
    made = experiment("fedavgm", "shards", rounds=4, checkpoint={"seconds": 0})
    whole = outcome(made.run(tmp_path / "whole"))
    directory = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        made.run(directory, progress=Stopping(0))
    for stop in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            resume(directory, progress=Stopping(stop))
    assert outcome(resume(directory)) == whole


@pytest.mark.parametrize("algorithm", nightly_but(KINDS, ALGORITHMS))
def test_it_leaves_its_inputs_untouched(algorithm: str, tmp_path) -> None:
    made = experiment(algorithm, "iid")
    built = build(plan(made.config, made._source), tmp_path, download=False)
    data = built.client_data.dataset

    def fingerprint() -> str:
        held = {"train": data.train.inputs, "labels": data.train.targets, "test": data.test.inputs}
        return digest({**held, "test labels": data.test.targets, "indices": built.client_data.indices})

    before, states = fingerprint(), ClientStates()
    built.engine.open(Program(built.algorithm.ops, built.source, 0), states)
    try:
        gate = Driver(built.engine, states)
        state = built.algorithm.init(built.model, built.federation)
        kept = []
        for round in (1, 2):
            context = RoundContext(round, 2, built.federation, Rng((0, "round", round)))
            gate.drive(built.algorithm.evaluate(state, context), round)
            kept += [(t, t.clone()) for t in tensors_in([state, states.snapshot()])]
            state = gate.drive(built.algorithm.round(state, context), round)
        gate.drive(built.algorithm.evaluate(state, context), 2)
    finally:
        built.engine.close()
    assert len(kept) > 15
    assert all(torch.equal(now, then) for now, then in kept)
    assert fingerprint() == before


# All that average what comes back. Without the others' models there is nothing to compare where models are personal.
FAMILY = sorted(
    {name for name, row in ALGORITHMS.items() if row["name"] == name}
    - PERSONAL
    - SERVER_TRAINS
    - {"fedir-population", *WITHOUT_SELECT}
)


@pytest.mark.parametrize("inner", nightly_but(HEARD, FAMILY))
def test_it_survives_a_missing_client_as_if_it_were_not_there(inner: str, tmp_path) -> None:
    there = settings(inner, rounds=3, select={"name": "fixed", "clients": [0, 4, 1]})
    flaky = {"name": f"{USERS}:flaky", "inner": inner, "client": 1, "settings": ALGORITHMS[inner]}
    result = Experiment(**there | {"algorithm": flaky}).run(tmp_path / "missing")
    other = Experiment(**there | {"select": {"name": "fixed", "clients": [0, 4]}}).run(tmp_path / "without")
    times = 2 if inner in TWO_EXCHANGES else 1
    assert failures(result) == {"1": {"ConnectionError: no answer": 3 * times}}
    assert [line["failed"] for line in result.metrics] == [
        0,
        1,
        1,
        1,
    ]  # once a round, however often it was asked
    assert [line["clients"] for line in result.metrics] == [0, 2, 2, 2]
    assert outcome(result)[0] == outcome(other)[0]
    measured = [[(m["test_loss"], m["test_accuracy"]) for m in r.metrics] for r in (result, other)]
    assert measured[0] == measured[1]


# A client of split learning and of FedMA answers several times a round; their identities have its failures.
@pytest.mark.parametrize(
    "inner", nightly_but(HEARD, [name for name in FAMILY if not name.startswith(("split", "fedma"))])
)
def test_a_refused_reply_leaves_its_clients_state_as_a_missing_one_does(inner: str, tmp_path) -> None:
    """Client 1 answers once, fails once, and is good again: a state kept from what was refused would show."""
    there = settings(inner, rounds=3, select={"name": "fixed", "clients": [0, 4, 1]})
    flaky = {"name": f"{USERS}:flaky", "inner": inner, "settings": ALGORITHMS[inner], "after": 1, "times": 1}
    missing = Experiment(**there | {"algorithm": flaky}).run(tmp_path / "missing")
    refused = Experiment(**there | {"algorithm": {**flaky, "garbled": True}}).run(tmp_path / "refused")
    assert [line["clients"] for line in refused.metrics] == [0, 3, 2, 3]
    reasons = failures(refused)["1"]
    assert sum(reasons.values()) == sum(failures(missing)["1"].values())
    assert all("NaN" in reason for reason in reasons), reasons
    assert outcome(refused)[0] == outcome(missing)[0]


@pytest.mark.parametrize(
    "algorithm", nightly_but(KINDS, [name for name in ALGORITHMS if name not in PEERS | ON_PARTIES])
)
def test_it_survives_a_client_with_one_example_and_one_with_none(algorithm: str, tmp_path) -> None:
    select = {} if algorithm == "centralized" else {"select": {"name": "fixed", "clients": [0, 1, 2]}}
    result = experiment(algorithm, "uneven", rounds=2, **select).run(tmp_path / "run")
    assert all(math.isfinite(judged(line)[0]) for line in result.metrics)
    if algorithm == "centralized":
        assert result.metrics[-1]["examples"] == result.summary["partition"]["examples"]
    else:
        times = 4 if ALGORITHMS[algorithm]["name"] in TWO_EXCHANGES else 2
        assert failures(result) == {"0": {"ValueError: the client holds no example": times}}
        sizes = Partition.load(result.directory / "partition.npz").sizes()
        assert sizes[:2].tolist() == [0, 1]
        of_each = ALGORITHMS[algorithm].get("examples")  # virtual clients have so many, whatever they hold
        looked, held = result.metrics[-1]["examples"], sizes[1] + sizes[2]
        if algorithm in SOLVERS - {"liadmm"}:  # these look at each example again and again
            assert looked > held
        elif algorithm in SERVER_TRAINS:
            assert looked == 2 * held
        elif algorithm == "fedma":  # which trains once for each layer with weights
            assert looked == 3 * held
        elif algorithm == "fednas":  # whose weights train on half of the examples
            assert looked == sum(n - n // 2 for n in sizes[1:3])
        else:
            assert looked == (2 * of_each if of_each else held)


@pytest.mark.parametrize("inner", nightly_but({"push-sum"}, sorted(PEERS)))
def test_peers_go_on_without_one_that_is_missing_and_with_one_of_one_example(inner: str, tmp_path) -> None:
    there = settings(inner, rounds=3)
    there["data"]["partition"] = {"name": f"{USERS}:one_example", "clients": 6}
    flaky = {"name": f"{USERS}:flaky", "inner": inner, "client": 1, "settings": ALGORITHMS[inner], "after": 1}
    result = Experiment(**there | {"algorithm": flaky}).run(tmp_path / "missing")
    assert failures(result) == {"1": {"ConnectionError: no answer": 3 if inner in STEP_BY_STEP else 2}}
    assert [line["clients"] for line in result.metrics[2:]] == [5, 5]
    assert all(math.isfinite(line["test_loss"]) for line in result.metrics)


def test_one_clients_loss_that_is_no_number_does_not_end_the_run(tmp_path) -> None:
    mumbling = {"algorithm": {"name": f"{USERS}:mumbling", "client": 4}, "select": {"name": "all"}}
    result = Experiment(**settings(rounds=2) | mumbling).run(tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert math.isfinite(result.metrics[-1]["test_loss"])


def test_uniform_selection_passes_over_a_client_that_holds_nothing(tmp_path) -> None:
    made = experiment("fedavg", "uneven", rounds=2, select={"name": "uniform"})
    result = made.run(tmp_path / "run")
    assert [line["clients"] for line in result.metrics[1:]] == [5, 5]
    assert result.summary["failures"] == {}
