"""Brightness, contrast and sharpness of images, and clients whose images differ from those of all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedlens.data.diagnostics import Findings, shortened

_SIDE = 128  # pixels: images of all sizes are measured at one size
_CLIENTS = 4  # that are compared at least
_IMAGES = 10  # of a client that is compared, at least
_DEVIATIONS = 3.5  # scaled median absolute deviations from the median, beyond which a client is an outlier
_RATIO = 1.5  # to the median, beyond which a client is an outlier
_GAP = 1.2  # to the nearest client that is not one
_SCALE = 1.4826  # of a median absolute deviation to the standard deviation of a normal distribution
_WORDS = {
    "brightness": ("darker", "brighter"),
    "contrast": ("lower in contrast", "higher in contrast"),
    "sharpness": ("less sharp", "sharper or noisier"),
}
_FLAT = 1e-6  # variance of an image of one grey value, computed in float32
_LISTED = 10  # clients that are warned about one by one


class ImageStatistics(NamedTuple):
    """How an image looks: of its grey values from 0 to 255, scaled to 128 x 128 pixels.

    Args:
        brightness: their mean.
        contrast: their standard deviation.
        sharpness: 1,000 times the variance of their Laplacian (four neighbours) over their variance; 0 if all are
            equal. The ratio does not change with brightness or contrast: a dark image is not taken for a blurred one.
    """

    brightness: float
    contrast: float
    sharpness: float

    @classmethod
    def of(cls, image: Image.Image) -> ImageStatistics:
        """The statistics of a decoded image.

        >>> ImageStatistics.of(Image.new("L", (8, 8), 40))
        ImageStatistics(brightness=40.0, contrast=0.0, sharpness=0.0)
        """
        if image.mode not in ("L", "RGB"):
            image = image.convert("L" if image.mode in ("1", "LA") else "RGB")
        across, down = (max(1, side // (2 * _SIDE)) for side in image.size)
        # Floats: rounded to whole numbers, a dark or enlarged image would have noise of its own.
        reduced = image.reduce((across, down)).convert("L").convert("F")
        grey = np.asarray(reduced.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR))
        inner = grey[1:-1, 1:-1]
        laplacian = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * inner
        variance = float(grey.var())
        sharpness = 1000 * float(laplacian.var()) / variance if variance > _FLAT else 0.0
        return cls(float(grey.mean()), variance**0.5, sharpness)


def medians(statistics: Sequence[ImageStatistics | None], names: Sequence[str]) -> dict[str, ImageStatistics]:
    """The medians over the images of each name, a class or a client; images without statistics do not count."""
    of_name: defaultdict[str, list[ImageStatistics]] = defaultdict(list)
    for one, name in zip(statistics, names, strict=True):
        if one is not None:
            of_name[name].append(one)
    return {name: ImageStatistics(*np.median(rows, axis=0).tolist()) for name, rows in of_name.items()}


def check_looks(
    of_client: Mapping[str, ImageStatistics], counts: Mapping[str, int], where: object, findings: Findings
) -> None:
    """Adds a warning for each client whose images are an outlier in brightness, contrast or sharpness.

    A client is one if its median differs from the median of all clients by more than 3.5 scaled median absolute
    deviations (Iglewicz and Hoaglin 1993) and by a factor of more than 1.5, and from that of the nearest other client
    by one of more than 1.2. Clients with fewer than ten images are not compared, nor are fewer than four clients.

    >>> findings = Findings()
    >>> looks = {name: ImageStatistics(110.0 + at, 50.0, 0.1) for at, name in enumerate("abc")}
    >>> looks["Ulm"] = ImageStatistics(38.0, 50.0, 0.1)
    >>> check_looks(looks, dict.fromkeys(looks, 10), "scans", findings)
    >>> print(findings.warnings[0])
    scans: the images of 'Ulm' are darker (brightness 38, others 110 to 112); check its scanner or export.
    """
    compared = [name for name in of_client if counts[name] >= _IMAGES]
    if len(compared) < _CLIENTS:
        return
    differences: defaultdict[str, list[str]] = defaultdict(list)
    for at, (statistic, words) in enumerate(_WORDS.items()):
        values = np.array([of_client[name][at] for name in compared])
        median = float(np.median(values))
        distance = np.abs(values - median)
        far = distance > _DEVIATIONS * _SCALE * float(np.median(distance))
        apart = (values * _RATIO < median) | (values > _RATIO * median)
        outliers = far & apart
        usual = values[~outliers]
        outliers &= (values * _GAP < usual.min()) | (values > _GAP * usual.max())
        for index in np.flatnonzero(outliers).tolist():
            span = f"{statistic} {values[index]:.3g}, others {usual.min():.3g} to {usual.max():.3g}"
            word = words[int(values[index] > median)]
            differences[compared[index]].append(f"{word} ({span})")
    for name in list(differences)[:_LISTED]:
        *first, last = differences[name]
        listed = f"{', '.join(first)} and {last}" if first else last
        what = f"the images of '{shortened(name, 60)}' are {listed}"
        findings.warn(where, what, "check its scanner or export")
    if len(differences) > _LISTED:
        more = f"the images of {len(differences) - _LISTED:,} more clients look different"
        findings.warn(where, more, "--json has the brightness, contrast and sharpness of each client")
