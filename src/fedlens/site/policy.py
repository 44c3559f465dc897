"""What the table `[allow]` of `site.toml` refuses: an experiment before its data are read, an operation before it runs.

`RULES` is the list. A rule looks at the settings of an experiment, which are known before anybody approves it, at an
operation, which the server asks of a client with a share of the work, or at both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from fedlens.aggregate.secure.encoded_train import EncodedTrain
from fedlens.aggregate.secure.secagg_client import Agree, MaskedTrain, RoundKeys, SendShares, Unmask
from fedlens.algorithms.client_evaluation import EVALUATE_OWN, EvaluateOwn
from fedlens.algorithms.fedir import CountClasses
from fedlens.algorithms.full_gradients import Gradient
from fedlens.algorithms.peers import EvaluateHeld, Mix, Send, Show
from fedlens.base.errors import ConfigError
from fedlens.base.format import many
from fedlens.core.protocol import Op
from fedlens.local.example_privacy import PrivateSteps
from fedlens.local.settings import LocalSettings
from fedlens.local.training import Train
from fedlens.local.vectorized.batched_train import BatchedTrain
from fedlens.models.registry import MODELS
from fedlens.privacy.accounting import by_client
from fedlens.settings.config import NETWORK, Config, read_config
from fedlens.site.contract import Contract
from fedlens.site.settings import SiteAllow, SiteSettings

_SECURE = "secagg"
_SUMMED = "summing images, since data.dataset has no mean and std,"
_UNNOISED = "without noise for each example, whose epsilon is infinite,"


@dataclass(frozen=True)
class OperationWork:
    """What an operation does at a client. A number is None if it depends on a client that is not known yet.

    Attributes:
        op: the name of the operation.
        epochs: passes over the images that it trains on; None also if it does not train.
        steps: the local steps behind the update that it sends; None also if it sends none.
        batch: the images behind each of these steps.
        summed: whether it is a part of a secure sum.
        measures: whether what it sends are losses and counts.
        totals: whether some of these are sums over all images that it measures.
        known: False for an operation whose training does not follow from the settings.
        persons: how many persons the images are of that it trains on, or measures; None also if no column names them.
        hides: what `epsilon` is of, if noise was counted: an image, or a value of the column that names persons.
        epsilon: of one example of the client after all operations so far and this one; None if its noise is known, and
            the client is not. Infinite for what has no noise for each example.
    """

    op: str
    epochs: float | None = None
    steps: int | None = None
    batch: int | None = None
    summed: bool = False
    measures: bool = False
    totals: bool = False
    known: bool = True
    persons: int | None = None
    hides: str = ""
    epsilon: float | None = math.inf


def work_of(name: str, op: Op, examples: int | None = None, asked: int | None = None) -> OperationWork:
    """The work of an operation. Only classes of fedlens are known: one that inherits from them may do more.

    Args:
        name: the name of the operation.
        op: the operation.
        examples: how many images the client trains on.
        asked: the epochs or steps that the server asks for, if fewer than in the settings.
    """
    kind, inside = type(op), cast("Any", op)
    if kind is MaskedTrain:
        return replace(work_of(name, inside.train, examples, asked), summed=True)
    if kind is EncodedTrain:
        return work_of(name, inside.train, examples, asked)
    if kind in (RoundKeys, SendShares, Agree, Unmask):  # these read no image
        return OperationWork(name, summed=True, epsilon=0.0)
    if kind in (CountClasses, Mix, Show):
        return OperationWork(name)
    if kind is EvaluateHeld:
        return work_of(name, inside.evaluate, examples)
    if kind is EvaluateOwn:
        tuned = None if inside.tune is None else _epochs(inside.tune.settings, examples)
        return OperationWork(name, tuned, measures=True, totals=bool(inside.task.known_totals()))
    if kind is Gradient:
        return OperationWork(name, 1, 1, examples)
    if kind is Send and inside.settings is not None:  # one step of a round
        return OperationWork(name, None, 1, _batch(inside.settings, examples))
    train = inside.rule.train if kind is Send else inside
    if type(train) in (Train, BatchedTrain) and (private_steps(op) or train.rule.solve is None):
        work = _training(name, train.settings, examples, asked, train.rule.traits.full_gradients)
        return replace(work, epsilon=None) if private_steps(op) else work
    return OperationWork(name, known=False)


def private_steps(op: Op) -> PrivateSteps | None:
    """The noised steps of an operation of `privacy.unit = "example"`; None for any other operation."""
    train = _bare(op)
    solve = train.rule.solve if type(train) in (Train, BatchedTrain) else None
    return solve if type(solve) is PrivateSteps else None


def _bare(op: Op) -> Any:
    """The training in a secure sum; any other operation as it is."""
    inside = cast("Any", op)
    return _bare(inside.train) if type(op) in (MaskedTrain, EncodedTrain) else inside


def release_of(op: Op, examples: int, asked: int | None = None) -> Mapping[str, Any] | None:
    """What a client of so many examples releases by an operation with noise; see `fedlens.privacy.accounting`.

    Noise from the seed, which the server knows, counts as none. `column` is the unit that the noise hides, if it is no
    single example.

    Args:
        asked: the epochs or steps that the server asks for, if fewer than in the settings.
    """
    if (steps := private_steps(op)) is None:
        return None
    local = _bare(op).settings
    release = steps.release(examples, local, local.steps_at(examples, asked))
    release = {**release, "column": steps.settings.column}
    return {**release, "z": 0.0} if steps.settings.seeded else release


def spent_by(
    work: OperationWork,
    releases: Sequence[Mapping[str, Any]],
    allow: SiteAllow,
    persons: str | None = None,
) -> OperationWork:
    """The operation with the epsilon of the client's releases, its own included, if `[allow]` limits it; by RDP.

    With a column of `persons`, releases that hide something else count as without noise.
    """
    if not releases or allow.max_epsilon is None:
        return work
    if persons is not None:
        releases = [each if each.get("column") == persons else {**each, "z": 0.0} for each in releases]
    spent = by_client({work.op: releases}, allow.delta)[work.op]
    return replace(work, epsilon=spent, hides=persons or "image")


def _training(
    name: str,
    local: LocalSettings,
    examples: int | None = None,
    asked: int | None = None,
    gradient: bool = False,
) -> OperationWork:
    """Local training. With `gradient` it also sends a gradient over all images, which is one step of its own."""
    steps = local.steps if examples is None else local.steps_at(local.examples or examples, asked)
    epochs, batch = _epochs(local, examples, asked), _batch(local, examples)
    return OperationWork(name, epochs, 1 if gradient else steps, batch)


def _epochs(local: LocalSettings, examples: int | None, asked: int | None = None) -> float | None:
    """Passes over the images that a client trains on, which `local.examples` may draw, and draw twice."""
    if examples is None:
        return None if local.steps else local.work
    drawn = local.examples or examples
    return local.examples_in(drawn, local.steps_at(drawn, asked)) / max(1, min(drawn, examples))


def _batch(local: LocalSettings, examples: int | None) -> int | None:
    if examples is None:
        return None if local.batch_size == "all" else local.batch_size
    return min(local.batch(local.examples or examples), examples)


@dataclass(frozen=True)
class _Experiment:
    """The settings of an experiment, without resolving a name in them, and its models; and the site's `persons`."""

    config: Config
    models: list[str]
    persons: str | None

    @property
    def training(self) -> tuple[OperationWork, OperationWork]:
        """Local training, and the tuning of a model that is measured, as the settings say, for any client."""
        tuned = self.config.algorithm.get("epochs")
        epochs = float(tuned) if isinstance(tuned, int) else None
        return _training("train", self.config.local), OperationWork(EVALUATE_OWN, epochs)


# What is wrong with an experiment or an operation, for the value of the line in `[allow]`; None if it is allowed.
_OfExperiment = Callable[[_Experiment, Any], str | None]
_OfOperation = Callable[[OperationWork, Any], str | None]


def _algorithm(experiment: _Experiment, allowed: list[str]) -> str | None:
    name = str(experiment.config.algorithm["name"])
    return None if name in allowed else f"the algorithm '{name}'"


def _model(experiment: _Experiment, allowed: list[str]) -> str | None:
    return next((f"the model '{name}'" for name in experiment.models if name not in allowed), None)


def _rounds(experiment: _Experiment, most: int) -> str | None:
    rounds = experiment.config.rounds
    return f"an experiment of {rounds} rounds" if rounds > most else None


def _secure(experiment: _Experiment, which: str) -> str | None:
    config = experiment.config
    if which == "any":
        return None
    if config.aggregate is None or config.aggregate["name"] != _SECURE:
        return f"training without aggregate.name = '{_SECURE}'"
    return _summing(experiment, sums=False)


def _summing(experiment: _Experiment, sums: bool) -> str | None:
    return _SUMMED if experiment.config.sums_moments and not sums else None


def _private(experiment: _Experiment, most: float) -> str | None:
    privacy = experiment.config.privacy
    if privacy is None or privacy.hides_clients or privacy.seeded or privacy.noise_multiplier == 0:
        return f"training {_UNNOISED}"
    if experiment.persons is not None and privacy.column != experiment.persons:
        return f"training without privacy.column = '{experiment.persons}', whose noise hides no person,"
    return _summing(experiment, sums=False)


def _spending(work: OperationWork, most: float) -> str | None:
    if work.epsilon is None or work.epsilon <= most:
        return None
    if math.isinf(work.epsilon) and not work.hides:
        return f"'{work.op}' {_UNNOISED}"
    return f"'{work.op}', after which epsilon is {work.epsilon:.3g} for one {work.hides} of the client,"


def _few_persons(work: OperationWork, least: int) -> str | None:
    few = work.persons is not None and work.persons < least
    return f"'{work.op}' over images of {many(work.persons or 0, 'person')}" if few else None


def _operation(work: OperationWork, allowed: list[str]) -> str | None:
    return None if work.op in allowed else f"the operation '{work.op}'"


def _unknown(work: OperationWork) -> str | None:
    return None if work.known else f"'{work.op}', whose training does not follow from [local],"


def _too_long(work: OperationWork, most: int) -> str | None:
    long = work.epochs is not None and work.epochs > most
    return f"'{work.op}' with {work.epochs:g} epochs" if long else _unknown(work)


def _too_short(work: OperationWork, least: int) -> str | None:
    few = work.steps is not None and work.steps < least
    return f"'{work.op}' with {many(work.steps or 0, 'local step')}" if few else _unknown(work)


def _too_small(work: OperationWork, least: int) -> str | None:
    small = work.batch is not None and work.batch < least
    return f"'{work.op}' with batches of {work.batch}" if small else _unknown(work)


def _unsummed(work: OperationWork, which: str) -> str | None:
    return None if which == "any" or work.summed else f"'{work.op}' outside a secure sum"


def _measuring(work: OperationWork, reports: bool | str) -> str | None:
    if not work.measures or reports is True or (reports and work.totals):
        return None
    return f"'{work.op}', which sends {'no sums over all images' if reports else 'losses and counts'},"


def _of_training(fault: _OfOperation) -> tuple[_OfExperiment, _OfOperation]:
    def of_experiment(experiment: _Experiment, limit: Any) -> str | None:
        return next(filter(None, (fault(work, limit) for work in experiment.training)), None)

    return of_experiment, fault


RULES: Mapping[str, tuple[_OfExperiment | None, _OfOperation | None]] = {
    "operations": (None, _operation),
    "algorithms": (_algorithm, None),
    "models": (_model, None),
    "max_rounds": (_rounds, None),
    "max_epochs": _of_training(_too_long),
    "min_persons": (None, _few_persons),
    "min_steps": _of_training(_too_short),
    "min_batch": _of_training(_too_small),
    "secure_sum": (_secure, _unsummed),
    "report_metrics": (None, _measuring),
    "pixel_sums": (_summing, None),
    "max_epsilon": (_private, _spending),
}
"""The lines of `[allow]` that refuse experiments and operations. Others are read where they are needed."""


def refusals(contract: Contract, settings: SiteSettings) -> list[str]:
    """Why the site refuses an experiment, one sentence a line of `[allow]`; empty if it may be approved.

    Nothing that the experiment names is imported or opened. Raises `ConfigError` for settings that are no experiment.
    """
    config = read_config({**contract.settings, "engine": {"name": NETWORK}})
    experiment = _Experiment(config, contract.names(MODELS), settings.data.persons)
    return _sentences(settings, {line: rule[0] for line, rule in RULES.items()}, experiment)


def refuse(contract: Contract, settings: SiteSettings) -> None:
    """Raises `ConfigError` with the `refusals`, if there are any."""
    if sentences := refusals(contract, settings):
        raise ConfigError("; ".join(sentences), hint="reject the experiment, or change the line")


def refused(work: OperationWork, settings: SiteSettings) -> list[str]:
    """Why the site does not run an operation; empty if it does."""
    return _sentences(settings, {line: rule[1] for line, rule in RULES.items()}, work)


def _sentences(
    settings: SiteSettings, rules: Mapping[str, Callable[[Any, Any], str | None] | None], what: Any
) -> list[str]:
    lines = {line: value for line, value in settings.allow if value is not None}
    faults = {line: rule(what, lines[line]) for line, rule in rules.items() if rule and line in lines}
    return [settings.not_allowed(fault, line) for line, fault in faults.items() if fault is not None]
