"""Audits the differential privacy of an experiment from outside: do clients with known updates show, or not?

The audit runs the experiment's own selection, clip, sum and noise in this process. Only local training is replaced: a
canary sends a long update in a random direction, which the client's clip shortens to C, and all others send zero. The
score of a canary is what the server releases in its direction, summed over the rounds. What the server does with the
released update afterwards, such as a step of Adam, cannot weaken the promise and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.aggregate.server_steps import ServerStep
from fedlens.algorithms.averaging import Averaging, averaging
from fedlens.algorithms.client_sampling import SecretCohorts, Select
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.base.format import duration
from fedlens.core.driver import Driver, Tally
from fedlens.core.protocol import ClientId, ClientStates, FederationInfo, Payload, RoundContext
from fedlens.core.random import derive
from fedlens.core.tree import Tree, part
from fedlens.engines.inline import inline
from fedlens.local.rules import ClientRule, LocalContext, Tensors
from fedlens.local.settings import LocalSettings
from fedlens.privacy.accounting import epsilons
from fedlens.privacy.audit import FALSE_ALARM, AuditDesign, Claim, Rate, epsilon_of_guesses
from fedlens.run.build import Built
from fedlens.run.round_context import round_context

_LENGTH = 100.0  # of a canary's update before the clip, in units of C
_FACTORS = (1.2, 1.5, 2.0)  # by which faulty updates are longer, where the power is computed


class Canaries:
    """Clients whose updates are known, for one run: random directions on disjoint coordinates, and a coin for each.

    Attributes:
        clients: int64 [m].
        present: bool [m], the coins.
    """

    def __init__(self, m: int, eligible: NDArray[np.int64], size: int, replaced: bool, clip: float) -> None:
        self._m, self._eligible, self._size, self._replaced = m, eligible, size, replaced
        self._length = _LENGTH * clip

    def draw(self, rng: np.random.Generator) -> None:
        """Chooses clients, directions and coins of a run."""
        self.clients = rng.choice(self._eligible, self._m, replace=False)
        self.present = rng.random(self._m) < 0.5
        self._owner = rng.permutation(np.arange(self._size) % self._m)
        self._direction = rng.standard_normal(self._size)
        self._direction /= np.sqrt(self._sums(self._direction**2))[self._owner]
        self._at: dict[ClientId, int] = {int(client): k for k, client in enumerate(self.clients)}

    def scores(self, update: NDArray[np.float64]) -> NDArray[np.float64]:
        """What of an update [d] lies in the direction of each canary, [m]."""
        return self._sums(update * self._direction)

    def absent(self, client: ClientId) -> bool:
        """Whether a client is a canary that does not take part."""
        k = self._at.get(client)
        return not (self._replaced or k is None or self.present[k])

    def grad(self, gradients: Tensors, parameters: Tensors, context: LocalContext) -> Tensors:
        """The update that a client sends in place of the gradients of its one step: a canary's own, or zero."""
        k = self._at.get(context.problem.client.id)
        if k is None:
            return [torch.zeros_like(leaf) for leaf in parameters]
        length = self._length if self.present[k] else -self._length
        step = torch.from_numpy(np.where(self._owner == k, length * self._direction, 0.0))
        pieces = torch.split(step, [leaf.numel() for leaf in parameters])
        return [piece.view_as(leaf).to(leaf) for leaf, piece in zip(parameters, pieces, strict=True)]

    def _sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(self._owner, values, self._m).astype(np.float64, copy=False)


@dataclass(frozen=True)
class _WithoutAbsent(Select):
    """The cohorts of a selection without the canaries that do not take part."""

    select: Select
    canaries: Canaries

    def cohort(self, ctx: RoundContext) -> list[int]:
        return [client for client in self.select.cohort(ctx) if not self.canaries.absent(client)]

    def size(self, federation: FederationInfo) -> int:
        return self.select.size(federation)


@dataclass(frozen=True)
class _Released(ServerStep):
    """Keeps the released update as its state, and the weights as they are."""

    def init(self, weights: Tree) -> Payload:
        return {}

    def step(self, weights: Tree, update: Tree, state: Payload) -> tuple[dict[str, Tensor], Payload]:
        return dict(weights), {"released": update}


class AuditedRuns:
    """Runs of an experiment with m canaries, one after the other, from one build.

    With noise from the system each run draws new cohorts and noise. Seeded noise differs from run to run too, since
    no two runs share the number of a round, but the whole audit repeats to the bit.

    Raises `ConfigError` for what an audit cannot test.
    """

    def __init__(self, built: Built, m: int) -> None:
        algorithm, privacy = cast(Averaging, built.algorithm), built.config.privacy
        release = algorithm.release
        if privacy is None or release is None or str(privacy.unit) != "client":
            what = "tests client-level privacy, and this experiment has another unit"
            raise _refusal(what, "unit", "'client'")
        if privacy.of_tree:
            raise _refusal("needs noise that is new in each round", "mechanism", "'gaussian'")
        if privacy.adaptive:
            what = "needs a fixed clip: with an adaptive one the count of unclipped clients is released too"
            raise _refusal(what, "clip", "0.1, or another number")
        if not release["z"]:
            what = "needs a promise, and an experiment without noise makes none"
            raise _refusal(what, "noise_multiplier", "1.0, or another number above 0")
        self.events, self.delta = (release,) * built.config.rounds, privacy.delta
        spec = algorithm.parts.spec
        self._names = part(spec, "weight", trainable=True)
        size = sum(int(np.prod(spec[name].shape)) for name in self._names)
        eligible = built.federation.eligible
        replaced = release["relation"] == "replace"
        self.m = min(m, len(eligible), size)
        self._canaries = Canaries(self.m, eligible, size, replaced, privacy.first_clip)
        solved = privacy.model_copy(update={"noise_multiplier": release["z"], "epsilon": None})
        select = algorithm.select.select if isinstance(algorithm.select, SecretCohorts) else algorithm.select
        parts = replace(
            algorithm.parts,
            client=ClientRule(name="canary", grad=self._canaries.grad),
            local=LocalSettings(lr=1.0, steps=1, batch_size=1),
            select=select,
            server=_Released(),
            privacy=solved,
        )
        made = averaging(parts)
        if not replaced:
            made = replace(made, select=_WithoutAbsent(made.select, self._canaries))
        self._built = replace(built, algorithm=made, engine=inline(device="cpu"))
        self._scale = release["cohort"] / privacy.first_clip
        seeds = built.config.seeds
        self._rng = np.random.default_rng(derive(seeds.selection, "audit") if privacy.seeded else None)
        self._round = 0

    def __enter__(self) -> AuditedRuns:
        states = ClientStates()
        self._built.engine.open(self._built.program, states)
        self._driver = Driver(self._built.engine, states)
        self._state = self._built.algorithm.init(self._built.model, self._built.federation)
        return self

    def __exit__(self, *error: object) -> None:
        self._built.engine.close()

    def run(self, runs: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The scores of the canaries in so many new runs, [runs m], and whether each took part.

        A score is about the number of rounds in which the canary was drawn; its noise has the deviation z sqrt(rounds).

        Raises `RunFailed` if a client fails.
        """
        pairs = [(self._scores(), self._canaries.present) for _ in range(runs)]
        return np.concatenate([scores for scores, _ in pairs]), np.concatenate([there for _, there in pairs])

    def _scores(self) -> NDArray[np.float64]:
        self._canaries.draw(self._rng)
        scores = np.zeros(self.m)
        for _ in self.events:
            self._round += 1
            self._driver.tally = tally = Tally()
            context = replace(round_context(self._built, self._round), rounds=self._round)
            self._state = self._driver.drive(self._built.algorithm.round(self._state, context), self._round)
            for client, reasons in tally.failures.items():
                raise RunFailed(f"client {client} failed in the audit: {next(iter(reasons))}")
            released = self._state["server"]["released"]
            flat = torch.cat([released[name].double().flatten() for name in self._names])
            scores += self._scale * self._canaries.scores(flat.numpy())
        return scores


def _refusal(what: str, name: str, value: str) -> ConfigError:
    return ConfigError(f"an audit {what}", where=f"privacy.{name}", hint=f"set privacy.{name} = {value}")


def audit_runs(built: Built, runs: int, say: Callable[[str], None] = lambda sentence: None) -> dict[str, Any]:
    """Compares the error rates of guesses about one canary in each of so many runs with the claimed curve.

    The first tenth of the runs chooses the threshold, halfway between the mean scores with and without the canary; the
    others are measured. `say` hears how long they take. Returns the object of `fedlens audit --json`.

    Raises `ConfigError` for what an audit cannot test, and `RunFailed` if a client fails.
    """
    first, began = runs // 10, time.monotonic()
    with AuditedRuns(built, 1) as audited:
        scores, present = audited.run(first)
        threshold = (float(scores[present].mean()) + float(scores[~present].mean())) / 2
        each = (time.monotonic() - began) / first
        say(f"{runs:,} runs take about {duration(each * runs)}")
        scores, present = audited.run(runs - first)
    design = AuditDesign.of(Claim(audited.events), int(present.sum()), int((~present).sum()))
    wrong = (scores > threshold) != present
    counts = int(wrong[~present].sum()), int(wrong[present].sum())
    alpha = Rate.of_count(counts[0], design.absent, design.level)
    beta = Rate.of_count(counts[1], design.present, design.level)
    at_measured, at_low, at_high = design.claim(np.array([alpha.rate, alpha.low, alpha.high])).tolist()
    return {
        "mode": "runs",
        "runs": runs,
        "threshold_runs": first,
        "threshold": threshold,
        "false_positives": alpha._asdict(),
        "false_negatives": beta._asdict(),
        "confidence": design.level,
        "claimed_false_negatives": at_measured,
        "violation": design.contradicted(*counts),
        "below_at_least": max(0.0, at_high - beta.high),
        "below_at_most": max(0.0, at_low - beta.low),
        "false_alarm": design.false_alarm,
        "power": {factor: design.power(factor) for factor in _FACTORS},
    }


def audit_one_run(built: Built) -> dict[str, Any]:
    """Guesses in one run which of its clients take part, each by a coin, and bounds epsilon by the right guesses.

    The quarter with the highest scores is guessed to take part, and the quarter with the lowest not to; about the
    others nothing is guessed. Returns the object of `fedlens audit --one-run --json`.

    Raises `ConfigError` and `RunFailed` as `audit_runs` does.
    """
    with AuditedRuns(built, len(built.federation.eligible)) as audited:
        scores, present = audited.run(1)
    m, delta, order = audited.m, audited.delta, np.argsort(scores)
    out, took_part = order[: m // 4], order[m - m // 4 :]
    right, guesses = int(present[took_part].sum() + (~present[out]).sum()), 2 * len(out)
    claimed, at_least = epsilons(audited.events, delta).best, epsilon_of_guesses(right, guesses, m, delta)
    return {
        "mode": "one-run",
        "canaries": m,
        "guesses": guesses,
        "right": right,
        "confidence": 1 - FALSE_ALARM,
        "violation": at_least > claimed,
        "epsilon_at_least": at_least,
        "most_epsilon": epsilon_of_guesses(guesses, guesses, m, delta),
    }


def verdict(found: Mapping[str, Any], claimed: str) -> list[str]:
    """The sentences of an audit.

    Args:
        found: what `audit_runs` or `audit_one_run` returned.
        claimed: the claim, such as "epsilon = 2 at delta = 1e-05".
    """
    if found["mode"] == "one-run":
        bound = f"{found['right']:,} of {found['guesses']:,} guesses are right"
        shown = f"epsilon is at least {found['epsilon_at_least']:.3g} (confidence {found['confidence']:.1%})"
        first = "Violation found" if found["violation"] else "No violation found"
        most = f"If all were right it would be {found['most_epsilon']:.3g}; the claim is {claimed}"
        return [f"{first}: {bound}, so {shown}. {most}."]
    at_least, at_most = found["below_at_least"], found["below_at_most"]
    first = (
        f"Violation found: the true error rates lie at least {at_least:.2g} below the claimed curve"
        if found["violation"]
        else f"No violation of more than {at_most:.2g} found: error rates that lie further below the claimed curve "
        "contradict the measured ones"
    )
    chances = ", ".join(
        f"{100 * (factor - 1):.0f} % longer: {chance:.3g}" for factor, chance in found["power"].items()
    )
    alpha, beta = (Rate(**found[name]) for name in ("false_positives", "false_negatives"))
    return [
        f"False positive rate, canary absent: {alpha}. False negative rate, canary present: {beta}; the claim, "
        f"{claimed}, allows {found['claimed_false_negatives']:.4f} or more.",
        f"{first} (confidence {found['confidence']:.1%}).",
        f"A mechanism that keeps its claim is accused with probability {found['false_alarm']:.2g} at most. The "
        f"probability to find updates longer than the clip: {chances}.",
    ]
