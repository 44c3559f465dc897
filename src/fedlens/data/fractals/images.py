"""Images of fractals, drawn when a batch is read (chen2022, section 5 and appendix A.1)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedlens.base.errors import ConfigError
from fedlens.data.fractals.codes import MOST, FractalCodes, singular_values, thresholds
from fedlens.data.fractals.drawings import GRID, Drawings, Look, mixed, uniform_of, words_of
from fedlens.data.fractals.rendering import render
from fedlens.data.lazy_images import LazyImages

if TYPE_CHECKING:
    import torch

_NUMBERS = 14  # random numbers of one fractal
_CHOICE, _VIEW, _BACKGROUND = (np.uint64(word) for word in (0x5EED, 0x71E3, 0xBAC6))
_LARGEST = 0.999  # singular value after the jitter, so that points stay bounded


@dataclass(frozen=True)
class FractalStyle:
    """How fractals are drawn.

    Args:
        size: the side of an image in pixels.
        channels: 3, or 1 for the brightness alone.
        iterations: the number of points of each fractal.
        fractals: the smallest and the largest number of fractals on an image.
        look: their colouring.
        background: whether the background is a smooth random image; else it is black.
        scale: the smallest and the largest side of a fractal, as shares of `size`.
        jitter: one random map of each code is multiplied by a factor between these (Anderson and Farrell 2022).
        pairs: whether the two views of an image are drawn independently from the same codes (FPS, section 5.2).
    """

    size: int = 32
    channels: int = 3
    iterations: int = 1000
    fractals: tuple[int, int] = (2, 5)
    look: Look = Look.HUE_BY_DENSITY
    background: bool = False
    scale: tuple[float, float] = (0.4, 0.9)
    jitter: tuple[float, float] = (0.8, 1.1)
    pairs: bool = True


@dataclass(frozen=True, eq=False)
class FractalImages(LazyImages):
    """n images of fractals: each has codes of its own, and is drawn anew in every training step.

    A drawing varies places, sizes, flips and colours, and jitters the codes. Outside of training an image is the
    same every time.

    Args:
        codes: those that images choose from, uniformly and without repetition within an image.
        style: how they are drawn.
        numbers: int64 [n], the number of each image; images with the same number have the same codes.
        seed: what the choice depends on, together with the numbers.
        single: whether image i shows exactly the code `numbers[i] % len(codes)`, which is then its class.

    Raises `ConfigError` if an image has more fractals than there are codes.

    >>> from fedlens.data.fractals.code_sampling import sample_codes
    >>> images = FractalImages(sample_codes(10, seed=0), FractalStyle(), np.arange(4), seed=0)
    >>> images.shape, images.views(np.array([0])).shape
    ((4, 3, 32, 32), (1, 2, 3, 32, 32))
    """

    changing: ClassVar[bool] = True

    codes: FractalCodes
    style: FractalStyle
    numbers: NDArray[np.int64]
    seed: int
    single: bool = False
    _largest: NDArray[np.float64] = field(init=False, repr=False)  # [codes, 8], singular values

    def __post_init__(self) -> None:
        low, high = self.style.fractals
        if not 1 <= low <= high:
            raise ConfigError(
                f"the numbers of fractals are {[low, high]}, but must be at least 1, smallest first",
                where="fractals",
            )
        if high > len(self.codes):
            raise ConfigError(
                f"an image of {high} fractals needs as many codes, but there are only {len(self.codes)}",
                where="fractals",
                hint="lower it, or raise codes",
            )
        object.__setattr__(self, "_largest", singular_values(self.codes.maps)[..., 0])

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, C, H, W)."""
        return len(self), self.style.channels, self.style.size, self.style.size

    @property
    def held_nbytes(self) -> int:
        """The bytes of the codes and numbers."""
        return self.codes.maps.nbytes + self.numbers.nbytes

    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of all that the images depend on."""
        hashed = hashlib.sha256(f"{self.style} {self.seed} {self.single} {self.codes.digest}".encode())
        hashed.update(self.numbers.astype("<i8").tobytes())
        return hashed.hexdigest()

    def subset(self, rows: NDArray[Any]) -> FractalImages:
        """The images at `rows`, int64 [k]."""
        return replace(self, numbers=self.numbers[rows])

    def take(self, index: NDArray[Any]) -> NDArray[np.uint8]:
        """uint8 [k, C, H, W]: one drawing of each image, the same every time."""
        return render(self.drawings(self.numbers[index], self._still_keys(index, 1)[:, 0]))

    def views(self, index: NDArray[Any]) -> NDArray[np.uint8]:
        """uint8 [k, 2, C, H, W] of pairs, else [k, C, H, W]: the same every time."""
        return self._viewed(index, self._still_keys(index, 2)) if self.style.pairs else self.take(index)

    def draw(self, index: NDArray[Any], generator: torch.Generator) -> NDArray[np.uint8]:
        """uint8 [k, 2, C, H, W] of pairs, else [k, C, H, W]: drawn anew."""
        import torch

        views = 2 if self.style.pairs else 1
        keys = torch.randint(0, 2**62, (len(index), views), generator=generator).numpy().astype(np.uint64)
        if self.style.pairs:
            return self._viewed(index, keys)
        return render(self.drawings(self.numbers[index], keys[:, 0]))

    def code_sets(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(codes int64 [k, K], counts int64 [k]): the first `counts[i]` of `codes[i]` are those of image i."""
        low, high = self.style.fractals
        n = len(self.codes)
        if self.single:
            return (numbers % n)[:, None], np.ones(len(numbers), np.int64)
        keys = mixed(mixed(np.uint64(self.seed) ^ _CHOICE) ^ numbers.astype(np.uint64))
        uniform = uniform_of(words_of(keys, high + 1))
        counts = low + np.floor(uniform[:, 0] * (high - low + 1)).astype(np.int64)
        chosen = np.empty((len(numbers), high), np.int64)
        for j in range(high):
            code = np.floor(uniform[:, 1 + j] * (n - j)).astype(np.int64)
            # Position `code` among the codes that are left.
            for before in np.sort(chosen[:, :j], axis=1).T:
                code += code >= before
            chosen[:, j] = code
        return chosen, counts

    def drawings(self, numbers: NDArray[np.int64], keys: NDArray[np.uint64]) -> Drawings:
        """The drawings of images with these numbers; places, colours and jitter follow from `keys`, uint64 [k]."""
        style = self.style
        sets, counts = self.code_sets(numbers)
        most = sets.shape[1]
        words = words_of(keys, most * _NUMBERS).reshape(len(keys), most, _NUMBERS)
        used = np.arange(most) < counts[:, None]
        codes, words = sets[used], words[used]
        u = uniform_of(words)
        maps = self._jittered(codes, u[:, 0], u[:, 1])
        low, high = style.scale
        side = np.rint(style.size * (low + u[:, 2] * (high - low))).astype(np.int64).clip(1, style.size)
        room = style.size - side + 1
        left, top = (np.floor(u[:, k] * room).astype(np.int64) for k in (3, 4))
        flips = (u[:, 5] < 0.5).astype(np.int64) + 2 * (u[:, 6] < 0.5)
        span = np.where(u[:, 8] < 0.5, -1.0, 1.0) * (0.1 + 0.4 * u[:, 9])
        colours = np.stack([u[:, 7], span, 0.4 + 0.6 * u[:, 10], 0.6 + 0.4 * u[:, 11]], axis=1)
        grids = uniform_of(words_of(mixed(keys ^ _BACKGROUND), 3 * GRID * GRID))
        return Drawings(
            style.size,
            style.channels,
            style.iterations,
            np.concatenate([[0], np.cumsum(counts)]),
            maps,
            thresholds(maps, self.codes.counts[codes]),
            words[:, 12],
            np.stack([left, top, side, side], axis=1),
            flips,
            colours,
            style.look,
            grids.reshape(-1, 3, GRID, GRID) if style.background else np.zeros((0, 3, GRID, GRID)),
        )

    def _jittered(
        self, codes: NDArray[np.int64], which: NDArray[np.float64], how: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """float64 [f, 8, 6]: the maps of these codes, one of each multiplied by a factor."""
        maps = self.codes.maps[codes].copy()
        rows = np.arange(len(codes))
        j = np.minimum(np.floor(which * self.codes.counts[codes]).astype(np.int64), MOST - 1)
        low, high = self.style.jitter
        factors = np.minimum(low + how * (high - low), _LARGEST / np.maximum(self._largest[codes, j], 1e-9))
        maps[rows, j] *= factors[:, None]
        return maps

    def _viewed(self, index: NDArray[Any], keys: NDArray[np.uint64]) -> NDArray[np.uint8]:
        views = keys.shape[1]
        images = render(self.drawings(np.repeat(self.numbers[index], views), keys.ravel()))
        return images.reshape(len(index), views, *images.shape[1:])

    def _still_keys(self, index: NDArray[Any], views: int) -> NDArray[np.uint64]:
        """uint64 [k, views]."""
        first = mixed(mixed(np.uint64(self.seed) ^ _VIEW) ^ self.numbers[index].astype(np.uint64))
        return words_of(first, views)
