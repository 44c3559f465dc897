"""Initial weights from a file: which tensors match a module, which are resized, which leaves stay as drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlens.base.errors import ConfigError, DataError
from fedlens.base.parse_text import parse_json
from fedlens.base.summary_text import listed
from fedlens.core.tree import Leaf, spec_of
from fedlens.files.caches import HUB, hub_file
from fedlens.models.backbone import WithBackbone
from fedlens.models.head import head_of
from fedlens.models.imagenet import FILES, imagenet_file
from fedlens.models.user_models import downloads_allowed
from fedlens.models.weights_file import WHERE, WeightsFile, file_of_run, read_weights
from fedlens.models.weights_setting import IMAGENET, RUN

_CONFIG = "config.json"
_POSITIONS = ("pos_embed", "pos_embedding", "position_embedding", "position_embeddings")


@dataclass(frozen=True)
class Match:
    """Which leaves of a model came from a file.

    Attributes:
        loaded: the names of the leaves whose values are those of the file, with resized ones.
        resized: each resized leaf, with how.
        head: the leaves of the classifier that were left as drawn: the file has another number of classes, or none.
        drawn: the other leaves that were left as drawn.
        unused: the names in the file that the model does not have.
        leaves: how many leaves the model has, counters left out.
        backbone: the name of the backbone, if the file is of a classifier and only the backbone was loaded.
        backbone_leaves: how many of the leaves the backbone has.
    """

    loaded: tuple[str, ...]
    resized: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    leaves: int = 0
    backbone: str | None = None
    backbone_leaves: int = 0

    def sentence(self, source: str) -> str:
        """One line for the run.

        >>> Match(("a", "b"), resized=("a (3 to 1 channels)",), head=("c",), leaves=3).sentence("x.pt")
        'weights from x.pt: 2 of 3 leaves loaded; resized: a (3 to 1 channels); left as drawn: c (the classifier)'
        """
        leaves = f"{self.leaves:,} leaves"
        left = [f"{listed(self.head)} (the classifier)"] if self.head else []
        left += [listed(self.drawn)] if self.drawn else []
        if self.backbone is not None:
            leaves = f"{self.backbone_leaves:,} leaves of the backbone"
            left = self._parts_left(self.backbone)
        parts = [f"weights from {source}: {len(self.loaded):,} of {leaves} loaded"]
        parts += [f"resized: {listed(self.resized)}"] if self.resized else []
        parts += [f"left as drawn: {', '.join(left)}"] if left else []
        parts += [f"not in the model: {listed(self.unused)}"] if self.unused else []
        return "; ".join(parts)

    def _parts_left(self, backbone: str) -> list[str]:
        """What was left as drawn: leaves of the backbone by name, and the parts of the network beside it."""
        drawn = [*self.drawn, *self.head]
        inside = [name for name in drawn if name.startswith(f"{backbone}.")]
        path = backbone.split(".")
        parts: dict[str, None] = {}
        for name in drawn:
            steps = name.split(".")
            apart = next((k for k, step in enumerate(path) if steps[k : k + 1] != [step]), None)
            if apart is not None:
                parts[".".join(steps[: apart + 1])] = None
        return [*([listed(inside)] if inside else []), *parts]


def load_weights(module: nn.Module, file: WeightsFile, classes: int, partial: bool = False) -> Match:
    """Copies the tensors of a file into the leaves of the same names, and says which matched.

    - Floating-point tensors of another precision are converted to the leaf's.
    - The first convolution, of 3 channels in the file, is adapted to the module's channels as timm does: summed for
      one, else repeated and scaled by 3 / channels.
    - Position embeddings of another image size are resized bicubically; prefix tokens are kept.
    - The classifier, the last linear layer of `classes` outputs, keeps its drawn values if the file has another number
      of classes, or none. So do the `heads` of a network with a backbone.
    - Embeddings of another number of tokens are refused unless `partial`: the ids stand for other tokens.
    - Weights of a classifier are loaded into the backbone of a network that declares one (`WithBackbone`); the rest of
      the network keeps its drawn values.

    Raises `ConfigError` if fewer than half of the leaves match and not `partial`, if none does, or if the vocabulary is
    another; and `DataError` for NaN, infinite values, or a type that cannot be converted.

    >>> module = nn.Linear(3, 2)
    >>> tensors = {"weight": torch.ones(2, 3).half(), "bias": torch.zeros(2)}
    >>> load_weights(module, WeightsFile(tensors, "", Path("a.pt")), 2).loaded, module.weight.dtype
    (('weight', 'bias'), torch.float32)
    """
    spec, state = spec_of(module), module.state_dict()
    tensors, backbone = _placed(module, file.tensors, spec)
    in_head = _head(module, classes)
    adapted: dict[str, Tensor] = {}
    resized: list[str] = []
    head: list[str] = []
    drawn: list[str] = []
    misshapen: list[str] = []
    for name, leaf in spec.items():
        value = tensors.get(name)
        if value is None:
            if leaf.role != "counter":
                (head if in_head(name) else drawn).append(name)
        elif tuple(value.shape) == leaf.shape:
            adapted[name] = _converted(value, leaf, name, file.path)
        elif in_head(name) and value.dim() == len(leaf.shape):
            head.append(name)
        else:
            fitting = _resized(name, _converted(value, leaf, name, file.path), leaf.shape, module)
            if fitting is None:
                if not partial and isinstance(module.get_submodule(name.rpartition(".")[0]), nn.Embedding):
                    raise _other_tokens(name, tuple(value.shape), leaf.shape, file)
                misshapen.append(f"{name} {list(value.shape)} in the file, {list(leaf.shape)} in the model")
                drawn.append(name)
            else:
                adapted[name], how = fitting
                resized.append(f"{name} ({how})")
    loaded = [name for name in adapted if spec[name].role != "counter"]
    counted = [name for name, leaf in spec.items() if leaf.role != "counter"]
    inside = [name for name in counted if backbone is not None and name.startswith(f"{backbone}.")]
    wanted = len(inside or counted) - len(head) * (backbone is None)
    if not loaded or not (partial or 2 * len(loaded) >= wanted):
        outside = " outside the classifier" * bool(head)
        of = f"{wanted:,} names" + (outside if backbone is None else " of the backbone")
        raise _another_network(len(loaded), of, misshapen, drawn, file)
    with torch.no_grad():
        for name, value in adapted.items():
            state[name].copy_(value)
    unused = [name for name in tensors if name not in spec]
    return Match(
        tuple(loaded),
        tuple(resized),
        tuple(head),
        tuple(drawn),
        tuple(unused),
        len(counted),
        backbone,
        len(inside),
    )


def _placed(
    module: nn.Module, tensors: Mapping[str, Tensor], spec: Mapping[str, Leaf]
) -> tuple[Mapping[str, Tensor], str | None]:
    """The tensors by the names of the module's leaves, and the backbone's name if they are those of a classifier.

    Tensors that the backbone has no place for keep their names.
    """
    if not isinstance(module, WithBackbone):
        return tensors, None
    inside = {name: module.backbone_leaf(name) for name in tensors}
    moved = {name: f"{module.backbone}.{leaf}" for name, leaf in inside.items() if leaf is not None}
    moved = {name: place for name, place in moved.items() if place in spec}
    if len(moved) <= sum(name in spec for name in tensors):
        return tensors, None
    return {moved.get(name, name): value for name, value in tensors.items()}, module.backbone


def _head(module: nn.Module, classes: int) -> Callable[[str], bool]:
    """Whether a leaf belongs to the classifier, or to a head that gives the classes."""
    if isinstance(module, WithBackbone):
        heads = tuple(f"{head}." for head in module.heads)
        return lambda leaf: leaf.startswith(heads)
    classifier = head_of(module, classes)
    return lambda leaf: classifier is not None and classifier.holds(leaf)


def _other_tokens(name: str, there: tuple[int, ...], here: tuple[int, ...], file: WeightsFile) -> ConfigError:
    return ConfigError(
        f"'{name}' is {list(there)} in {file.path}, but {list(here)} in the model: other tokens, or another width",
        where=WHERE,
        hint="take the tokenizer that belongs to the weights (data.dataset.tokenizer of sent140), and their width",
    )


def _another_network(
    loaded: int, of: str, misshapen: Sequence[str], drawn: Sequence[str], file: WeightsFile
) -> ConfigError:
    why = f"; other shapes: {listed(misshapen)}"
    if not misshapen:
        why = f" (names in the file: {listed(list(file.tensors))}; in the model: {listed(drawn)})"
    hint = "choose the model that the file was saved from"
    if loaded:
        hint += ", or set model.weights_partial = true to load what matches and draw the rest"
    return ConfigError(
        f"{loaded:,} of the model's {of} match {file.path}, so these are weights of another network{why}",
        where=WHERE,
        hint=hint,
    )


def _converted(value: Tensor, leaf: Leaf, name: str, path: Path) -> Tensor:
    """The tensor in the leaf's type, if that is a number of the same kind and every value is finite."""
    floats = leaf.dtype.is_floating_point
    fits = value.is_floating_point() if floats else not (value.is_floating_point() or value.is_complex())
    if not fits or value.layout is not torch.strided or value.is_quantized:
        kind = f"{value.layout} {value.dtype}".replace("torch.strided ", "").replace("torch.", "")
        raise DataError(
            f"'{name}' is {kind} in the weights file, which cannot be converted to {str(leaf.dtype)[6:]}",
            where=str(path),
            hint="save the weights in a floating-point type",
        )
    converted = value.to(leaf.dtype)
    if floats and not converted.isfinite().all():
        what = "NaN" if converted.isnan().any() else "infinite values"
        raise DataError(
            f"'{name}' contains {what} in the weights file", where=str(path), hint="use an earlier checkpoint"
        )
    return converted


def _resized(
    name: str, value: Tensor, shape: tuple[int, ...], module: nn.Module
) -> tuple[Tensor, str] | None:
    """The tensor in the leaf's shape, and how in words; None if this leaf cannot be resized."""
    before, after = tuple(value.shape), shape
    if len(before) == len(after) == 4 and name == _first_convolution(module):
        if before[1] == 3 and (before[0], *before[2:]) == (after[0], *after[2:]):
            return adapted_channels(value, after[1]), f"3 to {after[1]} channels"
        return None
    embedding = name.rpartition(".")[2] in _POSITIONS and len(before) == len(after) == 3
    if embedding and (before[0], before[2]) == (after[0], after[2]):
        for prefix in (1, 0, 2):
            old, new = math.isqrt(before[1] - prefix), math.isqrt(max(after[1] - prefix, 0))
            if (old**2, new**2) == (before[1] - prefix, after[1] - prefix) and new:
                return resized_positions(value, new, prefix), f"{old}x{old} to {new}x{new} positions"
    return None


def _first_convolution(module: nn.Module) -> str | None:
    """The name of the weight of the first 2-d convolution."""
    return next(
        (f"{n}.weight".lstrip(".") for n, m in module.named_modules() if isinstance(m, nn.Conv2d)), None
    )


def _check_configuration(path: Path, expected: Mapping[str, object]) -> None:
    """Raises `ConfigError` if the file of a published configuration has other values than the network."""
    try:
        stated = dict(parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        what = f"the configuration cannot be read: {error}"
        raise DataError(what, where=str(path), hint="copy it from its source again") from error
    for key, value in expected.items():
        if stated.get(key, value) != value:
            raise ConfigError(
                f"{path} states {key} = {stated[key]!r}, but the model has {value!r}",
                where=WHERE,
                hint="set [model] to the network of the weights, or take other weights",
            )


def adapted_channels(weight: Tensor, channels: int) -> Tensor:
    """A convolution's weight of 3 input channels, [o, 3, h, w], for another number: [o, channels, h, w].

    Summed for one channel, so that a grey image gives what its grey RGB image gave; else the 3 are repeated and scaled
    by 3 / channels (timm, `adapt_input_conv`).

    >>> adapted_channels(torch.ones(1, 3, 1, 1), 1).item(), adapted_channels(torch.ones(1, 3, 1, 1), 6)[0, 0].item()
    (3.0, 0.5)
    """
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    return weight.repeat(1, -(-channels // 3), 1, 1)[:, :channels] * (3 / channels)


def resized_positions(embedding: Tensor, side: int, prefix: int) -> Tensor:
    """Position embeddings [1, prefix + n^2, d] for side x side patches: [1, prefix + side^2, d].

    The grid is interpolated bicubically with antialiasing; the first `prefix` tokens are kept (timm,
    `resample_abs_pos_embed`).

    >>> resized_positions(torch.ones(1, 1 + 4, 8), side=3, prefix=1).shape
    torch.Size([1, 10, 8])
    """
    first, grid = embedding[:, :prefix], embedding[:, prefix:]
    old, width = math.isqrt(grid.shape[1]), grid.shape[2]
    image = grid.float().reshape(1, old, old, width).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=(side, side), mode="bicubic", antialias=True)
    grid = image.permute(0, 2, 3, 1).reshape(1, side * side, width).to(embedding.dtype)
    return torch.cat([first, grid], dim=1)


@dataclass(eq=False)
class InitialWeights:
    """The weights that a run starts from: read once, and loaded into each module that is built with initial weights.

    Workers build modules without them, as a tree follows. Where clients start from the model's own leaves (personal
    parts), `travels` is set, and the tensors go to the workers with the program.

    Attributes:
        setting: `model.weights`, with an absolute path.
        partial: `model.weights_partial`.
        expected: the SHA-256 that the file must have; None for any.
        travels: whether a copy in another process has the tensors too.
        note: what was matched, in a sentence; None before the first module.
    """

    setting: str
    partial: bool = False
    expected: str | None = None
    travels: bool = False
    note: str | None = None
    match: Match | None = None
    sha256: str | None = None
    _file: WeightsFile | None = field(default=None, repr=False)
    _copy: Path | None = None

    def load(self, module: nn.Module, classes: int) -> None:
        """Loads the weights into the module. Raises `ConfigError` or `DataError` with the reason if they do not fit."""
        file = self._read(module)
        if isinstance(module, WithBackbone) and self._published:
            _check_configuration(file.path.with_name(_CONFIG), module.configuration)
        match = load_weights(module, file, classes, self.partial)
        if self.note is None:
            self.match = match
            self.note = match.sentence(self.setting)

    def look_in(self, folder: Path) -> None:
        """Takes the file from `folder` if the setting is a bare name and the current folder has no such file."""
        path = Path(self.setting)
        named = self.setting != IMAGENET and not self.setting.startswith(RUN) and path.parent == Path.cwd()
        if named and not path.exists() and (folder / path.name).is_file():
            self.setting = str((folder / path.name).absolute())

    def read_before_data(self) -> None:
        """Reads the file now, so that a wrong one is an error before large data are decoded.

        ImageNet weights are not read: their file depends on the module. Raises `ConfigError` or `DataError`.
        """
        if self.setting != IMAGENET:
            self._read(None)

    def keep(self, path: Path, note: str | None = None) -> None:
        """From now on reads the whole initial model from `path`, a copy in the run directory.

        `note` is the sentence of the start of the run; None where it is known.
        """
        self._copy, self._file, self.note = path, None, self.note or note

    def _read(self, module: nn.Module | None) -> WeightsFile:
        if self._file is not None:
            return self._file
        if self._copy is not None:
            return read_weights(self._copy)  # not kept: a run builds few modules with initial weights
        self._file = file = read_weights(self._path(module))
        self.sha256 = file.sha256
        if self.expected not in (None, file.sha256):
            raise ConfigError(
                f"{file.path} has the SHA-256 {file.sha256}, but model.weights_sha256 is {self.expected}",
                where=f"{WHERE}_sha256",
                hint="use the original file, or remove weights_sha256",
            )
        return file

    def _path(self, module: nn.Module | None) -> Path:
        if module is not None and self.setting == IMAGENET:
            return imagenet_file(module)
        if self.setting.startswith(RUN):
            return file_of_run(Path(self.setting.removeprefix(RUN)))
        if self.setting.startswith(HUB):
            repository, download = self.setting.removeprefix(HUB), downloads_allowed()
            hub_file(repository, [_CONFIG], "the weights", WHERE, download)
            return hub_file(repository, FILES, "the weights", WHERE, download)
        return Path(self.setting) / FILES[0] if self._published else Path(self.setting)

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says of itself, once it was read."""
        return {} if self._file is None else self._file.metadata

    @property
    def _published(self) -> bool:
        """Whether the weights lie beside a configuration, and are not a copy in a run."""
        return self._copy is None and (self.setting.startswith(HUB) or Path(self.setting, _CONFIG).is_file())

    def __getstate__(self) -> dict[str, Any]:
        file = self._file
        if self.travels and file is None and self._copy is not None:
            file = read_weights(self._copy)
        return {**self.__dict__, "_file": file if self.travels else None}
