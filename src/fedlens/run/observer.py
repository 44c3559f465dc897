"""What follows a run: the base class of observers, and the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from fedlens.base.errors import ConfigError
from fedlens.base.signatures import check_methods, offered, offers_all
from fedlens.core.step_counts import Phase, Work
from fedlens.core.types import ClientId, client_name
from fedlens.run.progress import Listener, Progress, ProgressBase

if TYPE_CHECKING:
    from pathlib import Path

    from fedlens.core.driver import Tally
    from fedlens.core.protocol import Answer, Ask, Payload, State, Steps
    from fedlens.run.build import Built
    from fedlens.run.rundir import RunDir


class Place(IntEnum):
    """When an observer is called, in each hook: the lower place first, and at the same place the one listed first.

    A round is complete, and is not repeated by a resume, before the observers at `WRITE` and later places are told of
    its end.
    """

    MEASURE = 10  # adds metrics to those of the evaluation
    WATCH = 20  # warns
    COLLECT = 30  # writes what was measured
    OWN = 40  # an observer of a user
    WRITE = 50  # metrics.jsonl and clients.jsonl
    SHOW = 60  # progress
    END = 70  # ends a run after a complete round


@dataclass(frozen=True)
class ObservedRun:
    """The run that an observer follows, as `Observer.began` gets it.

    Attributes:
        built: the experiment: its settings (`config`), data, partition, algorithm, engine and task.
        directory: the run directory.
        round: the last complete round of a run that is resumed; None if the run begins.
        note: passes a sentence on to `note` of all observers.
        problem: passes a sentence on to `problem` of all observers.
    """

    built: Built
    directory: RunDir
    round: int | None
    note: Callable[[str], None]
    problem: Callable[[str], None]

    def name_of(self, client: ClientId) -> str:
        """The name of a client, by its row in the partition, or of data at the server."""
        return client_name(client, self.built.partition.ids)


class Observer(Listener):
    """Follows a run. Inherit from it, and override the hooks that you need; the others do nothing.

    An observer never changes a result: it changes neither its arguments nor PyTorch's random state. The hooks of a run,
    in the order in which they are called:

    1. `started`, and if the run is resumed `restore`. Then `began`: the engine is open, nothing has been asked.
    2. Of each round `t` (round 0 is the untrained model: it is not trained, so it starts with c):

        a. `asks("training", t)`; then `working` and `answered` as the clients answer.
        b. The end of round `t - 1`, d to f, if its evaluation ran beside the training of round `t`
           (`evaluation.overlap`).
        c. `released`: the server has made the state of the round; of a skipped round it is the state before. Nothing
           of this round has been written or sent yet, but the recordings of single replies. If the round ends the
           run, `failed` follows, and no other hook. If the round is evaluated: `asks("evaluating", t)`, `working` and
           `answered`.
        d. `evaluated`, if the round is evaluated: the evaluation is complete; its failures and bytes are not in the
           tally of the round yet.
        e. `round_done` of observers before `Place.WRITE`, then `rows` of all, then the checkpoint's `part` of all. If
           one of them ends the run, round `t` does not count, and a resume repeats it.
        f. The round is complete. `rows` are appended to the files, then `round_done` of `Place.WRITE` and later.
        g. `saved`, if a checkpoint was written: every `checkpoint.seconds`, and when the rounds stop for any reason.

    3. `ended` after the last round of the run, not when it pauses or fails. `finished` in every case.

    `note` and `problem` may come at any time.

    Attributes:
        place: its place in the order.
        file: the name of its file in the run directory; empty for none. If `rows` is overridden, these rows are
            appended to it as JSON Lines. Otherwise the observer writes it, or a folder of this name.
        resumed: what a resume does with `file`. "cut": it removes the lines, or in a folder the folders
            `round-000012`, of rounds after the checkpoint, which are repeated. "keep": it removes nothing.
        part_name: the name of its part of the checkpoint; empty for none.
        ends_run: whether its failure ends the run. By default the failure is reported as a problem, and the run
            continues without the observer. In a generator that `asks` returns, a failure always ends the run.

    >>> class Norms(Observer):
    ...     file = "norms.jsonl"
    ...
    ...     def rows(self, state, tally, metrics):
    ...         return [{"largest_update": max((norm for _, _, norm in tally.norms), default=None)}]
    >>> Norms().place.name, Norms().resumed
    ('OWN', 'cut')
    """

    place: ClassVar[Place] = Place.OWN
    file: ClassVar[str] = ""
    resumed: ClassVar[Literal["cut", "keep"]] = "cut"
    part_name: ClassVar[str] = ""
    ends_run: ClassVar[bool] = False

    def restore(self, part: Payload) -> None:
        """The run is resumed: `part` is what `part` returned at the last complete round. Not called without one."""

    def began(self, run: ObservedRun) -> None:
        """The rounds begin, at round 0 or after `run.round`."""

    def asks(self, steps: Steps, phase: Phase, round: int, state: State) -> Steps:
        """The asks of a phase, passed on, and their answers; by default `steps` itself.

        Args:
            steps: the generator of the algorithm, or of an observer at a lower place.
            phase: "training" or "evaluating".
            state: the server state that is trained or evaluated.
        """
        return steps

    def answered(self, ask: Ask, answer: Answer, work: Work) -> None:
        """The algorithm has read an answer; `answer.refused` says whether it rejected it. Called once an answer.

        Args:
            answer: a reply or a failure. Fields that workers or the aggregate have summed are missing. Do not keep it.
            work: the phase and the round.
        """

    def released(self, round: int, state: State, tally: Tally) -> None:
        """The server has made the state of a round, which is not written or sent yet.

        Args:
            tally: of the training of this round.
        """

    def failed(self, round: int, tally: Tally) -> None:
        """The round ends the run: no reply was accepted, or the loss is not finite."""

    def evaluated(
        self, round: int, state: State, tally: Tally, metrics: Mapping[str, float]
    ) -> Mapping[str, float]:
        """The evaluation of a round is complete. Returns metrics to add to the round's; by default none.

        Args:
            tally: of the evaluation alone.
            metrics: those of the algorithm's evaluation, which replace added ones of the same name.
        """
        return {}

    def round_done(self, state: State, tally: Tally, metrics: dict[str, Any]) -> None:
        """A round is over.

        Args:
            state: the server state after it.
            tally: of its training, with the failures and bytes of its evaluation.
            metrics: its line of metrics.jsonl; `metrics["round"]` is its number.
        """

    def rows(self, state: State, tally: Tally, metrics: dict[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The lines of the round for `file`, of values that JSON can hold; `round` is added. By default none."""
        return ()

    def part(self) -> Payload:
        """What a checkpoint keeps under `part_name`: plain values and tensors, none of which changes later."""
        return {}

    def saved(self, round: int, checkpoint: Path) -> None:
        """A checkpoint of a round was written, of the last one or of the best; `checkpoint` is its path."""

    def ended(self, metrics: Mapping[str, Any], states: Mapping[str, tuple[int, State]]) -> None:
        """The last round of the run is done, and the model files are written.

        Args:
            metrics: the last line of metrics.jsonl.
            states: round and server state of "last" and, if it can be read, "best".
        """

    def summary(self) -> Mapping[str, Any]:
        """What it adds to summary.json; by default nothing. It cannot replace what is there."""
        return {}


class Listening(Observer):
    """A listener that gets the lines of rounds alone, as an observer.

    One that has only the four methods of `Progress` does not hear of work, and gets problems as notes.
    """

    place = Place.SHOW
    ends_run = True

    def __init__(self, listener: Progress) -> None:
        self.listener = listener
        whole = offers_all(listener, "progress", Listener, Progress)
        self._whole = cast("ProgressBase", listener) if whole else None

    def started(self, plan: dict[str, Any]) -> None:
        """Passed on."""
        self.listener.started(plan)

    def working(self, work: Work) -> None:
        """Passed on."""
        if self._whole is not None:
            self._whole.working(work)

    def round_done(self, state: State, tally: Tally, metrics: dict[str, Any]) -> None:
        """Passed on, without the state and the tally."""
        self.listener.round_done(metrics)

    def note(self, text: str) -> None:
        """Passed on."""
        self.listener.note(text)

    def problem(self, text: str) -> None:
        """Passed on."""
        (self.listener.note if self._whole is None else self._whole.problem)(text)

    def finished(self, summary: dict[str, Any]) -> None:
        """Passed on."""
        self.listener.finished(summary)


def observer_of(listener: Progress | Observer, where: str = "progress") -> Observer:
    """The observer itself, or a listener of the progress as an observer.

    Raises `ConfigError` if it is neither, or a hook cannot be called as fedlens calls it; `where` is what it names.
    """
    if isinstance(listener, Observer):
        check_methods(listener, "observer", where)
        return listener
    needed = ("started", "round_done", "note", "finished")
    if len(offered(listener, needed)) < len(needed):
        raise ConfigError(
            f"{type(listener).__name__} is no observer",
            where=where,
            hint="inherit from fedlens.Observer, or define started, round_done, note and finished",
        )
    return Listening(listener)
