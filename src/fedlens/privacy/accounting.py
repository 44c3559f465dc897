"""How much privacy releases spend: their epsilon at a delta, by the accountants of the package dp-accounting.

An event is a mapping, one for each release: `z`, the noise multiplier; `q`, the probability that a client takes part;
`sampling`, "poisson" (each client by itself), "fixed" (a number of clients, without replacement) or "all"; `cohort`,
the expected clients a release, of `clients`; and `relation`, between the data sets that the guarantee compares:

- "add-or-remove": one client more or less. The sum of clipped updates changes by C at most.
- "replace": one client in place of another. The sum changes by 2 C at most, so that noise of z C is worth z / 2.

Events of a tree of noise (`fedlens.privacy.tree`) have `leaf`, the number of the round in its tree: each 1 starts a
new one. A client pays for a Gaussian for each level of each tree that asked it. Clients return after `cohorts` rounds,
in the same order, so that the round says which clients were asked. Nothing counts as drawn.

With `unit = "example"` the events are a client's own, and examples stand where clients do: `cohort` is the expected
batch, of `clients` examples, and `steps` is the number of such releases.

Two accountants are asked. PLD composes the distributions of the privacy loss numerically and is tight; it does not know
sampling without replacement. RDP composes Rényi divergences; it is looser, and knows Poisson sampling under
"add-or-remove" alone. Both see the multiplier z as the settings mean it: RDP is given z / 2 under "replace", and PLD z,
since its relation REPLACE_ONE halves by itself.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple

from fedlens.base.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent, PrivacyAccountant

_QUICK = (*range(2, 64), 128, 256, 512)  # whole orders alone, which take no series
_HINT = "pip install 'fedlens[privacy]'"


class Release(NamedTuple):
    """What the privacy loss of a release depends on; see the module for its parts."""

    z: float
    q: float
    sampling: str
    relation: str
    cohort: float
    clients: int

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Release:
        """The kind of an event."""
        return cls(**{name: event[name] for name in cls._fields})


@dataclass(frozen=True)
class Epsilons:
    """The epsilon of releases at a delta, by each accountant; infinite if a release had no noise.

    Attributes:
        pld: by privacy loss distributions; None where they do not know the sampling.
        rdp: by Rényi divergences.
    """

    pld: float | None
    rdp: float

    @property
    def best(self) -> float:
        """The smaller one: both are upper bounds."""
        return self.rdp if self.pld is None else min(self.pld, self.rdp)


def epsilons(events: Iterable[Mapping[str, Any]], delta: float) -> Epsilons:
    """The epsilon of all these releases together. Raises `ConfigError` without the package that accounts.

    >>> event = {"z": 1.5, "q": 0.04, "sampling": "poisson", "relation": "add-or-remove", "cohort": 40, "clients": 1000}
    >>> found = epsilons([event] * 100, delta=1e-5)
    >>> round(found.pld, 3), round(found.rdp, 3)
    (1.314, 1.485)
    """
    return _epsilons(_kinds(events), delta)


def by_client(events: Mapping[str, Iterable[Mapping[str, Any]]], delta: float) -> dict[str, float]:
    """The epsilon of the events of each client, by RDP, which is quick; the largest first.

    >>> event = {"z": 1.0, "q": 0.02, "sampling": "poisson", "relation": "add-or-remove", "cohort": 20, "clients": 1000}
    >>> half = {**event, "steps": 500}
    >>> {client: round(epsilon, 3) for client, epsilon in by_client({"a": [half], "b": [half, half]}, 1e-5).items()}
    {'b': 4.324, 'a': 3.144}
    """
    spent = {client: _rdp_of(_kinds(own), delta) for client, own in events.items()}
    return dict(sorted(spent.items(), key=lambda each: -each[1]))


def planned(release: Mapping[str, Any], rounds: int) -> list[Mapping[str, Any]]:
    """The events of so many rounds without a break that each release this.

    >>> release = {"z": 8.0, "q": 1.0, "sampling": "once-each", "relation": "add-or-remove", "cohort": 10}
    >>> tree = {**release, "clients": 1000, "restart": 100, "cohorts": 100}
    >>> round(epsilons(planned(tree, 100), delta=1e-5).rdp, 6)  # 100 leaves have 7 levels
    1.374122
    """
    if (every := release.get("restart")) is None:
        return [release] * rounds
    return [{**release, "round": t + 1, "leaf": t % every + 1} for t in range(rounds)]


def _kinds(events: Iterable[Mapping[str, Any]]) -> tuple[tuple[Release, int], ...]:
    kinds = Counter[Release]()
    trees = list[list[Mapping[str, Any]]]()
    for event in events:
        if "leaf" not in event:
            kinds[Release.of(event)] += event.get("steps", 1)
        elif event["leaf"] == 1 or not trees:
            trees.append([event])
        else:
            trees[-1].append(event)
    by_cohort = defaultdict[int, Counter[Release]](Counter)
    for tree in trees:
        for cohort in {event["round"] % event["cohorts"] for event in tree}:
            by_cohort[cohort][Release.of(tree[0])] += tree[-1]["leaf"].bit_length()
    # Of each kind as many as the client pays who pays most.
    return tuple(sorted(reduce(or_, by_cohort.values(), kinds).items()))


@lru_cache(maxsize=1024)
def _rdp_of(kinds: tuple[tuple[Release, int], ...], delta: float) -> float:
    return math.inf if any(kind.z <= 0 for kind, _ in kinds) else _by_rdp(kinds, delta)


def noise_for(epsilon: float, delta: float, rounds: int, event: Mapping[str, Any]) -> float:
    """The smallest noise multiplier z, to 3 digits after the point, with which `rounds` releases stay within epsilon.

    Args:
        event: a release; its `z` does not matter.

    Raises `ConfigError` if no z up to 10,000 is enough.

    >>> event = {"z": 0, "q": 0.04, "sampling": "fixed", "relation": "replace", "cohort": 40, "clients": 1000}
    >>> noise_for(6.77, 1e-5, 2250, event)
    5.819
    """

    from scipy.optimize import brentq

    ((_, times),) = _kinds(planned({**event, "steps": 1}, rounds))

    def excess(log_z: float, by_rdp: bool) -> float:
        kinds = ((Release.of({**event, "z": math.exp(log_z)}), times),)
        spent = None if by_rdp else _by_pld(kinds, delta)
        if spent is None:
            spent = _by_rdp(kinds, delta, _QUICK if by_rdp else None)
        return math.log(max(spent, 1e-12) / epsilon)

    # RDP is looser and takes a part of the time: its answer bounds the search.
    high = 0.0
    while excess(high, True) > 0:
        high += math.log(2)
        if high > math.log(10_000):
            raise ConfigError(
                f"no noise_multiplier up to 10,000 keeps {rounds:,} releases within epsilon = {epsilon:g} at delta = "
                f"{delta:g}",
                where="privacy.epsilon",
                hint="set a larger epsilon, fewer rounds, or a smaller cohort",
            )
    low = high - math.log(2)
    while excess(low, False) <= 0:
        low -= math.log(2)
    thousandths = math.ceil(1000 * math.exp(brentq(excess, low, high, args=(False,), xtol=2e-4)))
    while excess(math.log(thousandths / 1000), False) > 0:
        thousandths += 1
    return thousandths / 1000


def noise_for_most(epsilon: float, delta: float, times: int, releases: Iterable[Mapping[str, Any]]) -> float:
    """The smallest noise multiplier z for all clients with which the one that spends most stays within epsilon.

    Which one spends most is decided by RDP, at that z.

    Args:
        times: how often each client makes its release.
        releases: one of each client, with its `steps`; `z` does not matter.

    Raises `ConfigError` as `noise_for` does.

    >>> event = {"z": 0, "q": 1.0, "sampling": "poisson", "relation": "add-or-remove", "cohort": 9, "clients": 9}
    >>> noise_for_most(2.0, 1e-5, 10, [{**event, "steps": 1}, {**event, "steps": 4}])
    12.61
    """
    kinds = {(event["q"], event["steps"]): event for event in releases}
    z, solved = 1.0, dict[Any, float]()
    while True:
        each = {
            str(kind): [{**event, "z": z, "steps": times * event["steps"]}] for kind, event in kinds.items()
        }
        most = next(iter(by_client(each, delta)))
        if most in solved:
            return z
        (event,) = each[most]
        solved[most] = noise_for(epsilon, delta, event["steps"], event)
        z = max(solved.values())


def deltas(events: Iterable[Mapping[str, Any]], epsilons: Sequence[float]) -> list[float]:
    """The smallest delta of all these releases together at each epsilon: by PLD where it knows the sampling, else RDP.

    Every release has noise. Raises `ConfigError` without the package that accounts.

    >>> event = {"z": 1.5, "q": 0.04, "sampling": "poisson", "relation": "add-or-remove", "cohort": 40, "clients": 1000}
    >>> print(f"{deltas([event] * 100, [1.314])[0]:.4g}")
    1.001e-05
    """
    kinds = _kinds(events)
    accountant = _pld(kinds) or _rdp(kinds)
    with _silent():
        return [float(accountant.get_delta(epsilon)) for epsilon in epsilons]


@lru_cache(maxsize=256)
def _epsilons(kinds: tuple[tuple[Release, int], ...], delta: float) -> Epsilons:
    if not kinds:
        return Epsilons(0.0, 0.0)
    if any(kind.z <= 0 for kind, _ in kinds):
        return Epsilons(math.inf, math.inf)
    relations = {kind.relation for kind, _ in kinds}
    if len(relations) > 1:
        raise ValueError("releases under different relations between data sets have no common epsilon")
    return Epsilons(_by_pld(kinds, delta), _by_rdp(kinds, delta))


@lru_cache(maxsize=256)
def _by_pld(kinds: tuple[tuple[Release, int], ...], delta: float) -> float | None:
    accountant = _pld(kinds)
    return None if accountant is None else float(accountant.get_epsilon(delta))


def _pld(kinds: tuple[tuple[Release, int], ...]) -> PrivacyAccountant | None:
    if any(kind.sampling == "fixed" for kind, _ in kinds):
        return None
    _require()
    from dp_accounting.pld import PLDAccountant

    return _composed(PLDAccountant, kinds, 1.0)


def _by_rdp(
    kinds: tuple[tuple[Release, int], ...], delta: float, orders: Sequence[float] | None = None
) -> float:
    with _silent():
        return float(_rdp(kinds, orders).get_epsilon(delta))


def _rdp(kinds: tuple[tuple[Release, int], ...], orders: Sequence[float] | None = None) -> PrivacyAccountant:
    _require()
    from dp_accounting.rdp import RdpAccountant

    return _composed(partial(RdpAccountant, orders), kinds, 0.5)


def _composed(
    make: Callable[..., PrivacyAccountant], kinds: tuple[tuple[Release, int], ...], share: float
) -> PrivacyAccountant:
    """The accountant of these releases; under "replace" it is given this share of each z."""
    from dp_accounting import NeighboringRelation

    replaced = kinds[0][0].relation == "replace"
    relation = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = make(neighboring_relation=relation)
    with _silent():
        for kind, times in kinds:
            accountant.compose(_event(kind, share if replaced else 1.0), times)
    return accountant


@contextmanager
def _silent() -> Iterator[None]:
    """Without the accountant's warnings of orders that it leaves out: its bound holds without them."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _event(kind: Release, factor: float) -> DpEvent:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent

    release = GaussianDpEvent(kind.z * factor)
    if kind.sampling == "fixed":
        return SampledWithoutReplacementDpEvent(kind.clients, round(kind.cohort), release)
    return PoissonSampledDpEvent(kind.q, release) if kind.q < 1 else release


def _require() -> None:
    try:
        import dp_accounting  # noqa: F401
    except ImportError:
        raise ConfigError(
            "counting the privacy that a run spends needs dp-accounting, which is not installed",
            where="privacy",
            hint=_HINT,
        ) from None
