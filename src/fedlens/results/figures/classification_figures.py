"""The figures of a classifier on the test data, from its summed measurements, for pages and picture files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlens.base.format import capitalized, count, many, percent
from fedlens.results.figures.chart import Axis, Cells, Panel, Series, named_axis, value_axis

CLUSTERED_ABOVE = 30  # classes; fewer stay in their order
_CELLS = 200  # rows of a heat map; more classes share one


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """A confusion matrix as it is drawn.

    Args:
        counts: int64 [rows, rows], truth in rows and answers in columns.
        members: the classes of each row and column, positions in the list of classes.
        clustered: whether the rows are in clustered order.
    """

    counts: NDArray[np.int64]
    members: Sequence[Sequence[int]]
    clustered: bool

    @classmethod
    def of(cls, confusion: NDArray[np.int64]) -> ConfusionMatrix:
        """The matrix of all classes: above 30 in clustered order, above 200 in groups of neighbouring classes.

        >>> ConfusionMatrix.of(np.eye(1000, dtype=np.int64)).counts.shape
        (200, 200)
        """
        classes = len(confusion)
        clustered = classes > CLUSTERED_ABOVE
        order = clustered_order(confusion) if clustered else list(range(classes))
        each = math.ceil(classes / _CELLS)
        starts = list(range(0, classes, each))
        counts = confusion[np.ix_(order, order)]
        if each > 1:
            counts = np.add.reduceat(np.add.reduceat(counts, starts, axis=0), starts, axis=1)
        return cls(counts, [order[start : start + each] for start in starts], clustered)

    @property
    def shares(self) -> NDArray[np.float64]:
        """float64 [rows, rows]: the share of each answer among the examples of a row; 0 in a row without examples."""
        return row_shares(self.counts)


def row_shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Counts divided by the sum of their row, 0 in an empty row.

    >>> row_shares(np.array([[3, 1], [0, 0]])).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    totals = counts.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    return shares


def clustered_order(confusion: NDArray[np.int64]) -> list[int]:
    """The classes in an order in which classes that are confused with each other are neighbours.

    Average linkage on the distance 1 - s / max s, where s is the symmetrized matrix of shares, (P + P^T) / 2.

    >>> confusion = np.diag([9, 9, 9, 9])
    >>> confusion[0, 2] = confusion[3, 1] = 5
    >>> clustered_order(confusion)
    [0, 2, 1, 3]
    """
    from scipy.cluster.hierarchy import leaves_list, linkage  # here, because most pages do not need it
    from scipy.spatial.distance import squareform

    shares = row_shares(confusion)
    similar = (shares + shares.T) / 2
    np.fill_diagonal(similar, 0.0)
    largest = similar.max(initial=0.0)
    if len(confusion) < 3 or largest == 0.0:
        return list(range(len(confusion)))
    distances = 1.0 - similar / largest
    np.fill_diagonal(distances, 0.0)
    order: list[int] = leaves_list(linkage(squareform(distances), "average")).tolist()
    return order


def confused_pairs(confusion: NDArray[np.int64], most: int) -> list[tuple[int, int, int]]:
    """(truth, answer, count) of the most frequent confusions, the most frequent first; equal ones by class.

    >>> confused_pairs(np.array([[5, 2, 0], [7, 1, 0], [0, 2, 9]]), 2)
    [(1, 0, 7), (0, 1, 2)]
    """
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    truths, answers = wrong.nonzero()
    counts = wrong[truths, answers]
    order = np.lexsort((answers, truths, -counts))[:most]
    return [(int(truths[k]), int(answers[k]), int(counts[k])) for k in order]


COUNTED_UP_TO = 15  # classes whose counts are written into the cells
KIND = "classification"
_BARS = Axis(values="share", limits=(0.0, 1.01))  # bars stand on 0


@dataclass(frozen=True, eq=False)
class ClassResults:
    """How a classifier did on the test images of each class.

    Args:
        classes: their names.
        examples, correct: int64 [classes].
        confusion: int64 [classes, classes], truth in rows and answers in columns; None if it was not recorded.
    """

    classes: Sequence[str]
    examples: NDArray[np.int64]
    correct: NDArray[np.int64]
    confusion: NDArray[np.int64] | None

    @classmethod
    def of(cls, classes: Sequence[str], sums: Mapping[str, NDArray[Any]]) -> ClassResults:
        """From the sums of the task: `confusion`, or `class_examples` and `class_correct`.

        Raises `KeyError` if they are missing, and `ValueError` if their shapes do not fit the classes.

        >>> results = ClassResults.of(("cat", "dog"), {"confusion": np.array([[3, 1], [0, 0]])})
        >>> results.accuracy.tolist()
        [0.75, nan]
        """
        counted = [sums[name] for name in ("confusion", "class_examples", "class_correct") if name in sums]
        if any(array.dtype != np.int64 or (array < 0).any() for array in counted):
            raise ValueError("counts of classes are not whole numbers from 0 on")
        confusion = sums.get("confusion")
        if confusion is not None:
            if confusion.shape != (len(classes), len(classes)):
                raise ValueError(
                    f"'confusion' is {list(confusion.shape)} for {many(len(classes), 'class', 'classes')}"
                )
            return cls(classes, confusion.sum(axis=1), confusion.diagonal().copy(), confusion)
        examples, correct = sums["class_examples"], sums["class_correct"]
        if not examples.shape == correct.shape == (len(classes),):
            raise ValueError(
                f"'class_examples' is {list(examples.shape)} for {many(len(classes), 'class', 'classes')}"
            )
        return cls(classes, examples, correct, None)

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """float64 [classes]: the share of correct answers, NaN for a class without test images."""
        empty = np.full(len(self.examples), np.nan)
        some = self.examples > 0
        shares: NDArray[np.float64] = np.divide(self.correct, self.examples, out=empty, where=some)
        return shares

    def order(self) -> NDArray[np.int64]:
        """The classes with test images, the least accurate first; of equal ones, the one with more images first."""
        order = np.lexsort((-self.examples, self.accuracy))
        return order[self.examples[order] > 0]


@dataclass(frozen=True, eq=False)
class Calibration:
    """The confidence of a classifier in equal bins from 0 to 1, and how often it was right.

    Args:
        counts, correct: int64 [bins], the answers of each confidence, and those that were right.
        confidence: float64 [bins], the summed confidence.
    """

    counts: NDArray[np.int64]
    correct: NDArray[np.int64]
    confidence: NDArray[np.float64]

    @classmethod
    def of(cls, sums: Mapping[str, NDArray[Any]]) -> Calibration:
        """From the sums of the task. Raises `KeyError` if they are missing, and `ValueError` if they do not fit."""
        parts = [sums[name] for name in ("bin_count", "bin_correct", "bin_confidence")]
        if len({part.shape for part in parts}) > 1 or parts[0].ndim != 1 or not parts[0].size:
            raise ValueError("the calibration bins differ in number")
        if not all(np.isfinite(part).all() for part in parts):
            raise ValueError("the calibration bins are not finite")
        return cls(*parts)

    @property
    def error(self) -> float:
        """The expected calibration error: sum_b n_b / n |accuracy_b - confidence_b| (Guo et al. 2017, Eq. 3).

        >>> Calibration(np.array([0, 4]), np.array([0, 3]), np.array([0.0, 3.8])).error
        0.2
        """
        total = int(self.counts.sum())
        gaps = np.abs(self.correct - self.confidence)
        return round(float(gaps.sum()) / total, 12) if total else float("nan")


def confusion_map(results: ClassResults, unit: str = "image") -> Panel | None:
    """The confusion matrix, each row divided by its sum; None if it was not recorded.

    Args:
        unit: what is counted: images, or the pixels of masks, whose counts are too long for the cells.
    """
    if results.confusion is None:
        return None
    matrix, classes = ConfusionMatrix.of(results.confusion), results.classes
    grouped = len(matrix.members) < len(classes)
    names = ["" if grouped else classes[row[0]] for row in matrix.members]
    if grouped:
        names = [f"{classes[row[0]]} to {classes[row[-1]]}" for row in matrix.members]
        names = [
            f"{name}, {many(len(row), 'class', 'classes')}"
            for name, row in zip(names, matrix.members, strict=True)
        ]
    notes = []
    if matrix.clustered:
        notes.append("classes that are confused with each other are neighbours")
    if grouped:
        notes.append(f"{len(matrix.members[0])} classes a cell")
    size = f"{len(classes)} classes" + (", clustered" if matrix.clustered else "")
    totals = matrix.counts.sum(axis=1)
    named = len(classes) <= CLUSTERED_ABOVE
    shown = len(names) if named else 0
    cells = Cells(
        matrix.shares,
        [f"{name} ({count(total)} {unit}s)" for name, total in zip(names, totals, strict=True)],
        names,
        f"share of the {unit}s",
        (0.0, 1.0),
        "share",
        0.2 if named else 0.06,
        counts=matrix.counts if len(classes) <= COUNTED_UP_TO and unit == "image" else None,
    )
    return Panel(
        title="; ".join(["Confusion matrix", *notes]),
        about=f"Heat map of the answers for each true class, {size}.",
        x=named_axis(Axis("answer"), names, "answer", shown),
        y=named_axis(Axis("true class"), names, f"true class ({size})", shown),
        cells=cells,
        shape="square",
    )


def reliability(calibration: Calibration) -> Panel:
    """The reliability diagram: the accuracy of the answers of each confidence, and the diagonal."""
    bins, counts = len(calibration.counts), calibration.counts
    centers = ((np.arange(bins) + 0.5) / bins).tolist()
    some = np.maximum(counts, 1)
    accuracy = np.where(counts > 0, calibration.correct / some, 0.0)
    confidence = np.where(counts > 0, calibration.confidence / some, 0.0)
    texts = [
        f"{k / bins:.2f} to {(k + 1) / bins:.2f}: {many(int(n), 'image')}"
        + (f", mean confidence {percent(c)}" if n else "")
        for k, (n, c) in enumerate(zip(counts.tolist(), confidence.tolist(), strict=True))
    ]
    error = percent(calibration.error)
    return Panel(
        title=f"Reliability diagram; expected calibration error {error}",
        about=f"Bars of the accuracy by confidence, in {bins} bins. The expected calibration error is {error}.",
        x=Axis("confidence", "share", limits=(0.0, 1.0)),
        y=Axis("accuracy", "share", limits=(0.0, 1.01)),
        series=[
            Series(
                centers,
                accuracy.tolist(),
                "accuracy",
                "bar",
                texts=texts,
            ),
            Series([0.0, 1.0], [0.0, 1.0], "perfect calibration", color="#d66a00", dash="dash", width=1.5),
        ],
    )


def class_accuracies(results: ClassResults) -> Panel:
    """The accuracy of each class, the lowest first."""
    order = results.order()
    mean = float(np.mean(results.accuracy[order])) if len(order) else float("nan")
    return sorted_classes(
        "accuracy", mean, results.classes, order, results.accuracy, results.examples, "image"
    )


def sorted_classes(
    metric: str,
    mean: float,
    classes: Sequence[str],
    order: NDArray[np.int64],
    values: NDArray[np.float64],
    numbers: NDArray[np.int64],
    unit: str,
) -> Panel:
    """A share of each class in a given order: bars with names up to 30 classes, a line above."""
    few = len(order) <= CLUSTERED_ABOVE
    names, shares = [classes[k] for k in order], values[order].tolist()
    texts = [f"{name}, {many(int(n), unit)}" for name, n in zip(names, numbers[order], strict=True)]
    ranks = list(range(1, len(order) + 1))
    about = f"No class has {unit}s."
    if names:
        ends = [f"{names[k]} with {percent(shares[k])}" for k in (0, -1)]
        about = f"The {metric} of each class in rising order, from {ends[0]} to {ends[1]}."
    x = Axis("" if few else "class, by rank", "count", limits=(0.4, len(order) + 0.6))
    return Panel(
        f"{capitalized(metric)} of each class, sorted; mean {percent(mean)}",
        about,
        replace(x, ticks=ranks, names=names) if few else x,
        _BARS if few else value_axis(metric, shares),
        [Series(ranks, shares, kind="bar" if few else "line", texts=texts)],
    )
