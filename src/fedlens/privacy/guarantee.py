"""What a private run promises to whom, as numbers and as sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.base.format import many
from fedlens.privacy.accounting import Epsilons, by_client, epsilons
from fedlens.privacy.settings import PrivacySettings

_NEIGHBOURS = {
    "add-or-remove": "whether any one client takes part, with all of its examples",
    "replace": "which data any one client has, all of its examples included",
}
_DRAWN = {
    "poisson": "Each of {clients} clients takes part in a round by itself, with probability {q:.3g}",
    "fixed": "{cohort} of {clients} clients are drawn for each round, without replacement",
    "all": "All {clients} clients take part in every round",
    "once-each": "{clients} clients take part in one order that is public, {cohort} a round, each once before any "
    "returns. Drawing is not counted",
}
_ASSUMED = (
    "The server is trusted: it sees the clipped updates and their sum before the noise. Who watches the network sees "
    "who takes part, so that drawing clients hides nothing from them.",
    "The list of clients is public: how many there are, and who may be drawn, does not depend on who takes part.",
    "A client may fail for reasons in its own data; whether a round is skipped or the run ends may not depend on them.",
    "Other runs on the same clients, and choosing settings by their results, spend privacy that is not counted here.",
)


_ONE = (
    "It hides one example of a client, from the server too. Several images of one person are protected less: see "
    "'Privacy for each image' in docs/choose-privacy.md."
)
_JOINED = (
    "It hides all examples of a client with one value of '{column}', from the server too. With examples at several "
    "clients the epsilons add up."
)
_OF_EXAMPLES = (
    "How many examples each client has is public, and so are the steps that follow. Drawing clients is not counted: it "
    "hides nothing from the server.",
    "Other runs on the same clients, and choosing settings by their results, spend privacy that is not counted here. "
    "Real sites count all runs on their data.",
)


def guarantee(
    settings: PrivacySettings, events: Sequence[Mapping[str, Any]], unsafe: bool = False
) -> dict[str, Any]:
    """The guarantee of a run after these releases: its numbers, `sentence`, and `assumed`, sentences.

    Args:
        settings: the table `[privacy]`.
        events: all releases so far, see `fedlens.privacy.accounting`.
        unsafe: whether values of single clients are recorded (`record.unsafe`).

    Raises `ConfigError` as `epsilons` does.

    >>> settings = PrivacySettings(clip=0.1, noise_multiplier=1.5, delta=1e-5)
    >>> event = {"z": 1.5, "q": 0.04, "sampling": "poisson", "relation": "add-or-remove", "cohort": 40, "clients": 1000}
    >>> found = guarantee(settings, [event] * 100)
    >>> found["sentence"][:61]
    'After 100 rounds the model is (1.31, 1e-05)-differentially pr'
    """
    spent = epsilons(events, settings.delta)
    about = _numbers(settings, spent, len(events))
    if not events:
        return {**about, "sentence": "Nothing has been released yet.", "assumed": []}
    last = events[-1]
    about |= {name: last[name] for name in ("relation", "sampling", "q", "z", "cohort", "clients")}
    rounds = many(len(events), "round")
    promised = (
        f"({spent.best:.3g}, {settings.delta:g})-differentially private in {_NEIGHBOURS[last['relation']]}"
    )
    if unsafe:
        sentence = "Not private: record.unsafe lets values of single clients into the files of the run."
    else:
        sentence = _sentence(
            settings,
            spent,
            f"the model would be {promised} after {rounds}",
            f"After {rounds} the model is {promised}",
        )
    drawn = _DRAWN[last["sampling"]].format(
        clients=f"{last['clients']:,}", q=last["q"], cohort=f"{last['cohort']:,.0f}"
    )
    return {**about, "sentence": sentence, "assumed": [f"{drawn}.", *_ASSUMED]}


def example_guarantee(
    settings: PrivacySettings, events: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """The guarantee of each client with `unit = "example"`: as `guarantee`, and `clients`, the largest epsilon first.

    The numbers are those of the client that spent most; of the others epsilon is by RDP alone, which is quick.

    Args:
        settings: the table `[privacy]`.
        events: the releases of each client by its name.

    Raises `ConfigError` as `epsilons` does.

    >>> settings = PrivacySettings(unit="example", clip=1.0, noise_multiplier=1.0, delta=1e-5)
    >>> event = {"z": 1.0, "q": 0.05, "sampling": "poisson", "relation": "add-or-remove", "cohort": 30, "clients": 600}
    >>> found = example_guarantee(settings, {"a": [{**event, "steps": 20}] * 2, "b": [{**event, "steps": 20}]})
    >>> [(row["client"], row["trained"], row["steps"], round(row["epsilon"], 2)) for row in found["clients"]]
    [('a', 2, 40, 2.97), ('b', 1, 20, 2.48)]
    """
    by_rdp = by_client({client: own for client, own in events.items() if own}, settings.delta)
    most = next(iter(by_rdp), None)
    spent = epsilons(events[most] if most is not None else (), settings.delta)
    rows = [
        {
            "client": client,
            "examples": events[client][-1]["clients"],
            "trained": len(events[client]),
            "steps": sum(event["steps"] for event in events[client]),
            "q": events[client][-1]["q"],
            "epsilon": epsilon if math.isfinite(epsilon) else None,
        }
        for client, epsilon in by_rdp.items()
    ]
    about = {**_numbers(settings, spent, sum(map(len, events.values()))), "clients": rows}
    if most is None:
        return {**about, "sentence": "Nothing has been released yet.", "assumed": []}
    column = settings.column
    of = "one of its examples takes" if column is None else f"one '{column}' with all its examples takes"
    unknown = f"differentially private in whether any {of} part"
    promised = f"({spent.best:.3g}, {settings.delta:g})-{unknown}"
    kept = f"All that client {most} sends is {promised}; no other client spends more"
    would = f"all that client {most} sends would be {promised}"
    return {
        **about,
        "sentence": _sentence(settings, spent, would, kept),
        "assumed": [_ONE if column is None else _JOINED.format(column=column), *_OF_EXAMPLES],
    }


def _numbers(settings: PrivacySettings, spent: Epsilons, releases: int) -> dict[str, Any]:
    finite = math.isfinite(spent.best)
    return {
        "unit": settings.unit,
        "delta": settings.delta,
        "releases": releases,
        "epsilon": spent.best if finite else None,
        "epsilon_pld": spent.pld if finite else None,
        "epsilon_rdp": spent.rdp if finite else None,
        "noise": settings.noise,
    }


def _sentence(settings: PrivacySettings, spent: Epsilons, would: str, promise: str) -> str:
    if not math.isfinite(spent.best):
        return "Not private: noise_multiplier is 0, so no noise was added."
    if settings.seeded:
        return (
            "Nothing is promised: the noise comes from the seed, and who knows it can subtract it. With noise = "
            f"'system' {would}."
        )
    return f"{promise}."
