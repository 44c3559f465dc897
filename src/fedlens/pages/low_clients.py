"""Clients that are clearly below the others with every model: what wrong labels look like, whichever model is measured.

A client is named if, with every model, three things hold.

1. Chance does not explain it. Under the hypothesis that the client's images of class c are right as often as the other
   clients' images of class c, the number H_c of its right images of that class is hypergeometric, given all right
   images of the class. With m_c of its N_c images of class c, of which K_c are right in all, and t right images of the
   client,

       p = P(sum_c H_c <= t),  H_c ~ Hypergeometric(N_c, K_c, m_c), independent,

   is the exact one-sided p-value: Fisher's exact test for one class, the exact form of the Mantel-Haenszel test for
   several. It must be below 0.05 / N for N clients (Bonferroni).
2. The differences between the others do not explain it: images differ in difficulty. With e what the others' shares by
   class give on the client's mix of classes, g its gap, e less its own share, and g_j the gaps of the k others to their
   common shares by class,

       g > sqrt(t(1 - 0.05 / N, k - 1)^2 tau^2 (1 + 1 / k) + z(1 - 0.05 / N)^2 e (1 - e) / m),

   with t and z quantiles, m its images, and tau^2 the variance of the g_j less their mean sampling variance
   e_j (1 - e_j) / m_j, at least 0. Local-only models leave this out: they differ by how much each has trained on.
3. g is at least 10 points.

All models have to agree, so no correction for the number of models is needed (intersection-union test, Berger 1982).
Of several seeds, which share the held-out images, the numbers of right images are means, rounded in favour of a client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedlens.data.partition.partition import Partition
from fedlens.observers.held_out_predictions import HeldOutPredictions

LEVEL = 0.05  # over all clients
GAP = 0.1  # below the others, at least


@dataclass(frozen=True)
class AgainstOthers:
    """A client against the others, with one model.

    Args:
        share: of its held-out images that are right.
        others: the same of the other clients, for the client's mix of classes.
        images: how many images `share` is of; images of classes that no other client has are left out.
        p: the one-sided p-value.
        allowed: the gap that the differences between the others explain; 0 if clients have models of their own.
    """

    share: float
    others: float
    images: int
    p: float
    allowed: float


def below_with_every_model(answers: Mapping[str, Answers]) -> dict[int, dict[str, AgainstOthers]]:
    """The clients that are clearly below the others with every model, each with its comparison by model.

    N is the number of clients with images that the first model was measured on. A client is not named if one of the
    models was not measured on its images, or has fewer than two others to compare it with.

    >>> owner = np.repeat([0, 1, 2], 40)
    >>> right = np.ones(120)
    >>> right[80:96] = 0  # 16 of the 40 images of client 2
    >>> one = Answers.of(owner, np.zeros(120, int), right)
    >>> [(client, round(found["federated"].share, 2)) for client, found in
    ...     below_with_every_model({"federated": one}).items()]
    [(2, 0.6)]
    """
    named: dict[int, dict[str, AgainstOthers]] = {}
    if not answers:
        return named
    clients = np.flatnonzero(next(iter(answers.values())).images.sum(axis=1)).tolist()
    for client in clients:
        found: dict[str, AgainstOthers] = {}
        for model, each in answers.items():
            compared = each.compare(client, LEVEL / len(clients))
            if compared is None:
                break
            found[model] = compared
        else:
            named[client] = found
    return named


@dataclass(frozen=True, eq=False)
class Answers:
    """The held-out images of each client and class, and how many a model has right: float64 [clients, classes].

    Args:
        images, right: of several seeds, `right` is the mean.
        shared: whether all clients have the same model.
    """

    images: NDArray[np.float64]
    right: NDArray[np.float64]
    shared: bool = True

    @classmethod
    def of(
        cls,
        owner: NDArray[np.int64],
        label: NDArray[np.int64],
        right: NDArray[np.float64],
        shared: bool = True,
    ) -> Answers:
        """Counts the answers of a model.

        Args:
            owner: [n], the client of each image, numbered as in all other answers.
            label: [n].
            right: [n], 1 if the model was right, else 0; of several seeds the mean.
        """
        shape = int(owner.max(initial=-1)) + 1, int(label.max(initial=-1)) + 1
        cells = owner * shape[1] + label
        counts = (np.bincount(cells, values, shape[0] * shape[1]) for values in (None, right))
        images, count = (each.reshape(shape).astype(np.float64) for each in counts)
        return cls(images, count, shared)

    def compare(self, client: int, level: float) -> AgainstOthers | None:
        """A client against all others, if it is clearly below them at this level; else None."""
        if client >= len(self.images):
            return None
        others = np.delete(self.images, client, axis=0), np.delete(self.right, client, axis=0)
        pooled, right = others[0].sum(axis=0), others[1].sum(axis=0)
        common = (self.images[client] > 0) & (pooled > 0)
        own, own_right = self.images[client][common], self.right[client][common]
        if not common.any():
            return None
        shares = np.divide(right, pooled, out=np.zeros_like(right), where=pooled > 0)
        m, share = float(own.sum()), float(own_right.sum() / own.sum())
        expected = float(own @ shares[common]) / m
        allowed = _explained(*others, shares, expected * (1 - expected) / m, level)
        if allowed is None:
            return None
        allowed = allowed if self.shared else 0.0
        if expected - share < GAP - 1e-9 or expected - share <= allowed:
            return None
        p = exact_p(own_right, own, right[common], pooled[common])
        return AgainstOthers(share, expected, int(m), p, allowed) if p < level else None


def _explained(
    images: NDArray[np.float64],
    right: NDArray[np.float64],
    shares: NDArray[np.float64],
    sampling: float,
    level: float,
) -> float | None:
    """The gap that the differences between the other clients explain, at this level; None with fewer than two others.

    `sampling` is the sampling variance of the client's share.
    """
    from scipy.special import ndtri, stdtrit  # here, because few pages need it

    measured = images.sum(axis=1) > 0
    m, k = images.sum(axis=1)[measured], int(measured.sum())
    if k < 2:
        return None
    expected = (images @ shares)[measured] / m
    gaps = expected - right.sum(axis=1)[measured] / m
    between = max(0.0, float(gaps.var(ddof=1) - (expected * (1 - expected) / m).mean()))
    t, z = float(stdtrit(k - 1, 1 - level)), float(ndtri(1 - level))
    return math.sqrt(t**2 * between * (1 + 1 / k) + z**2 * sampling)


def exact_p(
    right: NDArray[np.float64],
    images: NDArray[np.float64],
    others_right: NDArray[np.float64],
    others: NDArray[np.float64],
) -> float:
    """P(sum_c H_c <= t), the one-sided p-value of the module's equation.

    Args:
        right, images: [classes], the client's right and all images of each class.
        others_right, others: the same of the other clients.

    >>> one = [np.array([float(value)]) for value in (6, 10, 38, 40)]
    >>> round(exact_p(*one), 6)  # Fisher's exact test of [[6, 4], [38, 2]], as scipy.stats.fisher_exact gives it
    0.010955
    """
    pmf = np.ones(1)
    for mine, m, theirs, n in zip(right, images, others_right, others, strict=True):
        low, each = _hypergeometric(int(m + n), math.floor(mine + theirs + 1e-9), int(m))
        pmf = np.convolve(pmf, np.concatenate([np.zeros(low), each]))
    return float(min(1.0, pmf[: math.ceil(float(right.sum()) - 1e-9) + 1].sum()))


def _hypergeometric(population: int, successes: int, draws: int) -> tuple[int, NDArray[np.float64]]:
    """The smallest number of successes among the draws, and the probabilities from there on."""
    from scipy.special import gammaln  # here, because few pages need it

    low, high = max(0, draws - (population - successes)), min(draws, successes)
    k = np.arange(low, high + 1)

    def log_choose(n: int | NDArray[np.int64], r: NDArray[np.int64] | int) -> NDArray[np.float64]:
        return np.asarray(gammaln(np.add(n, 1)) - gammaln(np.add(r, 1)) - gammaln(np.subtract(n, r) + 1.0))

    logs = log_choose(successes, k) + log_choose(population - successes, draws - k)
    return low, np.exp(logs - log_choose(population, draws))


def answers_of(
    by_role: Mapping[str, Sequence[HeldOutPredictions]], owners: NDArray[np.int64]
) -> dict[str, Answers]:
    """The answers of each role's models, over its seeds.

    Args:
        by_role: the predictions of the runs of each role. Of a role's runs, those that hold out other images than the
            first are left out.
        owners: the client of each position in the training split, -1 for none; see `owners_of`. It says whose the
            images are that the IID twin's clients hold out.
    """
    answers = {}
    for role, runs in by_role.items():
        alike = [run for run in runs if np.array_equal(run.index, runs[0].index)]
        if not alike:
            continue
        index = alike[0].index
        owner = np.where(index < len(owners), owners[np.minimum(index, len(owners) - 1)], -1)
        right = np.stack([run.right for run in alike]).mean(axis=0)
        known = owner >= 0
        answers[role] = Answers.of(owner[known], alike[0].label[known], right[known], role != "local-only")
    return answers


def owners_of(partition: Partition, predictions: HeldOutPredictions) -> NDArray[np.int64]:
    """int64 [positions]: the client of each training or held-out image of a run; -1 for an image of no client."""
    last = max(partition.indices.max(initial=0), predictions.index.max(initial=0))
    owners = np.full(int(last) + 1, -1, np.int64)
    owners[partition.indices] = partition.owners()
    number = {name: k for k, name in enumerate(partition.ids)}
    numbers = np.array([number.get(name, -1) for name in predictions.clients], np.int64)
    owners[predictions.index] = numbers[predictions.owners]
    return owners
