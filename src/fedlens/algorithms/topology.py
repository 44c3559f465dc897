"""Who is joined to whom in peer-to-peer learning: graphs of N peers, and the weights with which they mix.

A *mixing* is one exchange in which peers send their models and replace them by weighted sums. Mixings are counted
from 0 over the whole run, and each has its graph: the same in every mixing, the next of a period, or a new draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Annotated, Any, Literal

import networkx as nx
import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fedlens.base.errors import ConfigError
from fedlens.core.algorithm_base import ClientGraph
from fedlens.core.random import Rng

_DRAWS = 100  # of which a redrawn graph's spectral gap is a mean
_WHERE = "algorithm.topology"
_MOST_DRAWN = 5000  # edges of a graph that is drawn


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Ring(_Table):
    """Each peer has two neighbours."""

    name: Literal["ring"] = "ring"


class Complete(_Table):
    """Each peer is a neighbour of all others."""

    name: Literal["complete"] = "complete"


class Exponential(_Table):
    """Neighbours 1, 2, 4, ... places away (Assran et al. 2019), all of them or one in each mixing."""

    name: Literal["exponential"] = "exponential"
    one_peer: bool = Field(
        False, description="one neighbour in each mixing: 1 place away, then 2, then 4, ..."
    )


class ErdosRenyi(_Table):
    """Each pair of peers is joined with the same probability."""

    name: Literal["erdos-renyi"] = "erdos-renyi"
    probability: float = Field(gt=0, le=1, description="that two peers are joined")
    redraw: bool = Field(False, description="draw a new graph for each mixing")


class Edges(_Table):
    """The edges of a CSV file: two client numbers a line, from 0. Push-sum sends from the first to the second."""

    name: Literal["edges"] = "edges"
    file: str = Field(min_length=1, description="a CSV file, with two client numbers a line and no header")


def _table(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


TopologySettings = Annotated[
    Annotated[Ring | Complete | Exponential | ErdosRenyi | Edges, Field(discriminator="name")],
    BeforeValidator(_table),
]


@dataclass(frozen=True)
class Topology:
    """The graphs of `peers` peers, and their weights.

    Args:
        directed: whether an edge says who sends to whom, as for push-sum; the weights are then column weights. If not,
            an edge joins two peers that send to each other, and the weights are Metropolis weights.
        seed: of drawn graphs; a run has `seeds.selection`.

    Raises `ConfigError` if some peer can never hear of another.

    >>> Topology(Ring(), 4).weights(0).round(2).tolist()[0]
    [0.33, 0.33, 0.0, 0.33]
    >>> Topology(Exponential(one_peer=True), 8).neighbours(2)[0]
    (4,)
    """

    settings: Ring | Complete | Exponential | ErdosRenyi | Edges
    peers: int
    directed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        n, settings = self.peers, self.settings
        if n < 2:
            raise ConfigError(
                "one peer has nobody to mix with", where=_WHERE, hint="take two clients or more"
            )
        if self._pairs and n & (n - 1):
            raise ConfigError(
                f"one_peer pairs the peers i and i xor 2^k, so their number must be a power of two, and is {n}",
                where=f"{_WHERE}.one_peer",
                hint=f"take {2 ** (n.bit_length() - 1)} or {2 ** n.bit_length()} clients, or one_peer = false",
            )
        if self.redrawn:
            return
        if not connected(nx.compose_all(self._period)):
            strongly = "strongly " if self.directed else ""
            raise ConfigError(
                f"the graph of the {n} peers is not {strongly}connected, so some would never hear of others",
                where=_WHERE,
                hint="draw it with a larger probability, or another seeds.selection"
                if isinstance(settings, ErdosRenyi)
                else "add edges between its parts",
            )

    @property
    def redrawn(self) -> bool:
        """Whether each mixing draws its own graph, which need not be connected."""
        return isinstance(self.settings, ErdosRenyi) and self.settings.redraw

    @property
    def period(self) -> int:
        """After how many mixings the graphs repeat; 1 if the graph is fixed."""
        one_peer = isinstance(self.settings, Exponential) and self.settings.one_peer
        return (self.peers - 1).bit_length() if one_peer else 1

    @property
    def _pairs(self) -> bool:
        return isinstance(self.settings, Exponential) and self.settings.one_peer and not self.directed

    def graph(self, mixing: int) -> nx.Graph:
        """The graph of a mixing: its nodes are 0 to N - 1; a `DiGraph` if directed."""
        return self._made(mixing) if self.redrawn else self._period[mixing % self.period]

    def neighbours(self, mixing: int) -> list[tuple[int, ...]]:
        """For each peer those that it sends to, in ascending order."""
        graph = self.graph(mixing)
        return [tuple(sorted(graph.adj[peer])) for peer in range(self.peers)]

    def weights(self, mixing: int) -> np.ndarray:
        """W, float64 [N, N]: peer i takes W[i, j] of what peer j sends.

        Metropolis: W_ij = 1 / (1 + max(d_i, d_j)) for neighbours, with d the degrees, and W_ii = 1 - sum_j W_ij; its
        rows and columns sum to 1. Column weights, if directed: A_ij = 1 / (d_j + 1) for j itself and each peer i that
        j sends to, with d_j their number; its columns sum to 1.
        """
        return _weights(self.graph(mixing), self.directed)

    @property
    def drawn(self) -> tuple[ClientGraph, ...]:
        """The graphs of a period with their weights, for the run's page; of redrawn ones only the first.

        A graph of more than 5,000 edges comes without them, and its title says so.

        >>> [graph.title for graph in Topology(Exponential(one_peer=True), 4).drawn]
        ['Mixing 1 of each 2', 'Mixing 2 of each 2']
        """
        graphs = []
        for mixing in range(self.period):
            title = f"Mixing {mixing + 1} of each {self.period}" if self.period > 1 else "In each mixing"
            title = "In the first mixing; each mixing draws another graph" if self.redrawn else title
            graph, weights = self.graph(mixing), self.weights(mixing)
            edges = [(j, i, float(weights[i, j])) for j, i in sorted(graph.edges)]
            if len(edges) > _MOST_DRAWN:
                title, edges = f"{title}: {len(edges):,} edges, too many to draw", []
            graphs.append(ClientGraph(title, self.peers, edges, self.directed))
        return tuple(graphs)

    def parted(self, mixing: int) -> bool:
        """Whether a redrawn graph is not connected in this mixing."""
        return self.redrawn and not connected(self.graph(mixing))

    @property
    def edges_digest(self) -> dict[str, str]:
        """The CSV file and a digest of the edges that were read from it; both empty without a file."""
        if not isinstance(self.settings, Edges):
            return {"file": "", "sha256": ""}
        edges = repr(sorted(self._period[0].edges)).encode()
        return {"file": self.settings.file, "sha256": hashlib.sha256(edges).hexdigest()}

    @property
    def note(self) -> str:
        """The spectral gap, as a sentence.

        >>> Topology(Exponential(one_peer=True), 8).note
        'the spectral gap of 8 peers is 1 (of the product of 3 mixing matrices): 0 is never, 1 is agreement at once'
        """
        of = "W" if self.period == 1 else f"the product of {self.period} mixing matrices"
        of = f"the mean of W^T W over {_DRAWS} draws" if self.redrawn else of
        gap = f"{self.spectral_gap():.3g} (of {of})"
        return f"the spectral gap of {self.peers} peers is {gap}: 0 is never, 1 is agreement at once"

    def spectral_gap(self) -> float:
        """1 - |lambda_2|: the larger, the sooner peers agree.

        lambda_2 is the eigenvalue second in modulus: of W if the graph is fixed, of the product of the matrices of a
        period, or, if each mixing draws its graph, of the mean of W^T W over 100 draws.
        """
        if self.redrawn:
            draws = [self.weights(mixing) for mixing in range(_DRAWS)]
            return 1 - second_modulus(sum(w.T @ w for w in draws) / _DRAWS)
        return 1 - second_modulus(
            reduce(lambda so_far, t: self.weights(t) @ so_far, range(1, self.period), self.weights(0))
        )

    @cached_property
    def _period(self) -> list[nx.Graph]:
        return [self._made(mixing) for mixing in range(self.period)]

    def _made(self, mixing: int) -> nx.Graph:
        graph = nx.DiGraph() if self.directed else nx.Graph()
        graph.add_nodes_from(range(self.peers))
        graph.add_edges_from(self._edges(mixing))
        return graph

    def _edges(self, mixing: int) -> Sequence[tuple[int, int]]:
        n, settings = self.peers, self.settings
        both = 2 if self.directed else 1  # edges that join two peers, as edges that say who sends
        joined: Sequence[Sequence[int]]
        match settings:
            case Exponential():
                away = [2**k for k in range((n - 1).bit_length())]
                if settings.one_peer:
                    away = [away[mixing % len(away)]]
                return [(i, i ^ k if self._pairs else (i + k) % n) for k in away for i in range(n)]
            case Edges():
                return _read(Path(settings.file), n)
            case ErdosRenyi():
                rng = (
                    Rng((self.seed, "topology")).child(mixing if settings.redraw else "fixed").numpy("edges")
                )
                joined = np.argwhere(np.triu(rng.random((n, n)) < settings.probability, 1)).tolist()
            case Ring():
                joined = [(i, (i + 1) % n) for i in range(n)]
            case Complete():
                joined = [(i, j) for i in range(n) for j in range(i)]
        return [edge for i, j in joined for edge in ((i, j), (j, i))[:both]]


def _weights(graph: nx.Graph, directed: bool) -> np.ndarray:
    n = len(graph)
    degree = np.array([len(graph.adj[peer]) for peer in range(n)])
    weights = np.zeros((n, n))
    for j, i in graph.edges:
        if directed:
            weights[i, j] = 1 / (degree[j] + 1)
        else:
            weights[i, j] = weights[j, i] = 1 / (1 + max(degree[i], degree[j]))
    weights[np.diag_indices(n)] = 1 / (degree + 1) if directed else 1 - weights.sum(axis=1)
    return weights


def without(weights: np.ndarray, missing: Collection[int]) -> np.ndarray:
    """The weights of a mixing in which some peers take no part: the columns still sum to 1.

    The weight of an edge to a missing peer goes to the self-loops of both ends (Metropolis), and what would have been
    sent to it stays with its sender (column weights). A missing peer keeps what it has.

    >>> without(Topology(Ring(), 3).weights(0), [2]).round(2).tolist()
    [[0.67, 0.33, 0.0], [0.33, 0.67, 0.0], [0.0, 0.0, 1.0]]
    """
    if not missing:
        return weights
    gone, kept = sorted(missing), weights.copy()
    diagonal = np.diag_indices(len(kept))
    kept[diagonal] += weights[gone].sum(axis=0)
    kept[gone], kept[:, gone] = 0, 0
    kept[gone, gone] = 1
    return kept


def second_modulus(weights: np.ndarray) -> float:
    """The modulus of the eigenvalue that is second in modulus.

    >>> round(second_modulus(Topology(Complete(), 5).weights(0)), 12)
    0.0
    """
    return float(np.sort(np.abs(np.linalg.eigvals(weights)))[-2])


def connected(graph: nx.Graph) -> bool:
    """Whether each node reaches each other one along the edges."""
    test = nx.is_strongly_connected if graph.is_directed() else nx.is_connected
    return bool(test(graph))


def _read(file: Path, peers: int) -> list[tuple[int, int]]:
    where = f"{_WHERE}.file"
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {file}: {error}", where=where, hint="name a CSV file of edges"
        ) from None
    edges = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        ends = [end.strip() for end in line.split(",")]
        if len(ends) != 2 or not all(end.isascii() and end.isdecimal() for end in ends):
            raise ConfigError(
                f"line {number} of {file} is not an edge: {line[:60]!r}",
                where=where,
                hint="write two client numbers a line, such as 0,1",
            )
        i, j = (int(end) for end in ends)
        if i == j or max(i, j) >= peers:
            what = "joins a peer with itself" if i == j else f"names peer {max(i, j)}"
            raise ConfigError(
                f"line {number} of {file} {what}; the {peers} peers are numbered from 0",
                where=where,
                hint="remove the line, or correct it",
            )
        edges.append((i, j))
    return edges
