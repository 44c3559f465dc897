"""Records the local models and updates of chosen rounds, for analyses of the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedlens.base.shell_command import quoted_command
from fedlens.core import tensorfile
from fedlens.core.driver import Tally
from fedlens.core.protocol import Answer, Answers, Ask, Payload, Reply, State, Steps
from fedlens.core.step_counts import Phase
from fedlens.core.tree import Tree
from fedlens.core.types import client_name
from fedlens.files.atomic_files import refused, replacing
from fedlens.observers.read_recordings import AFTER, BEFORE, FORMAT, MANIFEST, MODEL, STARTED, folder_of
from fedlens.run.build import Built
from fedlens.run.observer import ObservedRun, Observer, Place


class Recorder(Observer):
    """Writes the recordings of a run; see `fedlens.observers.read_recordings` for the files."""

    place = Place.COLLECT
    file = "recordings"
    ends_run = True

    def __init__(self, built: Built) -> None:
        self._algorithm, self._settings = built.algorithm, built.config.record
        self.name = partial(client_name, ids=built.partition.ids)
        self._recording: _RoundRecording | None = None  # of the round in progress

    def began(self, run: ObservedRun) -> None:
        """See `Observer`."""
        self._directory = run.directory

    def asks(self, steps: Steps, phase: Phase, round: int, state: State) -> Steps:
        """The same round, recorded if the settings name it."""
        if phase == "evaluating":
            return steps
        models, updates = self._settings.local_models, self._settings.updates
        kinds = {
            "local_models": models is not None and models.includes(round),
            "updates": updates is not None and updates.includes(round),
        }
        if not any(kinds.values()):
            return steps
        self._recording = _RoundRecording(self, state, round, **kinds)
        return self._recording.observed(steps)

    def released(self, round: int, state: State, tally: Tally) -> None:
        """Completes the recording; of a skipped round, too, whose asks may have ended with an error."""
        if self._recording is not None:
            self._recording.end(state)
            self._recording = None

    def model(self, state: State) -> Tree:
        """The global model of a server state."""
        return self._algorithm.model(state)[1]

    def local_model(self, state: State, reply: Payload) -> Tree:
        """The local model of a reply."""
        return self._algorithm.local_model(state, reply)

    @property
    def has_local_models(self) -> bool:
        """Whether replies of this algorithm hold local models."""
        return self._algorithm.training_op is not None

    def trains(self, ask: Ask) -> bool:
        """Whether the replies to this ask hold local models."""
        return ask.op == self._algorithm.training_op

    def start_time(self) -> Any:
        """When the run was started, by which its recordings are told from those of other runs."""
        return (self._directory.read_environment() or {}).get(STARTED)

    def new_folder(self, round: int) -> Path:
        """The empty folder of a round; what an interrupted run left there is removed."""
        folder = folder_of(self._directory.recordings_path, round)
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        except OSError as error:
            raise refused(error, folder.name, folder) from error
        return folder


class _RoundRecording:
    """The recording of one round."""

    def __init__(
        self, recorder: Recorder, state: State, round: int, local_models: bool, updates: bool
    ) -> None:
        self._recorder, self._state, self._round = recorder, state, round
        self._local_models, self._updates = local_models, updates
        self._folder = recorder.new_folder(round)
        self._files: dict[str, str] = {}  # SHA-256 by name
        self._clients: list[dict[str, Any]] = []

    def observed(self, steps: Steps) -> Steps:
        """The asks of the round; writes a file for each reply."""
        self._write(BEFORE, self._recorder.model(self._state))
        try:
            ask = next(steps)
            while True:
                if not (self._recorder.trains(ask) or self._updates):
                    ask = steps.send((yield ask))
                elif ask.reduce is None:
                    ask = steps.send(self._after(ask, (yield ask)))
                else:
                    answers = yield replace(ask, reduce=replace(ask.reduce, keep=True))
                    ask = steps.send(self._before(ask, answers, set(ask.reduce.fields)))
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()

    def _after(self, ask: Ask, answers: Answers) -> Iterator[Answer]:
        """The answers; writes each accepted reply once the algorithm has read it."""
        for answer in answers:
            yield answer
            if isinstance(answer, Reply) and answer.refused is None:
                self._record(ask, answer)
            del answer  # frees its tree before the next answer comes

    def _before(self, ask: Ask, answers: Answers, summed: set[str]) -> Iterator[Answer]:
        """The answers; writes each reply, and removes the fields that are summed already."""
        for answer in answers:
            if isinstance(answer, Reply):
                self._record(ask, answer)
                answer.payload = {name: v for name, v in answer.payload.items() if name not in summed}
            yield answer
            del answer

    def _record(self, ask: Ask, reply: Reply) -> None:
        tensors: dict[str, Tensor] = {}
        if self._local_models and self._recorder.trains(ask):
            tensors |= _under(MODEL, self._recorder.local_model(self._state, reply.payload))
        if self._updates:
            for field, value in reply.payload.items():
                tensors |= _under(field, value) if isinstance(value, Mapping) else {}
        if not tensors:
            return
        name = f"exchange-{reply.id.exchange}-slot-{reply.id.slot:05d}.safetensors"
        numbers = {k: v for k, v in reply.payload.items() if isinstance(v, int | float)}
        self._write(name, tensors)
        self._clients.append(
            {
                "client": self._recorder.name(reply.client),
                "number": reply.client,
                "op": ask.op,
                "trained": self._local_models and self._recorder.trains(ask),
                "exchange": reply.id.exchange,
                "slot": reply.id.slot,
                "file": name,
                "numbers": numbers,
            }
        )

    def end(self, state: State) -> None:
        """Writes the model of the state that the round ends with, and the manifest."""
        self._write(AFTER, self._recorder.model(state))
        content = {
            "format": FORMAT,
            "round": self._round,
            "run": self._recorder.start_time(),
            "local_models": self._local_models,
            "updates": self._updates,
            "trains": self._recorder.has_local_models,
            "clients": self._clients,
            "sha256": self._files,
        }
        # Nothing waits for the disk: without its files the manifest would be worth nothing, and readers check both.
        path = self._folder / MANIFEST
        with self._written(path), replacing(path, named=False) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")

    def _write(self, name: str, tensors: Tree) -> None:
        path = self._folder / name
        with self._written(path):
            self._files[name] = tensorfile.write(path, tensors, sync=False).sha256

    @contextmanager
    def _written(self, path: Path) -> Iterator[None]:
        """Raises `RunFailed`, with what to do, if the disk refuses this file."""
        try:
            yield
        except OSError as error:
            again = quoted_command("resume", self._folder.parents[1])
            hint = f"free space, then {again} continues the run; or record fewer rounds"
            raise refused(error, path.name, path, hint) from error


def _under(name: str, tree: Tree) -> dict[str, Tensor]:
    """The leaves of a tree below this name, as `name/leaf`."""
    return {f"{name}/{leaf}": value for leaf, value in tree.items()}
