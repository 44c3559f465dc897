"""The observers of a run: those of every run, those of the user, and the listener of its progress."""

from __future__ import annotations

from collections.abc import Sequence

from fedlens.base.errors import ConfigError
from fedlens.observers.divergence_watch import DivergenceWatch, EndInVain
from fedlens.observers.last_evaluation import LastEvaluation
from fedlens.observers.metrics_and_clients import ClientsFile, MetricsFile
from fedlens.observers.nearest_neighbours import NearestNeighbours
from fedlens.observers.participation import Participation
from fedlens.observers.predict_examples import ExampleStages
from fedlens.observers.privacy_ledger import PrivacyLedger
from fedlens.observers.record_models import Recorder
from fedlens.run.build import Built
from fedlens.run.call_observers import Observers
from fedlens.run.observer import Observer, Place
from fedlens.run.rundir import RunDir, file_names
from fedlens.settings.plan import Plan


def observers_of(built: Built, directory: RunDir, own: Sequence[Observer], listener: Observer) -> Observers:
    """All observers of a run. Raises `ConfigError` if two of them have the same file or part of the checkpoint."""
    watch = DivergenceWatch(built)
    every = [
        PrivacyLedger(built),
        NearestNeighbours(built),
        watch,
        Recorder(built),
        LastEvaluation(built),
        ExampleStages(built),
        MetricsFile(),
        ClientsFile(built),
        EndInVain(watch, built.config.rounds),
        *([Participation(built)] if built.config.at_sites and not built.algorithm.private else []),
    ]
    return Observers([*every, *own, listener], directory)


def own_observers(planned: Plan) -> list[Observer]:
    """Makes the observers of the setting `observe`.

    Raises `ConfigError` if one is no observer, has a file that is not its own, or keeps what cannot be kept.
    """
    own = []
    for resolved in planned.observers:
        where, observer = planned.locate("observe"), resolved()
        if not isinstance(observer, Observer):
            raise ConfigError(
                f"the observer '{resolved.name}' is of the class {type(observer).__name__}",
                where=where,
                hint="inherit from fedlens.Observer",
            )
        name, known = observer.file, file_names()
        if name and (name in known or name.startswith(".") or "/" in name or "\\" in name):
            raise ConfigError(
                f"the observer '{resolved.name}' has the file '{name}'",
                where=where,
                hint="choose a plain name that the run directory does not have yet, such as 'norms.jsonl'",
            )
        if observer.part_name and observer.place >= Place.WRITE:
            raise ConfigError(
                f"the observer '{resolved.name}' keeps a part of the checkpoint, and its place is "
                f"{observer.place.name}, after the checkpoint is made up",
                where=where,
                hint="choose a place before WRITE, such as Place.OWN",
            )
        own.append(observer)
    return own
