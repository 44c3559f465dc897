"""DARTS: a network that contains all architectures of a space, and the network of one of them.

Liu, Simonyan and Yang 2019 (arXiv 1806.09055). Written by fedlens, with the sizes of the authors' code. The network is
a chain of cells. A cell has two inputs, the outputs of the two cells before it, and `nodes` nodes; each node is the sum
of one operation of each input and of each earlier node. Its output are its nodes side by side. Two cells, at a third
and two thirds of the depth, halve the resolution and double the channels (`reduce`); the others are `normal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BeforeValidator, Field
from torch import Tensor, nn

from fedlens.base.parse_text import parse_json, read_text
from fedlens.core.tree import Tree
from fedlens.files.regular_file import open_regular

KINDS = ("normal", "reduce")
ARCHITECTURE = tuple(f"alphas_{kind}" for kind in KINDS)
"""The parameters of a search network that weigh the operations, float32 [edges, operations] each."""


def _read(value: Any) -> Any:
    """The genotype in a file, so that a run's settings hold it and not where it was."""
    if not isinstance(value, str):
        return value
    try:
        with open_regular(Path(value)) as file:
            return parse_json(read_text(file))
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the file is no JSON: {error}") from error


def _possible(cells: dict[str, list[list[tuple[str, int]]]]) -> dict[str, list[list[tuple[str, int]]]]:
    if {*cells} != {*KINDS} or not 0 < len(cells["normal"]) == len(cells["reduce"]):
        raise ValueError("it needs the cells 'normal' and 'reduce', with the same number of nodes")
    for kind, node, own in ((k, n, edges) for k in KINDS for n, edges in enumerate(cells[k])):
        for name, state in own:
            if name not in OPERATIONS or not 0 <= state < 2 + node:
                known = f"operations are {', '.join(OPERATIONS)}; its states are 0 to {1 + node}"
                raise ValueError(f"node {node} of '{kind}' takes {name!r} of state {state}: {known}")
        if not own:
            raise ValueError(f"node {node} of '{kind}' has no edge")
    return cells


Genotype = Annotated[
    dict[str, list[list[tuple[str, int]]]],
    BeforeValidator(_read),
    AfterValidator(_possible),
]
Channels = Annotated[int, Field(ge=1, le=1024, description="channels of the first cells")]
Cells = Annotated[
    int, Field(ge=1, le=64, description="number of cells; fewer than three are all of the kind that halves")
]
Nodes = Annotated[int, Field(ge=1, le=8, description="nodes of a cell")]


class Halved(nn.Module):
    """Halves the resolution: two 1x1 convolutions with stride 2, one of them a pixel further, side by side."""

    def __init__(self, before: int, channels: int, affine: bool) -> None:
        super().__init__()
        self.even = nn.Conv2d(before, channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(before, channels - channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(channels, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        """[n, before, H, W] -> [n, channels, ceil(H/2), ceil(W/2)]."""
        x = torch.relu(x)
        # One row and column of zeros, which an odd extent needs and an even one does not see.
        moved = nn.functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        halved: Tensor = self.norm(torch.cat([self.even(x), self.odd(moved)], 1))
        return halved


class Zero(nn.Module):
    """The operation `none`: no edge."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """[n, C, H, W] -> zeros of the shape that the other operations give."""
        return torch.zeros_like(x[:, :, :: self.stride, :: self.stride])


def _projected(before: int, channels: int, affine: bool) -> nn.Sequential:
    convolution = nn.Conv2d(before, channels, 1, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(channels, affine=affine))


def _separable(channels: int, kernel: int, stride: int, affine: bool, dilation: int = 1) -> list[nn.Module]:
    """ReLU, a convolution of each channel, one of all channels at each pixel, and batch normalization."""
    padding = dilation * (kernel - 1) // 2
    deep = nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False)
    point = nn.Conv2d(channels, channels, 1, bias=False)
    return [nn.ReLU(), deep, point, nn.BatchNorm2d(channels, affine=affine)]


def _twice(channels: int, kernel: int, stride: int, affine: bool) -> nn.Module:
    first = _separable(channels, kernel, stride, affine)
    return nn.Sequential(*first, *_separable(channels, kernel, 1, affine))


def _pooled(pool: nn.Module, channels: int, searching: bool) -> nn.Module:
    # In the search, pooling must not win by its scale alone.
    return nn.Sequential(pool, nn.BatchNorm2d(channels, affine=False)) if searching else pool


Make = Callable[[int, int, bool], nn.Module]  # channels, stride, searching
OPERATIONS: Mapping[str, Make] = {
    "none": lambda c, stride, searching: Zero(stride),
    "max_pool_3x3": lambda c, stride, searching: _pooled(nn.MaxPool2d(3, stride, 1), c, searching),
    "avg_pool_3x3": lambda c, stride, searching: _pooled(
        nn.AvgPool2d(3, stride, 1, count_include_pad=False), c, searching
    ),
    "skip_connect": lambda c, stride, searching: (
        nn.Identity() if stride == 1 else Halved(c, c, not searching)
    ),
    "sep_conv_3x3": lambda c, stride, searching: _twice(c, 3, stride, not searching),
    "sep_conv_5x5": lambda c, stride, searching: _twice(c, 5, stride, not searching),
    "dil_conv_3x3": lambda c, stride, searching: nn.Sequential(*_separable(c, 3, stride, not searching, 2)),
    "dil_conv_5x5": lambda c, stride, searching: nn.Sequential(*_separable(c, 5, stride, not searching, 2)),
}
NAMES = tuple(OPERATIONS)


class Edge(nn.ModuleList):
    """All operations of an edge of a search network."""

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        """Their sum, weighted by `shares` [operations]."""
        return torch.stack([share * made(x) for share, made in zip(shares, self, strict=True)]).sum(0)


class DartsCell(nn.Module):
    """One cell, with the edges `edges`: (node, state that it takes, module), in the order of the nodes."""

    def __init__(self, inputs: Sequence[nn.Module], nodes: int, edges: Sequence[tuple[int, int, nn.Module]]):
        super().__init__()
        self.inputs = nn.ModuleList(inputs)
        self.edges = nn.ModuleList([made for _, _, made in edges])
        self.ends = [(node, state) for node, state, _ in edges]
        self.nodes = nodes

    def forward(self, first: Tensor, second: Tensor, shares: Tensor | None = None) -> Tensor:
        """[n, C', H', W'] of the two cells before it -> [n, nodes C, H, W]; with `shares` [edges, operations]."""
        states = [self.inputs[0](first), self.inputs[1](second)]
        for node in range(self.nodes):
            terms = [
                edge(states[state]) if shares is None else edge(states[state], shares[at])
                for at, ((end, state), edge) in enumerate(zip(self.ends, self.edges, strict=True))
                if end == node
            ]
            states.append(torch.stack(terms).sum(0))
        return torch.cat(states[2:], 1)


class Network(nn.Module):
    """The chain of cells, with the edges that `edges(kind, channels)` gives."""

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        channels: int,
        cells: int,
        nodes: int,
        edges: Callable[[str, int], Sequence[tuple[int, int, nn.Module]]],
        searching: bool,
    ) -> None:
        super().__init__()
        previous = last = 3 * channels
        first = nn.Conv2d(input_shape[0], last, 3, padding=1, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(last))
        self.kinds: list[str] = []
        self.cells = nn.ModuleList()
        for at in range(cells):
            kind = KINDS[at in (cells // 3, 2 * cells // 3)]
            channels *= 2 if kind == "reduce" else 1
            enter = Halved if self.kinds and self.kinds[-1] == "reduce" else _projected
            inputs = [enter(previous, channels, not searching), _projected(last, channels, not searching)]
            self.cells.append(DartsCell(inputs, nodes, edges(kind, channels)))
            self.kinds.append(kind)
            previous, last = last, nodes * channels
        self.classifier = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, C, H, W] -> logits [n, classes]."""
        first = second = self.stem(x)
        shares = self.shares()
        for kind, cell in zip(self.kinds, self.cells, strict=True):
            first, second = second, cell(first, second, shares.get(kind))
        logits: Tensor = self.classifier(second.mean((2, 3)))
        return logits

    def shares(self) -> Mapping[str, Tensor]:
        """The shares of the operations by kind of cell; none outside of a search."""
        return {}


class SearchNetwork(Network):
    """The network that has every operation on every edge, weighted by the softmax of its `alphas`."""

    def __init__(self, input_shape: Sequence[int], classes: int, channels: int, cells: int, nodes: int):
        ends = [(node, state) for node in range(nodes) for state in range(2 + node)]

        def edges(kind: str, width: int) -> list[tuple[int, int, nn.Module]]:
            stride = {state: 2 if kind == "reduce" and state < 2 else 1 for _, state in ends}
            return [
                (n, s, Edge([make(width, stride[s], True) for make in OPERATIONS.values()])) for n, s in ends
            ]

        super().__init__(input_shape, classes, channels, cells, nodes, edges, searching=True)
        self.alphas_normal = nn.Parameter(1e-3 * torch.randn(len(ends), len(NAMES)))
        self.alphas_reduce = nn.Parameter(1e-3 * torch.randn(len(ends), len(NAMES)))

    def shares(self) -> Mapping[str, Tensor]:
        """softmax(alpha) over the operations of each edge."""
        return {"normal": self.alphas_normal.softmax(1), "reduce": self.alphas_reduce.softmax(1)}


def darts_search(
    input_shape: Sequence[int], classes: int, *, channels: Channels = 16, cells: Cells = 8, nodes: Nodes = 4
) -> nn.Module:
    """The search network of DARTS, section 2; `fednas` trains its weights and its architecture.

    >>> network = darts_search((3, 32, 32), 10)
    >>> sum(p.numel() for name, p in network.named_parameters() if name not in ARCHITECTURE)
    1930618
    >>> network.alphas_normal.shape
    torch.Size([14, 8])
    """
    return SearchNetwork(input_shape, classes, channels, cells, nodes)


def genotype_of(tree: Tree) -> dict[str, list[list[tuple[str, int]]]]:
    """The architecture that the alphas of a search network choose (DARTS, section 2.4).

    On each edge the operation with the largest share, never `none`; for each node the two edges whose operations have
    the largest shares. Ties go to the lower number. Edges are in the order of their states.

    >>> alphas = torch.zeros(5, 8)
    >>> alphas[1, NAMES.index("skip_connect")] = 1.0
    >>> alphas[4, NAMES.index("sep_conv_3x3")] = 2.0
    >>> genotype_of(dict.fromkeys(ARCHITECTURE, alphas))["reduce"]
    [[('max_pool_3x3', 0), ('skip_connect', 1)], [('max_pool_3x3', 0), ('sep_conv_3x3', 2)]]
    """
    found = {}
    for kind, name in zip(KINDS, ARCHITECTURE, strict=True):
        shares = tree[name].detach().double().softmax(1)[:, 1:].tolist()
        nodes: list[list[tuple[str, int]]] = []
        while shares:
            own, shares = shares[: 2 + len(nodes)], shares[2 + len(nodes) :]
            best = [max(edge) for edge in own]
            # Stable: ties stay in order.
            kept = sorted(range(len(own)), key=best.__getitem__, reverse=True)[:2]
            nodes.append([(NAMES[1 + own[state].index(best[state])], state) for state in sorted(kept)])
        found[kind] = nodes
    return found


# The cells that DARTS' authors found on CIFAR-10 (figures 4 and 5, second order).
PUBLISHED: dict[str, list[list[tuple[str, int]]]] = {
    "normal": [
        [("sep_conv_3x3", 0), ("sep_conv_3x3", 1)],
        [("sep_conv_3x3", 0), ("sep_conv_3x3", 1)],
        [("skip_connect", 0), ("sep_conv_3x3", 1)],
        [("skip_connect", 0), ("dil_conv_3x3", 2)],
    ],
    "reduce": [
        [("max_pool_3x3", 0), ("max_pool_3x3", 1)],
        [("max_pool_3x3", 1), ("skip_connect", 2)],
        [("max_pool_3x3", 0), ("skip_connect", 2)],
        [("max_pool_3x3", 1), ("skip_connect", 2)],
    ],
}


def darts(
    input_shape: Sequence[int],
    classes: int,
    *,
    genotype: Annotated[
        Genotype | None,
        Field(
            description="the architecture: the file `genotype.json` of a run of `fednas`, or what it holds: for each "
            "kind of cell and each of its nodes, two edges, each an operation and the number of the state that it takes"
        ),
    ] = None,
    channels: Channels = 36,
    cells: Cells = 20,
) -> nn.Module:
    """The network of one architecture, without the auxiliary classifier and the dropped paths of DARTS, section 3.1.

    Without `genotype` it has the cells that DARTS' authors found on CIFAR-10.

    >>> sum(p.numel() for p in darts((3, 32, 32), 10).parameters())
    3349342
    >>> edges = [[("sep_conv_3x3", 0), ("skip_connect", 1)]]
    >>> network = darts((3, 32, 32), 10, genotype={"normal": edges, "reduce": edges}, channels=4, cells=3)
    >>> network(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    chosen = genotype or PUBLISHED

    def edges(kind: str, width: int) -> list[tuple[int, int, nn.Module]]:
        return [
            (node, state, OPERATIONS[name](width, 2 if kind == "reduce" and state < 2 else 1, False))
            for node, own in enumerate(chosen[kind])
            for name, state in own
        ]

    nodes = len(chosen["normal"])
    return Network(input_shape, classes, channels, cells, nodes, edges, searching=False)
