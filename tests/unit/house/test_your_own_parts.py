"""The examples of the page on parts of one's own: each is used as the page says, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedlens import Experiment
from fedlens.base.registry import load_file
from fedlens.core.random import Rng
from fedlens.local.rules import LocalContext

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLES = DOCS / "examples"


IID: dict[str, Any] = {"dataset": "digits", "partition": {"name": "iid", "clients": 10}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A short run with each part, and one without any."""
    parts: dict[str, dict[str, Any]] = {
        "none": {},
        "model": {"model": {"name": f"{EXAMPLES}/own_model.py:TwoLayers", "hidden": 8}},
        "pulled": {"client": {"name": f"{EXAMPLES}/own_rules.py:pulled", "mu": 0.5}},
        "proximal": {"client": {"name": "proximal", "mu": 0.5}},
        "smoothed": {"client": f"{EXAMPLES}/own_rules.py:smoothed"},
        "jittered": {"client": f"{EXAMPLES}/own_rules.py:jittered"},
        "noisy": {"client": f"{EXAMPLES}/own_rules.py:noisy"},
        "kept": {"client": f"{EXAMPLES}/kept_momentum.py:kept"},
        "aggregate": {"aggregate": f"{EXAMPLES}/own_aggregate.py:Median"},
        "geometric": {"aggregate": f"{EXAMPLES}/own_aggregate.py:GeometricMedian"},
        "clipping": {"aggregate": {"name": f"{EXAMPLES}/own_aggregate.py:CenteredClipping", "radius": 0.3}},
        "field": {
            "client": f"{EXAMPLES}/field_weighted.py:sends_gap",
            "aggregate": f"{EXAMPLES}/field_weighted.py:FieldWeighted",
        },
        "task": {"task": {"name": f"{EXAMPLES}/own_task.py:Focal", "gamma": 1.0}},
        "server": {"server": {"name": f"{EXAMPLES}/own_server_step.py:signed", "lr": 0.003}},
        "partition": {
            "data": {"dataset": "digits", "partition": f"{EXAMPLES}/one_kind_each.py:one_kind_each"}
        },
        "inverted": {"data": {**IID, "augment": f"{EXAMPLES}/own_augmentation.py:inverted"}},
        "upside-down": {
            "data": {**IID, "augment": {"name": f"{EXAMPLES}/own_augmentation.py:upside_down", "p": 1}}
        },
        "dataset": {
            "data": {"dataset": f"{EXAMPLES}/own_dataset.py:stripes", "partition": "natural"},
            "select": None,
        },
    }
    common: dict[str, Any] = {
        "rounds": 2,
        "data": IID,
        "select": {"clients_per_round": 3},
        "model": "linear",
        "local": {"lr": 0.1, "batch_size": 20},
        "evaluation": {"every": 2},
        "engine": "inline",
    }
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: Experiment(**{**common, **more}).run(folder / name, report=False)
        for name, more in parts.items()
    }


def weights(result: Any) -> list[torch.Tensor]:
    return list(result.model.state_dict().values())


def test_every_example_runs_without_a_failure(runs: dict[str, Any]) -> None:
    for name, result in runs.items():
        assert result.summary["totals"]["failed"] == 0, name
        assert result.metrics[-1]["round"] == 2, name


def test_the_model_has_its_setting(runs: dict[str, Any]) -> None:
    assert runs["model"].model.first.out_features == 8


def test_the_pull_is_fedprox(runs: dict[str, Any]) -> None:
    for mine, theirs in zip(weights(runs["pulled"]), weights(runs["proximal"]), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_every_rule_changes_the_result(runs: dict[str, Any]) -> None:
    for name in (
        "pulled", "smoothed", "jittered", "noisy", "kept", "aggregate", "geometric", "clipping", "field", "server",
        "inverted", "upside-down",
    ):  # fmt: skip
        assert not torch.equal(weights(runs[name])[0], weights(runs["none"])[0]), name


def test_the_smoothed_loss_is_that_of_pytorch() -> None:
    outputs, targets = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    plain = torch.nn.functional.cross_entropy(outputs, targets)
    context = LocalContext([], [], {}, {}, 0.1, 1)
    smoothed = load_file(EXAMPLES / "own_rules.py").smooth(plain, outputs, targets, context, share=0.2)
    torch.testing.assert_close(
        smoothed, torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=0.2)
    )


def test_the_noise_differs_from_step_to_step() -> None:
    rules = load_file(EXAMPLES / "own_rules.py")
    zero = [torch.zeros(3)]

    def drawn() -> list[list[float]]:
        context = LocalContext(["w"], zero, {}, {}, 0.1, 2)
        context.problem = SimpleNamespace(rng=Rng((0,)))  # type: ignore[assignment]
        rule = rules.jittered(scale=1.0)
        rule.start(context)
        return [rule.grad(zero, zero, context)[0].tolist() for _ in range(2)]

    first, second = drawn()
    assert first != second
    assert drawn() == [first, second]


def test_the_next_visit_begins_with_the_momentum_of_the_last() -> None:
    rule, state = load_file(EXAMPLES / "kept_momentum.py").kept(beta=0.5), {}
    seen = []
    for _ in range(2):
        context = LocalContext(["w"], [torch.zeros(1)], {}, state, 0.1, 1)
        rule.start(context)
        seen += [rule.grad([torch.ones(1)], context.anchor, context)[0].item() for _ in range(2)]
        state = rule.finish(context.anchor, context)[1]
    assert seen == [1.0, 1.5, 1.75, 1.875]


def test_the_median_ignores_one_broken_client() -> None:
    block = torch.tensor([[value, -value] for value in (1.0, 2.0, 1e9)])
    assert load_file(EXAMPLES / "own_aggregate.py").Median().column(block).tolist() == [2.0, -2.0]


def test_the_focal_loss_without_gamma_is_the_cross_entropy_and_gamma_is_a_setting(
    runs: dict[str, Any],
) -> None:
    outputs, targets = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    focal = load_file(EXAMPLES / "own_task.py").Focal
    plain = torch.nn.functional.cross_entropy(outputs, targets)
    torch.testing.assert_close(focal(gamma=0.0).loss(outputs, targets), plain)
    p = outputs.softmax(1)[torch.arange(5), targets]
    torch.testing.assert_close(focal(gamma=2.0).loss(outputs, targets), (-((1 - p) ** 2) * p.log()).mean())
    assert not torch.equal(weights(runs["task"])[0], weights(runs["none"])[0])


def test_the_dataset_has_three_hospitals(runs: dict[str, Any]) -> None:
    assert runs["dataset"].summary["partition"]["clients"] == 3
    assert runs["dataset"].summary["partition"]["examples"] == 240


def test_the_page_shows_the_files_that_are_tested() -> None:
    page = (DOCS / "your-own-parts.md").read_text(encoding="utf-8")
    shown = set(re.findall(r'--8<-- "examples/(\w+\.py)"', page))
    assert shown == {path.name for path in EXAMPLES.glob("own_*.py")} | {
        "fedexp.py", "field_weighted.py", "kept_momentum.py", "one_kind_each.py", "tensorboard_curves.py", "trackers.py"
    }  # fmt: skip
    assert "(your-own-parts.md)" in (DOCS / "add-an-algorithm.md").read_text(encoding="utf-8")
