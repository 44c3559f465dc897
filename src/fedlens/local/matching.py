"""Matching of units: which hidden units of several networks play the same role, and the network of their means.

The model of PFNM (Yurochkin et al. 2019, arXiv 1905.12022), layer by layer as in FedMA (Wang et al. 2020, arXiv
2002.06440): a client's unit, the vector of its incoming weights and its bias, is a global unit plus noise of variance
`sigma`; global units are normal around 0 with variance `sigma0`; and how many clients share one follows a
Beta-Bernoulli process of mass `gamma`.

Of the variants of the cost this is Proposition 2 of PFNM: the popularity m of a global unit counts as
2 log(m / (J - m)). The public code of both papers has log(m / (J - m)) there, counts popularity up to 10 only, and
limits a layer to 700 units. It begins with the widest client, and matches clients again in a random order that no seed
decides; here they keep their order, so that the same networks give the same result. The layer is the posterior mean, as
in that code; Algorithm 1 of FedMA prints the plain mean, which a large `sigma0` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError
from fedlens.core.tree import Leaf, Tree, spec_of, tree_of
from fedlens.models.chains import chain_layers, resize, widths

Layer = Mapping[str, Tensor]  # `weight` [out, in, ...] and, if it has one, `bias` [out]


@dataclass(frozen=True)
class UnitPrior:
    """What is assumed of global units, and how long matches are improved.

    Attributes:
        sigma: the variance of a client's unit around its global unit.
        sigma0: the variance of global units around 0.
        gamma: the mass of new units: the larger, the more a layer grows.
        passes: how often each client is matched again, with the others as they are.
        growth: the largest width of a layer, in multiples of the widest client's; None for any width.

    Raises `ConfigError` for variances and masses that are not above 0, negative passes, and growth below 1.
    """

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 7.0
    passes: int = 5
    growth: float | None = None

    def __post_init__(self) -> None:
        positive = min(self.sigma, self.sigma0, self.gamma) > 0
        if not positive or self.passes < 0 or (self.growth is not None and self.growth < 1):
            raise ConfigError(
                f"units cannot be matched under {self}",
                hint="take sigma, sigma0 and gamma above 0, passes from 0 on, and growth from 1 on",
            )

    def most(self, widths: Sequence[int]) -> int:
        """The largest width of a layer that has these widths at clients.

        >>> UnitPrior(growth=1.15).most([100, 80]), UnitPrior().most([100, 80])
        (115, 180)
        """
        # 1.15 is slightly less in floating point, and 1.15 * 100 not quite 115.
        return sum(widths) if self.growth is None else int(max(widths) * self.growth + 1e-6)


@dataclass(frozen=True)
class Matched:
    """Networks matched: their common `tree`, and `units[j][n]`, the global units of layer n that client j's are."""

    tree: dict[str, Tensor]
    units: list[list[Tensor]]


def match(
    trees: Sequence[Tree],
    layers: Sequence[str],
    prior: UnitPrior = UnitPrior(),
    counts: Tensor | None = None,
) -> Matched:
    """Matches networks layer by layer, without training between layers.

    Args:
        trees: networks of the same layers, whose widths may differ.
        layers: the names of the layers with weights, in the order of the forward pass; they form a chain.
        prior: of the units.
        counts: [networks, classes], the weight of each network in each row of the last layer, such as its examples of
            that class; by default equal.

    >>> first = {"0.weight": torch.tensor([[3.0], [-4.0]]), "1.weight": torch.tensor([[1.0, 2.0]])}
    >>> second = {"0.weight": torch.tensor([[-4.0], [3.0]]), "1.weight": torch.tensor([[2.0, 1.0]])}
    >>> matched = match([first, second], ["0", "1"], UnitPrior(sigma0=1e9, gamma=1.0))
    >>> matched.units[1], matched.tree["1.weight"]
    ([tensor([1, 0])], tensor([[1., 2.]]))
    """
    tree: dict[str, Tensor] = {}
    own: list[list[Tensor]] = [[] for _ in trees]
    parts = [[layer_in(each, name) for each in trees] for name in layers]
    for at, name in enumerate(layers[:-1]):
        merged, units = match_layer(parts[at], prior)
        width = len(merged["weight"])
        for j, mine in enumerate(units):
            parts[at + 1][j] = widen_inputs(parts[at + 1][j], mine, width)
            own[j].append(mine)
        tree |= named(merged, name)
    if counts is None:
        counts = torch.ones(len(trees), len(parts[-1][0]["weight"]))
    return Matched(tree | named(mean_rows(parts[-1], counts), layers[-1]), own)


def match_models(models: Sequence[nn.Module], prior: UnitPrior = UnitPrior()) -> nn.Module:
    """The network of several trained ones, such as `load_result(run).model` of two runs; without further training.

    Raises `ConfigError` if one is not a chain of layers, or has other layers than the first; widths may differ.

    >>> models = [nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(2)]
    >>> match_models(models, UnitPrior(growth=1.0))(torch.zeros(1, 4)).shape
    torch.Size([1, 2])
    """
    first, *others = (chain_layers(model) for model in models)
    if any(layers != first for layers in others):
        raise ConfigError(
            "the models have different layers, so their units have no counterparts",
            hint="match models of the same kind; their widths may differ",
        )
    hidden = widths(models[0])
    like, *forms = (_form(model, hidden) for model in models)
    for at, form in enumerate(forms, 1):
        if other := next((name for name in like | form if form.get(name) != like.get(name)), None):
            raise ConfigError(
                f"'{other}' has another shape or dtype in model {at} than in model 0, whatever the widths",
                hint="match models of the same kind, with the same inputs and classes",
            )
    tree = match([tree_of(model) for model in models], first, prior).tree
    found = deepcopy(models[0])
    resize(found, [len(tree[f"{name}.weight"]) for name in first[:-1]])
    found.load_state_dict(tree)
    return found


def _form(module: nn.Module, hidden: Sequence[int]) -> dict[str, Leaf]:
    """The leaves of a chain once its hidden layers have these widths."""
    found = deepcopy(module).to("meta")  # without memory, and without drawing initial weights
    resize(found, hidden)
    return spec_of(found)


def match_layer(layers: Sequence[Layer], prior: UnitPrior) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The layer of the global units of one layer at several clients, and the global unit of each client's units.

    Global units are numbered from 0 in the order in which they were first needed, those without a client left out.

    >>> layer = {"weight": torch.tensor([[2.0, 2.0]]), "bias": torch.tensor([1.0])}
    >>> match_layer([layer], UnitPrior())  # one client: times 1 / (1 + sigma / sigma0)
    ({'weight': tensor([[1., 1.]]), 'bias': tensor([0.5000])}, [tensor([0])])
    """
    vectors = [_vectors(layer) for layer in layers]
    units = assign(vectors, prior)
    counts = torch.bincount(torch.cat(units)).to(vectors[0].device)
    sums = vectors[0].new_zeros(len(counts), vectors[0].shape[1], dtype=torch.float64)
    for mine, vector in zip(units, vectors, strict=True):
        sums[mine] += vector.double()
    means = (sums / (counts + prior.sigma / prior.sigma0)[:, None]).to(layers[0]["weight"].dtype)
    weight = layers[0]["weight"]
    merged = {"weight": means[:, : weight[0].numel()].reshape(-1, *weight.shape[1:])}
    return merged | ({"bias": means[:, -1].clone()} if "bias" in layers[0] else {}), units


def assign(vectors: Sequence[Tensor], prior: UnitPrior) -> list[Tensor]:
    """The global unit of each client's units, int64 [units] for every client.

    The first client's units are the first global ones. Each other client is matched in turn, and then each again with
    the others as they are, `prior.passes` times or until a pass changes nothing.

    Args:
        vectors: the units of each client, [units, n].
    """
    found = _Units(vectors, prior, prior.most([len(units) for units in vectors]))
    for client in range(len(vectors)):
        found.match(client)
    for _ in range(prior.passes):
        before = [mine.clone() for mine in found.own]
        for client in range(len(vectors)):
            found.remove(client)
            found.match(client)
        if all(torch.equal(a, b) for a, b in zip(before, found.own, strict=True)):
            break
    return found.own


class _Units:
    """The global units while clients are matched: the sum of their clients' units, and how many there are."""

    def __init__(self, vectors: Sequence[Tensor], prior: UnitPrior, most: int) -> None:
        self.vectors, self.prior, self.most = vectors, prior, most
        self.sums = vectors[0].new_zeros(0, vectors[0].shape[1])
        self.counts = torch.zeros(0, dtype=torch.int64)
        self.own = [torch.zeros(0, dtype=torch.int64) for _ in vectors]

    def remove(self, client: int) -> None:
        """Takes a client out, with the units that no other client has; the others keep their order."""
        mine = self.own[client]
        self.sums[mine] -= self.vectors[client]
        self.counts[mine] -= 1
        kept = self.counts > 0
        number = kept.cumsum(0) - 1
        self.sums, self.counts = self.sums[kept], self.counts[kept]
        self.own = [number[units] for j, units in enumerate(self.own) if j != client]
        self.own.insert(client, mine.new_zeros(0))

    def match(self, client: int) -> None:
        """Matches a client that is not in."""
        own = self.vectors[client]
        new = min(len(own), self.most - len(self.counts))
        gain = gains(own, self.sums, self.counts, len(self.vectors), new, self.prior)
        chosen = cheapest(-gain)
        # Which of the new units is taken makes no difference to the sum: they are numbered in the client's order.
        added = chosen >= len(self.counts)
        mine = torch.where(added, len(self.counts) + added.cumsum(0) - 1, chosen)
        self.sums = torch.cat([self.sums, own.new_zeros(int(added.sum()), own.shape[1])])
        self.counts = torch.cat([self.counts, self.counts.new_zeros(int(added.sum()))])
        self.sums[mine] += own
        self.counts[mine] += 1
        self.own[client] = mine


def gains(own: Tensor, sums: Tensor, counts: Tensor, clients: int, new: int, prior: UnitPrior) -> Tensor:
    """What each match of a client's units adds to twice the log posterior, float64 [units, global + new] on the CPU.

    With w a unit of the client, s the sum of the n units of other clients that are the global unit i, and J clients:

        |w + s|^2 / (sigma (r + n + 1)) - |s|^2 / (sigma (r + n)) + 2 log(n / (J - n)),    r = sigma / sigma0
        |w|^2 / (sigma (r + 1)) + 2 log(gamma / J) - 2 log k                               for the k-th new unit

    The squares are opened, so that all pairs take one matrix product (equation 8 of arXiv 1905.12022).

    Args:
        own: w, [units, n].
        sums, counts: s, [global, n], and n, int64 [global].
        clients: J.
        new: how many new units are offered.
        prior: of the units.
    """
    ratio, n = prior.sigma / prior.sigma0, counts.to(torch.float64)
    squares, others = (units.square().sum(1).cpu().double() for units in (own, sums))
    cross = (own @ sums.T).cpu().double()
    joined = (squares[:, None] + 2 * cross + others) / (ratio + n + 1) - others / (ratio + n)
    alone = squares[:, None] / (ratio + 1)
    rank = torch.arange(1, new + 1, dtype=torch.float64)
    old = joined / prior.sigma + 2 * (n / (clients - n)).log()
    return torch.cat([old, alone / prior.sigma + 2 * log(prior.gamma / clients) - 2 * rank.log()], dim=1)


def cheapest(cost: Tensor) -> Tensor:
    """The column of each row, int64 [rows], all different, with the least total cost; there are no fewer columns.

    >>> cheapest(torch.tensor([[1.0, 2.0, 9.0], [1.0, 5.0, 9.0]]))
    tensor([1, 0])
    """
    from scipy.optimize import linear_sum_assignment  # here, because it takes long to import

    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1]).to(torch.int64)


def widen_inputs(layer: Layer, units: Tensor, width: int) -> dict[str, Tensor]:
    """The layer behind units that became `units` among `width` global ones: it computes the same of its own units.

    Its inputs are permuted and the others get zeros. Behind a flattening each unit has a block of inputs.

    >>> layer = {"weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]])}  # two units, two inputs each
    >>> widen_inputs(layer, torch.tensor([2, 0]), 3)["weight"]
    tensor([[3., 4., 0., 0., 1., 2.]])
    """
    weight = layer["weight"]
    blocks = weight.reshape(len(weight), len(units), -1)
    wide = blocks.new_zeros(len(weight), width, blocks.shape[2])
    wide[:, units.to(wide.device)] = blocks
    return {**layer, "weight": _as_inputs(wide, weight)}


def narrow_inputs(layer: Layer, units: Tensor, width: int) -> dict[str, Tensor]:
    """The layer behind `units` alone, of the `width` units before it, in this order."""
    weight = layer["weight"]
    blocks = weight.reshape(len(weight), width, -1)[:, units.to(weight.device)]
    return {**layer, "weight": _as_inputs(blocks, weight)}


def mean_rows(layers: Sequence[Layer], counts: Tensor, kept: Layer | None = None) -> dict[str, Tensor]:
    """The mean of layers, row by row, weighted by `counts` [layers, rows].

    A row that none has is that of `kept`, and without it the plain mean.

    >>> layers = [{"weight": torch.tensor([[0.0], [2.0]])}, {"weight": torch.tensor([[4.0], [4.0]])}]
    >>> mean_rows(layers, torch.tensor([[3, 0], [1, 0]]), {"weight": torch.tensor([[9.0], [9.0]])})["weight"].flatten()
    tensor([1., 9.])
    """
    nobody = counts.sum(0) == 0
    shares = torch.where(nobody, 1.0, counts.double())
    shares, found = shares / shares.sum(0), {}
    for name, like in layers[0].items():
        by_row = shares.to(like.device).reshape(*shares.shape, *[1] * (like.dim() - 1))
        mean = sum(share * layer[name] for share, layer in zip(by_row, layers, strict=True))
        assert isinstance(mean, Tensor)
        if kept is not None:
            mean[nobody.to(like.device)] = kept[name][nobody.to(like.device)].to(mean)
        found[name] = mean.to(like.dtype)
    return found


def layer_in(tree: Tree, name: str) -> dict[str, Tensor]:
    """The layer of this name.

    >>> list(layer_in({"0.weight": torch.ones(1), "0.bias": torch.ones(1), "1.weight": torch.ones(1)}, "0"))
    ['weight', 'bias']
    """
    return {leaf: tree[f"{name}.{leaf}"] for leaf in ("weight", "bias") if f"{name}.{leaf}" in tree}


def named(layer: Layer, name: str) -> dict[str, Tensor]:
    """The leaves of a layer in a tree, as `layer_in` reads them."""
    return {f"{name}.{leaf}": value for leaf, value in layer.items()}


def narrow(tree: Tree, layers: Sequence[str], units: Sequence[Tensor]) -> dict[str, Tensor]:
    """The network of some units of another one.

    Args:
        tree: the other network, a chain of these layers.
        layers: their names.
        units: for each hidden layer, int64, which of its units, in their new order.
    """
    found: dict[str, Tensor] = {}
    for at, name in enumerate(layers):
        layer = layer_in(tree, name)
        if at:
            layer = narrow_inputs(layer, units[at - 1], len(tree[f"{layers[at - 1]}.weight"]))
        if at < len(units):
            layer = {leaf: value[units[at].to(value.device)] for leaf, value in layer.items()}
        found |= named(layer, name)
    return found


def _vectors(layer: Layer) -> Tensor:
    """The units of a layer, [units, inputs and bias]."""
    parts = [layer["weight"].flatten(1)] + ([layer["bias"][:, None]] if "bias" in layer else [])
    return torch.cat(parts, dim=1)


def _as_inputs(blocks: Tensor, weight: Tensor) -> Tensor:
    """A weight from its blocks [out, units, ...]: of a convolution like `weight`, else of a linear layer."""
    return blocks.reshape(len(weight), -1, *weight.shape[2:])
