"""Saves the rounds of a run as checkpoints: the last one, and the best."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from fedlens.base.errors import RunDirectoryError
from fedlens.core.schema import nbytes
from fedlens.core.states import ClientStates, Mark
from fedlens.core.types import ClientId
from fedlens.run import checkpoint
from fedlens.run.build import Built
from fedlens.run.call_observers import Observers
from fedlens.run.changes import Change, defining
from fedlens.run.run_state import RunState
from fedlens.run.rundir import RunDir
from fedlens.run.state_files import StateFiles
from fedlens.settings.config import plain
from fedlens.settings.own_files import OWN_FILES, own_files

_HEAVY = 2**28  # bytes of a server state: larger best states are kept on disk, not in memory


class RunSaver:
    """Saves complete rounds, and keeps the client states of those that are not saved yet.

    Args:
        changes: accepted changes of the run so far.
        run_state: the checkpoint that the run is resumed from.

    Attributes:
        states: the states of the clients.
    """

    def __init__(
        self,
        built: Built,
        directory: RunDir,
        observers: Observers,
        changes: Sequence[Change],
        run_state: RunState | None,
    ) -> None:
        self._built, self._directory, self._observers = built, directory, observers
        # Checked when the run is resumed: what was edited, and what is missing.
        self._about = {
            "settings": defining(built.config),
            "changes": list(changes),
            OWN_FILES: own_files(plain(built.config)),
        }
        self._best: RunState | None = None  # the best round, until it is saved
        self._saved_at = time.monotonic()
        self._saved_round = -1 if run_state is None else run_state.round
        self._handles: dict[
            int, Mapping[ClientId, str]
        ] = {}  # of states at sites, by the round of a checkpoint
        self._files = StateFiles(directory.states_path)
        self.states = ClientStates(self._files, built.engine.state_memory * 2**20)

    @property
    def due(self) -> bool:
        """Whether the last checkpoint is as old as the settings say."""
        return time.monotonic() - self._saved_at >= self._built.config.checkpoint.seconds

    def restore(self, run_state: RunState) -> None:
        """Takes the client states of the checkpoint that the run is resumed from."""
        self.states.restore(run_state.clients.saved())
        run_state.clients = self.states.mark()

    def rewind(self, run_state: RunState) -> None:
        """Takes back what clients have stored since the last complete round."""
        assert isinstance(run_state.clients, Mark)
        self.states.rewind(run_state.clients)

    def complete(self, run_state: RunState) -> None:
        """Takes a complete round: keeps it if it is the best one, until it is saved."""
        if run_state.best and run_state.best["round"] == run_state.round:
            self._best = run_state
        elif self._best is not None and nbytes(self._best.state) >= _HEAVY:
            self._save_best(self._best)
            checkpoint.prune(self._directory.checkpoint_path, keep=2, best=self._best.round)
            self._best = None
        self._keep_marks(run_state)

    def _keep_marks(self, run_state: RunState, ahead: Mark | None = None) -> None:
        """Releases the client states of rounds that will not be saved."""
        marks = (run_state.clients, ahead, None if self._best is None else self._best.clients)
        self.states.keep(*(mark for mark in marks if isinstance(mark, Mark)))

    def save(self, run_state: RunState, ahead: Mark | None = None) -> None:
        """Saves the last complete round, and the best one if it is not saved yet.

        Args:
            ahead: the client states after a later round, which is not complete yet.
        """
        path = self._directory.checkpoint_path
        if run_state.round != self._saved_round:
            self._observers.sync()
            best = self._best
            if best is not None and best.round < run_state.round:
                self._save_best(best)
            self._save_one(run_state)
        elif run_state.round < self._built.config.rounds:
            return  # nothing new, and the existing checkpoint may be the only complete one
        checkpoint.prune(path, keep=2, best=run_state.best["round"] if run_state.best else None)
        self._saved_round, self._saved_at, self._best = run_state.round, time.monotonic(), None
        self._keep_marks(run_state, ahead)
        self._keep_at_sites()
        self.sweep()

    def _keep_at_sites(self) -> None:
        """Tells the engine which states at sites the checkpoints name; nothing if one of them cannot be read."""
        if not self._built.engine.states_at_sites:
            return
        path, keep = self._directory.checkpoint_path, dict[ClientId, set[str]]()
        saved = checkpoint.rounds_saved(path)
        with suppress(RunDirectoryError):
            for round in saved:
                if round not in self._handles:  # of an earlier process
                    found = RunState.of(checkpoint.load(checkpoint.path_of(path, round)).payload)
                    self._handles[round] = found.clients.saved().handles
                for client, handle in self._handles[round].items():
                    keep.setdefault(client, set()).add(handle)
            self._handles = {round: self._handles[round] for round in saved}
            self._built.engine.keep(keep)

    def _save_best(self, best: RunState) -> None:
        """Saves the best round, which is not the last, if it is not saved yet."""
        if self._saved_round < best.round:
            self._observers.sync()
            self._save_one(best)

    def _save_one(self, run_state: RunState) -> None:
        payload = run_state.payload()
        keys = set(payload["client_files"].values())
        self._files.sync(keys)
        self._files.saving(keys)
        about = {**self._about, "lines": dict(run_state.digests)}
        path = checkpoint.save(self._directory.checkpoint_path, run_state.round, payload, keys, about)
        self._handles[run_state.round] = run_state.clients.saved().handles
        self._observers.saved(run_state.round, path)

    def sweep(self) -> None:
        """Removes state files that neither a checkpoint nor a client refers to, such as those of a killed run."""
        with suppress(OSError):  # a checkpoint that cannot be read at the moment: try again at the next save
            spilled = self._files.directory.exists()
            saved = checkpoint.states_of_all(self._directory.checkpoint_path) if spilled else set()
            self._files.sweep(saved, self.states.keys)
