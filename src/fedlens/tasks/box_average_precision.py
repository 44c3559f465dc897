"""Average precision of boxes as COCO defines it, from rows that merge over batches, clients and workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlens.vision.box_batch import BoxBatch

# As pycocotools computes them, to the last bit: a recall of 0.57 is below its 58th level.
THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MOST = 100  # detections of one class in one image
_BITS = 1 << np.arange(len(THRESHOLDS))
_PAIRS = 2**20  # of a detection and a true box, whose overlap is computed at once

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Curve:
    """Precision and recall of one class at each score, at each of the ten thresholds.

    Attributes:
        scores: float32 [k], the different scores in descending order.
        hits: int64 [10, k], matched detections of at least each score.
        detections: int64 [k], detections of at least each score.
        truths: the number of true boxes.
    """

    scores: NDArray[np.float32]
    hits: Ints
    detections: Ints
    truths: int

    def recall(self) -> Floats:
        """float64 [10, k]: matched detections / true boxes."""
        return self.hits / self.truths

    def precision(self) -> Floats:
        """float64 [10, k]: matched detections / detections."""
        return self.hits / self.detections

    def average_precision(self) -> Floats:
        """float64 [10]: at each threshold, the mean over 101 recalls of the best precision at that recall or above.

        Equal scores are one step of the curve, so the order of detections does not matter. 0 without a detection.
        """
        return np.array([best.sum() / len(RECALLS) for best in self._at_recalls()])

    def precision_at_recalls(self) -> Floats:
        """float64 [101]: at a threshold of 0.5, the best precision at each recall 0, 0.01, ..., 1 or above; else 0."""
        found = np.zeros(len(RECALLS))
        reached = self._at_recalls()[0]
        found[: len(reached)] = reached
        return found

    def _at_recalls(self) -> list[Floats]:
        """At each threshold, the best precision at each recall or above, of the recalls that are reached."""
        if not len(self.scores):
            return [np.empty(0)] * len(THRESHOLDS)
        best = np.maximum.accumulate(self.precision()[:, ::-1], axis=1)[:, ::-1]
        places = [np.searchsorted(recall, RECALLS, side="left") for recall in self.recall()]
        return [one[at[at < len(one)]] for one, at in zip(best, places, strict=True)]


def curve(scores: NDArray[np.float32], bits: NDArray[np.int16], truths: int) -> Curve:
    """The curve of one class from its detections in any order.

    Args:
        scores: float32 [m].
        bits: int16 [m], see `matched`.
        truths: the number of true boxes of the class.

    >>> one = curve(np.array([0.9, 0.5, 0.5], np.float32), np.array([1, 1, 0], np.int16), 2)
    >>> one.precision()[0].tolist(), float(one.average_precision()[0].round(4))
    ([1.0, 0.6666666666666666], 0.835)
    """
    order = np.argsort(-scores, kind="stable")
    scores, bits = scores[order], bits[order]
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True)) if len(scores) else np.empty(0, int)
    hits = ((bits[None] & _BITS[:, None]) != 0).cumsum(axis=1, dtype=np.int64)
    return Curve(scores[last], hits[:, last], last + 1, truths)


def curves(
    labels: NDArray[np.int64], scores: NDArray[np.float32], bits: NDArray[np.int16], truths: Ints
) -> dict[int, Curve]:
    """The curve of each class that has a true box, by class; `truths` int64 [classes] counts true boxes."""
    order = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[order], np.arange(len(truths) + 1))
    parts = {at: order[starts[at] : starts[at + 1]] for at in np.flatnonzero(truths).tolist()}
    return {at: curve(scores[part], bits[part], int(truths[at])) for at, part in parts.items()}


def matched(
    boxes: Tensor, labels: Tensor, scores: Tensor, image: Tensor, truth: BoxBatch
) -> tuple[Tensor, Tensor, Tensor]:
    """The detections that COCO counts, and at which thresholds each has found a true box.

    Of each image and class the 100 detections with the highest scores count, of equal ones the first. At each
    threshold t, in descending order of score, a detection takes the free true box of its image and class that it
    overlaps most, if their intersection over union is at least t; of equal overlaps the last (pycocotools,
    `COCOeval.evaluateImg`).

    Args:
        boxes: float [m, 4], left, top, right, bottom.
        labels: int64 [m].
        scores: float [m].
        image: int64 [m], the image of each detection.
        truth: the true boxes.

    Returns the classes int64 [k], the scores float32 [k], and int16 [k], whose bit j says whether the detection has
    a box at the threshold 0.5 + 0.05 j.

    >>> truth = BoxBatch(torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([2]), torch.tensor([0]), 1)
    >>> found = torch.tensor([[0.0, 0, 10, 6], [0, 0, 10, 10]])
    >>> labels, image = torch.tensor([2, 2]), torch.tensor([0, 0])
    >>> [part.tolist() for part in matched(found, labels, torch.tensor([0.75, 0.5]), image, truth)]
    [[2, 2], [0.75, 0.5], [7, 1016]]
    """
    found, own = _on_cpu(boxes), _on_cpu(truth.boxes)
    classes = 1 + max((int(part.max()) for part in (labels, truth.labels) if len(part)), default=0)
    key = (image * classes + labels).cpu().numpy()
    kept = scores.detach().float().cpu().numpy()
    order = np.lexsort((-kept, key))  # stable
    key = key[order]
    rank = np.arange(len(key)) - np.searchsorted(key, key)  # in its image and class
    order, key = order[rank < MOST], key[rank < MOST]
    true_key = (truth.image * classes + truth.labels).cpu().numpy()
    by_key = np.argsort(true_key, kind="stable")
    bits = _greedy(found[order], key, own[by_key], true_key[by_key])
    return (
        torch.from_numpy(key % classes),
        torch.from_numpy(kept[order]),
        torch.from_numpy(bits.astype(np.int16)),
    )


def _greedy(found: Floats, key: Ints, own: Floats, true_key: Ints) -> Ints:
    """int64 [m]: the bits of detections that are sorted by `key`, the image and class, and by score within it."""
    bits = np.zeros(len(found), np.int64)
    detection, true, overlap = _overlapping(found, key, own, true_key)
    if not len(detection):
        return bits
    taken = np.zeros((len(own), len(THRESHOLDS)), bool)
    enough = np.minimum(THRESHOLDS, 1 - 1e-10)
    # Only detections that overlap a box take a turn. Those of one turn are in different images or classes.
    turns = np.zeros(len(found), np.int64)
    active = np.unique(detection)
    turns[active] = np.arange(len(active)) - np.searchsorted(key[active], key[active])
    # The pairs in order of turn, detection, overlap and true box; the last free one of a detection is the best.
    order = np.lexsort((true, overlap, detection, turns[detection]))
    detection, true, overlap = detection[order], true[order], overlap[order]
    turn = turns[detection]
    edges = np.searchsorted(turn, np.arange(turn[-1] + 2))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        at, box = detection[start:stop], true[start:stop]
        free = (overlap[start:stop, None] >= enough) & ~taken[box]
        ends = np.flatnonzero(np.append(at[1:] != at[:-1], True))
        place = np.where(free, np.arange(len(at))[:, None], -1)
        best = np.maximum.reduceat(place, np.append(0, ends[:-1] + 1), axis=0)  # [detections, 10]
        which, level = np.nonzero(best >= 0)
        taken[box[best[which, level]], level] = True
        np.add.at(bits, at[ends][which], _BITS[level])
    return bits


def _overlapping(found: Floats, key: Ints, own: Floats, true_key: Ints) -> tuple[Ints, Ints, Floats]:
    """The pairs of a detection and a true box of the same key that overlap by at least half: positions and overlap."""
    starts = np.searchsorted(true_key, key)
    counts = np.searchsorted(true_key, key, side="right") - starts
    ends = counts.cumsum()
    parts: list[tuple[Ints, Ints, Floats]] = []
    begin = 0
    while begin < len(found):
        before = int(ends[begin] - counts[begin])
        end = max(begin + 1, int(np.searchsorted(ends, before + _PAIRS, side="right")))
        some = counts[begin:end]
        at = np.repeat(np.arange(begin, end), some)
        true = np.arange(len(at)) - np.repeat(some.cumsum() - some, some) + starts[at]
        overlap = _intersection_over_union(found[at], own[true])
        near = overlap >= THRESHOLDS[0]
        parts.append((at[near], true[near], overlap[near]))
        begin = end
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))  # type: ignore[return-value]


def _intersection_over_union(one: Floats, other: Floats) -> Floats:
    """float64 [m]: of the boxes [m, 4], one by one; 0 where they do not meet."""
    meeting = np.minimum(one[:, 2:], other[:, 2:]) - np.maximum(one[:, :2], other[:, :2])
    shared = np.where((meeting > 0).all(axis=1), meeting.prod(axis=1), 0.0)
    areas = (one[:, 2:] - one[:, :2]).prod(axis=1) + (other[:, 2:] - other[:, :2]).prod(axis=1)
    return shared / np.where(shared > 0, areas - shared, 1.0)


def _on_cpu(boxes: Tensor) -> Floats:
    values: Floats = boxes.detach().cpu().double().numpy()
    return values


def best_f1(scores: NDArray[np.float32], bits: NDArray[np.int16], truths: int) -> dict[str, float]:
    """The largest F1 over all scores, at an overlap of 0.5 and of all classes together; nothing without a true box.

    With N true boxes, D(s) detections of a score of at least s, and H(s) of them matched: `precision` H / D, `recall`
    H / N, `f1` 2 H / (D + N), and `best_score`, the s at which F1 is largest, of equal ones the largest. Detections of
    a class without a true box count as wrong ones.

    >>> best_f1(np.array([0.9, 0.5, 0.3], np.float32), np.array([1, 0, 0], np.int16), 1)["precision"]
    1.0
    """
    if not truths:
        return {}
    whole = curve(scores, bits, truths)
    if not len(whole.scores):
        return {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    f1 = 2 * whole.hits[0] / (whole.detections + whole.truths)
    at = int(f1.argmax())
    return {
        "precision": float(whole.precision()[0, at]),
        "recall": float(whole.recall()[0, at]),
        "f1": float(f1[at]),
        "best_score": float(whole.scores[at]),
    }
