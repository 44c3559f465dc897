"""The column `label` of a table: names of classes, or their numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path

from fedlens.core.errors import nearest
from fedlens.data.diagnostics import Findings
from fedlens.data.formats.cells import is_number, missing
from fedlens.data.formats.clients import listed

_MOST = 100  # classes that a hint lists


def classes_in_cells(texts: Sequence[str], table: Path, findings: Findings) -> list[str]:
    """The classes that a column names: sorted names, or the whole numbers from 0 on.

    Numbers of which some are skipped, below 0 or not whole are a finding of the whole set; they are the names
    then.

    >>> classes_in_cells(["2", "0", "1"], Path("t.csv"), Findings())
    ['0', '1', '2']
    """
    different = {text for text in texts if missing(text) is None}
    if not all(_is_whole(text) or is_number(text) for text in different):
        return sorted(different)
    by_size = sorted(different, key=lambda text: (float(text), text))
    if broken := [text for text in by_size if not _is_whole(text)]:
        what = f"the labels are numbers, and not whole ones: {listed(broken)}"
    else:
        numbers = sorted({int(text) for text in by_size})
        if numbers == list(range(len(numbers))):
            return [str(number) for number in numbers]
        what = f"the label {numbers[0]} is below 0" if numbers[0] < 0 else _skipped(numbers)
    names = as_setting(by_size) if len(by_size) <= _MOST else "name each in data.dataset.classes"
    findings.add(table, what, f"number them from 0 on, or take them as names: {names}", example=False)
    return by_size


def _skipped(numbers: Sequence[int]) -> str:
    there = set(numbers)
    # Labels may be ids of many digits: what is between them is counted, not walked through.
    first = islice((str(number) for number in count() if number not in there), 3)
    skipped = listed(list(first)[: numbers[-1] + 1 - len(there)], numbers[-1] + 1 - len(there))
    return f"the labels skip {skipped}, and go up to {numbers[-1]}"


def as_setting(classes: Sequence[str]) -> str:
    """The setting that names the classes, to be copied as it stands.

    >>> as_setting(["0", "2"])
    'data.dataset.classes = ["0", "2"]'
    """
    return f"data.dataset.classes = {json.dumps(classes, ensure_ascii=False)}"


def labels_of_cells(
    texts: Sequence[str], where: Sequence[str], classes: Sequence[str], bad: set[int], findings: Findings
) -> list[int]:
    """The position in `classes` that each cell names or is; -1 where it does neither, and why is in `findings`.

    A whole number is a position only where no class is named by a number: otherwise it would be a name gone astray.

    >>> labels_of_cells(["dog", "0"], ["line 2", "line 3"], ["cat", "dog"], set(), Findings())
    [1, 0]
    """
    places = {name: at for at, name in enumerate(classes)}
    positions = not any(map(_is_whole, classes))
    numbers = []
    for row, text in enumerate(texts):
        at = places.get(text)
        if at is None and positions and text.isdecimal() and int(text) < len(classes):
            at = int(text)
        if at is None and row not in bad:
            if fault := missing(text):
                findings.add(where[row], f"the cell 'label' {fault}", "say the class of the image")
            else:
                findings.add(where[row], f"there is no class '{text}'", nearest(text, classes))
            bad.add(row)
        numbers.append(-1 if at is None else at)
    return numbers


def _is_whole(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]+", text) is not None
