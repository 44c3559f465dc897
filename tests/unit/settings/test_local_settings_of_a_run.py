"""Local settings that do not fit the data or the run are refused before it, with the clients."""

import numpy as np
import pytest
from torch import nn

from fedlens import Experiment
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import ModelSpec
from fedlens.local.settings import LocalSettings
from fedlens.settings.single_images import fails_on_one_image, refuse_single_images
from fedlens.tasks.classification import Classification

TASK = Classification()


def normalized(input_shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))


def over_pixels(input_shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, classes))


def spec(factory) -> ModelSpec:
    return ModelSpec(factory, "net", {}, (1, 8, 8), 10, 0)


def test_only_models_that_fail_on_one_image_are_found() -> None:
    assert fails_on_one_image(spec(normalized), TASK)
    assert not fails_on_one_image(spec(over_pixels), TASK)
    assert not fails_on_one_image(spec(lambda input_shape, classes: nn.Linear(64, classes)), TASK)


def halved(input_shape, classes: int) -> nn.Module:
    layers = (
        nn.AvgPool2d(4),
        nn.BatchNorm2d(1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1, classes),
    )
    return nn.Sequential(*layers)


def test_a_model_is_tried_on_one_image_of_the_size_it_is_trained_on() -> None:
    assert not fails_on_one_image(spec(halved), TASK)
    assert fails_on_one_image(spec(halved), TASK, (1, 4, 4))
    local, sizes = LocalSettings(lr=0.1), np.array([33])
    refuse_single_images(spec(halved), TASK, local, sizes, ["a"])
    with pytest.raises(ConfigError, match="batch of one image"):
        refuse_single_images(spec(halved), TASK, local, sizes, ["a"], shape=(1, 4, 4))


@pytest.mark.parametrize(
    ("local", "sizes", "named", "hint"),
    [
        ({}, [32, 33, 65, 0], "2 of 3 clients", "last_batch = 'drop'"),
        ({"last_batch": "drop"}, [32, 33, 1], "1 of 3 clients", "leave clients with one image out"),
        ({"batch_size": 1}, [2, 3], "2 of 2 clients", "at least 2"),
        ({"steps": 2}, [33], "1 of 1 clients", "drop"),
    ],
)
def test_the_clients_are_named(local, sizes, named: str, hint: str) -> None:
    names = [f"site-{n}" for n in sizes]
    with pytest.raises(ConfigError) as caught:
        refuse_single_images(spec(normalized), TASK, LocalSettings(lr=0.1, **local), np.array(sizes), names)
    assert named in str(caught.value)
    assert hint in str(caught.value.hint)
    assert "site-" in str(caught.value)
    assert "site-32" not in str(caught.value)
    assert "site-0" not in str(caught.value)


@pytest.mark.parametrize(
    "local", [{"last_batch": "drop"}, {"steps": 1}, {"batch_size": "all"}, {"batch_size": 11}]
)
def test_what_never_meets_such_a_batch_is_not_refused(local) -> None:
    refuse_single_images(
        spec(normalized), TASK, LocalSettings(lr=0.1, **local), np.array([33, 65]), ["a", "b"]
    )


def test_a_run_is_refused_and_runs_with_whole_batches(tmp_path) -> None:
    settings = {
        "rounds": 1,
        "model": normalized,
        "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
        "algorithm": "fedavg",
    }
    sizes = (
        Experiment(**settings, local={"lr": 0.1}).run(tmp_path / "first", report=False).summary["partition"]
    )
    n = -(-sizes["examples"] // 4)
    with pytest.raises(ConfigError, match="batch of one image"):
        Experiment(**settings, local={"lr": 0.1, "batch_size": n - 1}).run(tmp_path / "second", report=False)
    assert not (tmp_path / "second").exists()
    local = {"lr": 0.1, "batch_size": n - 1, "last_batch": "drop"}
    summary = Experiment(**settings, local=local).run(tmp_path / "third", report=False).summary
    assert summary["totals"]["failed"] == 0
    assert summary["totals"]["clients"] == 4


UNEVEN = {
    "dataset": "digits",
    "partition": {"name": "iid", "clients": 22},
}  # clients 7 to 21 have 65 examples


def test_only_clients_that_can_be_selected_count(tmp_path) -> None:
    def run(clients: list[int], name: str) -> dict:
        settings = {
            "rounds": 1,
            "model": normalized,
            "data": UNEVEN,
            "local": {"lr": 0.1, "batch_size": 64},
        }
        settings["select"] = {"name": "fixed", "clients": clients}
        return Experiment(**settings, algorithm="fedavg").run(tmp_path / name, report=False).summary["totals"]

    sizes = {"few": run([0, 1, 1], "few"), "one": run([2], "one")}
    assert [totals["failed"] for totals in sizes.values()] == [0, 0]
    with pytest.raises(ConfigError, match=r"1 of 3 clients .* at least two: 9 \("):
        run([0, 9, 1], "more")


@pytest.mark.parametrize(
    "algorithm",
    [
        "liadmm",
        "mime",
        "mimelite",
        "feddane",
        {"name": "scaffold", "option": "I"},
        {"name": "iceadmm", "gradient": "full"},
    ],
)
def test_gradients_over_all_examples_include_the_last_batch(tmp_path, algorithm) -> None:
    """Leaving it out of the steps helps no client there; another batch size does."""
    settings = {"rounds": 1, "model": normalized, "data": UNEVEN, "algorithm": algorithm}
    settings["select"] = {"name": "fixed", "clients": [0, 9]}
    local = {"lr": 0.1, "last_batch": "drop"}
    with pytest.raises(ConfigError, match=r"1 of 2 clients .* set another local\.batch_size") as caught:
        Experiment(**settings, local=local | {"batch_size": 64}).run(tmp_path / "bad", report=False)
    assert "last_batch" not in str(caught.value)
    run = Experiment(**settings, local={"lr": 0.1, "batch_size": 60}).run(tmp_path / "good", report=False)
    assert run.summary["totals"]["failed"] == 0


def test_one_batch_for_a_gradient_may_leave_the_last_one_out(tmp_path) -> None:
    settings = {
        "rounds": 1,
        "model": normalized,
        "data": UNEVEN,
        "algorithm": {"name": "liadmm", "gradient": "batch"},
    }
    with pytest.raises(ConfigError, match=r"set local\.last_batch = 'drop'"):
        Experiment(**settings, local={"lr": 0.1, "batch_size": 64}).run(tmp_path / "bad", report=False)


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    settings = {"rounds": 3, "model": "linear", "data": {"dataset": "digits", "partition": "iid"}}
    settings["data"]["partition"] = {"name": "iid", "clients": 4}
    with pytest.raises(ConfigError, match="never reach"):
        Experiment(**settings, local={"lr": 0.1, "lr_warmup": 3}).run(report=False)
