"""Averaging with client-level differential privacy: how cohorts are drawn, and what does not fit it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedlens.aggregate.mean import Aggregate, Mean
from fedlens.algorithms.client_sampling import BySize, Everyone, Poisson, Select, Uniform
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import FederationInfo
from fedlens.core.tree import TreeSpec, part
from fedlens.local.client_privacy import PrivateMean
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.privacy.settings import PrivacySettings

_OTHER = "choose another algorithm, such as 'fedavg', 'fedprox' or 'fedadam', or remove [privacy]"


def private_mean(settings: PrivacySettings, select: Select, federation: FederationInfo) -> PrivateMean:
    """The mechanism for these cohorts.

    Raises `ConfigError` if the selection is none of 'poisson', 'uniform' and 'all', or if an adaptive clip does not
    fit the cohort.
    """
    clients = len(federation.eligible)
    if isinstance(select, Poisson):
        return PrivateMean(settings, "poisson", clients, select.fraction * clients)
    if isinstance(select, Uniform | Everyone):
        size = select.size(federation)
        return PrivateMean(settings, "all" if size == clients else "fixed", clients, float(size))
    what = (
        "clients are drawn in proportion to their examples, so that a large one is protected less"
        if isinstance(select, BySize)
        else f"the probability of a client is not known for the selection {type(select).__name__}"
    )
    hint = "set select = {name = 'poisson', fraction = 0.04}, or remove [privacy]"
    raise ConfigError(what, where="select.name", hint=hint)


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
    if not isinstance(aggregate, Mean) or aggregate.weighting != "uniform":
        what = "the noise fits the uniform mean of updates: a client that decides its weight may change it by more"
        hint = "set aggregate = {name = 'mean', weighting = 'uniform'}, or choose another algorithm"
        raise ConfigError(what, where="aggregate", hint=hint)
    if local.stragglers:
        what = "stragglers are drawn among the cohort, so one client decides whether others take part"
        raise ConfigError(what, where="local.stragglers", hint="remove it, or remove [privacy]")
    if more or rule.traits.replaces_update:
        what = f"{rule.called} sends, asks for or keeps more of a client than its clipped update"
        raise ConfigError(what, where="algorithm.name", hint=_OTHER)


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
                what, where=without.split()[0], hint=f"set {without}; the test data measure the model"
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
