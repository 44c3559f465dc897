from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from fedlens.data.diagnostics import Findings
from fedlens.data.formats.folder_check import check_folder
from fedlens.data.formats.probe import ImageStatistics, check_looks, medians
from tests.unit.data.pictures import write


def picture(seed: int, side: int = 32) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(60, 240, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def test_the_statistics_of_stripes_are_those_computed_by_hand() -> None:
    stripes = np.zeros((128, 128), np.uint8)
    stripes[:, ::2] = 200
    # The Laplacian of stripes of width 1 is +-400, and the grey values are 100 +- 100.
    assert ImageStatistics.of(Image.fromarray(stripes)) == pytest.approx((100.0, 100.0, 16_000.0), rel=1e-5)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_images_of_every_mode_and_shape_are_measured(mode: str) -> None:
    for size in ((1, 1), (700, 3), (300, 600)):
        assert np.isfinite(ImageStatistics.of(Image.new("RGB", size, (9, 9, 9)).convert(mode))).all()


def test_a_dark_image_is_not_taken_for_a_blurred_one_and_a_blurred_one_is_less_sharp() -> None:
    image = picture(0)
    plain, dark, blurred = map(
        ImageStatistics.of,
        (
            image,
            image.point([value // 3 for value in range(256)] * 3),
            image.filter(ImageFilter.GaussianBlur(2)),
        ),
    )
    assert dark.brightness == pytest.approx(plain.brightness / 3, rel=0.05)
    assert dark.sharpness == pytest.approx(plain.sharpness, rel=0.1)
    assert blurred.sharpness < plain.sharpness / 1.5
    assert blurred.brightness == pytest.approx(plain.brightness, rel=0.05)


def test_a_large_copy_of_an_image_looks_the_same() -> None:
    small, large = ImageStatistics.of(picture(1, 256)), ImageStatistics.of(picture(1, 1024))
    assert tuple(large) == pytest.approx(tuple(small), rel=0.05)


def looks(values: dict[str, float]) -> dict[str, ImageStatistics]:
    return {name: ImageStatistics(value, 50.0, 5.0) for name, value in values.items()}


@pytest.mark.parametrize(
    ("ulm", "few", "others", "warned"),
    [
        (38.0, 10, 3, True),
        (300.0, 10, 3, True),
        (90.0, 10, 3, False),  # less than a factor of 1.5
        (38.0, 9, 3, False),  # too few images
        (38.0, 10, 2, False),  # too few clients
    ],
)
def test_a_client_is_an_outlier_by_deviation_and_by_ratio(
    ulm: float, few: int, others: int, warned: bool
) -> None:
    values = {f"site {at}": 110.0 + at for at in range(others)}
    counts = {**dict.fromkeys(values, 10), "Ulm": few}
    findings = Findings()
    check_looks(looks({**values, "Ulm": ulm}), counts, "scans", findings)
    assert len(findings.warnings) == warned


def test_clients_that_vary_widely_have_no_outlier() -> None:
    findings = Findings()
    values = {str(at): 20.0 * 1.4**at for at in range(7)}
    check_looks(looks(values), dict.fromkeys(values, 50), "scans", findings)
    assert not findings.warnings


def test_many_outliers_are_counted() -> None:
    findings = Findings()
    values = {str(at): 100.0 if at < 20 else 10.0 for at in range(32)}
    check_looks(looks(values), dict.fromkeys(values, 50), "scans", findings)
    assert len(findings.warnings) == 11
    assert findings.warnings[-1].what == "the images of 2 more clients look different"


def test_medians_leave_out_images_without_statistics() -> None:
    rows = [ImageStatistics(float(at), 1.0, 1.0) for at in range(3)]
    assert medians([*rows, None], ["a", "a", "b", "c"]) == {"a": (0.5, 1.0, 1.0), "b": (2.0, 1.0, 1.0)}


def test_a_check_of_a_folder_names_the_hospital_with_dark_and_blurred_images(tmp_path: Path) -> None:
    for at in range(50):
        image, client = picture(at), ["Ulm", "Bonn", "Jena", "Celle", "Emden"][at % 5]
        if client == "Ulm":
            image = image.filter(ImageFilter.GaussianBlur(2)).point([value // 3 for value in range(256)] * 3)
        write(tmp_path / client / "ab"[at // 5 % 2] / f"{at}.png", np.asarray(image))
    check = check_folder(tmp_path, "image-folder", {"client_level": 1, "label_level": 2})
    assert not check.findings
    (warning,) = check.warnings
    assert warning.what.startswith("the images of 'Ulm' are darker (brightness ")
    assert "less sharp (sharpness " in warning.what
    assert set(check.facts["looks"]) == {"class", "client"}
    assert set(check.facts["looks"]["client"]["Ulm"]) == {"brightness", "contrast", "sharpness"}
