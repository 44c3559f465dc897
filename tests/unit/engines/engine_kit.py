"""One operation that can do whatever a test asks of it, and open engines to do it on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedlens.core.driver import Driver
from fedlens.core.protocol import (
    Answer,
    Ask,
    Client,
    ClientDataSource,
    ClientStates,
    Outcome,
    Payload,
    Program,
    Reply,
    Request,
)
from fedlens.core.random import Rng
from fedlens.core.schema import Bound, Schema
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes


class NoData(ClientDataSource):
    def data_of(self, client: int | str) -> None:
        return None


def work(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """A vector of this slot's own random numbers; before it, the mischief that the payload asks for."""
    if payload.get("die") == "at the start":
        die(payload)
    if "touch" in payload:
        (Path(payload["graves"]) / f"{client.id}").touch()
    if "hang" in payload and (payload["hang"] == "always" or not any(Path(payload["graves"]).iterdir())):
        (Path(payload["graves"]) / "hung").touch()
        time.sleep(60)
    time.sleep(payload.get("seconds", 0.0))
    vector = torch.rand(payload.get("size", 16), generator=rng.torch("work")) * payload.get("scale", 1.0)
    if payload.get("die") == "in the middle":
        die(payload)
    if "print" in payload:
        print(payload["print"])  # noqa: T201
    reply: dict[str, Any] = {"vector": vector, **payload.get("more", {})}
    state = None if "stateless" in payload else {"visits": client.state.get("visits", 0) + 1}
    return Outcome(reply, state, {"examples": 1, "ended": time.monotonic(), "pid": os.getpid()})


def die(payload: Payload) -> None:
    """Kills this process as often as the payload says, counting in files: the process remembers nothing."""
    graves = Path(payload["graves"])
    if len(list(graves.iterdir())) < payload.get("times", 1):
        (graves / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def held(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """Waits until a folder has `files` files, then adds one: an order of clients that depends on no seconds."""
    folder = Path(payload["folder"])
    while len(list(folder.iterdir())) < payload["files"]:
        time.sleep(0.01)
    outcome = work(payload, client, rng)
    (folder / f"{client.id}").touch()  # after the work, so that whoever waits ends later
    return outcome


OPS = {"work": work, "held": held}
DECLARED = Schema(metrics={"ended": Bound(0), "pid": Bound(0, integer=True)})


def opened(engine: Any, ops: Any = OPS) -> tuple[Any, ClientStates]:
    states = ClientStates()
    engine.open(Program(ops, NoData(), seed=7), states)
    return engine, states


@contextmanager
def fresh(name: str = "processes", ops: Any = OPS, **settings: Any) -> Iterator[Driver]:
    """A gate over an engine of its own."""
    made = inline() if name == "inline" else processes(**{"workers": 2, **settings})
    try:
        yield Driver(*opened(made, ops))
    finally:
        made.close()


def ask(requests: Sequence[Payload], **more: Any) -> Ask:
    """Client k in slot k gets the k-th payload."""
    more.setdefault("expect", DECLARED)
    return Ask("work", [Request(k, payload) for k, payload in enumerate(requests)], **more)


def answers_to(gate: Driver, wanted: Ask, round: int = 1) -> list[Answer]:
    """Every answer, kept."""

    def steps() -> Any:
        return list((yield wanted))

    gate._next = {}  # as if nothing had been asked in this round yet: the same ids, so the same answers
    found: list[Answer] = gate.drive(steps(), round)
    return found


def vectors(answers: Sequence[Answer]) -> list[torch.Tensor]:
    assert all(isinstance(answer, Reply) for answer in answers), answers
    return [answer.payload["vector"] for answer in answers if isinstance(answer, Reply)]


def expected(wanted: Ask, round: int = 1) -> list[torch.Tensor]:
    """What the same ask gives in this process when nobody dies."""
    requests = [
        Request(r.client, {n: v for n, v in r.payload.items() if n not in ("die", "seconds", "hang")})
        for r in wanted.requests
    ]
    with fresh("inline") as gate:
        return vectors(answers_to(gate, Ask(wanted.op, requests, wanted.shared, expect=DECLARED), round))


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def children(pid: int) -> list[int]:
    """Living processes that descend from `pid`, zombies left out."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [far for child in found for far in children(child)]


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(seconds: float, pids: Sequence[int]) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def shared_bytes() -> int:
    """How much of the engines' anonymous memory this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:fedlens" in line:
            first, last = line.split()[0].split("-")
            total += int(last, 16) - int(first, 16)
    return total


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
