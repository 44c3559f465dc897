import numpy as np
import pytest
from PIL import Image

from fedlens.data.boxes import Boxes, placed
from fedlens.data.images import ImageFiles, Paths


def boxes_of(*rows: list[list[float]]) -> Boxes:
    corners = np.array([box for row in rows for box in row], np.float32).reshape(-1, 4)
    return Boxes(corners, np.arange(len(corners)), np.cumsum([0, *map(len, rows)]))


def test_by_hand() -> None:
    given = boxes_of([[0, 0, 20, 10], [4, 2, 8, 6]], [], [[1, 2, 3, 4]])
    sizes = np.array([[20, 10], [7, 7], [10, 20]])
    padded = placed(given, sizes, 20, 20, "pad")
    # 20x10 as it is, 5 rows of filling above; 10x20 as it is, 5 columns left of it.
    assert padded.boxes.boxes.tolist() == [[0, 5, 20, 15], [4, 7, 8, 11], [6, 2, 8, 4]]
    assert (padded.boxes.offsets.tolist(), padded.boxes.labels.tolist()) == ([0, 2, 2, 3], [0, 1, 2])
    stretched = placed(given, sizes, 20, 20, "stretch")
    assert stretched.boxes.boxes.tolist() == [[0, 0, 20, 20], [4, 4, 8, 12], [2, 2, 6, 4]]
    cropped = placed(given, sizes, 20, 20, "crop")
    # Twice as large, and 10 columns (rows) gone on each side.
    assert cropped.boxes.boxes.tolist() == [[0, 0, 20, 20], [0, 4, 6, 12]]
    assert (cropped.boxes.offsets.tolist(), cropped.cropped, cropped.empty) == ([0, 2, 2, 2], 1, 0)
    assert cropped.kept.tolist() == [True, True, False]


def test_the_centre_decides_what_the_crop_keeps() -> None:
    # 40x10 to 10x10: columns 15 to 25 stay.
    given = boxes_of([[11, 0, 19, 10], [10, 0, 19, 10], [21, 0, 29, 10], [20, 0, 30, 10], [0, 0, 40, 10]])
    found = placed(given, np.array([[40, 10]]), 10, 10, "crop")
    assert found.kept.tolist() == [True, False, False, False, True]
    assert found.boxes.boxes.tolist() == [[0, 0, 4, 10], [0, 0, 10, 10]]
    assert found.boxes.labels.tolist() == [0, 4]
    assert found.notes("test") == ("test, objects left out because the crop cuts their centre off: 3",)


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
def test_boxes_are_cut_at_the_image_and_left_out_where_nothing_is_left(fit) -> None:
    given = boxes_of([[-5, 2, 4, 30], [3, 3, 3, 9], [8, 8, 4, 9], [10, 0, 14, 10], [2, 2, 3, 3]])
    found = placed(given, np.array([[10, 10]]), 10, 10, fit)
    assert found.boxes.boxes.tolist() == [[0, 2, 4, 10], [2, 2, 3, 3]]
    assert (found.empty, found.cropped) == (3, 0)
    assert found.notes("x") == ("x, objects left out because their box has no area in the image: 3",)


def test_nothing_stays_nothing() -> None:
    found = placed(boxes_of([], []), np.array([[3, 4], [5, 6]]), 8, 8, "pad")
    assert (len(found.boxes), found.boxes.boxes.shape, found.notes("train")) == (2, (0, 4), ())
    assert len(placed(boxes_of(), np.empty((0, 2), np.int64), 8, 8, "pad").boxes) == 0


@pytest.mark.parametrize("fit", ["pad", "crop", "stretch"])
@pytest.mark.parametrize("to", [(60, 60), (48, 96), (96, 40), (200, 200)])
def test_a_box_stays_on_what_it_is_around(tmp_path, fit, to: tuple[int, int]) -> None:
    """A white rectangle on black: the bright pixels of the delivered image fill the box that is delivered."""
    rng = np.random.default_rng(0)
    corners, sizes, names = [], [], []
    for at in range(6):
        width, height = (int(side) for side in rng.integers(80, 160, 2))
        left, top = width // 2 - 20, height // 2 - 14
        pixels = np.zeros((height, width), np.uint8)
        pixels[top : top + 30, left : left + 36] = 255
        names.append(f"{at}.png")
        Image.fromarray(pixels).save(tmp_path / names[-1])
        corners.append([[left, top, left + 36, top + 30]])
        sizes.append((width, height))
    found = placed(boxes_of(*corners), np.array(sizes), *to, fit)
    images = ImageFiles(tmp_path, Paths.of(names), 1, *to, fit).take(np.arange(6))
    assert found.kept.all()
    for (left, top, right, bottom), image in zip(found.boxes.boxes.tolist(), images, strict=True):
        rows, columns = np.nonzero(image[0] >= 128)
        seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(seen, [left, top, right, bottom], atol=0.75)
