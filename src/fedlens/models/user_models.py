"""Models of a user's own: a class, a function or an `nn.Module`, called with what each takes."""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, create_model
from torch import nn

from fedlens.base.errors import ConfigError
from fedlens.base.registry import INSTANCE, OwnSettings, import_name
from fedlens.base.signatures import name_of
from fedlens.core.tree import digest as tree_digest

# Parameters that are filled in from the data, by their names.
_SHAPE, _CLASSES, _CHANNELS = (
    ("input_shape", "shape"),
    ("classes", "num_classes"),
    ("in_channels", "in_chans"),
)
_VOCABULARY = "vocabulary"  # filled in for texts unless the user sets it, and then in config.toml
_PLAIN = (bool, int, float, str, NoneType)
_DETECTION = "torchvision.models.detection."
_downloads = False


@dataclass(frozen=True)
class UserModel(OwnSettings):
    """A class or function that makes a model, called with what it takes.

    - Parameters called `input_shape` or `shape`, `classes` or `num_classes`, `in_channels` or `in_chans` are passed by
      keyword.
    - If it has none of them: two required positional parameters are the input shape and the number of classes.
    - Otherwise `**kwargs` gets `num_classes`, as models of torchvision expect.
    - Otherwise it is called with settings alone.
    - A detector of torchvision, which it may return, is adapted; see `fedlens.models.torchvision_detectors`.

    All its other parameters with plain defaults are settings, and with `**kwargs` any name is. A setting `vocabulary`
    is the number of different tokens of the dataset by default; for images it is left out.

    >>> UserModel(lambda num_classes, hidden=3: (num_classes, hidden), "mine")((1, 8, 8), 10, hidden=5)
    (10, 5)
    """

    target: Callable[..., Any]
    name: str

    def __call__(self, input_shape: Sequence[int], classes: int, **settings: Any) -> Any:
        """A new model.

        Raises `ConfigError` if it would download weights without leave, or if it needs a vocabulary and has images.
        """
        if settings.get(_VOCABULARY, 0) is None and _VOCABULARY in self._parameters:
            del settings[_VOCABULARY]
            if self._parameters[_VOCABULARY].default is inspect.Parameter.empty:
                raise ConfigError(
                    f"the model '{self.name}' needs a vocabulary, which images do not have",
                    where=f"model.{_VOCABULARY}",
                    hint="set model.vocabulary, or choose a dataset of texts",
                )
        # Torchvision counts the background.
        counted = classes + 1 if _makes_detectors(self.target) else classes
        data = {"input_shape": tuple(input_shape), "classes": counted, "channels": input_shape[0]}
        with _hub(self.name):
            if self._by_position:
                return _adapted(self.target(data["input_shape"], classes, **settings), classes)
            filled = {name: data[role] for name, role in self._filled.items()}
            return _adapted(self.target(**{**filled, **settings}), classes)

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(self.target).parameters
        except (TypeError, ValueError):
            return {}

    @property
    def _keywords(self) -> list[inspect.Parameter]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [p for p in self._parameters.values() if p.kind in kinds]

    @property
    def _open(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())

    @cached_property
    def _filled(self) -> dict[str, str]:
        """The role of each parameter that is filled in from the data."""
        roles = dict.fromkeys(_SHAPE, "input_shape") | dict.fromkeys(_CLASSES, "classes")
        roles |= dict.fromkeys(_CHANNELS, "channels")
        found = {p.name: roles[p.name] for p in self._keywords if p.name in roles}
        return {"num_classes": "classes"} if not found and not self._by_position and self._open else found

    @cached_property
    def _by_position(self) -> bool:
        own = [p for p in self._parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(own) != 2 or any(p.default is not p.empty for p in own):
            return False
        first, second = (p.name for p in own)
        if first in _SHAPE:
            return second not in _CHANNELS
        return not {first, second} & {*_SHAPE, *_CLASSES, *_CHANNELS}

    def settings_model(self) -> type[BaseModel]:
        """Its settings: parameters that the data does not fill in."""
        first = 2 if self._by_position else 0
        try:
            typed: Any = self.target
            if isinstance(typed, type):
                typed = vars(typed).get("__init__", typed)
            hints = get_type_hints(typed, include_extras=True)
        except Exception:  # annotations that cannot be evaluated are no settings' types
            hints = {}
        fields: dict[str, Any] = {}
        for p in self._keywords[first:]:
            required = p.default is p.empty
            if p.name not in self._filled and (required or _is_plain(p.default)):
                hint = hints.get(p.name, Any)
                if p.name == _VOCABULARY:
                    fields[p.name] = (int | None, Field(None, ge=1))
                    continue
                fields[p.name] = (hint if _is_simple(hint) else Any, Field(... if required else p.default))
        extra: Literal["allow", "forbid"] = "allow" if self._open else "forbid"
        config = ConfigDict(extra=extra, frozen=True, validate_default=True, protected_namespaces=())
        return create_model(f"{name_of(self.target)}_settings", __config__=config, **fields)


@dataclass(frozen=True, eq=False)
class Instance(OwnSettings):
    """A model that was given as an object. Each build is a copy of it; the object itself is never changed."""

    prototype: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> Instance:
        """A copy of the model. Raises `ConfigError` if it cannot be copied."""
        try:
            return cls(copy.deepcopy(model))
        except Exception as error:
            raise ConfigError(
                f"the model {type(model).__name__} cannot be copied: {type(error).__name__}: {error}",
                where="model",
                hint="pass its class, or a function that creates it",
            ) from error

    def __call__(self, input_shape: Sequence[int], classes: int, *, module: str, digest: str) -> nn.Module:
        """A copy of the model, with the weights that it was given with; a detector of torchvision is adapted."""
        made: nn.Module = _adapted(copy.deepcopy(self.prototype), classes)
        return made

    @cached_property
    def settings(self) -> dict[str, str]:
        """What config.toml keeps of it: its class, and its digest.

        The digest is the SHA-256 in hexadecimal of its structure, of the names, shapes and types of its weights, and
        of the contents of its non-persistent buffers, which no checkpoint has. Attributes that are neither in its
        `repr` nor in a buffer are not compared.
        """
        model = self.prototype
        name = import_name(type(model))
        structure = re.sub(r" at 0x[0-9a-f]+", "", repr(model))
        saved = model.state_dict()
        weights = [(n, tuple(v.shape), str(v.dtype)) for n, v in saved.items()]
        trained = [(n, p.requires_grad) for n, p in model.named_parameters()]
        unsaved = {
            n: b.to_dense() if b.layout is not torch.strided else b
            for n, b in model.named_buffers(remove_duplicate=False)
            if n not in saved
        }
        parts = (name, structure, weights, trained, *((tree_digest(unsaved),) if unsaved else ()))
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        return {"module": name, "digest": digest}

    def settings_model(self) -> type[BaseModel]:
        """Its settings, which are those that it has."""
        fields: dict[str, Any] = {name: (Literal[value], value) for name, value in self.settings.items()}
        return create_model("instance_settings", __config__=ConfigDict(extra="forbid", frozen=True), **fields)

    def matching(self, table: Mapping[str, Any], where: str) -> Instance:
        """This model, if `table` of a run's config.toml was written for one like it; else raises `ConfigError`."""
        if table.get("name") != INSTANCE:
            raise ConfigError(
                f"the run's model is '{table.get('name')}', which needs no object",
                where=where,
                hint="leave out model=",
            )
        if table.get("digest") != self.settings["digest"]:
            raise ConfigError(
                f"the {self.settings['module']} that was passed differs from the {table.get('module')} that "
                "the run started with: the layers, the names, shapes or types of the weights, or the contents of the "
                "non-persistent buffers, differ",
                where=where,
                hint="create it in the same way",
            )
        return self


def try_model(
    module: nn.Module,
    inputs: torch.Tensor,
    classes: int,
    misfit: Callable[[object, torch.Tensor, int], str | None],
) -> nn.Module:
    """The module itself, if it takes two images and gives what the task needs for them.

    Args:
        module: the model.
        inputs: two images, or two texts of integers; floats are converted to the type of the model.
        classes: the number of classes.
        misfit: `misfit` of the task; see `fedlens.tasks.task.Task`.

    Raises `ConfigError` otherwise: before the run, not as a failure of every client.
    """
    weight = next(module.parameters(), None)
    if weight is not None and inputs.is_floating_point():
        inputs = inputs.to(weight.dtype)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = copy.deepcopy(module).eval()(inputs)
    except Exception as error:
        shape = f"[n, {', '.join(map(str, inputs.shape[1:]))}]"
        things = "images" if inputs.is_floating_point() else "tokens"
        raise ConfigError(
            f"the model cannot take {things} {shape}: {type(error).__name__}: {error}".splitlines()[0],
            where="model",
            hint=_for_the_data(error, inputs),
        ) from error
    expected = misfit(outputs, inputs, classes)
    if expected is not None:
        found = list(outputs.shape) if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"
        things = "images" if inputs.is_floating_point() else "texts"
        raise ConfigError(
            f"the model returns {found} for 2 {things}, but must return {expected}",
            where="model",
            hint="a parameter called classes or num_classes gets their number",
        )
    return module


def _for_the_data(error: Exception, inputs: torch.Tensor) -> str:
    """What to do about a model that cannot take the inputs."""
    if not inputs.is_floating_point():
        return (
            f"it must take int64 [n, T] with tokens up to {int(inputs.max())}: a parameter called vocabulary gets the "
            "number of tokens"
        )
    channels = inputs.shape[1]
    if channels != 3 and f"to have 3 channels, but got {channels} channels" in str(error):
        return (
            "it takes colour images: write a function that replaces its first convolution (conv1 of a torchvision "
            f"ResNet) by one of {channels} channel{'s' * (channels > 1)}, or use colour images"
        )
    return "make it for the data: a parameter called input_shape gets (channels, height, width)"


@contextmanager
def downloads(allowed: bool) -> Iterator[None]:
    """Whether models made in this block may download weights, as torchvision's do through `torch.hub`."""
    global _downloads
    before, _downloads = _downloads, allowed
    try:
        yield
    finally:
        _downloads = before


def downloads_allowed() -> bool:
    """Whether weights may be downloaded at the moment; see `downloads`."""
    return _downloads


@contextmanager
def _hub(name: str) -> Iterator[None]:
    """Refuses downloads of `torch.hub` in this block, unless they are allowed."""
    if _downloads:
        yield
        return

    def refuse(*arguments: Any, **more: Any) -> Any:
        raise ConfigError(
            f"the model '{name}' would download {arguments[0] if arguments else 'weights'}",
            where="model",
            hint="allow it with --download, or run(download=True)",
        )

    hub: Any = torch.hub
    before = hub.download_url_to_file, hub.urlopen
    hub.download_url_to_file = hub.urlopen = refuse
    try:
        yield
    finally:
        hub.download_url_to_file, hub.urlopen = before


def _makes_detectors(target: object) -> bool:
    """Whether this is a function of torchvision that makes detectors."""
    module = inspect.getmodule(target)
    return module is not None and module.__name__.startswith(_DETECTION)


def _adapted(model: Any, classes: int) -> Any:
    """The model itself; a detector of torchvision as fedlens calls it."""
    if not any(base.__module__.startswith(_DETECTION) for base in type(model).__mro__):
        return model
    from fedlens.models.torchvision_detectors import adapted

    return adapted(model, classes)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_simple(hint: Any) -> bool:
    """Whether values of this type can be checked as TOML has them."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _is_simple(get_args(hint)[0])
    if origin is Literal or hint in _PLAIN:
        return True
    return origin in (Union, UnionType, list) and all(map(_is_simple, get_args(hint)))
