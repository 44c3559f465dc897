"""Images of several classes each, divided over the clients in proportions from a Dirichlet distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedlens.base.errors import ConfigError, nearest
from fedlens.data.partition.dirichlet_classwise import dirichlet_classwise
from fedlens.data.partition.drawing import check_population, streams
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.partitioner import partitioner
from fedlens.data.partition.settings import Alpha, Balance, Clients, Redraws
from fedlens.data.table import Table


@partitioner
def lda_multilabel(
    labels: Table | NDArray[Any],
    seed: int,
    *,
    clients: Clients,
    alpha: Alpha,
    minimum: Annotated[int, Field(ge=1, description="minimum number of images with a class per client")] = 1,
    redraws: Redraws = 20,
    balance: Balance = False,
    order: Annotated[
        Literal["rarest", "index"],
        Field(description="an image is assigned to the rarest class in it, or to the first by number"),
    ] = "rarest",
    ignore: Annotated[
        tuple[int | str, ...],
        Field(description="classes, by name or number, that are ignored"),
    ] = (),
) -> Partition:
    """Divides the images class by class: those that show class c, and no earlier one, by p_c ~ Dir(alpha 1).

    The LDA partition of fedcv for segmentation (7.1.2 and table 9: augmented PASCAL VOC, 4 or 8 clients, alpha 0.1,
    0.5 and 100). The paper does not say which class counts for an image with several; this is our reading:

    1. Count for each class the images that show it, once an image. Put the classes in order: the rarest first, equal
       ones by number (`order = "rarest"`), or by number (`"index"`).
    2. For each class in this order, take the images that show it and none of the classes before, and divide them over
       the clients by proportions p_c ~ Dir(alpha 1).
    3. Deal the images that show no class to the clients in a random order, the same number to each, or one more.

    So one class of an image decides, and step 2 is `dirichlet_classwise` with that class as the label: the same cuts,
    the same repair if a client is below `minimum` (step 3 adds to it), the same `balance`. On labels, one class per
    image, `order = "index"` gives the same partition.

    The rarest class comes first so that every class decides for some images, whatever the numbers of the classes are:
    of a frequent class such as "person", images are left. FedCV's published code takes the classes by number, with a
    cap, and draws again until no client is below 10: `order = "index"`, `balance = true`, `minimum = 10`. A background
    class that is in every image does no harm if it is the most frequent one, but takes all images if it is number 0
    and comes first: name it in `ignore`. The partition's census still counts the classes in `ignore`. Nothing is
    discarded.

    Raises `ConfigError` if alpha is negative or NaN, `ignore` names an unknown class, or fewer than clients * minimum
    images show a class.

    >>> table = Table.of_sets([[0, 1], [0], [0, 2], []] * 100)
    >>> p = lda_multilabel(table, 0, clients=4, alpha=0.5)
    >>> len(p.indices), int(p.sizes().min()) > 0
    (400, True)
    """
    table = Table.of(labels)
    check_population(len(table), clients)
    ignored = _numbers(ignore, table)
    decisive = _decisive(table, ignored, order)
    shown = np.flatnonzero(decisive >= 0)
    if not len(shown):
        what = "except ignored ones" if len(ignored) else "at all"
        raise ConfigError(f"no example has a class {what}", where="ignore", hint="take iid or quantity")
    owners = np.empty(len(table), np.int64)
    dealt = dirichlet_classwise(
        decisive[shown], seed, clients=clients, alpha=alpha, minimum=minimum, redraws=redraws, balance=balance
    )
    owners[shown[dealt.indices]] = dealt.owners()

    (*_, dealing) = streams(seed, 3)  # the first two are those of dirichlet_classwise
    rest = dealing.permutation(np.flatnonzero(decisive < 0))
    owners[rest] = dealing.permutation(clients)[np.arange(len(rest)) % clients]
    return Partition.of_owners(owners, clients)


def _decisive(table: Table, ignored: NDArray[np.int64], order: str) -> NDArray[np.int64]:
    """int64 [n]: the position in the order of the class that decides for each example; -1 for none."""
    width = max(1, len(table.classes))
    counts = np.bincount(np.unique(table.rows * width + table.marks) % width, minlength=width)
    place = np.empty(width, np.int64)
    place[np.argsort(counts, kind="stable") if order == "rarest" else np.arange(width)] = np.arange(width)
    place[ignored] = width
    first = np.full(len(table), width)
    np.minimum.at(first, table.rows, place[table.marks])
    return np.where(first < width, first, -1)


def _numbers(ignore: Sequence[int | str], table: Table) -> NDArray[np.int64]:
    """The numbers of classes given by name or number."""
    numbers = []
    for entry in ignore:
        if isinstance(entry, str) and entry in table.classes:
            numbers.append(table.classes.index(entry))
        elif isinstance(entry, int) and 0 <= entry < len(table.classes):
            numbers.append(entry)
        else:
            known = nearest(entry, table.classes) if isinstance(entry, str) and table.classes else None
            raise ConfigError(
                f"there is no class {entry!r} to be ignored",
                where="ignore",
                hint=known or f"take a name, or a number in 0 .. {len(table.classes) - 1}",
            )
    return np.array(numbers, np.int64)
