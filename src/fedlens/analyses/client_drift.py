"""Client drift: how far the clients' updates of a round are from their mean, and whether they agree, by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlens.analyses.opened_run import OpenedRun
from fedlens.base.errors import ConfigError
from fedlens.core.tree import Tree, TreeSpec, part, scale, select, subtract
from fedlens.observers.read_recordings import RecordedReply, RecordedRound

ALL = "all"  # the name of all layers together


def client_drift(run: OpenedRun) -> list[dict[str, Any]]:
    """How far the clients' updates are from their mean, and whether they agree, by layer; see `drift`.

    Of a round without local models, what clients sent as their `update` counts.

    Returns:
        a row per round and layer, the whole model (`all`) first: `round`; `layer`, its path, and `kind`, its class;
        `clients`, their number; `norm`, `distance` and `cosine`, means over the clients weighted as in the average;
        `cosine_low`, the smallest cosine; `orthogonal`, what `cosine` were for orthogonal updates of equal norm,
        sqrt(sum_k p_k^2); `mean_norm`; `diversity`; `agreeing`; and, of the whole model, `by_client` with the values of
        each client.

    Raises `RunDirectoryError` if neither local models nor updates are recorded.
    """
    rounds = [each for each in run.recorded if each.trained or _senders(each)]
    if not rounds:
        raise run.missing("local models or updates", "record.updates")
    spec = run.built.model.leaves
    rows: list[dict[str, Any]] = []
    for recorded in rounds:
        updates: list[Tree]
        if recorded.trained:
            replies, before = recorded.trained, recorded.before()
            updates = [*updates_of([recorded.local_model(r, before) for r in replies], before, spec)]
        else:
            replies = _senders(recorded)
            # Clients send (w^t - w_k) / tau: the other way round, and with FedNova for one step.
            updates = [scale(recorded.sent(reply), -reply.numbers.get("tau", 1.0)) for reply in replies]
        found = drift(updates, [reply.weight for reply in replies])
        kinds = run.evaluator.layer_kinds
        rows += [_row(recorded.round, layer, kinds, replies) for layer in (found.total, *found.layers)]
    return rows


def _senders(recorded: RecordedRound) -> list[RecordedReply]:
    """The replies with an update; those of the round's last exchange where there are several."""
    sent = [reply for reply in recorded.replies if "weight" in reply.numbers] if recorded.updates else []
    return [reply for reply in sent if reply.op == sent[-1].op]


def _row(
    round: int, layer: LayerDrift, kinds: Mapping[str, str], replies: Sequence[RecordedReply]
) -> dict[str, Any]:
    weights = [reply.weight for reply in replies]
    cosines = [value for value in layer.cosines if value is not None]
    row: dict[str, Any] = {
        "round": round,
        "layer": layer.layer,
        "kind": kinds.get(layer.layer, ""),
        "clients": len(replies),
        "norm": _weighted_mean(layer.norms, weights),
        "distance": _weighted_mean(layer.distances, weights),
        "cosine": _weighted_mean([0.0 if c is None else c for c in layer.cosines], weights)
        if cosines
        else None,
        "cosine_low": min(cosines, default=None),
        "orthogonal": orthogonal_cosine(weights),
        "mean_norm": layer.mean_norm,
        "diversity": layer.diversity,
        "agreeing": layer.agreeing,
    }
    if layer.layer == ALL:
        row["by_client"] = [
            {"client": reply.client, "weight": w, "norm": norm, "distance": distance, "cosine": cosine}
            for reply, w, norm, distance, cosine in zip(
                replies, weights, layer.norms, layer.distances, layer.cosines, strict=True
            )
        ]
    return row


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)


@dataclass(frozen=True)
class LayerDrift:
    """The drift in one layer, or in all of them together; see `drift`. A quotient by 0 is None.

    Attributes:
        layer: the path of the module; `ALL` for the whole model.
        norms: |d_k| of each client.
        distances: |d_k - d| of each client.
        cosines: of the angle between d_k and d, of each client.
        mean_norm: |d|.
        diversity: sum_k p_k |d_k|^2 / |d|^2, at least 1.
        agreeing: |sum_k p_k d_k|^2 / sum_k p_k^2 |d_k|^2, from 0 to the number of clients.
    """

    layer: str
    norms: tuple[float, ...]
    distances: tuple[float, ...]
    cosines: tuple[float | None, ...]
    mean_norm: float
    diversity: float | None
    agreeing: float | None


@dataclass(frozen=True)
class UpdateDrift:
    """The drift of a round: of the whole model, and of each layer in the order of the model."""

    total: LayerDrift
    layers: tuple[LayerDrift, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer with the fields of `LayerDrift`, that of the whole model first."""
        return [asdict(each) for each in (self.total, *self.layers)]


def drift(updates: Sequence[Tree], weights: Sequence[float]) -> UpdateDrift:
    """The drift of clients' updates d_k, weighted with p_k = n_k / sum_j n_j, from their mean d = sum_k p_k d_k.

    The gradient diversity sum_k p_k |d_k|^2 / |d|^2 is 1 for equal updates; with equal weights it is K times the one of
    Yin et al. 2018 (Definition 1). The effective number of agreeing clients is |sum_k p_k d_k|^2 / sum_k p_k^2 |d_k|^2:
    1 for orthogonal updates, K for equal ones with equal weights, 1 / sum_k p_k^2 (Kish 1965) for equal ones with
    other weights, and near 0 where updates cancel.

    Args:
        updates: of each client, theta_k - theta; see `updates_of`. Only their floating-point leaves count.
        weights: of each client, such as its number of examples.

    Raises `ConfigError` without an update, for updates of different shapes, or for weights that fit no average.

    >>> one, other = {"f.weight": torch.tensor([3.0, 0.0])}, {"f.weight": torch.tensor([0.0, 4.0])}
    >>> found = drift([one, other], [1, 1]).total
    >>> found.norms, found.mean_norm, found.agreeing
    ((3.0, 4.0), 2.5, 1.0)
    """
    _check_alike(updates)
    shares = average_weights(weights, len(updates))
    by_layer: dict[str, list[str]] = {}
    for name, value in updates[0].items():
        if value.is_floating_point():
            by_layer.setdefault(layer_of(name), []).append(name)
    found = {
        layer: _Squares.of(
            [torch.cat([u[name].reshape(-1).double() for name in names]) for u in updates], shares
        )
        for layer, names in by_layer.items()
    }
    total = _Squares(*(torch.stack(column).sum(0) for column in zip(*found.values(), strict=True)))
    return UpdateDrift(
        total.drift(ALL, shares), tuple(squares.drift(layer, shares) for layer, squares in found.items())
    )


def orthogonal_cosine(weights: Sequence[float]) -> float:
    """The weighted mean cosine to the mean of orthogonal updates of equal norm: sqrt(sum_k p_k^2).

    It is 1 / sqrt(K) for equal weights, since each update is a part of the mean.

    >>> orthogonal_cosine([1, 1, 1, 1])
    0.5
    """
    return math.hypot(*weights) / math.fsum(weights)


def updates_of(models: Sequence[Tree], before: Tree, spec: TreeSpec) -> list[dict[str, Tensor]]:
    """The updates theta_k - theta of the trained weights, from local models and the global model before the round."""
    names = [name for name in part(spec, "weight", trainable=True) if name in before]
    start = select(before, names)
    return [subtract(select(model, names), start) for model in models]


def layer_of(name: str) -> str:
    """The module that a leaf belongs to; a leaf of the outermost module has its own name.

    >>> layer_of("layer1.0.conv1.weight"), layer_of("scale")
    ('layer1.0.conv1', 'scale')
    """
    return name.rpartition(".")[0] or name


class _Squares(NamedTuple):
    """Squared norms and products, which add up over layers; [K] of the clients, [] of the mean."""

    norms: Tensor
    distances: Tensor
    products: Tensor  # <d_k, d>
    mean: Tensor

    @classmethod
    def of(cls, updates: Sequence[Tensor], shares: Tensor) -> _Squares:
        mean = torch.zeros_like(updates[0])
        for share, update in zip(shares.tolist(), updates, strict=True):
            mean += share * update
        return cls(
            torch.stack([update @ update for update in updates]),
            torch.stack([(update - mean).square().sum() for update in updates]),
            torch.stack([update @ mean for update in updates]),
            mean @ mean,
        )

    def drift(self, layer: str, shares: Tensor) -> LayerDrift:
        mean, norms = self.mean.sqrt().item(), self.norms.sqrt().tolist()
        squares = self.mean.item()
        return LayerDrift(
            layer,
            tuple(norms),
            tuple(self.distances.sqrt().tolist()),
            tuple(
                _quotient(product, norm * mean)
                for product, norm in zip(self.products.tolist(), norms, strict=True)
            ),
            mean,
            _quotient((shares @ self.norms).item(), squares),
            _quotient(squares, (shares.square() @ self.norms).item()),
        )


def _quotient(above: float, below: float) -> float | None:
    return above / below if below and math.isfinite(above / below) else None


def _check_alike(updates: Sequence[Tree]) -> None:
    if not updates or not any(value.is_floating_point() for value in updates[0].values()):
        raise ConfigError(
            "no update with a trained weight was given", where="updates", hint="record the updates of a round"
        )
    form = _form(updates[0])
    for k, update in enumerate(updates):
        if _form(update) != form:
            raise ConfigError(
                f"update {k} has other leaves or shapes than update 0",
                where="updates",
                hint="compare updates of one architecture",
            )


def _form(tree: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in tree.items()}


def average_weights(weights: Sequence[float], count: int) -> Tensor:
    """float64 [count]: p_k = n_k / sum_j n_j, for weights n_k such as numbers of examples.

    Raises `ConfigError` unless there are `count` finite numbers of at least 0, and one above 0.

    >>> average_weights([1, 3], 2)
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    values = torch.tensor(weights, dtype=torch.float64)
    if len(values) != count or not bool((values >= 0).all()) or not 0 < float(values.sum()) < math.inf:
        raise ConfigError(
            f"the weights {list(weights)} do not fit the average of {count}",
            where="weights",
            hint="give one number of at least 0 each, and one above 0",
        )
    return values / values.sum()
