from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from fedlens import Experiment
from fedlens.base.errors import DataError
from fedlens.base.registry import settings_model
from fedlens.data.formats.registry import FORMATS
from tests.unit.data.formats.boxed import instances, picture
from tests.unit.data.pictures import pixels, write

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


def write_folder(folder: Path, format: str) -> dict[str, str | list[str]]:
    """Four images with labels, masks or boxes, and no splits; the settings of their reader."""
    for at, name in enumerate("abcd"):
        if format == "image-folder":
            write(folder / ("one", "two")[at % 2] / f"{name}.png", pixels(at))
        elif format == "mask-folder":
            write(folder / "images" / f"{name}.png", pixels(at))
            write(folder / "masks" / f"{name}.png", pixels(at, channels=1) % 2)
        else:
            picture(folder / f"{name}.png", name)
    if format == "coco-json":
        (folder / "boxes.json").write_text(json.dumps(instances("abcd")))
    more: dict[str, str | list[str]] = {"classes": ["zero", "one"]} if format == "mask-folder" else {}
    return {"path": str(folder), **more}


@pytest.mark.parametrize("format", ["image-folder", "mask-folder", "coco-json"])
def test_a_share_of_0_draws_no_test_data(format: str, tmp_path: Path) -> None:
    read, given = FORMATS[format].reader(), write_folder(tmp_path, format)
    whole, fifth = (read(Path(), False, 0, **given, **more) for more in ({"test": 0.0}, {}))
    assert (len(whole.train), len(whole.test)) == (4, 0)
    assert len(fifth.test) > 0
    assert whole.table().classes == fifth.classes


def test_a_run_needs_test_images(tmp_path: Path) -> None:
    data = {"name": "image-folder", **write_folder(tmp_path / "images", "image-folder"), "test": 0}
    settings = {"rounds": 1, "model": "linear", "local": {"lr": 0.1}}
    partition = {"name": "iid", "clients": 2}
    with pytest.raises(DataError, match="no test images"):
        Experiment(**settings, data={"dataset": data, "partition": partition}).run(tmp_path / "run")
