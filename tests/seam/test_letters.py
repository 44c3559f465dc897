"""Letters between clients: gossip over a ring in two asks, on every engine, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedlens.base.errors import HookError, RunFailed
from fedlens.core.driver import Driver
from fedlens.core.protocol import (
    Ask,
    BatchedOp,
    Client,
    ClientStates,
    Letter,
    Outcome,
    Payload,
    Program,
    Reduce,
    Request,
)
from fedlens.core.random import Rng
from fedlens.core.schema import Schema, TensorField, TreeField
from fedlens.core.traffic import Traffic
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes
from fedlens.engines.vectorized import vectorized
from fedlens.engines.verify import Verified
from tests.seam.seam_kit import Points

N = 6
LETTER = Schema({"x": TensorField((-1,), torch.float64, most=80)})
ENGINES: dict[str, Callable[[], Any]] = {
    "inline": inline,
    "processes": lambda: processes(workers=2),
    "blocks": lambda: processes(workers=2, group=3),
    "vectorized": vectorized,
    "verified": lambda: Verified(processes(workers=2), 3, exact=True),
}


def point(client: Client) -> torch.Tensor:
    number = 0.0 if isinstance(client.id, str) else float(client.id)
    return client.state.get("x", torch.full((3,), number, dtype=torch.float64))


def send(payload: Payload, client: Client, rng: Rng) -> Outcome:
    # The memory of the worker's last letter: a letter that is not copied holds another client's numbers.
    memory = client.scratch.setdefault("memory", torch.empty(3, dtype=torch.float64))
    memory.copy_(point(client))
    letters = [Letter(to, {"x": memory}) for to in payload.get("to", ())]
    return Outcome({"sum": memory.clone(), "one": 1.0}, None, {"examples": 1.0}, letters=letters)


def mix(payload: Payload, client: Client, rng: Rng) -> Outcome:
    x = point(client)
    for _, content in payload["letters"]:
        x = (x + content["x"]) / 2  # depends on the order of the letters
    return Outcome({"from": [sender for sender, _ in payload["letters"]]}, {"x": x})


def forward(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """The server's work: it remembers what it got, and sends the sum to all."""
    assert client.data is None
    total = torch.stack([content["x"] for _, content in payload["letters"]]).sum(0)
    got = client.state.get("got", 0) + len(payload["letters"])
    return Outcome({}, {"got": got}, {"loss": 2.0, "examples": 1.0, "batches": 1.0},
                   letters=[Letter(tuple(range(N)), {"x": total})])  # fmt: skip


class Joint(BatchedOp):
    """Lets engines that train several clients at once take the operations; it is not asked."""

    def obstacle(self) -> None:
        return None


OPS: dict[str, Any] = {"send": send, "mix": mix, "forward": forward, "joint": Joint()}


def driver(engine: str = "inline", ops: Any = OPS) -> tuple[Driver, Any]:
    made, states = ENGINES[engine](), ClientStates()
    made.open(Program(ops, Points(clients=N), 0), states)
    return Driver(made, states), made


def sending(to: Callable[[int], Any], asked: Any = range(N), **more: Any) -> Ask:
    return Ask("send", [Request(k, {"to": to(k)}) for k in asked], letter=LETTER, **more)


def mixing(asked: Any = range(N)) -> Ask:
    return Ask("mix", [Request(k) for k in asked], deliver=True)


def neighbours(k: int) -> list[Any]:
    return [((k - 1) % N, (k + 1) % N)]


def gossip(reduce: Reduce | None = None):
    replies = list((yield sending(neighbours, reduce=reduce)))
    assert all(reply.letters == () for reply in replies)
    return [reply.payload["from"] for reply in (yield mixing())]


@pytest.mark.parametrize(
    "reduce", [None, Reduce({"sum": "plain"}, weight="one", block=3)], ids=["single", "reduced"]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_gossip_gives_the_same_bits_on_every_engine(engine: str, reduce: Reduce | None) -> None:
    x = [torch.full((3,), float(k), dtype=torch.float64) for k in range(N)]
    gate, made = driver(engine)
    try:
        for round in (1, 2, 3):
            order = [sorted(((k - 1) % N, (k + 1) % N)) for k in range(N)]
            assert gate.drive(gossip(reduce), round) == order
            before = x
            x = [((before[k] + before[a]) / 2 + before[b]) / 2 for k, (a, b) in enumerate(order)]
    finally:
        made.close()
    assert all(torch.equal(gate.states.get(k)["x"], x[k]) for k in range(N))
    assert (gate.tally.bytes_peer, gate.tally.letters_dropped) == (3 * 2 * N * 24, 0)
    row = gate.tally.traffic.rows["send"]
    assert (row["bytes_peer"], row["bytes_up"], row["up"]["letter.x"]) == (3 * 2 * N * 24, 3 * N * 32, 3)
    told = Traffic.of({"clients": {"send": row}}).add(gate.tally.traffic).rows["send"]
    assert told["bytes_peer"] == 2 * row["bytes_peer"]


@pytest.mark.parametrize("engine", ["inline", "processes"])
def test_the_server_works_as_a_holder_without_data(engine: str) -> None:
    def steps():
        list((yield sending(lambda k: ["@server"])))
        list((yield Ask("forward", [Request("@server")], {"note": 1}, deliver=True, letter=LETTER)))
        list((yield mixing()))

    gate, made = driver(engine)
    try:
        gate.drive(steps(), 1)
    finally:
        made.close()
    tally = gate.tally
    assert gate.states.get("@server") == {"got": N}
    # Each client's letter up, beside its reply; the server's letter down.
    assert (tally.bytes_peer, tally.bytes_up) == (0, N * (32 + 24))
    assert tally.bytes_down == N * 24
    assert {op: (row["bytes_up"], row["bytes_down"]) for op, row in tally.traffic.rows.items()} == {
        "send": (N * (32 + 24), 0), "forward": (0, N * 24), "mix": (0, 0)
    }  # fmt: skip
    assert (tally.clients, tally.failed, tally.replies) == (N, 0, 2 * N)
    assert dict(tally.sums) == {"examples": N + 1.0, "loss": 2.0, "batches": 1.0}
    assert tally.batches_max == 0
    assert torch.equal(gate.states.get(2)["x"], torch.full((3,), (2.0 + 15.0) / 2, dtype=torch.float64))


def test_a_letter_keeps_no_memory_of_a_worker() -> None:
    made, states = processes(workers=2), ClientStates()
    made.open(Program(OPS, Points(clients=N), 0), states)
    try:
        replies = list(made.answer(sending(neighbours), 1, 0))
        # A reply lies in memory that its worker shares; a letter outlives it and has its own.
        assert [reply.payload["sum"].untyped_storage().resizable() for reply in replies] == [False] * N
        own = [reply.letters[0][1]["x"].untyped_storage().resizable() for reply in replies]
        assert own == [True] * N
    finally:
        made.close()


BAD: dict[str, tuple[Any, str]] = {
    "unknown": ([99], "its letter goes to 99, which is no client"),
    "negative": ([-1], "its letter goes to -1, which is no client"),
    "a list": ([[1, 2]], "its letter goes to [1, 2], which is no client"),
    "holder": (["@nobody"], "its letter goes to '@nobody', which is no client"),
}


class Known(Points):
    def data_of(self, client: int | str) -> Any:
        if client not in range(N):
            raise KeyError(client)
        return super().data_of(client)


@pytest.mark.parametrize("bad", BAD)
def test_a_letter_to_nobody_is_its_senders_failure(bad: str) -> None:
    to, said = BAD[bad]
    made, states = inline(), ClientStates()
    made.open(Program(OPS, Known(clients=N), 0), states)
    gate = Driver(made, states)

    def steps():
        list((yield sending(lambda k: to if k == 3 else neighbours(k))))
        return [reply.payload["from"] for reply in (yield mixing())]

    assert gate.drive(steps(), 1)[4] == [5]
    made.close()
    assert {k: dict(reasons) for k, reasons in gate.tally.failures.items()} == {3: {said: 1}}


@pytest.mark.parametrize(
    ("letter", "said"),
    [
        (None, "it sends a letter, and the ask expects none: set `letter` of the Ask to its schema"),
        (Schema({"y": TensorField((3,), torch.float64)}), "its letter to 1: y is missing"),
        (Schema({"x": TensorField((-1,), torch.float64, most=16)}),
         "its letter to 1: x has 24 bytes where at most 16 are expected"),
    ],
)  # fmt: skip
def test_a_letter_that_does_not_fit_is_its_senders_failure(letter: Schema | None, said: str) -> None:
    gate, made = driver()

    def steps():
        return list((yield Ask("send", [Request(0, {"to": [1]})], letter=letter)))

    assert gate.drive(steps(), 1)[0].reason == said
    made.close()


def test_the_letters_of_a_refused_reply_and_those_to_who_is_not_asked_are_dropped() -> None:
    gate, made = driver()

    def steps():
        for reply in (yield sending(neighbours)):
            if reply.client == 2:
                reply.refuse("not wanted")
        mixed = [reply.payload["from"] for reply in (yield mixing((1, 3)))]
        again = [reply.payload["from"] for reply in (yield mixing((1, 3)))]
        list((yield sending(neighbours, (0,))))  # never delivered
        return mixed, again

    assert gate.drive(steps(), 1) == ([[0], [4]], [[], []])
    # Ten letters were accepted: two delivered, eight not, and two more at the end.
    assert gate.tally.letters_dropped == 8 + 2
    assert gate.tally.bytes_peer == 12 * 24

    def late():
        return [reply.payload["from"] for reply in (yield mixing())]

    assert gate.drive(late(), 2) == [[]] * N  # boxes belong to a round
    made.close()


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ([sending(lambda k: [1, 1], (0,))], "client 0 sent two letters to 1 before one was delivered"),
        ([sending(lambda k: [1], (0,))] * 2, "client 0 sent two letters to 1 before one was delivered"),
        ([Ask("send", [Request("@server")] * 2)], "the ask 'send' asks @server twice"),
        ([mixing((1, 1))], "the ask 'mix' asks 1 twice"),
        ([Ask("forward", [Request("@server")], deliver=True)], "the server's operation 'forward' failed in round 1"),
    ],
)  # fmt: skip
def test_what_ends_the_run(asks: list[Ask], said: str) -> None:
    gate, made = driver()

    def steps():
        for ask in asks:
            list((yield ask))

    with pytest.raises(RunFailed, match=said):
        gate.drive(steps(), 1)
    made.close()
    assert not gate.tally.failures


def test_an_ask_for_each_of_the_servers_halves_keeps_their_states_apart() -> None:
    def count(payload: Payload, client: Client, rng: Rng) -> Outcome:
        return Outcome({}, {"n": client.state.get("n", 0) + int(client.id.split(":")[1])})

    gate, made = driver(ops={"count": count})

    def steps():
        list((yield Ask("count", [Request(f"@server:{k}") for k in range(3)])))

    for round in (1, 2):
        gate.drive(steps(), round)
    made.close()
    assert [gate.states.get(f"@server:{k}")["n"] for k in range(3)] == [0, 2, 4]
    assert gate.tally.traffic.server == {"count": ["@server"]}


def test_an_ask_that_measures_or_supports_is_not_taking_part() -> None:
    gate, made = driver()

    def steps():
        list((yield sending(lambda k: (), (0, 1), counts=False)))
        list((yield sending(lambda k: ["@server"], (2,), measuring=True)))
        list((yield sending(lambda k: (), (3,))))

    gate.drive(steps(), 1)
    made.close()
    assert gate.tally.replied == {3}
    assert gate.tally.bytes_up == 2 * 32 + 32
    assert gate.tally.sums["examples"] == 3.0
    assert [row["client"] for row in gate.tally.per_client] == [0, 1, 3]


def test_a_client_asked_in_many_asks_has_one_row_and_fails_once() -> None:
    def work(payload: Payload, client: Client, rng: Rng) -> Outcome:
        if client.id == 1:
            raise ValueError("broken")
        return Outcome({}, None, {"loss": 0.5, "examples": 2.0, "batches": 1.0})

    gate, made = driver(ops={"work": work})

    def steps():
        for _ in range(4):
            list((yield Ask("work", [Request(0), Request(1)])))

    gate.drive(steps(), 1)
    made.close()
    row = {"client": 0, "exchange": 3, "loss": 2.0, "examples": 8.0, "batches": 4.0}
    assert gate.tally.per_client == [row]
    assert (gate.tally.clients, gate.tally.failed, gate.tally.batches_max) == (1, 1, 4)


def test_a_huge_letter_is_refused_once_there_is_a_bound() -> None:
    def huge(payload: Payload, client: Client, rng: Rng) -> Outcome:
        x = torch.full((3,), payload["size"], dtype=torch.float64)
        return Outcome({}, letters=[Letter(1, {"x": {"w": x}})])

    letter = Schema({"x": TreeField({"w": ((3,), torch.float64)})})

    gate, made = driver(ops={"huge": huge})

    def steps(size: float):
        requests = [Request(k, {"size": size if k == 0 else 1.0}) for k in range(N)]
        return list((yield Ask("huge", requests, letter=letter)))

    for round in range(4):
        gate.drive(steps(1.0), round)
    (first, *_) = gate.drive(steps(1e9), 4)
    made.close()
    assert first.reason.startswith("its letter to 1: x norm 1.7e+09 is")


def test_verify_compares_letters() -> None:
    seen: list[int] = []

    def odd(payload: Payload, client: Client, rng: Rng) -> Outcome:
        seen.append(1)
        return Outcome(
            {}, letters=[Letter(1, {"x": torch.full((3,), float(len(seen)), dtype=torch.float64)})]
        )

    made, states = Verified(inline(), 1, exact=True), ClientStates()
    made.open(Program({"odd": odd}, Points(clients=N), 0), states)

    def steps():
        list((yield Ask("odd", [Request(0)], letter=LETTER)))

    with pytest.raises(HookError, match=r"letters\[0\]\[1\]\['x'\] differs"):
        Driver(made, states).drive(steps(), 1)
    made.close()


@pytest.mark.parametrize("more", [{"letter": LETTER}, {"deliver": True}])
def test_an_ask_in_arrival_order_has_no_letters(more: Any) -> None:
    with pytest.raises(ValueError, match="cannot send or deliver letters"):
        Ask("send", [], order="arrival", **more)
