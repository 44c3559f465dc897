"""Estimates the cost of a run: time by timed steps of the built model, disk space and memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from fedlens.base.errors import FedlensError, RunFailed
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import State
from fedlens.core.schema import nbytes
from fedlens.core.states import ClientStates
from fedlens.observers.held_out_predictions import MOST
from fedlens.run.build import Built, build, data_directory, images_of_the_run
from fedlens.run.round_context import new_state, round_context
from fedlens.run.run_state import placed
from fedlens.run.session import Session
from fedlens.settings.config import Config, read_config
from fedlens.settings.config_source import Source
from fedlens.settings.memory_check import memory_of_training
from fedlens.settings.plan import plan_of
from fedlens.studies.jobs import GpuMemory
from fedlens.studies.planned import settings_text
from fedlens.tasks.central_evaluation import central, stretch_of

_CLIENTS = 4  # of a timed round
_ENOUGH = 0.5  # approximate seconds of the steps of a timed round, and of a timed evaluation
_MANY = 500  # the most steps of a timed round
_SLOW = 2.0  # seconds of a round of one step after which no further round is timed
EVALUATION = 3  # a training step takes about as long as the evaluation of three times its images
_CHECKPOINTS = 3  # that a run keeps at most: the last two, and that of the best round
# Bytes of a run directory, measured: of the files of settings and results; of an image in partition.npz; of an image
# in evaluation.npz and held_out.npz, as they are compressed; of a line of metrics.jsonl; of a line of clients.jsonl.
_FILES, _PARTITIONED, _PREDICTION, _ROUND, _CLIENT = 12_000, 11, 40, 450, 280
_MANIFEST = 6_000  # of a checkpoint


@dataclass(frozen=True)
class Speed:
    """Seconds of the parts of a run, and bytes of what the algorithm keeps.

    Attributes:
        start: of the first round beside its training, such as the start of workers.
        visit: of a client besides its steps.
        step: of a batch.
        image: of an image that is evaluated.
        server: bytes of the server's state.
        state: bytes of the state that the algorithm keeps of a client.
    """

    start: float
    visit: float
    step: float
    image: float
    server: int
    state: int


@dataclass(frozen=True)
class RunCost:
    """The cost of one run.

    Attributes:
        images: trained on, counting each use; evaluated images aside.
        seconds: None if it could not be measured, or was not asked for.
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
    """Sizes that follow from the data and the model of a run.

    Attributes:
        visits: of clients in a round; the pooled data are one client.
        at_server, at_clients: images of one evaluation.
        memory, gpu: as in `RunCost`, without client states.
    """

    built: Built
    visits: int
    at_server: int
    at_clients: int
    memory: int
    gpu: GpuMemory | None

    @classmethod
    def of(cls, built: Built) -> _Shape:
        """The sizes of a run that was built."""
        evaluation, held = built.config.evaluation, built.federation.held
        sizes = built.client_data.held_out_sizes()
        at_clients = 0 if sizes is None or evaluation.clients == "none" else int(sizes.sum())
        peers = built.federation.clients if evaluation.test_peers == "all" else evaluation.test_peers or 0
        names = ["@validation", *["@train"] * evaluation.train, *["@test"] * (1 + peers)]
        at_server = sum(held.get(name, 0) for name in names)
        device = built.engine.applied(built.program).device
        data = built.shared.nbytes if built.shared is not None else 0
        gpu = None if device == "cpu" else GpuMemory(_training_of(built, device), data)
        return cls(
            built, built.clients_per_round or 1, at_server, at_clients, data + _training_of(built), gpu
        )

    def files(self, evaluations: int, rounds: int) -> int:
        """Bytes of the run directory without checkpoints: model files, lines, predictions and settings."""
        built, config = self.built, self.built.config
        measured = built.federation.clients * evaluations if self.at_clients else 0
        rows = measured + rounds * self.visits * config.record.clients
        predicted = min(self.at_clients, MOST) if built.task.has_confidences else 0
        images = predicted * _PREDICTION + int(built.federation.sizes.sum()) * _PARTITIONED
        return 2 * 4 * built.parameters + _FILES + images + rows * _CLIENT + (1 + rounds) * _ROUND


class RunCosts:
    """Estimates the cost of runs; what alike runs share is measured once.

    Two runs have the same speed if data, model, algorithm, engine and batches are the same. They have the same sizes if
    the partition is also the same, except for the seed. The speed is that of two rounds in memory, of one step and of
    some more, at no more than four clients where the algorithm allows that, and of a forward pass over test images.

    >>> settings = {"rounds": 10, "model": "linear", "local": {"lr": 0.1, "epochs": 2}, "seed": 0,
    ...             "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}}
    >>> cost = RunCosts(Session()).of(settings)
    >>> cost.images, cost.seconds > 0, cost.disk > 10_000, cost.memory > 2**28
    (28740.0, True, True, True)
    """

    def __init__(
        self, session: Session, data_dir: Path | None = None, download: bool = False, timed: bool = True
    ) -> None:
        """Args:
        timed: whether steps are timed; if not, costs are without seconds and disk space.
        """
        self._session, self._data_dir, self._download = session, data_directory(data_dir), download
        self._timed = timed
        self._shapes: dict[str, _Shape] = {}
        self._speeds: dict[str, Speed | None] = {}

    def of(self, settings: Mapping[str, Any], rounds: int | None = None) -> RunCost:
        """The cost of the run with these settings up to a round, by default all.

        Raises `FedlensError` if the settings or the data are wrong.
        """
        config = read_config(dict(settings))
        shape = self._shape(settings, config)
        built, local = shape.built, config.local
        done = config.rounds if rounds is None else min(rounds, config.rounds)
        shortened = config.model_copy(update={"rounds": done})
        images = images_of_the_run(shortened, built.federation, built.clients_per_round)
        speed = self._speed(settings, config, built) if self._timed else None
        if speed is None:
            return RunCost(images, None, 0, shape.memory, shape.gpu)
        visits, evaluations = done * shape.visits, 1 + done // config.evaluation.every
        each = images / max(1, visits)  # of a visit
        steps = visits * local.steps_at(max(1, round(each / (1 if local.steps else local.work))))
        seconds = speed.start + visits * speed.visit + steps * speed.step
        seconds += evaluations * (shape.at_server + shape.at_clients) * speed.image
        states = speed.state * min(visits, built.federation.clients)
        kept = min(states, built.engine.state_memory * 2**20)  # others are in files, once
        disk = (
            shape.files(evaluations, done) + _CHECKPOINTS * (speed.server + kept + _MANIFEST) + states - kept
        )
        return RunCost(images, seconds, disk, shape.memory + kept, shape.gpu)

    def _built(self, settings: Mapping[str, Any]) -> Built:
        planned = plan_of(Source(dict(settings)))
        return build(planned, self._data_dir, self._download, session=self._session)

    def _shape(self, settings: Mapping[str, Any], config: Config) -> _Shape:
        data = config.data.model_dump(mode="json", exclude={"cache", "prefetch"}, fallback=repr)
        batch = [config.local.batch_size, config.local.examples]
        components = [config.model, config.algorithm, config.select, config.task, batch]
        clients = [config.evaluation.train, config.evaluation.clients, config.evaluation.test_peers]
        key = settings_text([data, components, clients, config.engine])
        if key not in self._shapes:
            built = self._built(settings)
            built.engine.close()
            self._shapes[key] = _Shape.of(built)
        return self._shapes[key]

    def _speed(self, settings: Mapping[str, Any], config: Config, built: Built) -> Speed | None:
        local = config.local.model_dump(include={"batch_size", "optimizer", "examples", "clip_norm"})
        alike = [config.data.dataset, config.data.augment, config.model, config.task, config.engine]
        key = settings_text(
            [*alike, config.algorithm.get("name"), config.client, config.server, config.aggregate, local]
        )
        if key not in self._speeds:
            self._speeds[key] = self._measure(settings, built)
        return self._speeds[key]

    def _measure(self, settings: Mapping[str, Any], built: Built) -> Speed | None:
        """The speed by rounds of few steps; None if they fail, as the run itself will.

        An algorithm that refuses few clients is timed with all of them, and one that refuses few steps with all.
        """
        # What the engine chose is not chosen again.
        engine = {**settings.get("engine", {}), **built.config.engine}

        def timed(steps: int, clients: int | None) -> _Timed:
            few = {**_shortened(settings, steps, clients), "engine": engine} if steps else {"engine": engine}
            return _Timed.of(self._built({**settings, **few}))

        for clients in (_CLIENTS, None):
            with suppress(FedlensError):
                one = timed(1, clients)
                more = min(_MANY, max(2, int(_ENOUGH / one.seconds)))
                return _speed_of(one, None if one.seconds > _SLOW else timed(more, clients), built)
        with suppress(FedlensError):
            return _speed_of(timed(0, None), None, built)
        return None


@dataclass(frozen=True)
class _Timed:
    """A round in memory: its seconds, those that the first round took longer, and what it trained and keeps."""

    seconds: float
    start: float
    visits: int
    steps: float  # of a visit
    image: float | None
    server: int
    state: int

    @classmethod
    def of(cls, built: Built) -> _Timed:
        """The second round, or the first one if that is slow. Raises `FedlensError` if the round fails."""
        states, seconds = ClientStates(), list[float]()
        driver = Driver(built.engine, states)
        try:
            built.engine.open(built.program, states)
            state = placed(built, built.algorithm.init(built.model, built.federation))
            for round in (1, 2):
                driver.tally = Tally()
                began, context = time.perf_counter(), round_context(built, round)
                state = new_state(built, driver, built.algorithm.round(state, context), state, round)
                seconds.append(time.perf_counter() - began)
                if seconds[0] > 2 * _SLOW:
                    break
            tally, driver.tally = driver.tally, Tally()
            if tally.failed_round:
                raise RunFailed("no client could be timed")
            image = _evaluated(built, driver, state)
        finally:
            built.engine.close()
            torch.cuda.empty_cache()  # for the study's workers; does nothing where no GPU is in use
        visits = max(1, tally.clients)
        # A gradient over all examples also counts batches, and belongs to the visit.
        batches = sum(tally.batches.values()) or context.metrics.get("batches", 0.0)  # of a blind sum
        steps = float(built.config.local.steps or max(1.0, batches / visits))
        kept = max((nbytes(states.get(client)) for client in tally.replied), default=0)
        return cls(seconds[-1], seconds[0] - seconds[-1], visits, steps, image, nbytes(state), kept)


def _speed_of(one: _Timed, many: _Timed | None, built: Built) -> Speed:
    """The speed from one timed round, or from two of different length."""
    visit, step = 0.0, one.seconds / one.visits / one.steps
    if many is not None and many.steps > one.steps:
        each, all_steps = one.seconds / one.visits, many.seconds / many.visits
        step = min(max((all_steps - each) / (many.steps - one.steps), 0.0), all_steps / many.steps)
        step = step or all_steps / many.steps  # a machine that slowed down in between
        visit = max(0.0, all_steps - many.steps * step)
    batch = built.config.local.batch(max(1, round(float(built.federation.sizes.mean()))))
    image = (many or one).image
    image = step / batch / EVALUATION if image is None else image
    return Speed(max(0.0, one.start), visit, step, image, one.server, one.state)


def _evaluated(built: Built, driver: Driver, state: State) -> float | None:
    """Seconds of a test image in the evaluation of the model; None if the algorithm has another evaluation."""
    images = 1
    most = min(built.federation.held.get("@test", 0), stretch_of(prod(built.federation.input_shape)))
    try:
        spec, model = built.algorithm.model(state)

        def seconds() -> float:
            few = replace(built.federation, held={"@test": images})
            began = time.perf_counter()
            driver.drive(central(model, few, built.task, ["@test"], varying=spec.varying), 1)
            return time.perf_counter() - began

        seconds()  # the first one also loads what an evaluation needs
        while (spent := seconds()) < _ENOUGH / 8 and images < most:
            images = min(8 * images, most)
    except Exception:  # of any kind: the operation may be missing, or the user's own
        return None
    return spent / images


def _training_of(built: Built, device: str = "cpu") -> int:
    """Bytes of a process that trains, or of its GPU."""
    cohort = built.clients_per_round
    largest = built.federation.largest if cohort is not None else int(built.partition.sizes().sum())
    module = built.model.build(initial=False)
    trained = replace(built.model, input_shape=built.client_data.training_shape)
    return memory_of_training(module, trained, built.task, built.config.local, largest, device)


def _shortened(settings: Mapping[str, Any], steps: int, clients: int | None) -> dict[str, Any]:
    """The settings of timed rounds: `steps` local steps, and at most `clients` clients a round."""
    work = ("epochs", "steps", "examples", "stragglers", "straggler_work", "lr_warmup")
    local = {key: value for key, value in settings["local"].items() if key not in work}
    changes: dict[str, Any] = {"rounds": 2, "local": {**local, "steps": steps}}
    select = settings.get("select")
    table = {"name": select} if isinstance(select, str) else dict(select or {})
    asked = table.get("clients_per_round")
    if clients is not None and table and not (isinstance(asked, int) and asked <= clients):
        table.pop("fraction", None)
        changes["select"] = {**table, "clients_per_round": clients}
    return changes


__all__ = ["RunCost", "RunCosts", "Speed"]
