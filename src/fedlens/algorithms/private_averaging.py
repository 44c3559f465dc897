"""Averaging with client-level differential privacy: how cohorts are drawn, and what does not fit it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedlens.aggregate.mean import Aggregate, Mean
from fedlens.aggregate.secure.blind_sum import RANGES, BlindSum
from fedlens.algorithms.client_sampling import (
    BySize,
    Everyone,
    OnceEach,
    Poisson,
    SecretCohorts,
    Select,
    Uniform,
)
from fedlens.base.errors import ConfigError
from fedlens.core.algorithm_base import OwnCurve
from fedlens.core.protocol import FederationInfo
from fedlens.core.random import derive
from fedlens.core.tree import TreeSpec, count, part
from fedlens.local.chain import chain
from fedlens.local.client_privacy import PrivateMean, Sampling, client_privacy
from fedlens.local.example_privacy import PrivateSteps, example_privacy
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.privacy.accounting import noise_for, noise_for_most
from fedlens.privacy.settings import PrivacySettings
from fedlens.tasks.task import Task

_UNKNOWN = 1e-3  # the noise in a check without data: small, so that any cohort is large enough
_OTHER = "choose another algorithm, such as 'fedavg', 'fedprox' or 'fedadam', or remove [privacy]"


def private_mean(
    settings: PrivacySettings, select: Select, federation: FederationInfo, rounds: int | None = None
) -> PrivateMean:
    """The mechanism for these cohorts; the noise for an epsilon is solved for these rounds.

    Raises `ConfigError` if the selection is none of 'poisson', 'uniform' and 'all', or if an adaptive clip does not
    fit the cohort.
    """
    clients = len(federation.eligible)
    if isinstance(select, Poisson):
        return _solved(settings, "poisson", clients, select.fraction * clients, rounds)
    if isinstance(select, Uniform | Everyone):
        size = select.size(federation)
        return _solved(settings, "all" if size == clients else "fixed", clients, float(size), rounds)
    what = (
        "clients are drawn in proportion to their examples, so that a large one is protected less"
        if isinstance(select, BySize)
        else f"the probability of a client is not known for the selection {type(select).__name__}"
    )
    hint = "set select = {name = 'poisson', fraction = 0.04}, or remove [privacy]"
    raise ConfigError(what, where="select.name", hint=hint)


def tree_mean(
    settings: PrivacySettings, select: Select, federation: FederationInfo, rounds: int | None, seed: int
) -> PrivateMean:
    """The mechanism with a tree of noise, for the order of clients that this seed of the selection gives.

    Raises `ConfigError` if a client may be asked twice in a tree.
    """
    if not isinstance(select, OnceEach):
        what = f"a tree of noise may ask a client once, and the selection {type(select).__name__} may ask one twice"
        hint = "set select = {name = 'once-each', clients_per_round = 100}, or privacy.mechanism = 'gaussian'"
        raise ConfigError(what, where="select.name", hint=hint)
    clients, size, cohorts = len(federation.eligible), select.size(federation), select.cohorts(federation)
    if rounds is not None and min(settings.restart_every or 0, rounds) > cohorts:
        asked = f"all {clients:,} have been asked after {cohorts} rounds of {size:,}"
        what = f"a tree of {settings.restart_every} rounds asks a client twice: {asked}"
        hint = f"set it to {cohorts} or less, or ask fewer clients a round"
        raise ConfigError(what, where="privacy.restart_every", hint=hint)
    order = f"{derive(size, *select.order(federation, seed)):016x}"
    return replace(_solved(settings, "once-each", clients, float(size), rounds), order=order)


def _solved(
    settings: PrivacySettings, sampling: Sampling, clients: int, expected: float, rounds: int | None
) -> PrivateMean:
    if settings.epsilon is None:
        return PrivateMean(settings, sampling, clients, expected)
    first = settings.model_copy(update={"noise_multiplier": _UNKNOWN})
    mechanism = PrivateMean(first, sampling, clients, expected)
    if rounds is None:
        return mechanism
    z = noise_for(settings.epsilon, settings.delta, rounds, mechanism.release)
    return PrivateMean(settings.model_copy(update={"noise_multiplier": z}), sampling, clients, expected)


def _solved_for_examples(settings: PrivacySettings, parts: Any) -> PrivacySettings:
    """The settings with the noise of an epsilon: one z for all clients, by the one that would spend most."""
    if settings.epsilon is None:
        return settings
    solved = settings.model_copy(update={"noise_multiplier": _UNKNOWN, "epsilon": None})
    if parts.rounds is None:
        return solved
    sizes = sorted({int(parts.federation.sizes[client]) for client in parts.federation.eligible})
    releases = [PrivateSteps(solved).release(size, parts.local) for size in sizes]
    z = noise_for_most(settings.epsilon, settings.delta, parts.rounds, releases)
    return solved.model_copy(update={"noise_multiplier": z})


def summed_blindly(
    aggregate: Aggregate, mechanism: PrivateMean, spec: TreeSpec
) -> tuple[Aggregate, PrivateMean]:
    """A blind sum with C as the range of updates, and a clip that leaves room for the rounding of their words.

    Other aggregates stay as they are. Rounding d words of the range C at b bits moves an update by at most
    sqrt(d) C / 2^(b+1).

    Raises `ConfigError` for cohorts of any size, for an adaptive clip, which is no range, for another range of updates,
    and if the rounding leaves nothing of C.
    """
    if not isinstance(aggregate, BlindSum):
        return aggregate, mechanism
    if mechanism.sampling == "poisson":
        what = (
            f"{type(aggregate).__name__} sums over cohorts of one size, and those of 'poisson' may be of any"
        )
        raise ConfigError(what, where="select.name", hint="set select.name = 'uniform'")
    if mechanism.settings.adaptive:
        what = "an adaptive clip changes from round to round, and the range of a secure sum is fixed"
        raise ConfigError(what, where="privacy.clip", hint="set a number")
    clip = mechanism.settings.first_clip
    ranges = aggregate.ranges if isinstance(aggregate.ranges, Mapping) else {"update": aggregate.ranges}
    if (given := ranges.get("update", clip)) not in (RANGES["update"], clip):
        what = f"updates are clipped to {clip:g}, which is the range of their words, and aggregate.range says {given:g}"
        hint = "leave the range of `update` out: aggregate.range = {loss = 64.0}"
        raise ConfigError(what, where="aggregate.range", hint=hint)
    words = count(spec, trainable=True)
    rounding = float(words**0.5 * clip / 2 ** (aggregate.bits + 1))
    if rounding >= clip:
        raise ConfigError(
            f"rounding {words:,} words at {aggregate.bits} bits moves an update by up to {rounding / clip:.3g} C, so "
            "nothing is left of the clip",
            where="aggregate.bits",
            hint=f"set aggregate.bits = {aggregate.bits + 8}",
        )
    summed = replace(aggregate, ranges={**ranges, "update": clip})
    return summed, replace(mechanism, rounding=rounding)


def privacy_curves(settings: PrivacySettings | None) -> tuple[OwnCurve, ...]:
    """What a private run draws over rounds: epsilon, and an adaptive clip with the noised share within it."""
    if settings is None:
        return ()
    spent = OwnCurve(
        "epsilon", f"spent by all rounds so far, at delta = {settings.delta:g}", {"epsilon": "epsilon"}
    )
    if not settings.adaptive:
        return (spent,)
    clip = OwnCurve("clip", "the largest norm of an update", {"clip": "C"})
    return (
        spent,
        clip,
        OwnCurve("share", "of clients within the clip, under noise", {"unclipped": "unclipped"}),
    )


def refuse_unprotected(rule: ClientRule, aggregate: Aggregate, local: LocalSettings, personal: bool) -> None:
    """Raises `ConfigError` if clients send or decide more than their clipped updates.

    Args:
        rule: the rules before the one that clips.
        aggregate: which must be the uniform mean.
        local: the local settings.
        personal: whether parts of the model stay at the clients.
    """
    hooks = [hook for server in rule.server_rules.values() for hook in (server.prepare, server.after)]
    more = bool(rule.fields or rule.metrics or rule.ops) or rule.expect is not None or any(hooks)
    if personal:
        raise ConfigError(
            "parts of the model stay at clients; the promise is about one model", where="privacy", hint=_OTHER
        )
    computed = aggregate.of if isinstance(aggregate, BlindSum) else aggregate
    if not isinstance(computed, Mean) or computed.weighting != "uniform":
        what = "the noise fits the uniform mean of updates: a client that decides its weight may change it by more"
        uniform = (
            "aggregate.weighting" if isinstance(computed, Mean) else "aggregate.name = 'mean', and weighting"
        )
        hint = f"set {uniform} = 'uniform', or choose another algorithm"
        raise ConfigError(what, where="aggregate", hint=hint)
    if local.stragglers:
        what = "stragglers are drawn among the cohort, so one client decides whether others take part"
        raise ConfigError(what, where="local.stragglers", hint="remove it, or remove [privacy]")
    if more or rule.traits.replaces_update:
        what = f"{rule.called} sends, asks for or keeps more of a client than its clipped update"
        raise ConfigError(what, where="algorithm.name", hint=_OTHER)


def refuse_beside_examples(
    rule: ClientRule, aggregate: Aggregate, local: LocalSettings, personal: bool, task: Task
) -> None:
    """Raises `ConfigError` for what reads examples beside the noised steps of `unit = "example"`, or changes them.

    Args:
        rule: those of the algorithm and of the user.
        aggregate: of the replies.
        local: the local settings.
        personal: whether parts of the model stay at the clients.
        task: whose loss has to be that of each example alone.
    """
    mean = "set aggregate = {name = 'mean', weighting = 'uniform'}"
    asks = f"{type(aggregate).__name__} asks clients for more than their update, or weighs them by their examples"
    asking = not aggregate.blind and bool(aggregate.ops)  # a blind sum asks for the noised update in words
    examples = "set task.class_weights = 'none', or choose another task"
    of_examples = "the loss of an example is not its own: it depends on others, or on counts of classes"
    alone = task.losses is not None and not task.takes_targets and not task.weighs
    refused = (
        (personal, "privacy", "parts of the model stay at clients; the promise is about one model", _OTHER),
        (not rule.plain, "algorithm.name", f"{rule.called} changes local steps, which are those of DP-SGD", _OTHER),
        (asking or aggregate.weighting != "uniform", "aggregate.weighting", asks, mean),
        (bool(local.stragglers), "local.stragglers", "the number of steps of a client is fixed", "remove it"),
        (local.examples is not None, "local.examples", "examples are drawn by DP-SGD alone", "remove it"),
        (local.clip_norm is not None, "local.clip_norm", "each gradient is clipped already", "set privacy.clip"),
        (not alone, "task", of_examples, examples),
    )  # fmt: skip
    for holds, where, what, hint in refused:
        if holds:
            raise ConfigError(f"with privacy.unit = 'example', {what}", where=where, hint=hint)


def refuse_measured(federation: FederationInfo, measure: Sequence[str], clients: object) -> None:
    """Raises `ConfigError` if the clients' data measure the model: these numbers would have no noise.

    Args:
        federation: the clients and the held-out data.
        measure: the names of the data that the server evaluates on.
        clients: `evaluation.clients`.
    """
    asked = {
        "evaluation.train = false": "@train" in measure,
        "data.validation = 0": bool(federation.held.get("@validation")) or federation.held_out is not None,
        "evaluation.clients = 'none'": clients not in (None, "none"),
    }
    for without, holds in asked.items():
        if holds:
            what = "what the clients' own data measure or choose has no noise"
            raise ConfigError(
                what,
                where=without.split()[0],
                hint=f"set {without}; the test data measure the model. 'fedlens cost' measures clients on their own "
                "data, so it needs the experiment without [privacy]",
            )


def refuse_statistics(spec: TreeSpec) -> None:
    """Raises `ConfigError` if clients would send running statistics, or weights too coarse to be clipped."""
    statistics = [name for name in part(spec, "buffer", "counter") if not spec[name].fixed]
    if statistics:
        what = f"clients would send statistics of their images ({statistics[0]}) without noise"
        raise ConfigError(what, where="model", hint="set model.norm = 'group', which keeps none")
    exact = (torch.float32, torch.float64)
    if any(spec[name].dtype not in exact for name in part(spec, "weight", trainable=True)):
        what = "weights with few digits may be rounded to a norm above C"
        raise ConfigError(what, where="model", hint="use float32 weights")


def example_notes(settings: PrivacySettings, federation: FederationInfo) -> tuple[str, ...]:
    """What a user should know before a run with `unit = "example"`, as sentences."""
    largest, column = federation.largest, settings.column
    hidden = "one image of a client, and not all images of one person,"
    if column is not None:
        hidden = f"all images of a client with one value of the column '{column}'"
    cases = {
        f"[privacy] hides {hidden} in all that the client sends; it does not hide which clients take part": True,
        "privacy.noise = 'seeded' promises nothing: who knows the seed subtracts the noise": settings.seeded,
        f"privacy.delta = {settings.delta:g} is no promise to a client of {largest:,} images: sending one of them, "
        f"drawn at random, would keep it. Set it far below {1 / largest:.1g}": settings.delta * largest >= 1,
    }
    return tuple(sentence for sentence, holds in cases.items() if holds)


def privacy_notes(settings: PrivacySettings, clients: int) -> tuple[str, ...]:
    """What a user should know before a private run of so many clients, as sentences."""
    cases = {
        "[privacy] trusts the server, which sees each client's clipped update and their sum before the noise: the "
        "promise is about what it publishes": True,
        "privacy.noise = 'seeded' promises nothing: who knows the seed subtracts the noise": settings.seeded,
        f"privacy.delta = {settings.delta:g} is no promise to {clients:,} clients: publishing all that one of them "
        f"has, drawn at random, would keep it. Set it far below {1 / clients:.1g}": settings.delta * clients
        >= 1,
    }
    return tuple(sentence for sentence, holds in cases.items() if holds)


def private_parts(
    parts: Any,
    privacy: PrivacySettings,
    rule: ClientRule,
    aggregation: Aggregate,
    choose: Select,
    personal: frozenset[str],
) -> tuple[ClientRule, Aggregate, Select]:
    """The components with noise.

    Args:
        parts: the `fedlens.algorithms.averaging.Parts`.
        privacy: the table `[privacy]`.
        rule, aggregation, choose: the client rule, the aggregate and the selection.
        personal: leaves of the model that stay at the clients.

    Raises `ConfigError` for those that would break its promise.
    """
    at_clients = bool(personal or parts.task.local_leaves(parts.spec))
    refuse_measured(parts.federation, parts.measure, parts.measure_clients)
    if not privacy.hides_clients:
        refuse_beside_examples(rule, aggregation, parts.local, at_clients, parts.task)
        return example_privacy(_solved_for_examples(privacy, parts)), aggregation, choose
    refuse_unprotected(rule, aggregation, parts.local, at_clients)
    if privacy.of_tree:
        mechanism = tree_mean(privacy, choose, parts.federation, parts.rounds, parts.selection_seed)
    else:
        mechanism = private_mean(privacy, choose, parts.federation, parts.rounds)
    aggregation, mechanism = summed_blindly(aggregation, mechanism, parts.spec)
    rule = chain(rule, client_privacy(mechanism))
    return rule, aggregation, choose if privacy.seeded or privacy.of_tree else SecretCohorts(choose)
