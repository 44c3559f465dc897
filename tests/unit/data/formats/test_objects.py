from __future__ import annotations

import numpy as np
import pytest

from fedlens.data.diagnostics import Findings
from fedlens.data.formats.detection import RawBox, RawBoxes, check_boxes, unknown

LABELS = {"cat": 0, "dog": 1}


def raw(*corners: float, category: str | int = "cat", line: int = 1) -> RawBox:
    return RawBox(f"a.txt, line {line}", category, corners, corners)  # type: ignore[arg-type]


def checked(
    *boxes: RawBox, width: int = 20, height: int = 10
) -> tuple[list[list[float]], list[int], list[str]]:
    findings = Findings()
    found, labels, rows = check_boxes(RawBoxes.of([boxes]), np.array([[width, height]]), LABELS, findings)
    assert found.dtype == np.float32
    assert found.shape == (len(labels), 4)
    assert labels.dtype == np.int64
    assert rows.tolist() == [0] * len(labels)
    assert all(finding.example for finding in findings)
    return found.tolist(), labels.tolist(), [str(finding) for finding in findings]


def test_a_box_that_fits_is_left_as_it_is() -> None:
    whole, inner = raw(0, 0, 20, 10), raw(1.5, 2.25, 3, 4, category="dog")
    assert checked(whole, inner) == ([[0, 0, 20, 10], [1.5, 2.25, 3, 4]], [0, 1], [])


def test_no_boxes_are_no_fault() -> None:
    assert checked() == ([], [], [])


@pytest.mark.parametrize(
    ("box", "said"),
    [
        (raw(5, 5, 5, 8), "its box 5, 5, 5, 8 has no area; draw it again, or remove the object."),
        (raw(5, 8, 9, 8), "its box 5, 8, 9, 8 has no area; draw it again, or remove the object."),
        (raw(9, 5, 5, 8), "its box 9, 5, 5, 8 has no area; draw it again, or remove the object."),
        # Thinner than single precision can tell apart there.
        (raw(19, 5, 19 + 1e-9, 8), "its box 19, 5, 19, 8 has no area; draw it again, or remove the object."),
        (
            raw(float("nan"), 5, 8, 8),
            "its box nan, 5, 8, 8 has a number that is not finite; draw it again, or remove the object.",
        ),
        (
            raw(1, 5, 8, float("inf")),
            "its box 1, 5, 8, inf has a number that is not finite; draw it again, or remove the object.",
        ),
        (
            raw(20, 2, 25, 8),
            "its box 20, 2, 25, 8 is outside the image of 20x10; correct it, or remove the object.",
        ),
        (
            raw(2, -8, 5, 0),
            "its box 2, -8, 5, 0 is outside the image of 20x10; correct it, or remove the object.",
        ),
        (
            raw(1e300, 2, 2e300, 8),
            "its box 1e+300, 2, 2e+300, 8 is outside the image of 20x10; correct it, or remove the object.",
        ),
        (raw(1, 2, 3, 4, category="dgo"), "its class 'dgo' is unknown; did you mean 'dog'."),
        (raw(1, 2, 3, 4, category=7), "its class 7 is unknown; known: cat, dog."),
    ],
)
def test_a_box_at_fault_is_named_and_left_out(box: RawBox, said: str) -> None:
    good = raw(1, 1, 2, 2, category="dog", line=2)
    assert checked(box, good) == ([[1, 1, 2, 2]], [1], [f"a.txt, line 1: {said}"])


@pytest.mark.parametrize(
    ("box", "cut", "pixels"),
    [
        (raw(-1, 2, 5, 8), [0, 2, 5, 8], "1 pixel"),
        (raw(1, -3, 5, 8), [1, 0, 5, 8], "3 pixels"),
        (raw(1, 2, 22.5, 8), [1, 2, 20, 8], "2.5 pixels"),
        (raw(1, 2, 5, 40), [1, 2, 5, 10], "30 pixels"),
        (raw(-5, -4, 30, 12), [0, 0, 20, 10], "10 pixels"),
    ],
)
def test_a_box_partly_outside_is_named_and_cut_off(box: RawBox, cut: list[float], pixels: str) -> None:
    found, labels, said = checked(box)
    assert (found, labels) == ([cut], [0])
    numbers = ", ".join(f"{n:g}" for n in box.written)  # type: ignore[str-format]
    assert said == [
        f"a.txt, line 1: its box {numbers} extends {pixels} beyond the image of 20x10; "
        "correct it, or skip errors to cut it off at the edge."
    ]


def test_less_than_a_pixel_outside_is_rounding() -> None:
    assert checked(raw(-0.99, 0, 20.99, 10.5)) == ([[0, 0, 20, 10]], [0], [])


def test_the_same_object_twice_counts_once() -> None:
    one, again = raw(1, 2, 3, 4), raw(1, 2, 3, 4, line=2)
    other = raw(1, 2, 3, 4, category="dog", line=3)
    found, labels, said = checked(one, again, other)
    assert (found, labels) == ([[1, 2, 3, 4]] * 2, [0, 1])
    assert said == [
        "a.txt, line 2: its box 1, 2, 3, 4 is there twice, with the same class; remove one of the two."
    ]


def test_all_faults_are_told_at_once_and_in_order() -> None:
    boxes = [raw(1, 1, 1, 1, line=1), raw(30, 1, 40, 2, line=2), raw(1, 1, 2, 2, category="x", line=3)]
    _, _, said = checked(*boxes)
    assert [sentence.split(":")[0] for sentence in said] == [f"a.txt, line {k}" for k in (1, 2, 3)]


def test_many_classes_are_not_all_named() -> None:
    assert unknown(40, range(30)) == "known: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 18 more"
    words = [f"class {k}" for k in range(30)]
    assert unknown("class 31", words).startswith("did you mean 'class ")
    assert unknown("???", words).endswith("class 11 and 18 more")
    assert unknown("cat", []) == "no class is known"
