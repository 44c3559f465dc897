"""The data of a partition's figures, computed once for the page (plotly) and for picture files (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedlens.data.partition.census import Census
from fedlens.data.partition.partition import Partition
from fedlens.report.downsample import PartitionSample, ranked, sample_partition

EMD_BINS = 40  # of the whole range, 0 to 2, so that the histograms of two partitions can be laid side by side
NAMED_AT_MOST = 20  # clients in a matrix with their names, in their own order
_BARS, _BARS_OF_MANY = 100, 60
_COLORS_AT_MOST = 100
_CELLS = (300, 250)  # at most so many clients, and classes or groups of them, in a matrix
_GOLDEN = (math.sqrt(5) - 1) / 2
_UNITS = {
    "brightness": "factor",
    "contrast": "factor",
    "blur": "standard deviation, pixels",
    "rotation": "degrees, counter-clockwise",
    "noise": "standard deviation, 1 is black to white",
}


@dataclass(frozen=True)
class RankCurve:
    """Examples or classes of each client, from the largest down (hsu2020, figures 2b, 2c, 3).

    Zeros are left out: logarithmic axes have no place for them.
    """

    name: str
    clients: int
    ranks: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True)
class EmdHistogram:
    """How many clients are how far from the population (hsu2020, figure 4, top row).

    Args:
        counts: int64 [bins].
        edges: float64 [bins + 1].
        mean: weighted by the clients' sizes, NaN where no client has a class.
        unknown: clients without any class.
    """

    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    mean: float
    unknown: int

    @property
    def centers(self) -> NDArray[np.float64]:
        return (self.edges[:-1] + self.edges[1:]) / 2

    @property
    def mean_label(self) -> str:
        return f"weighted mean {round(self.mean, 3):.3g}"

    @property
    def mean_align(self) -> str:
        """On which side of the line the label begins, so that it stays inside the axes."""
        return "left" if self.mean < 0.6 else "right" if self.mean > 1.4 else "center"


@dataclass(frozen=True)
class FeatureStrip:
    """One dot per client: its feature, and a height that keeps neighbouring dots apart."""

    name: str
    unit: str
    ids: Sequence[str]
    values: NDArray[np.float64]
    heights: NDArray[np.float64]


def class_bars(partition: Partition, census: Census) -> PartitionSample:
    """The clients of the class bars: all of up to 100 clients, else 60 of them."""
    clients = _BARS if len(partition) <= _BARS else _BARS_OF_MANY
    return sample_partition(partition, census, clients, _COLORS_AT_MOST)


def class_matrix(partition: Partition, census: Census) -> PartitionSample:
    """The cells of the matrix of clients and classes: few clients in their own order, more by their main class."""
    sample = sample_partition(partition, census, *_CELLS)
    return sample if len(sample.ids) <= NAMED_AT_MOST else sample.by_main_class()


def rank_curves(partition: Partition) -> list[RankCurve]:
    """The curve of examples, and that of classes where the classes were counted."""
    sizes, census = partition.sizes(), partition.census
    series = {"examples": sizes} | ({} if census is None else {"classes": census.classes_per_client()})
    return [RankCurve(name, len(sizes), *ranked(values[values > 0])) for name, values in series.items()]


def emd_histogram(census: Census) -> EmdHistogram:
    """The histogram of the clients' earth mover's distances."""
    distances = census.client_emds()
    known = distances[~np.isnan(distances)]
    counts, edges = np.histogram(known, bins=EMD_BINS, range=(0.0, 2.0))
    return EmdHistogram(counts, edges, census.emd(), len(distances) - len(known))


def feature_strips(partition: Partition) -> list[FeatureStrip]:
    """One strip per feature by which the clients' images differ."""
    heights = np.arange(len(partition), dtype=np.float64) * _GOLDEN % 1
    return [
        FeatureStrip(name, _UNITS.get(name, ""), partition.ids, values, heights)
        for name, values in partition.features.items()
    ]
