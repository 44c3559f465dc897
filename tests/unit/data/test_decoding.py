from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlens.base.errors import DataError
from fedlens.data.decoding import _draft, decode, fitted, placement
from tests.unit.data.pictures import pixels, smooth, write

FITS = ("crop", "pad", "stretch")


def delivered(
    path: Path, height: int, width: int, fit: str = "crop", channels: int = 3, **more
) -> np.ndarray:
    return decode(path, channels, height, width, fit, **more)


@pytest.mark.parametrize("fit", FITS)
def test_an_image_of_the_wanted_size_comes_as_it_is(tmp_path: Path, fit: str) -> None:
    image = pixels(0, 5, 7)
    found = delivered(write(tmp_path / "a.png", image), 5, 7, fit)
    np.testing.assert_array_equal(found, image.transpose(2, 0, 1))
    assert found.dtype == np.uint8


def test_crop_cuts_the_middle_out_of_the_longer_side(tmp_path: Path) -> None:
    image = pixels(1, 4, 9)
    found = delivered(write(tmp_path / "a.png", image), 4, 4)
    np.testing.assert_array_equal(found, image[:, 3:7].transpose(2, 0, 1))  # (4 - 9) // 2 = -3


def test_pad_fills_up_with_black(tmp_path: Path) -> None:
    image = pixels(2, 2, 5)
    found = delivered(write(tmp_path / "a.png", image), 5, 5, "pad")
    np.testing.assert_array_equal(found[:, 1:3], image.transpose(2, 0, 1))  # (5 - 2) // 2 = 1
    assert not found[:, :1].any()
    assert not found[:, 3:].any()


def test_halving_averages_as_bilinear_scaling_does(tmp_path: Path) -> None:
    # One row 0, 100, 200, 250; the triangle of width 2 weighs (1, 3, 3, 1) / 8, cut off and renormalized at the edge:
    # left = (3 * 0 + 3 * 100 + 200) / 7 = 71.4, right = (100 + 3 * 200 + 3 * 250) / 7 = 207.1.
    row = np.array([[0, 100, 200, 250]] * 2, np.uint8)
    found = delivered(write(tmp_path / "a.png", row), 1, 2, "stretch", channels=1)
    np.testing.assert_array_equal(found, [[[71, 207]]])


def test_stretch_scales_each_side_by_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", np.array([[10, 10], [30, 30]], np.uint8))
    found = delivered(path, 2, 6, "stretch", channels=1)
    np.testing.assert_array_equal(found[0], [[10] * 6, [30] * 6])


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((64, 48), (32, 32)),
        ((61, 37), (24, 40)),
        ((31, 90), (33, 32)),
        ((12, 12), (36, 20)),
        ((40, 8), (16, 16)),
    ],
)
def test_placement_says_where_a_marked_pixel_lands(fit: str, size: tuple, wanted: tuple) -> None:
    """The centre of brightness of a marked spot, measured and foretold."""
    (width, height), (to_width, to_height) = size, wanted
    x, y = width // 2 + 1, height // 2 - 2
    canvas = np.zeros((height, width), np.uint8)
    canvas[y - 1 : y + 2, x - 1 : x + 2] = 255
    found = np.asarray(fitted(Image.fromarray(canvas), to_height, to_width, fit), float)
    assert found.shape == (to_height, to_width)
    right, down, left, top = placement(width, height, to_width, to_height, fit)
    rows, columns = np.mgrid[0:to_height, 0:to_width] + 0.5
    mass = found.sum()
    assert mass > 0
    assert abs((columns * found).sum() / mass - ((x + 0.5) * right + left)) < 0.15
    assert abs((rows * found).sum() / mass - ((y + 0.5) * down + top)) < 0.15


def test_placement_of_hand_computed_cases() -> None:
    assert placement(500, 375, 224, 224, "crop") == (299 / 500, 224 / 375, -38.0, 0.0)  # 298.67 -> 299
    assert placement(500, 375, 224, 224, "pad") == (224 / 500, 168 / 375, 0.0, 28.0)
    assert placement(500, 375, 224, 224, "stretch") == (224 / 500, 224 / 375, 0.0, 0.0)
    assert placement(100, 1, 10, 10, "pad") == (0.1, 1.0, 0.0, 4.0)  # a side never becomes 0


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (3, 1000)])
def test_thin_images_become_the_wanted_shape(tmp_path: Path, fit: str, size: tuple) -> None:
    image = np.full((*size, 3), 200, np.uint8)
    found = delivered(write(tmp_path / "a.png", image), 6, 7, fit)
    assert found.shape == (3, 6, 7)
    assert found.max() == 200
    assert (found == 200).all() == (fit != "pad")


@pytest.mark.parametrize("fit", FITS)
def test_masks_keep_their_ids_and_are_void_where_filled_up(tmp_path: Path, fit: str) -> None:
    ids = np.array([[0, 7, 3], [3, 0, 7]], np.uint8).repeat(7, axis=0).repeat(7, axis=1)  # 14 x 21
    found = delivered(write(tmp_path / "m.png", ids), 10, 10, fit, channels=0)
    assert found.shape == (10, 10)
    expected = {0, 3, 7, 255} if fit == "pad" else {0, 3, 7}
    assert set(np.unique(found).tolist()) == expected
    if fit == "pad":  # 10 x 7, from row 1 on
        assert (found[:1] == 255).all()
        assert (found[8:] == 255).all()
        assert (found[1:8] != 255).all()


def test_masks_land_where_their_images_do(tmp_path: Path) -> None:
    """A white square in the photograph and in the mask: the same pixels afterwards, but for the soft edge."""
    photograph, mask = np.zeros((60, 90, 3), np.uint8), np.zeros((60, 90), np.uint8)
    photograph[20:40, 30:66], mask[20:40, 30:66] = 255, 1
    write(tmp_path / "i.png", photograph)
    write(tmp_path / "m.png", mask)
    for fit in FITS:
        seen = delivered(tmp_path / "i.png", 24, 20, fit)[0]
        found = delivered(tmp_path / "m.png", 24, 20, fit, channels=0)
        assert (found[seen == 255] == 1).all()
        assert (found[seen < 40] != 1).all()
        assert (found == 1).sum() > 20


def test_the_table_of_ids_says_what_each_becomes_and_leaves_the_filling_alone(tmp_path: Path) -> None:
    ids = np.full(256, 255, np.uint8)
    ids[[4, 9]] = 0, 1
    ids[255] = 6  # what the file says with 255 is class 6; what is filled up is still void
    path = write(tmp_path / "m.png", np.array([[4, 9, 255, 17]], np.uint8))
    found = delivered(path, 4, 4, "pad", channels=0, ids=ids)
    assert found.tolist() == [[255] * 4, [0, 1, 6, 255], [255] * 4, [255] * 4]


def test_a_palettes_positions_are_the_ids(tmp_path: Path) -> None:
    image = Image.new("P", (2, 2))
    image.putdata([0, 1, 2, 255])
    image.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200] + [9] * 759)
    image.save(tmp_path / "m.png")
    assert delivered(tmp_path / "m.png", 2, 2, channels=0).tolist() == [[0, 1], [2, 255]]


def test_masks_of_one_bit_and_of_sixteen(tmp_path: Path) -> None:
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "one.png")
    assert delivered(tmp_path / "one.png", 2, 2, "pad", channels=0).tolist() == [[1, 0], [255, 255]]
    write(tmp_path / "deep.png", np.array([[3, 255]], np.uint16))
    assert delivered(tmp_path / "deep.png", 1, 2, channels=0).tolist() == [[3, 255]]
    write(tmp_path / "deeper.png", np.array([[3, 300]], np.uint16))
    with pytest.raises(DataError, match=r"the mask has the id 300, and ids go from 0 to 255.*deeper\.png"):
        delivered(tmp_path / "deeper.png", 1, 2, channels=0)


@pytest.mark.parametrize("channels", [3, 4])
def test_a_mask_in_colour_is_refused(tmp_path: Path, channels: int) -> None:
    path = write(tmp_path / "m.png", pixels(0, channels=channels))
    with pytest.raises(DataError, match=r"the mask is in colour \(RGBA?\).*m\.png.*write ids instead"):
        delivered(path, 8, 8, channels=0)


def test_what_is_transparent_lies_on_black(tmp_path: Path) -> None:
    image = np.full((1, 3, 4), 200, np.uint8)
    image[0, :, 3] = 255, 0, 51
    path = write(tmp_path / "a.png", image)
    assert delivered(path, 1, 3)[0].tolist() == [[200, 0, 40]]
    assert delivered(path, 1, 3, channels=1).tolist() == [[[200, 0, 40]]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([250, 0, 0, 0, 240, 0])
    palette.putdata([0, 1])
    palette.save(tmp_path / "p.png", transparency=0)
    assert delivered(tmp_path / "p.png", 1, 2).tolist() == [[[0, 0]], [[0, 240]], [[0, 0]]]


def test_cmyk_and_grey_photographs_become_rgb(tmp_path: Path) -> None:
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "c.jpg", quality=95)
    red, green, blue = delivered(tmp_path / "c.jpg", 4, 4).mean(axis=(1, 2))
    assert red > 240
    assert max(green, blue) < 15
    write(tmp_path / "g.png", np.array([[5, 250]], np.uint8))
    assert delivered(tmp_path / "g.png", 1, 2).tolist() == [[[5, 250]]] * 3


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_deep_grey_photographs_are_refused_not_clipped(tmp_path: Path, dtype: type) -> None:
    path = write(tmp_path / "a.tif", np.full((2, 2), 1000, dtype))
    with pytest.raises(DataError, match=r"more than 8 bits a channel.*a\.tif"):
        delivered(path, 2, 2)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_as_their_tag_says_where_it_is_asked_for(
    tmp_path: Path, orientation: int
) -> None:
    image = np.array([[1, 2, 3], [4, 5, 6]], np.uint8) * 40
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write(tmp_path / "a.png", image, exif=exif)
    turned = {
        1: image,
        2: image[:, ::-1],
        3: image[::-1, ::-1],
        4: image[::-1],
        5: image.T,
        6: np.rot90(image, -1),
        7: image[::-1, ::-1].T,
        8: np.rot90(image),
    }[orientation]
    found = delivered(path, *turned.shape, channels=1, upright=True)
    np.testing.assert_array_equal(found[0], turned)
    np.testing.assert_array_equal(delivered(path, 2, 3, channels=1)[0], image)


def test_a_tag_that_cannot_be_read_turns_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", pixels(0), exif=b"Exif\0\0garbage")
    np.testing.assert_array_equal(delivered(path, 8, 8, upright=True), pixels(0).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("size", "wanted", "expected"),
    [
        ((1024, 1024), (64, 64), (128, 128)),  # an eighth, which is twice what is wanted
        ((1024, 1024), (65, 65), (256, 256)),
        ((1024, 768), (224, 224), (1024, 768)),  # half of 768 is less than twice 299
        ((1028, 1024), (64, 64), (257, 256)),  # 8 does not divide 1028
        ((1027, 1024), (64, 64), (1027, 1024)),
        ((500, 375), (224, 224), (500, 375)),
    ],
)
def test_large_jpegs_are_decoded_at_a_fraction(
    tmp_path: Path, size: tuple[int, int], wanted: tuple[int, int], expected: tuple[int, int]
) -> None:
    Image.new("RGB", size).save(tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as image:
        _draft(image, *wanted, "crop")
        assert image.size == expected


def test_a_fraction_gives_nearly_the_same_pixels_in_the_same_places(tmp_path: Path) -> None:
    image = smooth(960, 1280)
    write(tmp_path / "a.jpg", image, quality=92)
    with Image.open(tmp_path / "a.jpg") as whole:
        expected = np.asarray(fitted(whole.convert("RGB"), 100, 120, "crop"), int)
    found = delivered(tmp_path / "a.jpg", 100, 120).transpose(1, 2, 0)
    assert np.abs(found - expected).max() <= 3
    assert np.abs(found - expected).mean() < 0.6


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_a_file_that_cannot_be_decoded_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(DataError, match="not a readable image") as caught:
        delivered(tmp_path / "a.png", 4, 4)
    assert caught.value.where == str(tmp_path / "a.png")


def test_a_cut_off_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jpg", pixels(0, 64, 64))
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(DataError, match=r"truncated.*a\.jpg"):
        delivered(path, 64, 64)
