"""The loop of a local worker: receives blocks of requests, answers them, writes replies to shared memory."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import traceback
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import torch

from fedlens.base import interrupts
from fedlens.base.errors import FedlensError, HookError, RunFailed, told
from fedlens.base.memory import keep_freed_memory, release_freed_memory
from fedlens.base.registry import load_file
from fedlens.base.threads import share_cores
from fedlens.core.protocol import Program
from fedlens.core.tree import HEAVY
from fedlens.engines.client_groups import Groups
from fedlens.engines.executor import Executor
from fedlens.engines.shared_memory import LARGE, Packer, Region, roomy, unpack


def main(driver: Connection, settings: dict[str, Any]) -> None:
    """Serves the driver until it ends the worker or is gone."""
    interrupts.no_user()
    keep_freed_memory()
    torch.set_num_threads(settings["threads"])
    share_cores(settings["cores"])
    sys.path[:] = settings["path"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # So that output of an operation is not lost when the worker is ended.
        sys.stdout.reconfigure(line_buffering=True)
    # The driver is gone: there is nothing to report to.
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            worker = _Worker(driver, settings)
            with worker.options:
                worker.serve()
        except (EOFError, ConnectionError):
            raise
        except FedlensError as error:
            failed = (
                error
                if isinstance(error, HookError)
                else RunFailed(error.what, where=error.where, hint=error.hint)
            )
            driver.send_bytes(pickle.dumps(("broken", failed)))
        except BaseException as error:
            traceback.print_exc()
            hint = "its traceback is above; engine.name=inline runs without local workers"
            failed = RunFailed(f"a local worker failed: {told(error)}", hint=hint)
            driver.send_bytes(pickle.dumps(("broken", failed)))


class _Worker:
    def __init__(self, driver: Connection, settings: dict[str, Any]) -> None:
        self.driver = driver
        self.device, self.group = settings["device"], settings["group"]
        self.options = contextlib.ExitStack()  # of the device
        self.regions: dict[int, Region] = {}  # of the driver, by its numbers
        self.own: dict[int, Region] = {}  # for replies, by the numbers of this worker
        self.free: list[Region] = []
        self.released = False  # whether the memory that a heavy model was built in is freed
        self.asks: dict[int, tuple[Any, ...]] = {}
        self.inbox: deque[Any] = deque()  # messages that are not processed yet
        for file in settings["files"]:
            load_file(Path(file))

    def serve(self) -> None:
        while True:
            while not self.inbox:
                self.take_in()
            kind, *rest = self.inbox.popleft()
            if kind == "task":
                self.task(*rest)
            elif kind == "ask":
                self.ask(*rest)
            elif kind == "program":
                number, envelope = rest
                self.begin(unpack(envelope, self.regions[number].view()))
            else:
                return

    def take_in(self) -> None:
        """Receives the next message: information is stored at once, tasks wait in the inbox."""
        message = pickle.loads(self.driver.recv_bytes())
        kind, *rest = message
        if kind == "region":
            number, size = rest
            self.regions[number] = Region(size, recv_handle(self.driver), number)
            self.regions[number].close()  # the mapping keeps the memory
        elif kind == "freed":
            self.free.extend(self.own[own] for own in rest[0])
        else:
            self.inbox.append(message)

    def begin(self, program: Program) -> None:
        self.options.close()  # of the previous program
        program = replace(program, device=self.device)
        self.options.enter_context(program.computing())
        self.site = Executor(program, groups=Groups(self.group) if self.group > 1 else None)

    def ask(self, number: int, op: str, envelope: bytes, region: int | None) -> None:
        shared, expect, reduce = unpack(envelope, self.look(region), self.look)
        self.asks[number] = (op, shared, expect, reduce)

    def task(
        self,
        number: int,
        ask: int,
        envelope: bytes,
        region: int | None,
        freed: list[int],
        forget: list[int],
        alone: bool,
    ) -> None:
        for done in forget:
            self.asks.pop(done, None)
        self.free.extend(self.own[own] for own in freed)
        op, shared, expect, reduce = self.asks[ask]
        items = unpack(envelope, self.look(region))
        answers = self.site.block(op, shared, items, expect, reduce, alone)
        heavy = self.send(number, answers) >= HEAVY
        del answers
        if heavy and not self.released:
            # Once: the memory that the model was built in is not used again, see `Loadable.give`.
            self.released = True
            release_freed_memory()

    def look(self, region: int | None) -> memoryview:
        return memoryview(b"") if region is None else self.regions[region].view()

    def send(self, number: int, answers: Any) -> int:
        """Sends the answers; returns how many bytes of tensors they have."""
        packer = Packer(answers)
        if packer.size >= LARGE:  # the region of the last reply may be free again
            while self.driver.poll():
                self.take_in()
        region, new = self.reply_region(packer.size)
        if region is not None:
            packer.write(region.view())
        head = (
            number,
            packer.envelope,
            region.number if region else None,
            region.size if new and region else 0,
            packer.size,
        )
        self.driver.send_bytes(pickle.dumps(("done", *head)))
        if new and region is not None:
            send_handle(self.driver, region.fd, os.getpid())
            region.close()
        return packer.size

    def reply_region(self, size: int) -> tuple[Region | None, bool]:
        """A free region of this worker that is large enough, or a new one; None if there is nothing to write."""
        if size == 0:
            return None, False
        for region in self.free:
            if region.size >= size:
                self.free.remove(region)
                return region, False
        region = Region(roomy(size))
        self.own[region.number] = region
        return region, True
