"""Makes a dataset factory from a format's own settings, its `fill`, and the settings that all formats share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, get_type_hints

from fedlens.data.dataset import Dataset
from fedlens.data.formats import common_settings as common
from fedlens.data.formats.scan import Fill, read


def _shared(
    *,
    test: common.Test = 0.2,
    table: common.TableFile = None,
    path_column: common.PathColumn = None,
    client_column: common.ClientColumn = None,
    client_level: common.ClientLevel = None,
    client_pattern: common.ClientPattern = None,
    on_error: common.OnError = "stop",
) -> None:
    """The settings that every format has, with the same defaults; they follow the format's own."""


def reader(fill: Fill) -> Callable[[Callable[..., None]], Callable[..., Dataset]]:
    """Turns a function that only declares settings into the dataset factory of a format.

    The factory takes `root`, `download` and `seed`, and as keywords the declared settings followed by the shared
    ones. It hands all settings to `fedlens.data.formats.scan.read`. `registry.read_settings` and
    `inspect.signature` see the whole signature.

    Args:
        fill: completes the scan of a folder in this format.

    >>> from fedlens.data.formats.image_folder import image_folder
    >>> list(signature(image_folder).parameters)[:4], list(signature(image_folder).parameters)[-1]
    (['root', 'download', 'seed', 'path'], 'on_error')
    """

    def factory_of(declared: Callable[..., None]) -> Callable[..., Dataset]:
        @wraps(declared)
        def factory(root: Path, download: bool, seed: int, **values: Any) -> Dataset:
            bound = full_signature.bind(root, download, seed, **values)
            bound.apply_defaults()
            given = {key: value for key, value in bound.arguments.items() if key not in positional}
            changed = {key: value for key, value in given.items() if value != defaults[key]}
            return read(fill, given, seed, changed)

        positional = {name: Parameter(name, kind) for name in ("root", "download", "seed")}
        settings = [*signature(declared).parameters.values(), *signature(_shared).parameters.values()]
        defaults = {setting.name: setting.default for setting in settings}
        full_signature = Signature([*positional.values(), *settings], return_annotation=Dataset)
        hints = [get_type_hints(function, include_extras=True) for function in (declared, _shared)]
        factory.__annotations__ = {**hints[0], **hints[1], "return": Dataset}
        factory.__signature__ = full_signature  # type: ignore[attr-defined]  # read by `inspect.signature`
        return factory

    kind = Parameter.POSITIONAL_OR_KEYWORD
    return factory_of
