from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fedlens.base.registry import settings_model
from fedlens.data.formats.registry import FORMATS

SHARED = ["test", "table", "path_column", "client_column", "client_level", "client_pattern", "on_error"]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_its_own_settings_and_then_the_shared_ones(format: str) -> None:
    names = list(settings_model(FORMATS[format].reader()).model_fields)
    assert names[0] == "path"
    assert names[-len(SHARED) :] == SHARED
    assert {"size", "channels", "fit"} < set(names[: -len(SHARED)])


@pytest.mark.parametrize("format", FORMATS)
def test_a_factory_is_a_function_that_workers_can_be_sent(format: str) -> None:
    factory = FORMATS[format].reader()
    needed = {"path": ".", "classes": ["a", "b"]} if format == "mask-folder" else {"path": "."}
    assert pickle.loads(pickle.dumps(factory)) is factory
    with pytest.raises(TypeError, match="unexpected keyword argument 'sice'"):
        factory(Path(), False, 0, **needed, sice=8)
