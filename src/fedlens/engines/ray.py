"""The engine of workers on a Ray cluster, or on a Ray that is started on this machine for the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Mapping
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field

from fedlens.base.errors import ConfigError
from fedlens.base.memory import keep_freed_memory
from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import Answer, Ask, BatchedOp, ClientStates, Op, Program
from fedlens.core.states import STATE_MEMORY
from fedlens.data.feature_cache import FeatureStore
from fedlens.data.images import DecodedImages
from fedlens.engines.client_groups import Group, check_groups, layout_of
from fedlens.engines.devices import ChannelsLast, Computing, PrecisionSetting, usable_cores
from fedlens.engines.inline import StateMemory, Threads
from fedlens.engines.processes import Timeout, Window
from fedlens.engines.ray_cluster import HOST_AND_PORT, NO_RAY_CLIENT, Cluster, connect, import_ray
from fedlens.engines.ray_pool import RayPool, RaySettings, no_room
from fedlens.engines.ray_worker import Emptied, pack
from fedlens.engines.schedule import block_size
from fedlens.engines.traits import EngineTraits, declares
from fedlens.engines.verify import Verify, verified


def _whole_address(address: str | None) -> str | None:
    if address in (None, "auto") or re.fullmatch(HOST_AND_PORT, address):
        return address
    if address.startswith("ray://"):
        raise ValueError(NO_RAY_CLIENT)
    raise ValueError(
        "use 'host:port' or 'auto'; the port of a head is 6379, unless 'ray start' was given another"
    )


def _zero_or(least: float) -> AfterValidator:
    """A validator for settings whose 0 means a default."""

    def check(value: float) -> float:
        if 0 < value < least:
            raise ValueError(f"use 0, or at least {least:g}")
        return value

    return AfterValidator(check)


_LEAST = 0.0001  # the smallest part of a CPU or a GPU that Ray counts
Address = Annotated[
    str | None,
    Field(
        description="of the cluster: `host:port`, or `auto` for the one this machine is part of; "
        "left out, Ray is started on this machine for the run",
    ),
    AfterValidator(_whole_address),
]
Workers = Annotated[
    int,
    Field(ge=0, le=100_000, description="workers on all nodes; 0: as many as the cluster has room for"),
]
Cpus = Annotated[
    float, Field(ge=0, description="CPUs of one worker; 0: as many as `threads`"), _zero_or(_LEAST)
]
Gpus = Annotated[
    float,
    Field(
        ge=0,
        le=1,
        description="GPUs of one worker: 1, or a fraction to let several share one, 0.25 four of them",
    ),
    _zero_or(_LEAST),
]
Connecting = Annotated[
    float,
    Field(
        gt=0,
        description="seconds to wait for the cluster to answer, and for a free slot if the cluster is full",
    ),
]
ObjectStore = Annotated[
    int,
    Field(
        ge=0,
        description="maximum MiB of a local Ray's object store; 0: 30 % of the memory, Ray's default",
    ),
    _zero_or(100),
]


@declares(EngineTraits(exact=True, place="cluster"))
def ray(
    *,
    address: Address = None,
    workers: Workers = 0,
    threads: Threads = 1,
    cpus: Cpus = 0.0,
    gpus: Gpus = 0.0,
    group: Group = 1,
    precision: PrecisionSetting = "fp32",
    channels_last: ChannelsLast = "auto",
    window: Window = 512,
    state_memory: StateMemory = STATE_MEMORY,
    object_store: ObjectStore = 0,
    connect_timeout: Connecting = 60.0,
    timeout: Timeout = 3600.0,
    verify: Verify = 0,
) -> EngineBase:
    """Workers on a Ray cluster, on one machine or many; bit-identical to `inline` with the same threads."""
    import_ray()
    if object_store and address is not None:
        raise ConfigError(
            f"the nodes of the cluster at {address} set the size of their object stores themselves",
            where="engine.object_store",
            hint="leave it out, and start the nodes with 'ray start --object-store-memory=BYTES'",
        )
    settings = RaySettings(
        address,
        workers,
        threads,
        cpus or float(threads),
        gpus,
        group,
        window,
        object_store,
        connect_timeout,
        timeout,
    )
    computing = Computing("cuda" if gpus else "cpu", precision, layout_of(channels_last, group))
    return verified(Ray(settings, computing, state_memory), verify, exact=group == 1)


class Ray(EngineBase):
    """See `ray`.

    The program is put into the object store once, and the shared part of an ask once per ask. Ray copies each to a node
    once, however many workers run there. Blocks of requests go to workers that have started; others join when the
    cluster has room for them.
    """

    ahead = True  # asks may be sent before their answers are read

    def __init__(self, settings: RaySettings, computing: Computing, state_memory: int) -> None:
        self.settings, self.computing, self.state_memory = settings, computing, state_memory
        self._tell: Callable[[str | None, Mapping[str, Any]], None] = lambda line, facts: None
        self._cluster: Cluster | None = None
        self._pool: RayPool | None = None
        self._threads_before: int | None = None

    def warm(self) -> None:
        """Joins the cluster or starts Ray before the data are read, so that a wrong address is reported early."""
        if self._cluster is None:
            s, cores = self.settings, usable_cores()
            cpus = max(cores, math.ceil(max(1, s.workers) * s.cpus))  # a local Ray has room for all workers
            memory = s.object_store * 2**20 or None
            self._cluster = connect(s.address, cpus, memory, s.threads, s.connect_timeout)

    def check(self, ops: Mapping[str, Op]) -> None:
        """Raises `ConfigError` if clients cannot be computed in these groups or with this precision.

        GPUs belong to the workers, and are not checked here.
        """
        if self.computing.device == "cpu":
            self.computing.check()
        check_groups(ops, self.settings.group, self.computing, "ray")

    def applied(self, program: Program) -> Program:
        """The program on the workers' device, in this engine's arithmetic. Ray shows each worker only its own GPU."""
        return self.computing.applied(program)

    def listen(self, tell: Callable[[str | None, Mapping[str, Any]], None]) -> None:
        """Sets the function that is told about GPUs that no worker uses."""
        self._tell = tell

    def open(self, program: Program, states: ClientStates) -> None:
        """Puts the program into the object store and waits for a first worker.

        Raises `ConfigError` if no cluster answers or has other versions, and `RunFailed` if no worker starts.
        """
        self.check(program.ops)
        self.warm()
        assert self._cluster is not None
        room = self._cluster.room(self.settings.needs)
        if room == 0 and self._cluster.local:
            raise no_room(self._cluster, self.settings.needs)
        self._joint = {name for name, op in program.ops.items() if isinstance(op, BatchedOp)}
        count = self.settings.workers or max(1, room)
        what = "the algorithm's operations or its data"
        packed = pack(self.applied(program), what, code=True, instead=_emptied(count))
        self._ray = import_ray()
        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        if gpus and not self.settings.gpus:
            line = f"the cluster's GPUs ({gpus}) are not used: set engine.gpus=1, or a part such as 0.5"
            self._tell(line, {"name": "ray"})
        reference = self._ray.put(packed)
        del packed
        keep_freed_memory()
        # The server computes with the engine's threads, as with `inline`: the same bits.
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self.settings.threads)
        self._pool = RayPool(self._cluster, self.settings, count, reference, states)
        self._pool.wait_for_a_worker()

    def answer(self, ask: Ask, round: int, exchange: int) -> Generator[Answer, None, None]:
        """Answers an ask by workers."""
        assert self._cluster is not None
        assert self._pool is not None
        shared = pack(
            (ask.op, ask.shared, ask.expect, ask.reduce), f"the shared payload of the ask '{ask.op}'"
        )
        size = block_size(ask, self.settings.group if ask.op in self._joint else 1)
        self._cluster.check_node()
        job = self._pool.schedule.publish(ask, round, exchange, self._ray.put(shared), size)
        return self._pool.schedule.answers(job)

    def close(self) -> None:
        """Ends the workers, and a local Ray."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def _emptied(workers: int) -> Callable[[Any], Any]:
    kinds = (DecodedImages, FeatureStore)
    return lambda value: Emptied(value, workers) if isinstance(value, kinds) else None
