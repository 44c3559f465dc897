"""The test of each client's own model on the server's test data, after the last round of a run.

A run whose algorithm keeps a model at each client has no single model to test. Where all clients are simulated on one
machine, their models are at hand in the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from fedlens.base.errors import RunDirectoryError
from fedlens.core.driver import Driver
from fedlens.core.states import ClientStates, state_at_server
from fedlens.local.personal_leaves import PERSONAL
from fedlens.run import checkpoint
from fedlens.run.build import Built, build
from fedlens.run.run_state import RunState
from fedlens.run.rundir import RunDir
from fedlens.run.session import Session
from fedlens.run.state_files import StateFiles
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.own_files import OWN_FILES, refuse_edited_since
from fedlens.settings.plan import plan
from fedlens.tasks.central_evaluation import central
from fedlens.use.device_here import engine_here

TEST = "@test"
_PASSES = 3  # a training step takes about as long as three forward passes


def too_costly(models: int, examples: int, trained: float) -> str:
    """Why so many models are not tested on so many examples: it would take longer than training; empty if not so.

    >>> too_costly(models=6, examples=359, trained=23_000)
    ''
    >>> too_costly(models=1000, examples=10_000, trained=500_000)
    "testing 1,000 models on 10,000 images would take longer than the run's training"
    """
    if models * examples <= _PASSES * trained:
        return ""
    return f"testing {models:,} models on {examples:,} images would take longer than the run's training"


def write_client_tests(
    run: RunDir, source: Source, data_dir: Path, session: Session | None = None
) -> dict[str, dict[str, float]]:
    """Tests the model of each client of a finished run on the test data, and returns the task's metrics by client.

    They are written to `client_tests.json`, with the round and the number of test examples. Clients without held-out
    examples are left out if others have some, as in the evaluation at the clients. It takes one forward pass for each
    client and test example, in this process, on the device and in the precision of the run's engine, or on the
    processor if this machine has no GPU.

    Args:
        source: the settings of the run.

    Raises `RunDirectoryError` if the run keeps no model at its clients, if a Python file of the user's own was edited
    since it trained, or if its checkpoint is gone or corrupt.
    """
    engine, _ = engine_here(run.read_config().get("engine", {}))
    kept = {key: value for key, value in engine.items() if key in ("device", "precision")}
    values = {**source.values, "engine": {**kept, "name": "inline"}}
    settings = Source(values, source.path, source.lines, source.overridden, source.renamed)
    saved = (run.read_environment() or {}).get(OWN_FILES)
    refuse_edited_since("the run trained", saved, values, accept=False)
    initial = run.initial_path if run.initial_path.exists() else None
    planned = plan(read_config(values, settings.locate), settings)
    built = build(planned, data_dir, False, initial=initial, session=session)
    try:
        with run.lock():
            loaded = checkpoint.load_latest(run.checkpoint_path)
            if loaded is None:
                raise RunDirectoryError(
                    "the run has no checkpoint, so it has no models of clients", where=str(run.path)
                )
            tested = _tested(run, built, RunState.of(loaded.payload))
            examples = built.federation.held[TEST]
            run.write_client_tests({"round": loaded.round, "examples": examples, "clients": tested})
            return tested
    finally:
        built.engine.close()


def _tested(run: RunDir, built: Built, reached: RunState) -> dict[str, dict[str, float]]:
    """The task's metrics of each client's model."""
    algorithm, federation, engine = built.algorithm, built.federation, built.engine
    if not algorithm.personal:
        raise RunDirectoryError("the run keeps no model at its clients", where=str(run.path))
    states = ClientStates(StateFiles(run.states_path), engine.state_memory * 2**20)
    states.restore(reached.clients.saved())
    model, tree = algorithm.model(reached.state)
    for name in model.fixed:
        model.fixed[name] = tree[name]
    held = federation.held_out is not None and len(federation.holding_out)
    clients = federation.holding_out.tolist() if held else range(federation.clients)
    engine.open(built.program, states)
    driver, tested = Driver(engine, states), {}
    for client in clients:
        # The global tree has the initial values, which a client that never took part has too.
        state = state_at_server(states.get(client), built.partition.ids[client])
        own = {**tree, **state.get(PERSONAL, {})}
        asks = central(model.sent(own), federation, built.task, [TEST], varying=model.varying)
        measured = driver.drive(asks, reached.round)
        tested[built.partition.ids[client]] = dict(built.task.metrics(measured[TEST]))
    return tested
