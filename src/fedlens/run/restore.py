"""The state from which a run is resumed: its last intact checkpoint, compared with the settings of now."""

from __future__ import annotations

from typing import Any

from fedlens.base.errors import RunDirectoryError
from fedlens.core.schema import nbytes
from fedlens.core.tree import HEAVY
from fedlens.run import changes, checkpoint
from fedlens.run.build import Built
from fedlens.run.progress import Listener
from fedlens.run.run_state import RunState
from fedlens.run.rundir import RunDir
from fedlens.settings.config_source import Source
from fedlens.settings.own_files import OWN_FILES, refuse_edited_since
from fedlens.settings.plan import Plan


def restored(
    run: RunDir, built: Built, planned: Plan, source: Source, accept_changes: bool, listener: Listener
) -> tuple[RunState | None, list[dict[str, Any]]]:
    """The state in the last intact checkpoint, None without one, and all accepted changes of the run so far."""
    loaded = checkpoint.load_latest(run.checkpoint_path)
    if loaded is None:
        return None, []
    for sentence in loaded.skipped:
        listener.note(sentence)
    run_state = RunState.of(loaded.payload)
    edited = changes.check(run, run_state.round, loaded.about, planned.config, source, accept_changes)
    _check_fits(run, built, run_state, bool(edited))
    if changes.rescaling(edited):
        run_state.norms = {}
    for change in edited:
        listener.note(f"accepted: {changes.sentence(change)}")
    if "settings" not in loaded.about:
        listener.note("an older version of fedlens saved no settings: edits of config.toml are not noticed")
    if OWN_FILES not in loaded.about:
        for note in refuse_edited_since("then", None, source.values, accept_changes):
            listener.note(note)
    if not changes.line_digests(loaded.about):
        listener.note(
            "an older version of fedlens saved no digest of metrics.jsonl and clients.jsonl: edits of their lines are "
            "not noticed"
        )
    earlier = loaded.about.get("changes")
    return run_state, [*(earlier if isinstance(earlier, list) else ()), *edited]


def _check_fits(run: RunDir, built: Built, run_state: RunState, edited: bool) -> None:
    if edited and not built.algorithm.grows:  # the shapes of a first state say nothing of later ones
        changes.check_fits(run, built.algorithm.init(built.model, built.federation), run_state.state)
    elif nbytes(run_state.state) < HEAVY:
        try:
            model, tree = built.algorithm.model(run_state.state)
            right = {n: leaf.shape for n, leaf in model.leaves.items()} == {
                n: v.shape for n, v in tree.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            right = False
        if not right:
            what = "the checkpoint does not hold a model of this run"
            raise RunDirectoryError(what, where=str(run.checkpoint_path), hint="start a new run")
