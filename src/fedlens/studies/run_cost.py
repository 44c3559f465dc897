"""Estimates the cost of a run: time by a short measurement, disk space and memory."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlens.api import Experiment
from fedlens.base.errors import FedlensError
from fedlens.core.schema import nbytes
from fedlens.data.dataset import Dataset
from fedlens.data.decode_cache import Say
from fedlens.observers.held_out_predictions import MOST
from fedlens.run import checkpoint
from fedlens.run.build import Built, build, data_directory, images_of_the_run
from fedlens.run.run_state import RunState
from fedlens.run.rundir import RunDir
from fedlens.run.session import Session, SharedDataset
from fedlens.settings.config import Config, read_config
from fedlens.settings.config_source import Source
from fedlens.settings.memory_check import memory_of_training
from fedlens.settings.plan import plan
from fedlens.settings.resolve import Resolved
from fedlens.studies.gpu_runs import GpuMemory

PATIENCE = 20.0  # seconds of measuring; later models then count with a speed measured before
_STEPS, _CLIENTS, _TESTED = (1, 16), 4, (512, 128)  # of a round of the two short runs that are compared
_SLOW = 2.0  # seconds of a first round after which there is no second run
_PREDICTION = 40  # bytes of an image in held_out.npz, as it is compressed
_CHECKPOINTS = 3  # that a run keeps at most: the last two, and that of the best round


@dataclass(frozen=True)
class Speed:
    """Seconds of the parts of a run, and the bytes of its files.

    Attributes:
        start: before the first round and after the last.
        visit: of a client besides its steps.
        step: of a batch.
        evaluation, image: of an evaluation, and of each image in it.
        files: bytes of what is written once.
        checkpoint: bytes of a checkpoint without the states of clients.
        state: bytes of the state that the algorithm keeps of a client.
        round, client: bytes of the lines of a round, and of a client in a round.
    """

    start: float
    visit: float
    step: float
    evaluation: float
    image: float
    files: int
    checkpoint: int
    state: int
    round: int
    client: int


@dataclass(frozen=True)
class RunCost:
    """The cost of one run.

    Attributes:
        images: trained on, counting each use; evaluated images aside.
        seconds: on an otherwise idle processor; None if it could not be measured.
        disk: bytes of its directory.
        memory: bytes of a process that carries it out.
        gpu: what it takes of a GPU; None on the processor.
    """

    images: float
    seconds: float | None
    disk: int
    memory: int
    gpu: GpuMemory | None = None


@dataclass(frozen=True)
class _Shape:
    """Sizes that follow from the data and the model of a run: images per client, and bytes."""

    built: Built
    memory: int
    gpu: GpuMemory | None

    @property
    def visits(self) -> int:
        """Of clients in a round; the pooled data are one client."""
        return self.built.clients_per_round or 1

    @property
    def evaluated(self) -> int:
        """Images of one evaluation."""
        return self._at_server + self._at_clients

    @property
    def predictions(self) -> int:
        """Bytes of the predictions of the clients' held-out images, which a run keeps when it ends."""
        kept = min(self._at_clients, MOST) if self.built.task.has_confidences else 0
        return kept * _PREDICTION

    @property
    def _at_clients(self) -> int:
        sizes = self.built.client_data.held_out_sizes()
        return 0 if sizes is None or self.built.config.evaluation.clients == "none" else int(sizes.sum())

    def evaluated_of(self, tested: int) -> int:
        """Images of one evaluation without those at clients, with at most `tested` test images."""
        left_out = max(0, self.built.federation.held.get("@test", 0) - tested)
        return self._at_server - (1 + self._tested_peers) * left_out

    @property
    def _tested_peers(self) -> int:
        """The models of peers that are measured on the test data beside the mean model."""
        peers = self.built.config.evaluation.test_peers
        return self.built.federation.clients if peers == "all" else peers or 0

    @property
    def _at_server(self) -> int:
        names = ("@validation",) + (("@train",) if self.built.config.evaluation.train else ())
        names += ("@test",) * (1 + self._tested_peers)
        return sum(self.built.federation.held.get(name, 0) for name in names)


class RunCosts:
    """Estimates the cost of runs; what alike runs share is measured once.

    Two runs have the same speed if data, model, algorithm, engine and batches are the same. They have the same sizes if
    the partition is also the same, except for the seed. The speed is measured by two runs of two rounds on at most 512
    test images: one with a single step, one with some more steps of at most four clients if the algorithm allows that.

    >>> settings = {"rounds": 10, "model": "linear", "local": {"lr": 0.1, "epochs": 2}, "seed": 0,
    ...             "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}}
    >>> cost = RunCosts(Session()).of(settings)
    >>> cost.images, cost.seconds > 0, cost.disk > 10_000, cost.memory > 2**28
    (28740.0, True, True, True)
    """

    def __init__(
        self,
        session: Session,
        data_dir: Path | None = None,
        download: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        self._session, self._data_dir, self._download = session, data_dir, download
        self._patience, self._spent = patience, 0.0
        self._shapes: dict[str, _Shape] = {}
        self._speeds: dict[str, Speed | None] = {}
        self.skipped = 0  # kinds of runs whose speed was not measured for lack of time

    @property
    def measured(self) -> float:
        """Seconds that the measurement has taken."""
        return self._spent

    def of(self, settings: Mapping[str, Any], rounds: int | None = None) -> RunCost:
        """The cost of the run with these settings up to a round, by default all.

        Raises `FedlensError` if the settings or the data are wrong.
        """
        config = read_config(dict(settings))
        shape, speed = self._shape(settings, config), self._speed(settings, config)
        done = config.rounds if rounds is None else min(rounds, config.rounds)
        images = images_of_the_run(
            config.model_copy(update={"rounds": done}), shape.built.federation, shape.built.clients_per_round
        )
        if shape.built.clients_per_round is None:  # one client with all data
            images = _pooled(shape.built, config, done)
        visits = done * shape.visits
        evaluations = 1 + done // config.evaluation.every
        if speed is None:
            return RunCost(images, None, 0, shape.memory, shape.gpu)
        batch = config.local.batch(max(1, round(images / max(1, visits))))
        per_visit = images / max(1, visits)
        steps = visits * ceil(per_visit / batch) if per_visit else 0
        if config.local.epochs and config.local.epochs > 1:  # each epoch ends with a batch of what is left
            steps = visits * config.local.epochs * ceil(per_visit / config.local.epochs / batch)
        evaluating = evaluations * (speed.evaluation + shape.evaluated * speed.image)
        seconds = speed.start + visits * speed.visit + steps * speed.step + evaluating
        lines = speed.round * (1 + done) + speed.client * visits
        states = speed.state * min(visits, shape.built.federation.clients)
        kept = min(states, shape.built.engine.state_memory * 2**20)  # others are in files, once
        disk = (
            speed.files + shape.predictions + lines + _CHECKPOINTS * (speed.checkpoint + kept) + states - kept
        )
        return RunCost(images, seconds, disk, shape.memory + kept, shape.gpu)

    def _shape(self, settings: Mapping[str, Any], config: Config) -> _Shape:
        data = config.data.model_dump(mode="json", exclude={"cache", "prefetch"}, fallback=repr)
        batch = [config.local.batch_size, config.local.examples]
        components = [config.model, config.algorithm, config.select, config.task, batch]
        clients = [config.evaluation.train, config.evaluation.clients, config.evaluation.test_peers]
        key = _key([data, components, clients, config.engine.get("device")])
        if key not in self._shapes:
            source = Source(dict(settings))
            planned = plan(read_config(source.values, source.locate), source)
            built = build(planned, data_directory(self._data_dir), self._download, session=self._session)
            built.engine.close()
            device = built.engine.applied(built.program).device
            gpu = None if device == "cpu" else GpuMemory(_training_of(built, device), _data_of(built))
            self._shapes[key] = _Shape(built, _data_of(built) + _training_of(built), gpu)
        return self._shapes[key]

    def _speed(self, settings: Mapping[str, Any], config: Config) -> Speed | None:
        local = config.local.model_dump(include={"batch_size", "optimizer", "examples", "clip_norm"})
        alike = [config.data.dataset, config.data.augment, config.model, config.task, config.engine]
        loose = _key([*alike, local["batch_size"]])
        key = _key(
            [loose, config.algorithm.get("name"), config.client, config.server, config.aggregate, local]
        )
        if key not in self._speeds:
            others = [speed for name, speed in self._speeds.items() if name.startswith(loose) and speed]
            if self._spent > self._patience and (others or any(self._speeds.values())):
                self.skipped += 1
                speeds = others or [speed for speed in self._speeds.values() if speed]
                return speeds[0]
            began = time.perf_counter()
            self._speeds[key] = self._measure(settings)
            self._spent += time.perf_counter() - began
        return self._speeds[key]

    def _measure(self, settings: Mapping[str, Any]) -> Speed | None:
        """The speed by short runs; None if they fail, as the run itself will."""
        for clients in (_CLIENTS, None):
            with suppress(FedlensError):
                return self._compare(settings, clients)
        with suppress(FedlensError):
            return _speed_of(self._short(settings, {}, _TESTED[0], until=1), None)
        return None

    def _compare(self, settings: Mapping[str, Any], clients: int | None) -> Speed:
        """The speed by two short runs. Raises `FedlensError` if these settings cannot be shortened so."""
        few = self._short(settings, _shortened(settings, _STEPS[0], clients), _TESTED[0])
        if few.training > _SLOW:
            return _speed_of(few, None)
        steps = max(_STEPS[1] // few.visits, 4)
        return _speed_of(few, self._short(settings, _shortened(settings, steps, clients), _TESTED[1]))

    def _short(
        self, settings: Mapping[str, Any], changes: Mapping[str, Any], tested: int, until: int | None = None
    ) -> _Timed:
        with tempfile.TemporaryDirectory(prefix="fedlens-estimate-") as folder:
            out = Path(folder) / "run"
            experiment = Experiment(**{**settings, **changes})
            began = time.perf_counter()
            experiment.run(
                out,
                data_dir=self._data_dir,
                download=self._download,
                report=False,
                session=_ShortTests(self._session, tested),
                until=until,
            )
            clock = time.perf_counter() - began
            torch.cuda.empty_cache()  # for the study's workers; does nothing where no GPU is in use
            evaluated = self._shape(settings, read_config(dict(settings))).evaluated_of(tested)
            return _Timed.of(RunDir(out), experiment.config, clock, evaluated)


@dataclass(frozen=True)
class _Timed:
    """A short run: seconds of its parts, and bytes of its files."""

    steps: int
    visits: int
    training: float
    evaluating: float
    tested: int
    around: float  # seconds besides training and evaluation
    files: int
    checkpoint: int
    state: int
    round: int
    client: int

    @classmethod
    def of(cls, run: RunDir, config: Config, clock: float, tested: int) -> _Timed:
        first, second, *_ = run.read_metrics()
        last = run.read_metrics()[-1]
        evaluating = max(0.0, second["elapsed"] - first["elapsed"] - second["seconds"])
        trained = last["seconds"] if last["round"] > 1 else second["seconds"]
        rounds, visits = 1 + last["round"], max(1, last["clients"])
        training = sum(line["seconds"] for line in run.read_metrics())
        around = max(0.0, clock - training - rounds * evaluating)
        sizes = {
            path.relative_to(run.path).as_posix(): path.stat().st_size
            for path in run.path.rglob("*")
            if path.is_file()
        }
        lines = sizes.pop("metrics.jsonl", 0) // rounds, sizes.pop("clients.jsonl", 0) // (rounds * visits)
        latest = f"checkpoint/round-{last['round']:06d}/"
        state, states = _states(run)
        saved = sum(size for name, size in sizes.items() if name.startswith(latest)) - states
        once = sum(size for name, size in sizes.items() if not name.startswith(("checkpoint/", "states/")))
        steps = max(1, last["batches_max"])
        return cls(steps, visits, trained, evaluating, tested, around, once, saved, state, *lines)


def _states(run: RunDir) -> tuple[int, int]:
    """Bytes of the state of a client, and of all states in the last checkpoint."""
    loaded = checkpoint.load_latest(run.checkpoint_path)
    if loaded is None:
        return 0, 0
    states = RunState.of(loaded.payload).clients.saved().states
    total = sum(nbytes(state) for state in states.values())
    return total // max(1, len(states)), total


def _speed_of(few: _Timed, many: _Timed | None) -> Speed:
    """The speed from one short run, or from two of different length."""
    files = (few.files, few.checkpoint, few.state, few.round, few.client)
    per_visit, image = few.training / few.visits, few.evaluating / few.tested
    if many is None:
        return Speed(few.around, 0.0, per_visit / few.steps, 0.0, image, *files)
    step = per_visit / few.steps
    if many.steps > few.steps:
        step = min(step, max(0.0, (many.training / many.visits - per_visit) / (many.steps - few.steps)))
        step = step or many.training / many.visits / many.steps
    visit = max(0.0, many.training / many.visits - many.steps * step)
    if few.evaluating > many.evaluating and few.tested > many.tested:
        image = min(image, (few.evaluating - many.evaluating) / (few.tested - many.tested))
    evaluation = max(0.0, few.evaluating - few.tested * image)
    return Speed(min(few.around, many.around), visit, step, evaluation, image, *files)


def _data_of(built: Built) -> int:
    """Bytes of the data."""
    return built.shared.nbytes if built.shared is not None else 0


def _training_of(built: Built, device: str = "cpu") -> int:
    """Bytes of a process that trains, or of its GPU."""
    cohort = built.clients_per_round
    largest = built.federation.largest if cohort is not None else int(built.partition.sizes().sum())
    module = built.model.build(initial=False)
    trained = replace(built.model, input_shape=built.client_data.training_shape)
    return memory_of_training(module, trained, built.task, built.config.local, largest, device)


def _shortened(settings: Mapping[str, Any], steps: int, clients: int | None) -> dict[str, Any]:
    """The settings of a short run: two rounds, `steps` local steps, and at most `clients` clients a round."""
    work = ("epochs", "steps", "examples", "stragglers", "straggler_work", "lr_warmup")
    local = {key: value for key, value in settings["local"].items() if key not in work}
    changes: dict[str, Any] = {
        "rounds": 2,
        "local": {**local, "steps": steps},
        "evaluation": {**settings.get("evaluation", {}), "every": 1, "clients": "none", "overlap": False},
        "checkpoint": {"seconds": 3600.0},
    }
    select = settings.get("select")
    table = {"name": select} if isinstance(select, str) else dict(select or {})
    asked = table.get("clients_per_round")
    if clients is not None and table and not (isinstance(asked, int) and asked <= clients):
        table.pop("fraction", None)
        changes["select"] = {**table, "clients_per_round": clients}
    return changes


def _pooled(built: Built, config: Config, rounds: int) -> float:
    """The images that a run on the pooled data trains on."""
    total = int(built.federation.sizes.sum())
    if config.local.steps:
        return float(rounds * config.local.steps * config.local.batch(total))
    return float(rounds * (config.local.epochs or 1) * (config.local.examples or total))


class _ShortTests(Session):
    """A session with the data of another one, but few test images."""

    def __init__(self, whole: Session, tested: int) -> None:
        super().__init__(whole.memory)
        self._whole, self._tested = whole, tested

    def dataset(self, chosen: Resolved, root: Path, download: bool, seed: int) -> SharedDataset:
        """The dataset of the other session."""
        whole = self._whole.dataset(chosen, root, download, seed)
        return _ShortTest(whole.dataset, chosen, {}, "not computed", whole=whole, tested=self._tested)

    def machine(self) -> dict[str, Any]:
        """The machine of the other session."""
        return self._whole.machine()


@dataclass
class _ShortTest(SharedDataset):
    """A dataset of which only the first test examples are used."""

    whole: SharedDataset | None = None
    tested: int = 0

    def loaded(self, cache: int, say: Say) -> Dataset:
        """The dataset with few test examples."""
        assert self.whole is not None
        dataset = self.whole.loaded(cache, say)
        if len(dataset.test) <= self.tested:
            return dataset
        rows = np.linspace(0, len(dataset.test) - 1, self.tested).astype(np.int64)
        return replace(dataset, test=dataset.test.take(rows))


def _key(parts: Sequence[Any]) -> str:
    return json.dumps(parts, sort_keys=True, default=repr)


__all__ = ["PATIENCE", "RunCost", "RunCosts", "Speed"]
