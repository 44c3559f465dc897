"""The curves of small runs on the embedded digits, as they were.

The identities say that the algorithms are right; these say that nothing changed unnoticed. Accuracies are whole
numbers of images and have to be equal. Losses may differ by 1e-5: other processors round differently (over the
instruction sets from SSE4 to AVX-512 they were seen to differ by 8e-7, and the accuracies not at all).

Where a change of results is meant: `PYTHONPATH=src:. python -m tests.golden.curves`, and say why in the commit.
"""

import json
from pathlib import Path

import pytest

from tests.golden.curves import ALGORITHMS, CONTIGUOUS, FILE, curve

KEPT = json.loads(FILE.read_text())


def test_there_is_a_curve_for_every_run() -> None:
    assert set(KEPT) == set(ALGORITHMS)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize(("file", "channels_last"), [(FILE, "auto"), (CONTIGUOUS, False)])
def test_the_curve_is_as_it_was(algorithm: str, file: Path, channels_last: bool | str, tmp_path) -> None:
    """In the default layout, and in the contiguous one, which was the only one when its curves were drawn."""
    kept = json.loads(file.read_text())[algorithm]
    drawn = curve(algorithm, tmp_path / "run", channels_last=channels_last)
    assert drawn["partition"] == kept["partition"]
    assert drawn["correct"] == kept["correct"]
    for name in ("test_loss", "local_loss"):
        assert drawn[name] == [None if v is None else pytest.approx(v, abs=1e-5) for v in kept[name]]


def test_the_curves_are_worth_keeping() -> None:
    """They learn, and no two algorithms drew the same."""
    assert all(row["correct"][-1] > 2 * row["correct"][1] for row in KEPT.values())
    assert len({tuple(row["test_loss"]) for row in KEPT.values()}) == len(KEPT)
