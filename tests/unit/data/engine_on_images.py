"""Two real worker processes that are asked for one image, one after the other."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from fedlens.core.driver import Driver
from fedlens.core.protocol import (
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
from fedlens.data.images import ImageFiles
from fedlens.engines.processes import processes


@dataclass(frozen=True)
class Pictures(ClientDataSource):
    images: ImageFiles

    def data_of(self, client: int | str) -> ImageFiles:
        return self.images


def look(payload: Payload, client: Client, rng: Rng) -> Outcome:
    """The sum of an image's pixels, whichever worker it is; each waits until the other has been asked too."""
    images, row = client.data, int(payload["row"])
    with open(payload["barrier"], "ab", buffering=0) as file:
        file.write(b"x")
    while os.path.getsize(payload["barrier"]) < payload["workers"]:
        time.sleep(0.005)
    if payload["decodes"] == client.id:
        total = int(images.take(np.array([row])).astype(int).sum())
        images.path(row).unlink()
    else:
        while images.path(row).exists():
            time.sleep(0.005)
        total = int(images.take(np.array([row])).astype(int).sum())
    return Outcome({"total": total, "pid": os.getpid()}, None, {"examples": 1})


def seen_by_two_workers(images: ImageFiles, row: int) -> tuple[int, int]:
    """What each of two workers sees in an image, of which the second cannot read the file any more."""
    engine = processes(workers=2)
    try:
        states = ClientStates()
        engine.open(Program({"look": look}, Pictures(images), seed=1), states)
        barrier = str(images.root / "barrier")
        payload = {"row": row, "barrier": barrier, "workers": 2, "decodes": 0}

        def steps() -> object:
            return list((yield Ask("look", [Request(client, payload) for client in (0, 1)])))

        answers = Driver(engine, states).drive(steps(), 1)
    finally:
        engine.close()
    assert all(isinstance(answer, Reply) for answer in answers), answers
    assert len({answer.payload["pid"] for answer in answers}) == 2
    first, second = (answer.payload["total"] for answer in answers)
    return first, second
