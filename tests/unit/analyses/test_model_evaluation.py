"""The evaluation of any tree gives to the bit what a run records, alone and for several models together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedlens.analyses.model_evaluation import ModelEvaluator, evaluator_of
from fedlens.base.errors import ConfigError
from tests.unit.analyses.analysis_kit import built_of, models_of, run_of


@pytest.mark.parametrize(
    "changed", [["data.validation=0.2"], ["model.name='linear'", "evaluation.batch_size=7"]], ids=str
)
def test_the_metrics_are_those_of_the_run(tmp_path: Path, changed: list[str]) -> None:
    line, tree = run_of(tmp_path, *changed)
    built = built_of(*changed)
    for on in ("test", "validation") if "data.validation=0.2" in changed else ("test",):
        recorded = {name: value for name, value in line.items() if name.startswith(f"{on}_")}
        found = evaluator_of(built, on).metrics(tree)
        assert {f"{on}_{name}": value for name, value in found.items()} == recorded
        assert len(recorded) > 3


@pytest.mark.parametrize("cores", [1, 2])
def test_several_models_have_the_metrics_of_each(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr("fedlens.analyses.model_evaluation.own_cores", lambda: cores)
    monkeypatch.setattr("fedlens.analyses.model_evaluation._AT_ONCE", 3)
    built = built_of("model.name='linear'", "evaluation.batch_size=50")
    evaluator, models = evaluator_of(built), models_of(built, 7)
    alone = [evaluator.metrics(model) for model in models]
    assert list(evaluator.several(iter(models))) == alone
    assert len({found["loss"] for found in alone}) == 7


def test_the_examples_are_cut_as_in_a_run() -> None:
    built = built_of("model.name='linear'")
    whole = evaluator_of(built)
    some = ModelEvaluator(whole.model, whole.task, whole.data, 20, whole.batch_size)
    tree = models_of(built, 1)[0]
    inputs, targets = whole.data.stretch(0, 20)
    logits = some.learner(tree).module.eval()(inputs)
    assert some.metrics(tree)["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-6
    )


def test_threads_and_random_state_are_restored() -> None:
    built = built_of("model.name='linear'")
    evaluator, threads, state = evaluator_of(built), torch.get_num_threads(), torch.get_rng_state()
    evaluator.threads = threads + 1
    evaluator.metrics(models_of(built, 1)[0])
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_without_validation_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="no validation data"):
        evaluator_of(built_of("model.name='linear'"), "validation")
