"""The engine `ray` on a local Ray, without faults."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError
from fedlens.core.driver import Driver
from fedlens.core.protocol import Ask, Client, Outcome, Payload, Reduce, Reply, Request
from fedlens.core.random import Rng
from fedlens.data.images import DecodedImages
from fedlens.engines.devices import Computing
from fedlens.engines.ray import _emptied
from fedlens.engines.ray_worker import pack, unpacked
from fedlens.engines.vectorized import Vectorized
from tests.contract.contract_kit import USERS, Stopping, nightly_but, outcome
from tests.contract.contract_kit import settings as contract_settings
from tests.identity.identity_kit import course, model, parts, world
from tests.unit.engines import engine_kit
from tests.unit.engines.engine_kit import DECLARED, OPS, answers_to, ask, expected, same, vectors, work
from tests.unit.engines.ray_kit import NEEDS_RAY, all_ready, fresh
from tests.unit.engines.ray_kit import made as ray_made

pytestmark = NEEDS_RAY
HEARD: list[str] = []
RAY = {"name": "ray", "workers": 2, "connect_timeout": 300.0}


def seen(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """Reports whether the tensors that an operation gets are aligned, and are those that were sent."""
    big, small = payload["big"], payload["small"]
    told = {
        "ends": float(big[-1]),
        "small": float(small.sum()),
        "aligned": float((big.data_ptr() | small.data_ptr()) % 64 == 0),
    }
    return Outcome({"vector": torch.zeros(1), "told": told}, {"memory": torch.ones(300_000)}, {})


def loud(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """Writes in all the ways that Python has."""
    warnings.warn("a warning", stacklevel=1)
    logging.getLogger("own").warning("a log line")
    print("on standard error", file=sys.stderr)  # noqa: T201
    return Outcome({"vector": torch.zeros(1)})


@pytest.fixture(scope="module")
def gate() -> Iterator[Driver]:
    """Two workers on a local Ray that all tests of this file share."""
    before = signal.signal(signal.SIGTERM, lambda *_: HEARD.append("SIGTERM"))
    try:
        with fresh(ops={**OPS, "seen": seen, "loud": loud}, cpus=0.2) as made:
            all_ready(made)
            yield made
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _no_states(gate: Driver) -> None:
    gate.states.restore({})


def slow_again(gate: Driver) -> None:
    gate.engine._pool._seconds = 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("seconds", [1.0, 0.001])
def test_answers_come_in_request_order_with_the_bits_of_inline(gate: Driver, seconds: float) -> None:
    gate.engine._pool._seconds = seconds  # type: ignore[attr-defined]
    wanted = ask([{"seconds": 0.2}, *[{}] * 8, {"size": 200_000}], shared={"scale": torch.rand(1)})
    found = answers_to(gate, wanted)
    assert [answer.id.slot for answer in found] == list(range(10))
    assert same(vectors(found), expected(wanted))
    assert len({answer.metrics["pid"] for answer in found if isinstance(answer, Reply)}) == 2
    assert all(gate.states.get(client) == {"visits": 1} for client in range(10))


def test_a_slow_client_does_not_idle_the_others(gate: Driver, tmp_path: Path) -> None:
    """Its worker waits until the other worker has answered all other clients."""
    slow_again(gate)
    requests = [Request(k, {"files": 6 if k == 0 else 0}) for k in range(7)]
    answers = answers_to(gate, Ask("held", requests, {"folder": str(tmp_path)}, DECLARED))
    ended = [answer.metrics["ended"] for answer in answers if isinstance(answer, Reply)]
    assert max(ended[1:]) < ended[0]


def test_arrival_order_and_what_is_still_out(gate: Driver, tmp_path: Path) -> None:
    """The first client waits for the three others, the last of which is asked one step later."""
    slow_again(gate)
    taken: list[Any] = []

    def steps(requests: list[Request], take: int) -> Any:
        for answer in (yield Ask("held", requests, {"folder": str(tmp_path)}, DECLARED, order="arrival")):
            taken.append(answer.client)
            take -= 1
            if take == 0:
                break

    gate.drive(steps([Request(0, {"files": 3}), Request(1, {"files": 0}), Request(2, {"files": 0})], 2), 1)
    assert sorted(taken) == [1, 2]
    gate.drive(steps([Request(3, {"files": 0})], 1), 2)
    gate.drive(steps([], 1), 3)
    assert sorted(taken) == [0, 1, 2, 3]


def test_a_deadline(gate: Driver, tmp_path: Path) -> None:
    """The answers come while both workers still wait."""
    slow_again(gate)
    requests = [Request(k, {"files": 1}) for k in range(3)]
    answers = answers_to(gate, Ask("held", requests, {"folder": str(tmp_path)}, DECLARED, deadline=0.3))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "go").touch()
    assert [getattr(answer, "reason", "") for answer in answers] == ["the deadline passed"] * 3
    assert same(vectors(answers_to(gate, ask([{}] * 3), 2)), expected(ask([{}] * 3), 2))


def test_replies_are_reduced_at_the_workers(gate: Driver) -> None:
    requests = [{"more": {"weight": float(k)}} for k in range(7)]
    wanted = ask(requests, reduce=Reduce({"vector": "sum"}, block=3))
    found = answers_to(gate, wanted)
    with engine_kit.fresh("inline") as here:
        there = answers_to(here, wanted)
    assert [a.reduced is None for a in found] == [True, True, False, True, True, False, False]
    for one, other in zip(found, there, strict=True):
        assert isinstance(one, Reply)
        assert isinstance(other, Reply)
        assert "vector" not in one.payload
        if one.reduced is not None and other.reduced is not None:
            assert torch.equal(one.reduced["vector"], other.reduced["vector"])
            assert one.reduced["replies"] == other.reduced["replies"]


def test_what_is_asked_ahead_is_done_by_a_worker_that_would_idle(gate: Driver, tmp_path: Path) -> None:
    """The later ask waits for the earlier one, whose answers nobody has read yet."""
    slow_again(gate)

    def steps(wanted: Ask) -> Any:
        return list((yield wanted))

    folder = {"folder": str(tmp_path)}
    early = Ask("held", [Request(k, {"files": 0, "stateless": True}) for k in range(4)], folder, DECLARED)
    ahead = gate.begin(steps(early), 11)
    late = gate.drive(steps(Ask("held", [Request(0, {"files": 4})], folder, DECLARED)), 12)
    answers = ahead.finish()
    assert same(vectors(answers), expected(ask([{"stateless": True}] * 4), 11))
    assert all(answer.metrics["ended"] < late[0].metrics["ended"] for answer in answers)


def test_groups_and_16_bits_are_those_of_vectorized(gate: Driver) -> None:
    """With the bits of `vectorized` in groups of the same size."""
    scaffold = ALGORITHMS.find("scaffold")(parts(world(), {"lr": 0.2, "epochs": 2, "batch_size": 4}))
    one = course(scaffold, world(), 2, engine=Vectorized(group=2, computing=Computing(precision="bf16")))
    engine = ray_made(cpus=0.2, workers=1, group=2, precision="bf16")
    many = course(scaffold, world(), 2, engine=engine)
    assert same(list(one.final.values()), list(many.final.values()))
    with pytest.raises(ConfigError, match=r"'ray' with engine\.group = 2 cannot train several"):
        engine.check(ALGORITHMS.find("fedavg")(parts(world(), {"lr": 0.1}, model(norm=True))).ops)
    with pytest.raises(ConfigError, match="not optimized on CPUs"):
        ray_made(precision="fp16").check({})


def kept(actor: Any) -> int:
    """The number of asks whose shared payload a worker still keeps."""
    return len(actor.worker._asks)


def test_what_is_sent_is_what_arrives_and_nothing_keeps_its_memory(gate: Driver) -> None:
    """Large and small, shared and per client; after a round the object store can free all of it."""
    import ray

    big = torch.arange(300_000.0)
    for round in range(1, 4):
        requests = [Request(k, {"small": torch.ones(3)}) for k in range(4)]
        for answer in answers_to(gate, Ask("seen", requests, shared={"big": big}), round):
            assert isinstance(answer, Reply), answer
            assert answer.payload["told"] == {"ends": 299_999.0, "small": 3.0, "aligned": 1.0}
    workers: Any = gate.engine._pool.workers  # type: ignore[attr-defined]
    assert ray.get([worker.actor.__ray_call__.remote(kept) for worker in workers]) == [0, 0]
    states = [gate.states.get(k)["memory"] for k in range(4)]
    assert all(float(state.sum()) == 300_000 for state in states)
    assert all(state.untyped_storage().resizable() for state in states)  # memory of torch's own


def test_tensors_lie_where_torch_would_lay_them() -> None:
    """Also in an object that came in a message, at any address: the last bit of some sums depends on it."""
    envelope, memory = pack({"w": torch.arange(9.0)}, "it")
    for shift in range(1, 5):
        askew = np.empty(memory.size + 64, np.uint8)[shift : shift + memory.size]
        askew[:] = memory
        found = unpacked((envelope, askew))["w"]
        assert found.data_ptr() % 64 == 0
        assert torch.equal(found, torch.arange(9.0))


def test_a_store_of_decoded_images_arrives_empty_and_with_a_share_of_the_room() -> None:
    """Its images are no part of the program, and can be gigabytes."""
    store = DecodedImages.of(1000, 50)
    store.memory[:] = 1
    packed = pack({"train": store, "test": store}, "it", code=True, instead=_emptied(4))
    assert packed[1].size < 1000
    found = unpacked(packed)
    assert found["train"] is found["test"]
    assert (found["train"].slots, found["train"].memory.size) == (250, 250 * 51)
    assert not found["train"].memory.any()


def test_a_print_comes_out_on_standard_error(gate: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    answers_to(gate, ask([{"print": "from a worker"}]))
    assert capsys.readouterr() == ("", "from a worker\n")


def test_warnings_and_log_lines_come_out_on_standard_error(
    gate: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    answers_to(gate, Ask("loud", [Request(0)]))
    said = capsys.readouterr()
    assert said.out == ""
    assert "UserWarning: a warning" in said.err
    assert said.err.endswith("a log line\non standard error\n")


def test_an_operation_of_a_notebook_and_two_engines_on_one_ray(gate: Driver) -> None:
    """A function of no module, on a second engine; the first one works on after that is closed."""
    scale = 2.0

    def own(payload: Payload, client: Client, rng: Rng) -> Outcome:
        return Outcome({"vector": work(payload, client, rng).payload["vector"] * scale})

    wanted = ask([{}] * 3)
    with fresh(ops={"work": own}, cpus=0.2, workers=1) as there:
        doubled = vectors(answers_to(there, wanted))
        plain = vectors(answers_to(gate, wanted))
    assert same(doubled, [scale * vector for vector in plain])
    assert same(vectors(answers_to(gate, wanted)), plain)


def test_an_ask_with_code_in_it_is_one_sentence(gate: Driver) -> None:
    from fedlens.base.errors import RunFailed

    with pytest.raises(
        RunFailed, match="the shared payload of the ask 'work' cannot be sent to Ray's workers"
    ):
        answers_to(gate, ask([{}], shared={"f": lambda: 0}))
    with pytest.raises(RunFailed, match="a request of the ask 'work', or a client's state cannot be sent"):
        answers_to(gate, Ask("work", [Request(0, {"f": lambda: 0})]))
    assert len(answers_to(gate, ask([{}] * 2))) == 2


def digits(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": 3,
        "model": "small-cnn",
        "select": {"clients_per_round": 4},
        "local": {"lr": 0.05, "momentum": 0.5, "batch_size": 32},
        "data": {"dataset": "digits", "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5}},
    }
    return Experiment(**settings | changes)


CASES: dict[str, dict[str, Any]] = {
    "states, interrupted": contract_settings("fedbn", "dirichlet", rounds=3),
    "a file of one's own": {
        "algorithm": {"name": f"{USERS}:remembering", "pull": 0.2},
        "record": {"clients": True},
    },
    "folded in blocks": {
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 80}},
        "select": {"name": "uniform"},
        "record": {"clients": True},
        "model": "linear",
        "rounds": 2,
    },
    "two exchanges": contract_settings("feddane", "dirichlet", rounds=2),
}


# A state in `remembering`; reduced blocks above, and the others nightly, beside tests/contract/test_ray.py. Resumed on
# another engine in tests/contract/test_engines.py.
@pytest.mark.parametrize("case", nightly_but({"a file of one's own"}, CASES))
def test_a_run_has_the_bits_of_inline_also_when_it_is_resumed(
    gate: Driver, case: str, tmp_path: Path
) -> None:
    """A second engine on the first one's Ray, on the CPUs that the first leaves free."""
    changes = CASES[case]
    whole = outcome(digits(**changes).run(tmp_path / "inline"))
    on_ray = digits(engine=RAY | {"cpus": 0.4, "workers": 1 if "own" in case else 2}, **changes)
    if "interrupted" not in case:
        assert outcome(on_ray.run(tmp_path / "ray")) == whole
        return
    with pytest.raises(KeyboardInterrupt):
        on_ray.run(tmp_path / "ray", progress=Stopping(2))
    assert outcome(resume(tmp_path / "ray")) == whole


def test_the_environment_of_this_process_is_as_it_was(gate: Driver) -> None:
    assert not [name for name in os.environ if name.startswith("RAY_USAGE") or name.startswith("RAY_worker")]


def test_sigterm_is_still_whose_it_was(gate: Driver, capfd: pytest.CaptureFixture[str]) -> None:
    """Ray's own handler would print a stack."""
    HEARD.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert HEARD == ["SIGTERM"]
    assert capfd.readouterr() == ("", "")
