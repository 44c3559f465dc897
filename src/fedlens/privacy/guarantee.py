"""What a private run promises to whom, as numbers and as sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedlens.base.format import many
from fedlens.privacy.accounting import epsilons
from fedlens.privacy.settings import PrivacySettings

_NEIGHBOURS = {
    "add-or-remove": "whether any one client takes part, with all of its examples",
    "replace": "which data any one client has, all of its examples included",
}
_DRAWN = {
    "poisson": "Each of {clients} clients takes part in a round by itself, with probability {q:.3g}",
    "fixed": "{cohort} of {clients} clients are drawn for each round, without replacement",
    "all": "All {clients} clients take part in every round",
}
_ASSUMED = (
    "The server is trusted: it sees the clipped updates and their sum before the noise. Who watches the network sees "
    "who takes part, so that drawing clients hides nothing from them.",
    "The list of clients is public: how many there are, and who may be drawn, does not depend on who takes part.",
    "A client may fail for reasons in its own data; whether a round is skipped or the run ends may not depend on them.",
    "Other runs on the same clients, and choosing settings by their results, spend privacy that is not counted here.",
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
    finite = math.isfinite(spent.best)
    about: dict[str, Any] = {
        "unit": settings.unit,
        "delta": settings.delta,
        "releases": len(events),
        "epsilon": spent.best if finite else None,
        "epsilon_pld": spent.pld if finite else None,
        "epsilon_rdp": spent.rdp if finite else None,
        "noise": settings.noise,
    }
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
    elif not finite:
        sentence = "Not private: noise_multiplier is 0, so no noise was added."
    elif settings.noise == "seeded":
        sentence = (
            "Nothing is promised: the noise comes from the seed, and who knows it can subtract it. With noise = "
            f"'system' the model would be {promised} after {rounds}."
        )
    else:
        sentence = f"After {rounds} the model is {promised}."
    drawn = _DRAWN[last["sampling"]].format(
        clients=f"{last['clients']:,}", q=last["q"], cohort=f"{last['cohort']:,.0f}"
    )
    return {**about, "sentence": sentence, "assumed": [f"{drawn}.", *_ASSUMED]}
