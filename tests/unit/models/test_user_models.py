"""A model of a user's own, as PyTorch users have it: a class, a function, an object, one of torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlens import Experiment, load_result, resume
from fedlens.base.errors import ConfigError
from fedlens.base.registry import settings_model
from fedlens.models.registry import MODELS
from fedlens.models.user_models import Instance, downloads

pytestmark = pytest.mark.usefixtures("quick_workers")

SHAPE, CLASSES = (1, 8, 8), 10


class Net(nn.Module):
    def __init__(self, classes: int = 10, hidden: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, hidden), nn.Linear(hidden, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(images.flatten(1))))


class Few(Net):
    def __init__(self) -> None:
        super().__init__(3)


class Many(Net):
    def __init__(self) -> None:
        super().__init__(12)


def both(input_shape: Any, classes: Any) -> Any:
    return input_shape, classes


def turned(classes: Any, input_shape: Any) -> Any:
    return input_shape, classes


def of_torchvision(*, weights: Any = None, **more: Any) -> Any:
    return weights, more


def nothing() -> Any:
    return ()


def of_timm(in_chans: int = 3, num_classes: int = 1000) -> Any:
    return in_chans, num_classes


def loading(num_classes: int, *, folder: str) -> nn.Module:
    torch.hub.load_state_dict_from_url("https://example.org/weights.pth", model_dir=folder)
    return Net(num_classes)


def experiment(model: Any, engine: Any = "inline", rounds: int = 1, **more: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": rounds,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 8}},
        "select": {"clients_per_round": 2},
        "model": model,
        "local": {"lr": 0.1},
        "engine": engine,
    }
    return Experiment(**{**settings, **more})


@pytest.mark.parametrize(
    ("factory", "settings", "made"),
    [
        (both, {}, (SHAPE, CLASSES)),
        (turned, {}, (SHAPE, CLASSES)),
        (lambda shape, n: (shape, n), {}, (SHAPE, CLASSES)),
        (lambda shape, n, *, width=2: (shape, n, width), {"width": 3}, (SHAPE, CLASSES, 3)),
        (lambda num_classes, depth=2: (num_classes, depth), {"depth": 3}, (CLASSES, 3)),
        (of_torchvision, {}, (None, {"num_classes": CLASSES})),
        (of_torchvision, {"width": 3}, (None, {"num_classes": CLASSES, "width": 3})),
        (of_timm, {}, (1, CLASSES)),
        (of_timm, {"num_classes": 20}, (1, 20)),
        (nothing, {}, ()),
    ],
)
def test_a_factory_is_called_with_what_it_takes(factory: Any, settings: dict[str, Any], made: Any) -> None:
    assert MODELS.given(factory)[0](SHAPE, CLASSES, **settings) == made


def test_settings_are_the_parameters_that_the_data_does_not_fill() -> None:
    fields = settings_model(MODELS.given(Net)[0]).model_fields
    assert {name: field.default for name, field in fields.items()} == {"hidden": 4}
    with_function = settings_model(MODELS.given(lambda classes, act=nn.ReLU, width=2: None)[0])
    assert list(with_function.model_fields) == ["width"]  # config.toml cannot hold the other


def test_settings_of_a_class_are_checked_and_written_down(tmp_path: Path) -> None:
    result = experiment({"name": Net, "hidden": 3}).run(tmp_path / "run", report=False)
    assert result.config["model"] == {"name": f"{__name__}:Net", "hidden": 3}
    assert load_result(result.directory).model.first.out_features == 3  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"'hidden' is 'many'"):
        experiment({"name": Net, "hidden": "many"}).run(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"did you mean 'hidden'"):
        experiment({"name": Net, "hiden": 3}).run(tmp_path / "other")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Few, r"returns \[2, 3\] for 2 images, but must return \[2, 10\]: one number a class \(model\)"),
        (Many, r"returns \[2, 12\] for 2 images, but must return \[2, 10\]: one number a class \(model\)"),
        (lambda classes: nn.Linear(3, classes), r"the model cannot take images \[n, 1, 8, 8\]: RuntimeError"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_before_the_run(
    tmp_path: Path, model: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(model).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_of_colour_images_says_what_to_replace_for_grey_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"replaces its first convolution .* by one of 1 channel, or use"):
        experiment(lambda classes: nn.Conv2d(3, classes, 3)).run(tmp_path / "run")


def test_an_object_is_copied_and_its_weights_are_where_the_run_begins(tmp_path: Path) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    one = experiment(net).run(tmp_path / "one", report=False)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    other = experiment(net, seeds={"initialization": 5}).run(tmp_path / "other", report=False)
    final = one.model.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in final.items())
    assert all(torch.equal(final[name], value) for name, value in other.model.state_dict().items())
    assert one.config["model"]["name"] == "instance"
    assert one.config["model"]["module"] == f"{__name__}:Net"


def test_resume_refuses_a_class_in_place_of_an_object(tmp_path: Path) -> None:
    out = experiment(Net()).run(tmp_path / "run", report=False).directory
    for again in (resume, load_result):
        with pytest.raises(
            ConfigError, match=r"`model` is the class Net, but must be an object; pass Net\(\.\.\.\)"
        ):
            again(out, model=Net)  # type: ignore[operator]


def test_what_rebuilds_an_object_needs_it_again(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    class Stopping:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: None

        def round_done(self, line: Any) -> None:
            if line["round"] == 1:
                raise Stop

    net, out = Net(), tmp_path / "run"
    whole = experiment(net, rounds=2).run(tmp_path / "whole", report=False)
    with pytest.raises(Stop):
        experiment(net, rounds=2).run(out, report=False, progress=Stopping())  # type: ignore[arg-type]
    for again in (resume, lambda run: load_result(tmp_path / "whole").model):
        with pytest.raises(
            ConfigError, match=r"was given as an object in Python.*resume\(directory, model=\.\.\.\)"
        ):
            again(out)
    with pytest.raises(ConfigError, match="differs from the"):
        resume(out, model=Net(hidden=5), report=False)
    with pytest.raises(ConfigError, match="differs from the"):
        load_result(tmp_path / "whole", model=Net(hidden=5))
    resumed = resume(out, model=Net(), report=False)  # other weights: those of the run count
    loaded = load_result(tmp_path / "whole", model=Net())
    for result in (resumed, loaded):
        expected = whole.model.state_dict()
        assert all(torch.equal(expected[name], value) for name, value in result.model.state_dict().items())
    by_name = experiment("linear").run(tmp_path / "named", report=False)
    with pytest.raises(ConfigError, match="the run's model is 'linear', which needs no object"):
        load_result(by_name.directory, model=Net())


def test_the_digest_is_of_the_structure_and_not_of_the_weights() -> None:
    assert Instance.of(Net()).settings == Instance.of(Net()).settings
    frozen = Net()
    frozen.first.weight.requires_grad_(False)
    others = [
        Net(hidden=3),
        nn.Sequential(Net(), nn.Dropout(0.1)),
        nn.Sequential(Net(), nn.Dropout(0.2)),
        frozen,
    ]
    digests = {Instance.of(net).settings["digest"] for net in (Net(), *others)}
    assert len(digests) == 5


@pytest.mark.parametrize("layout", ["strided", "sparse"])
def test_the_digest_has_the_contents_of_buffers_that_no_checkpoint_has(layout: str) -> None:
    def digest(value: float, persistent: bool) -> str:
        net, buffer = Net(), torch.tensor([0.0, value])
        net.register_buffer(
            "scale", buffer.to_sparse() if layout == "sparse" else buffer, persistent=persistent
        )
        return Instance.of(net).settings["digest"]

    assert digest(1.0, persistent=False) != digest(2.0, persistent=False)
    assert digest(1.0, persistent=False) == digest(1.0, persistent=False)
    assert digest(1.0, persistent=True) == digest(2.0, persistent=True), "the run's checkpoint has it"


def test_weights_are_downloaded_only_with_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factory, fetched = MODELS.given(loading)[0], list[str]()
    with pytest.raises(ConfigError, match=r"would download https://example.org/weights.pth .*--download"):
        factory(SHAPE, CLASSES, folder=str(tmp_path))
    monkeypatch.setattr(
        torch.hub,
        "download_url_to_file",
        lambda url, file, *more, **rest: (fetched.append(url), torch.save({}, file)),
    )
    with downloads(True):
        factory(SHAPE, CLASSES, folder=str(tmp_path))
    assert fetched == ["https://example.org/weights.pth"]
    factory(SHAPE, CLASSES, folder=str(tmp_path))  # the file is there: no download


def test_a_model_of_torchvision_is_called_by_keyword(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    net = MODELS.find("torchvision.models:resnet18")((3, 32, 32), 7)
    assert net.fc.out_features == 7
    with pytest.raises(ConfigError, match=r"to have 3 channels, but got 1 channels instead"):
        experiment("torchvision.models:resnet18").run(tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["vectorized", {"name": "processes", "workers": 2}])
def test_an_object_trains_on_every_engine(tmp_path: Path, engine: Any) -> None:
    net = Net()
    here = experiment(net).run(tmp_path / "here", report=False).model.state_dict()
    there = experiment(net, engine).run(tmp_path / "there", report=False).model.state_dict()
    for name, value in here.items():
        torch.testing.assert_close(value, there[name])
