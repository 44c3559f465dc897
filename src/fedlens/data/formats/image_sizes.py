"""Summarizes the sizes and colours of image files, and chooses the size that they are trained at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedlens.data.decoding import Fit, placement
from fedlens.data.formats.common_settings import height_width
from fedlens.data.formats.probe import ImageHeader

LARGEST = 224  # pixels of the longer side, if the user names no size
_FREQUENT = 0.1  # the share of the images from which the most frequent size stands for all of them
_MODES = {
    "RGB": "colour (RGB)",
    "RGBA": "colour (RGBA)",
    "P": "palette (P)",
    "L": "grey (L)",
    "LA": "grey (LA)",
    "1": "black and white (1)",
}

Size = tuple[int, int]
"""(width, height) in pixels."""


@dataclass(frozen=True)
class TrainingSize:
    """The size that every image is scaled to.

    Args:
        height, width: in pixels.
        why: where the size comes from, as the rest of a sentence.
        note: a sentence for the user; None if there is nothing to say.
        chosen: whether it was chosen here, because the user named none.
        enlarged: the number of images that are smaller and are enlarged.
    """

    height: int
    width: int
    why: str
    note: str | None
    chosen: bool
    enlarged: int

    @property
    def setting(self) -> int | list[int]:
        """The value of the setting `size`: a number, or [height, width]."""
        return self.height if self.height == self.width else [self.height, self.width]


@dataclass(frozen=True)
class ImageSizes:
    """The sizes of the images as they are delivered, and their modes, with the number of images of each."""

    sizes: Mapping[Size, int]
    modes: Mapping[str, int]

    @classmethod
    def of(cls, headers: Iterable[ImageHeader], upright: bool) -> ImageSizes:
        """The sizes in the headers; with `upright`, after the EXIF tags have turned photographs.

        >>> ImageSizes.of([ImageHeader(4, 2, "L"), ImageHeader(2, 4, "RGB", turned=True)], upright=True)
        ImageSizes(sizes=Counter({(4, 2): 2}), modes=Counter({'L': 1, 'RGB': 1}))
        """
        headers = list(headers)
        delivered = (header.size[::-1] if upright and header.turned else header.size for header in headers)
        return cls(Counter(delivered), Counter(header.mode for header in headers))

    @property
    def count(self) -> int:
        """The number of images."""
        return sum(self.sizes.values())

    @property
    def most_frequent(self) -> Size:
        """The most frequent size; of several, the one with the fewest pixels, and then the narrowest."""
        return min(self.sizes, key=lambda size: (-self.sizes[size], size[0] * size[1], size[0]))

    def training(self, given: Any, fit: Fit) -> TrainingSize:
        """The size to train at: `given`, the setting `size`, or else the most frequent one.

        If fewer than a tenth of the images have the most frequent size, it is the median width and the median height.
        A side above 224 pixels is reduced to 224, and the other one in proportion, so images are reduced but, apart
        from those smaller than most, never enlarged.

        >>> sizes = ImageSizes({(640, 480): 9, (32, 32): 1}, {"RGB": 10})
        >>> chosen = sizes.training(None, "crop")
        >>> chosen.setting, chosen.why
        ([168, 224], 'the most frequent size of the files, 640x480, reduced to 224 pixels on the longer side')
        """
        if given is not None:
            height, width = height_width(given)
            smaller = self._enlarged(width, height, fit)
            common = shown(self.most_frequent)
            note = (
                f"images: enlarged to {shown((width, height))} by data.dataset.size: {smaller:,} of {self.count:,} "
                f"are smaller; the most frequent size of the files is {common}"
            )
            return TrainingSize(height, width, "data.dataset.size", note if smaller else None, False, smaller)
        width, height = self.most_frequent
        why = "the most frequent size of the files"
        if self.sizes[width, height] < _FREQUENT * self.count:
            width, height = (self._median(side) for side in (0, 1))
            why = f"the median width and height of the files, which have {len(self.sizes):,} sizes"
        if max(width, height) > LARGEST:
            longer = max(width, height)
            why += f", {shown((width, height))}, reduced to {LARGEST} pixels on the longer side"
            width, height = (
                max(1, (2 * side * LARGEST + longer) // (2 * longer)) for side in (width, height)
            )
        smaller = self._enlarged(width, height, fit)
        more = f"; {smaller:,} of {self.count:,} are smaller and are enlarged" if smaller else ""
        of_both = "" if width == height else " (width x height)"
        size = f"{shown((width, height))}{of_both}"
        note = f"images: {size}, {why}{more}; set data.dataset.size to change it"
        return TrainingSize(height, width, why, note, True, smaller)

    def facts(self) -> dict[str, Any]:
        """For `data check`: the smallest, largest and most frequent size as [width, height], and the modes."""
        by_area = sorted(self.sizes, key=lambda size: (size[0] * size[1], size[0]))
        return {
            "smallest": list(by_area[0]),
            "largest": list(by_area[-1]),
            "most_frequent": list(self.most_frequent),
            "most_frequent_images": self.sizes[self.most_frequent],
            "different": len(self.sizes),
            "colours": {_MODES.get(mode, mode): self.modes[mode] for mode in sorted(self.modes)},
        }

    def _median(self, side: int) -> int:
        """The lower median width (0) or height (1) of the images."""
        counts: Counter[int] = Counter()
        for size, number in self.sizes.items():
            counts[size[side]] += number
        passed, half = 0, (self.count + 1) // 2
        for value in sorted(counts):
            passed += counts[value]
            if passed >= half:
                return value
        raise ValueError("there are no images")

    def _enlarged(self, width: int, height: int, fit: Fit) -> int:
        """How many images are scaled up to fit width x height."""
        scales = {size: placement(*size, width, height, fit)[:2] for size in self.sizes}
        return sum(self.sizes[size] for size, scale in scales.items() if max(scale) > 1)


def shown(size: Iterable[int]) -> str:
    """A size as text.

    >>> shown((640, 480))
    '640x480'
    """
    return "x".join(map(str, size))
