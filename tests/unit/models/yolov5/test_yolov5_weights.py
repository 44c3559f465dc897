"""Files of YOLOv5's authors: networks pickled under their classes' names, which are read without their code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedlens.base.errors import ConfigError, DataError
from fedlens.models.weights import load_weights
from fedlens.models.weights_file import read_weights
from fedlens.models.yolov5.detector import Yolov5
from tests.unit.models.zoo_kit import images, made

REPEATS = {2: 1, 4: 3, 6: 3, 9: 1, 13: 1, 17: 1, 20: 1, 23: 1}  # bottlenecks of a small or nano network


class Module(nn.Module):
    """A module whose forward pass is written in the test, in the order of the published architecture."""


class Ran:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def theirs() -> Iterator[dict[str, type[Module]]]:
    """Classes with the names of the authors' classes, importable while a file is written."""
    names = {"models.yolo": ("Model", "Detect")}
    names["models.common"] = ("Conv", "Focus", "Bottleneck", "C3", "SPP", "Concat")
    made: dict[str, type[Module]] = {}
    modules = {"models": ModuleType("models"), **{name: ModuleType(name) for name in names}}
    for module, classes in names.items():
        for name in classes:
            made[name] = type(name, (Module,), {"__module__": module})
            setattr(modules[module], name, made[name])
    with pytest.MonkeyPatch.context() as patch:
        for name, module_object in modules.items():
            patch.setitem(sys.modules, name, module_object)
        yield made


def network(classes: dict[str, type[Module]], channels: int = 64, outputs: int = 3) -> Module:
    """A nano network as release 4.0 pickles it, with drawn weights and statistics."""

    def conv(inputs: int, out: int, kernel: int = 1) -> Module:
        module = classes["Conv"]()
        module.conv = nn.Conv2d(inputs, out, kernel, bias=False)
        module.bn, module.act = nn.BatchNorm2d(out, eps=1e-3), nn.SiLU()
        module.bn.running_mean, module.bn.running_var = torch.randn(out) / 4, 1 + torch.rand(out)
        return module

    def cross(inputs: int, out: int, repeats: int) -> Module:
        module, half = classes["C3"](), out // 2
        module.cv1, module.cv2, module.cv3 = conv(inputs, half), conv(inputs, half), conv(2 * half, out)
        module.m = nn.Sequential(*(classes["Bottleneck"]() for _ in range(repeats)))
        for one in module.m:
            one.cv1, one.cv2 = conv(half, half), conv(half, half, 3)
        return module

    a, b, c, d, e = 16, 32, 64, 128, 256
    focus, spp, detect = classes["Focus"](), classes["SPP"](), classes["Detect"]()
    focus.conv = conv(12, a, 3)
    spp.cv1, spp.cv2 = conv(e, d), conv(2 * e, e)
    spp.m = nn.ModuleList(nn.MaxPool2d(k, 1, k // 2) for k in (5, 9, 13))
    detect.m = nn.ModuleList(nn.Conv2d(width, 3 * (outputs + 5), 1) for width in (c, d, e))
    detect.register_buffer("anchors", torch.ones(3, 3, 2))
    concat, up = classes["Concat"], nn.Upsample
    model = classes["Model"]()
    model.model = nn.Sequential(
        focus, conv(a, b, 3), cross(b, b, 1), conv(b, c, 3), cross(c, c, 3), conv(c, d, 3), cross(d, d, 3),
        conv(d, e, 3), spp, cross(e, e, 1), conv(e, d), up(scale_factor=2), concat(), cross(e, d, 1), conv(d, c),
        up(scale_factor=2), concat(), cross(d, c, 1), conv(c, c, 3), concat(), cross(d, d, 1), conv(d, d, 3), concat(),
        cross(e, e, 1), detect,
    )  # fmt: skip
    model.names, model.stride, model.name = ["a", "b", "c"], torch.tensor([8.0, 16, 32]), "models.common.Conv"
    return model


def outputs(model: Any, x: Tensor) -> list[Tensor]:
    """The network's outputs, from a description of release 4.0, one layer after the other."""

    def conv(module: Any, x: Tensor, stride: int = 1) -> Tensor:
        kernel = module.conv.kernel_size[0]
        y = nn.functional.conv2d(x, module.conv.weight, stride=stride, padding=kernel // 2)
        bn = module.bn
        y = nn.functional.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=1e-3)
        return nn.functional.silu(y)

    def cross(module: Any, x: Tensor, shortcut: bool) -> Tensor:
        y = conv(module.cv1, x)
        for one in module.m:
            z = conv(one.cv2, conv(one.cv1, y))
            y = y + z if shortcut else z
        return conv(module.cv3, torch.cat([y, conv(module.cv2, x)], 1))

    m = model.model
    corners = [x[..., row::2, column::2] for row, column in ((0, 0), (1, 0), (0, 1), (1, 1))]
    x = conv(m[0].conv, torch.cat(corners, 1))
    kept = []
    for down, block in ((1, 2), (3, 4), (5, 6)):
        x = cross(m[block], conv(m[down], x, 2), True)
        kept.append(x)
    x = conv(m[8].cv1, conv(m[7], x, 2))
    x = conv(m[8].cv2, torch.cat([x, *(pool(x) for pool in m[8].m)], 1))
    lateral1 = conv(m[10], cross(m[9], x, False))
    x = cross(m[13], torch.cat([m[11](lateral1), kept[2]], 1), False)
    lateral2 = conv(m[14], x)
    first = cross(m[17], torch.cat([m[15](lateral2), kept[1]], 1), False)
    second = cross(m[20], torch.cat([conv(m[18], first, 2), lateral2], 1), False)
    third = cross(m[23], torch.cat([conv(m[21], second, 2), lateral1], 1), False)
    return [layer(y) for layer, y in zip(m[24].m, (first, second, third), strict=True)]


def checkpoint(path: Path, model: Module, **more: Any) -> Path:
    """A file as the authors save one."""
    fitness = np.array([0.5])
    torch.save({"epoch": -1, "best_fitness": fitness, "model": model, "optimizer": None, **more}, path)
    return path


def test_their_network_gives_the_outputs_of_ours(theirs, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = network(theirs).double().eval()
    path = checkpoint(tmp_path / "yolov5n.pt", model)
    ours = made("yolov5n", (3, 64, 64), 3).double().eval()
    match = load_weights(ours, read_weights(path), 3)
    assert match.drawn == match.head == ()
    assert match.unused == ("model.24.anchors",)
    x = images(2, 3, 64, 64).double()
    assert isinstance(ours, Yolov5)
    for expected, found in zip(outputs(model, x), ours.raw(x).values(), strict=True):
        by_anchor = expected.unflatten(1, (3, -1)).permute(0, 1, 3, 4, 2)
        torch.testing.assert_close(found, by_anchor)


def test_the_conversion_of_the_page_and_a_state_dictionary_give_the_same_leaves(
    theirs, tmp_path: Path
) -> None:
    model = network(theirs).half()
    tensors = dict(read_weights(checkpoint(tmp_path / "a.pt", model)).tensors)
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(model.state_dict(), tmp_path / "b.pt")
    for other in (load_file(tmp_path / "a.safetensors"), read_weights(tmp_path / "b.pt").tensors):
        assert other.keys() == tensors.keys()
        assert all(torch.equal(tensors[name], other[name]) for name in tensors)


def test_another_number_of_classes_draws_the_head(theirs, tmp_path: Path) -> None:
    ours = made("yolov5n", (3, 64, 64), 7)
    match = load_weights(ours, read_weights(checkpoint(tmp_path / "a.pt", network(theirs))), 7)
    assert match.head == tuple(f"head.{k}.{leaf}" for k in range(3) for leaf in ("weight", "bias"))


@pytest.mark.parametrize("place", ["beside", "attribute", "layer"])
def test_code_in_such_a_file_is_refused_and_does_not_run(theirs, tmp_path: Path, place: str) -> None:
    model, evil = network(theirs), Ran(tmp_path / "ran")
    if place == "attribute":
        model.hyp = evil
    if place == "layer":
        model.model[3].conv.hook = evil
    path = checkpoint(tmp_path / "a.pt", model, **({"extra": evil} if place == "beside" else {}))
    with pytest.raises(DataError, match=r"contains the Python object '\w+.mkdir' .* ran nothing of it"):
        read_weights(path)
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)  # the plant works
    assert (tmp_path / "ran").exists()


def test_networks_of_other_releases_and_sizes_are_refused(theirs, tmp_path: Path) -> None:
    other = type("BottleneckCSP", (Module,), {"__module__": "models.common"})
    sys.modules["models.common"].BottleneckCSP = other  # type: ignore[attr-defined]
    model = network(theirs)
    model.model[2] = other()
    with pytest.raises(DataError, match=r"the Python object 'models\.common\.BottleneckCSP'"):
        read_weights(checkpoint(tmp_path / "a.pt", model))
    path = checkpoint(tmp_path / "b.pt", network(theirs))
    with pytest.raises(ConfigError, match="these are weights of another network"):
        load_weights(made("yolov5s", (3, 64, 64), 3), read_weights(path), 3)
