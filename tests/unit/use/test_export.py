"""Exported models: the run's own numbers from a process without fedlens, and what has to go with the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fedlens import Experiment, Result
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.data.catalogue import CATALOGUE, restriction
from fedlens.run import checkpoint
from fedlens.run.rundir import RunDir
from fedlens.use import export as export_module
from fedlens.use.export import export
from fedlens.use.trained_model import TrainedModel, read_trained

# Loads both files and saves the outputs for one and for three images; fedlens cannot be imported.
ALONE = """
import sys, warnings
sys.modules |= dict.fromkeys([*(name for name in sys.modules if name.startswith("fedlens.")), "fedlens"])
warnings.simplefilter("error")
import numpy as np, onnxruntime, torch
folder = sys.argv[1]
session = onnxruntime.InferenceSession(folder + "/model.onnx", providers=["CPUExecutionProvider"])
program = torch.export.load(folder + "/model.pt2").module()
found = {}
for n in (1, 3):
    images = np.load(folder + "/images.npy")[:n]
    names = [output.name for output in session.get_outputs()]
    for name, value in zip(names, session.run(names, {"images": images})):
        found[f"onnx-{name}-{n}"] = value
    with torch.inference_mode():
        for name, value in program(torch.from_numpy(images)).items():
            found[f"pt2-{name}-{n}"] = value.numpy()
np.savez(folder + "/found.npz", **found)
"""


def run_of(
    out: Path, model: Any = "small-cnn", shape: tuple[int, ...] = (3, 32, 32), **settings: Any
) -> Result:
    dataset = {"name": "synthetic", "shape": list(shape), "train": 24, "test": 8}
    return Experiment(
        rounds=1,
        model=model,
        local={"lr": 0.001, "batch_size": 8},
        data={"dataset": dataset, "partition": {"name": "iid", "clients": 2}, **settings},
    ).run(out)


def trained_of(result: Result) -> TrainedModel:
    return read_trained(RunDir.open(result.directory), "last")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    return trained_of(run_of(tmp_path_factory.mktemp("run") / "run", shape=(1, 8, 8)))


def check_alone(result: Result, folder: Path, forked: Callable[..., str]) -> None:
    """Exports a run's last model, and compares both files with the run's own module in a process without fedlens."""
    model = trained_of(result)
    for name in ("model.onnx", "model.pt2"):
        assert result.export(folder / name, round="last") == folder / name
    shape = (model.form.channels, model.form.height, model.form.width)
    images = np.random.default_rng(7).integers(0, 256, (3, *shape)).astype(np.uint8)
    np.save(folder / "images.npy", images)
    assert forked(ALONE, folder) == "passed"
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (model.mean, model.std))
    with torch.inference_mode():
        logits = result.model((torch.from_numpy(images) / 255 - mean) / std)
    with np.load(folder / "found.npz") as found:
        assert len(found) == 8
        for key in ("onnx", "pt2"):
            for n in (1, 3):
                scores = found[f"{key}-scores-{n}"]
                np.testing.assert_allclose(scores, logits[:n].softmax(1), atol=1e-4)
                assert found[f"{key}-class-{n}"].tolist() == scores.argmax(1).tolist()


def test_an_exported_model_gives_the_runs_numbers_without_fedlens(
    tmp_path: Path, forked: Callable[..., str]
) -> None:
    check_alone(run_of(tmp_path / "run", shape=(1, 8, 8)), tmp_path, forked)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"name": "resnet20", "width": 4}, marks=pytest.mark.nightly),
        pytest.param({"name": "mobilenet-v2"}, marks=pytest.mark.nightly),
        pytest.param({"name": "vit-tiny"}, marks=pytest.mark.nightly),
        pytest.param(
            {"name": "efficientnet-b0", "norm": "group", "bottleneck": 8}, marks=pytest.mark.nightly
        ),
    ],
    ids=lambda model: model["name"],
)
def test_exported_networks_give_the_runs_numbers_without_fedlens(
    model: dict[str, Any], tmp_path: Path, forked: Callable[..., str]
) -> None:
    if model["name"] != "resnet20":
        pytest.importorskip("timm", reason="timm makes it: pip install 'fedlens[vision]'")
    side = 224 if model["name"] == "vit-tiny" else 32
    check_alone(run_of(tmp_path / "run", model, (3, side, side)), tmp_path, forked)


def pt2(trained: TrainedModel, file: Path) -> Callable[[Tensor], dict[str, Tensor]]:
    export(trained, file)
    program: Callable[[Tensor], dict[str, Tensor]] = torch.export.load(file).module()
    return program


def test_a_graph_takes_bytes_and_normalizes_inside(trained: TrainedModel, tmp_path: Path) -> None:
    shifted = replace(trained, mean=(0.9,), std=(0.01,))
    images = torch.full((2, 1, 8, 8), 230, dtype=torch.uint8)
    scores = pt2(shifted, tmp_path / "a.pt2")(images)["scores"]
    with torch.no_grad():
        expected = trained.module((images / 255 - 0.9) / 0.01).softmax(1)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
    assert not torch.allclose(pt2(trained, tmp_path / "b.pt2")(images)["scores"], expected, atol=1e-2)


def test_the_file_beside_it_has_classes_preprocessing_and_licence(
    trained: TrainedModel, tmp_path: Path
) -> None:
    made = export(trained, tmp_path / "new" / "model.onnx")
    facts = json.loads((tmp_path / "new" / "model.onnx.json").read_text())
    assert facts == json.loads(json.dumps(made.facts))
    expected = {
        "file": "model.onnx",
        "format": "onnx",
        "model": "small-cnn",
        "kind": "classification",
        "classes": list(trained.classes),
        "dataset": "synthetic",
        "licence": "none needed",
        "notice": None,
        "size": [8, 8],
        "channels": 1,
        "fit": "crop",
        "upright": True,
        "inverted": False,
        "mean": list(trained.mean),
        "std": list(trained.std),
        "normalizes": True,
        "round": 1,
        "run": "run",
        "input": {"name": "images", "type": "uint8", "shape": ["n", 1, 8, 8]},
        "outputs": [
            {"name": "class", "type": "int64", "shape": ["n"]},
            {"name": "scores", "type": "float32", "shape": ["n", 10]},
        ],
    }
    assert {key: facts[key] for key in expected} == expected
    assert len(list((tmp_path / "new").iterdir())) == 2
    session = onnxruntime.InferenceSession(made.file, providers=["CPUExecutionProvider"])
    (images,) = session.get_inputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["n", 1, 8, 8])
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list(trained.classes)
    onnx.checker.check_model(made.file, full_check=True)


def test_an_exported_file_names_no_folder_of_this_machine(trained: TrainedModel, tmp_path: Path) -> None:
    import zipfile

    for name in ("a.onnx", "a.pt2", "a.safetensors"):
        file = export(trained, tmp_path / name).file
        contents = [file.read_bytes()]
        if name.endswith("pt2"):
            with zipfile.ZipFile(file) as archive:
                contents = [archive.read(member) for member in archive.namelist()]
        places = [str(Path(export_module.__file__).parent).encode(), str(tmp_path).encode()]
        assert not any(place in content for content in contents for place in places), name


def test_safetensors_has_the_weights_and_the_runs_metadata(trained: TrainedModel, tmp_path: Path) -> None:
    made = export(trained, tmp_path / "model.safetensors")
    assert made.error is None
    with safe_open(made.file, "pt") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: value.tolist() for name, value in trained.tree().items()
        }
    _, about = checkpoint.read_model(made.file)
    assert about == dict(trained.about)
    assert json.loads((tmp_path / "model.safetensors.json").read_text())["normalizes"] is False


def test_a_licence_that_forbids_passing_on_is_written_into_each_file(
    trained: TrainedModel, tmp_path: Path
) -> None:
    licence = CATALOGUE["camvid"].licence
    assert licence is not None
    about = {**trained.about, "dataset": "camvid", "licence": licence}
    restricted = replace(trained, about=about, licence=licence)
    notice = restriction("camvid", licence)
    assert notice is not None
    assert "never to be passed on" in notice
    for name in ("a.onnx", "a.pt2", "a.safetensors"):
        made = export(restricted, tmp_path / name)
        assert made.facts["notice"] == json.loads(made.json_file.read_text())["notice"] == notice
    model = onnx.load(tmp_path / "a.onnx")
    assert model.doc_string == notice
    assert {entry.key: entry.value for entry in model.metadata_props}["notice"] == notice
    extra = {"fedlens.json": ""}
    torch.export.load(tmp_path / "a.pt2", extra_files=extra)
    assert json.loads(extra["fedlens.json"])["notice"] == notice
    assert checkpoint.read_model(tmp_path / "a.safetensors")[1]["notice"] == notice


@pytest.mark.parametrize("name", ["cityscapes", "imagenet", "camvid", "inaturalist-user-120k", "places365"])
def test_data_that_are_for_research_only_have_a_notice(name: str) -> None:
    assert restriction(name, CATALOGUE[name].licence or "") is not None


@pytest.mark.parametrize("name", ["digits", "mnist", "fashion-mnist", "cifar10", "femnist", "bccd"])
def test_data_that_may_be_passed_on_have_no_notice(name: str) -> None:
    assert restriction(name, CATALOGUE[name].licence or "") is None
    assert restriction("image-folder", "your own") is None


def test_an_existing_file_is_kept_unless_forced(trained: TrainedModel, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"already exists .*--force"):
        export(trained, file)
    assert file.read_text() == "mine"
    export(trained, file, force=True)
    checkpoint.read_model(file)
    file.unlink()
    with pytest.raises(ConfigError, match=r"already exists .*model\.safetensors\.json"):
        export(trained, file)


@pytest.mark.parametrize(
    ("name", "format", "words"),
    [
        ("model", None, "no ending that says its format .*onnx, pt2, safetensors"),
        ("model.pth", None, "unknown format .pth. .*onnx, pt2, safetensors"),
        (
            "model.pt2",
            "onnx",
            r"the format is onnx, but the file does not end in \.onnx .*name it model\.onnx",
        ),
        ("model.onnx", "torchscript", "unknown format 'torchscript'"),
    ],
)
def test_a_format_that_does_not_fit_is_refused(
    trained: TrainedModel, tmp_path: Path, name: str, format: str | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        export(trained, tmp_path / name, format)
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ConfigError, match="the path is a directory"):
        export(trained, tmp_path / "folder.onnx")


def test_without_its_packages_onnx_says_what_to_install(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "find_spec", lambda name: None if name != "onnx" else object())
    with pytest.raises(
        ConfigError, match=r"onnxscript and onnxruntime, which are not installed; pip install 'fedl"
    ):
        export(trained, tmp_path / "model.onnx")
    export(trained, tmp_path / "model.pt2")


def test_a_model_that_no_exporter_takes_ends_with_a_sentence_and_no_file(
    trained: TrainedModel, tmp_path: Path
) -> None:
    class Choosing(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1)[:, :10] * (2 if images.sum() > 0 else 1)

    with pytest.raises(
        RunFailed, match=r"PyTorch cannot export the model 'small-cnn' as pt2: .*--format safetensors"
    ):
        export(replace(trained, module=Choosing()), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_an_exported_model_that_computes_something_else_is_not_written(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = torch.export.load

    def other(file: Path) -> Any:
        program = loaded(file)
        with torch.no_grad():
            next(iter(program.state_dict.values())).add_(1.0)
        return program

    monkeypatch.setattr(torch.export, "load", other)
    with pytest.raises(RunFailed, match="the exported model computes something else: 'scores' differs by"):
        export(trained, tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_large_rounding_errors_is_exported_and_says_how_large_they_are(
    trained: TrainedModel, tmp_path: Path
) -> None:
    """Logits of 1e6 round to multiples of 0.06, and another order of additions rounds them to others."""

    class Cancelling(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            values = images.flatten(1)[:, :40]
            return (values.unsqueeze(2).expand(-1, -1, 10) * 1e5).sum(1) * self.factors - values.sum(1)[
                :, None
            ] * 1e5

        def __init__(self) -> None:
            super().__init__()
            self.factors = torch.nn.Parameter(torch.linspace(1, 1.000001, 10))

    made = replace(trained, module=Cancelling())
    images = torch.randint(256, (3, 1, 8, 8), generator=torch.Generator().manual_seed(1))
    assert export_module._rounding(export_module.Graph(made), images, "scores") > 1e-3
    export(made, tmp_path / "model.onnx")


def test_weights_that_do_not_fit_into_one_onnx_file_lie_beside_it(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "_ONE_FILE", 1000)
    export(trained, tmp_path / "model.onnx")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.onnx", "model.onnx.data", "model.onnx.json"}
    onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])


def test_weights_that_are_not_finite_are_exported_as_they_are(trained: TrainedModel, tmp_path: Path) -> None:
    import copy

    module = copy.deepcopy(trained.module)
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    program = pt2(replace(trained, module=module), tmp_path / "model.pt2")
    assert program(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))["scores"].isnan().all()
