"""The client rule of client-level differential privacy: DP-FedAvg, with a fixed or an adaptive clip, and DP-FTRL.

Sources: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1 with the estimator f_f; Andrew et al. 2021
(arXiv 1905.03871), Algorithm 1; Kairouz et al. 2021 (arXiv 2103.00039), Algorithm 1 and its variant with momentum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedlens.base.errors import ConfigError
from fedlens.core.device_copies import downloaded
from fedlens.core.protocol import FederationInfo, Payload, RoundContext
from fedlens.core.reduction import Update
from fedlens.core.schema import Field as SchemaField
from fedlens.core.schema import NumberField
from fedlens.core.tree import Tree, TreeSpec
from fedlens.local.rules import ClientRule, ServerRule, Traits
from fedlens.privacy.noise import KEY_BYTES, KeyedStream
from fedlens.privacy.settings import PrivacySettings
from fedlens.privacy.tree import NoiseTree

Sampling = Literal["poisson", "fixed", "all", "once-each"]
NAME = "client-privacy"
_MARGIN = 1e-6  # of a clipped norm below C, more than the rounding of float32
_RATE = 0.2  # of the adaptive clip, eta_C of Andrew et al. 2021
_SECRET = "@server"  # whose log in the journal is the tree of noise
_COUNT_NOISE = 0.05  # the deviation of the noise in the count of unclipped clients, as a share of q N


@dataclass(frozen=True)
class PrivateMean:
    """The release of a round: the sum of clipped updates, divided by the expected cohort, with normal noise.

    Equation, for the cohort S^t, the expected cohort q N and the clip C:

        client k:  b_k = 1 if ||Delta_k|| <= C, else 0
                   Delta_k <- min(1, (1 - 1e-6) C / ||Delta_k||) Delta_k
        server:    Delta = (sum_{k in S^t} Delta_k + N(0, (z_u C)^2 I)) / (q N)

    With a fixed clip z_u = z. An adaptive one follows the median of the norms:

                   b = 1/2 + (sum_{k in S^t} (b_k - 1/2) + N(0, s^2)) / (q N),   s = 0.05 q N
                   C <- max(C exp(-0.2 (b - 1/2)), floor)
                   z_u = (z^-2 - (2 s)^-2)^-1/2

    Both noised sums together are as private as one with the multiplier z. With z = 0 nothing is added.

    With `mechanism = "tree"` the noise is that of a prefix sum, n_t of `fedlens.privacy.tree.NoiseTree` with the
    deviation z C, less that of the round before, so that the released updates add up to the noised prefix sum:

                   Delta = (sum_{k in S^t} Delta_k + n_t - n_(t-1)) / (q N)

    A server step w <- w - gamma Delta is then DP-FTRL: w_t = w_0 - gamma S_t, with the noised prefix sum
    S_t = (sum_{s <= t} sum_k Delta_k + n_t) / (q N). One with momentum beta is its variant w_t = w_0 - gamma v_t,
    v_t = beta v_(t-1) + S_t. A new tree goes on from the model and the velocity of the last. The tree is in the
    journal, which only the server can read, and never in a state.

    Attributes:
        settings: of `[privacy]`.
        sampling: how the clients of a round are drawn. poisson: each by itself; fixed: a number of them, without
            replacement; all: everyone; once-each: in one order, each once before any returns.
        clients: N, all that can be drawn.
        expected: q N, the expected number of clients in a round.
        rounding: how much the norm of a clipped update may grow on its way to the server, as by the words of a secure
            sum: clients clip to C less that.
        order: of a tree: the name of the order of clients.

    Raises `ConfigError` if an adaptive clip has no z_u, because the cohort is small.

    >>> settings = PrivacySettings(clip="adaptive", noise_multiplier=1.0, delta=1e-5)
    >>> round(PrivateMean(settings, "poisson", 1000, 40.0).update_multiplier, 4)  # 2 s = 4
    1.0328
    """

    settings: PrivacySettings
    sampling: Sampling
    clients: int
    expected: float
    rounding: float = 0.0
    order: str = ""

    def __post_init__(self) -> None:
        z, least = self.settings.z, self.settings.z / (2 * _COUNT_NOISE)
        if self.settings.adaptive and self.expected <= least and z:
            raise ConfigError(
                f"an adaptive clip with noise_multiplier = {z:g} needs more than {least:g} clients a round, and "
                f"{self.expected:g} are expected: the noise of their count alone would spend more",
                where="privacy.clip",
                hint="set a number, or draw more clients a round",
            )

    @property
    def count_noise(self) -> float:
        """s, the deviation of the noise in the count of unclipped clients."""
        return _COUNT_NOISE * self.expected if self.settings.z else 0.0

    @property
    def update_multiplier(self) -> float:
        """z_u: the deviation of the noise in the sum of the updates, in units of C."""
        z = self.settings.z
        if not self.settings.adaptive or not z:
            return z
        return float((z**-2 - (2 * self.count_noise) ** -2) ** -0.5)

    def init(self, weights: Tree, federation: FederationInfo) -> Payload:
        """The clip of the first round."""
        return {"clip": self.settings.first_clip, "released": {}}

    def limit(self, norms: Tensor, payload: Payload) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The factors that clip, float64 [A], and with an adaptive clip b_k as `unclipped`, [A]."""
        clip = payload["clip"] if self.settings.adaptive else self.settings.first_clip
        clip = clip - self.rounding
        factors = (1 - _MARGIN) * clip / norms
        factors = factors.clamp(max=1.0)  # an update within C stays as it is, to the bit
        return factors, {"unclipped": (norms <= clip).double()} if self.settings.adaptive else {}

    def shared(self, state: Payload) -> Payload:
        """The clip of this round."""
        return {"clip": state["clip"]}

    def after(self, state: Payload, update: Update, ctx: RoundContext) -> tuple[Payload, Update]:
        """The next clip, and the noised update; noise is drawn and added in float64."""
        stream, clip, expected = self._stream(ctx), float(state["clip"]), self.expected
        share = update.replies / expected
        # Not every device has float64; the whole update is copied in one wait.
        values = downloaded(update.update)
        sizes = [value.numel() for value in values.values()]
        released = {"round": ctx.round, "clip": clip}
        noises = _normals(sizes, self.update_multiplier * clip / expected, stream)
        if self.settings.of_tree:
            noises, released["leaf"] = self._of_tree(sizes, clip, stream, ctx)
        sums = {name: _noised(value, share, next(noises)) for name, value in values.items()}
        noised = {name: total.to(update.update[name]) for name, total in sums.items()}
        ctx.metrics["clip"] = clip
        new = {"clip": clip, "released": released}
        if self.settings.adaptive:
            centred = float(update.more["unclipped"]) - update.replies / 2
            if self.count_noise:
                centred += self.count_noise * float(stream.normal(1))
            unclipped = 0.5 + centred / expected
            ctx.metrics["unclipped"] = unclipped
            new["clip"] = max(clip * math.exp(-_RATE * (unclipped - 0.5)), self.settings.clip_floor)
        return new, replace(update, update=noised)

    def spent(self, state: Payload) -> Sequence[Mapping[str, Any]]:
        """The release of the round that made this state, for the accountant; none before the first."""
        return [{**self.release, **state["released"]}] if state["released"] else ()

    @property
    def release(self) -> Mapping[str, Any]:
        """What each round releases, as `fedlens.privacy.accounting` reads it; of a tree nobody counts as drawn."""
        of_tree = {"restart": self.restart, "cohorts": self.cohorts, "order": self.order}
        return {
            "event": self.settings.mechanism,
            "q": 1.0 if self.settings.of_tree else self.expected / self.clients,
            "z": self.settings.z,
            "relation": "replace" if self.sampling == "fixed" else "add-or-remove",
            "sampling": self.sampling,
            "cohort": self.expected,
            "clients": self.clients,
            **(of_tree if self.settings.of_tree else {}),
        }

    @property
    def cohorts(self) -> int:
        """The number of rounds after which all clients of an order have been asked."""
        return math.ceil(self.clients / self.expected)

    @property
    def restart(self) -> int:
        """The number of rounds of a tree."""
        return self.settings.restart_every or self.cohorts

    def _of_tree(
        self, sizes: Sequence[int], clip: float, stream: KeyedStream, ctx: RoundContext
    ) -> tuple[Iterator[Tensor | None], int]:
        """The noise of this round for tensors of these sizes, and the number of the round in its tree."""
        tree = NoiseTree(self.update_multiplier * clip, self.restart, self.settings.honaker)
        kept, change = tree.grown(ctx.journal.log_of(_SECRET), ctx.round, sum(sizes), stream.normal)
        # After the last round nobody needs the noise, which could be subtracted.
        ctx.journal.keep_log(_SECRET, kept if ctx.round < ctx.rounds else {})
        return iter(torch.split(change / self.expected, list(sizes))), kept["leaf"]

    def _stream(self, ctx: RoundContext) -> KeyedStream:
        key = hashlib.sha256(str(ctx.rng.seed(NAME)).encode()).digest()
        return KeyedStream(key if self.settings.seeded else ctx.entropy(KEY_BYTES))


def client_privacy(mechanism: PrivateMean) -> ClientRule:
    """The rule that clips updates at the clients, and adds noise to their mean at the server.

    It is the last of a chain, and needs the uniform mean.

    >>> import torch
    >>> settings = PrivacySettings(clip=1.0, noise_multiplier=0.0, delta=1e-5)
    >>> rule = client_privacy(PrivateMean(settings, "all", 2, 2.0))
    >>> rule.limit(torch.tensor([0.5, 4.0], dtype=torch.float64), {})[0]
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    adaptive = mechanism.settings.adaptive
    at_server = ServerRule(
        init=mechanism.init,
        shared=mechanism.shared if adaptive else None,
        takes=_takes if adaptive else None,
        after=mechanism.after,
        release=mechanism.release,
        spent=mechanism.spent,
        follows_device=True,
    )
    return ClientRule(
        name=NAME,
        limit=mechanism.limit,
        expect=_expect if adaptive else None,
        fields={"unclipped": "sum"} if adaptive else {},
        server_rules={NAME: at_server},
        traits=Traits(stackable=True, releases=True),
    )


def _takes(spec: TreeSpec, federation: FederationInfo) -> Mapping[str, SchemaField]:
    return {"clip": NumberField(above=0)}


def _expect(spec: TreeSpec) -> Mapping[str, SchemaField]:
    return {"unclipped": NumberField(above=-0.5, most=1)}


def _normals(sizes: Sequence[int], deviation: float, stream: KeyedStream) -> Iterator[Tensor | None]:
    """Noise of this deviation for each leaf; None without any."""
    return (stream.normal(size).mul_(deviation) if deviation else None for size in sizes)


def _noised(value: Tensor, share: float, noise: Tensor | None) -> Tensor:
    """The mean of the replies as a sum over the expected cohort, float64, with noise."""
    total = value.double() * share
    return total if noise is None else total.add_(noise.view_as(total))
