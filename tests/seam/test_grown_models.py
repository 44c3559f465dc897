"""A model that gets wider each round: trained, evaluated, resumed, exported and reported with its widths of the moment.

`widening` is the smallest such algorithm: the server adds a unit with fixed weights to the first hidden layer of an
`mlp`, and two to the second, before each round; then clients train and the server averages.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlens import Experiment, load_result
from fedlens.algorithms.averaging import Parts
from fedlens.algorithms.client_evaluation import EVALUATE_OWN, EvaluateOwn, everywhere
from fedlens.analyses.analyze import analyze
from fedlens.api import resume
from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.core.algorithm_base import AlgorithmBase
from fedlens.core.modules import module_in
from fedlens.core.protocol import Ask, ModelSpec, Op, Reply, Request
from fedlens.core.tree import spec_of, tree_of
from fedlens.local.personal_leaves import own_leaves
from fedlens.local.rules import ClientRule
from fedlens.local.vectorized.batched_train import BatchedTrain
from fedlens.models.prepare import Preparation
from fedlens.models.simple import mlp
from fedlens.run import checkpoint
from fedlens.tasks.central_evaluation import Evaluate, central_metrics
from tests.contract.contract_kit import Stopping, outcome

FILE = str(Path(__file__))
WIDTHS, ROUNDS, INPUTS, CLASSES = [4, 3], 3, 64, 10
CPU = torch.device("cpu")


def padded(value: Tensor, *shape: int) -> Tensor:
    """The tensor in the corner of a larger one, whose other entries are 0.1."""
    larger = torch.full(shape, 0.1)
    larger[tuple(slice(n) for n in value.shape)] = value
    return larger


@dataclass(frozen=True)
class Widening(AlgorithmBase):
    parts: Parts
    rule: ClientRule = field(default_factory=ClientRule)
    grows = True

    @property
    def ops(self) -> Mapping[str, Op]:
        parts = self.parts
        train = BatchedTrain(parts.model, parts.task, parts.local, self.rule)
        evaluate = Evaluate(parts.model, parts.task, parts.evaluation_batch)
        own = EvaluateOwn(parts.model, parts.task, parts.evaluation_batch, tune=train)
        return {"train": train, "evaluate": evaluate, EVALUATE_OWN: own}

    def init(self, model: ModelSpec, federation: Any) -> Any:
        return {"model": tree_of(model.build()), **model.varied(settings={"hidden": WIDTHS}).varying}

    def round(self, state: Any, ctx: Any) -> Generator[Any, Any, Any]:
        before, tree = self.model(state)
        first, second = before.settings["hidden"]
        model = before.varied(settings={"hidden": [first + 1, second + 2]})
        tree = {name: padded(tree[name], *leaf.shape) for name, leaf in model.leaves.items()}
        train = self.ops["train"]
        assert isinstance(train, BatchedTrain)
        expect = train.expect(model.leaves, ctx.federation.largest)
        shared = {"model": model.sent(tree), **model.varying, "lr": self.parts.local.lr}
        answers = yield Ask("train", [Request(k) for k in range(4)], shared, expect=expect)
        replies = [answer.payload for answer in answers if isinstance(answer, Reply)]
        total = sum(reply["weight"] for reply in replies)
        moved = {n: v - sum(r["update"][n] * r["weight"] for r in replies) / total for n, v in tree.items()}
        return {"model": moved, **model.varying}

    def evaluate(self, state: Any, ctx: Any) -> Generator[Any, Any, Any]:
        model, tree = self.model(state)
        parts, sent = self.parts, model.sent(tree)
        central = yield from central_metrics(sent, ctx.federation, parts.task, parts.measure, model.varying)
        shared = {"model": sent, **model.varying, "lr": parts.local.lr}
        return {**central, **(yield from everywhere(shared, ctx, parts.task, "all"))}

    def model(self, state: Any) -> tuple[ModelSpec, Any]:
        return self.parts.model.of(state), state["model"]


def widening(parts: Parts) -> Widening:
    return Widening(parts)


def near(loss: Tensor, outputs: Tensor, targets: Tensor, context: Any) -> Tensor:
    """Needs a second module of the same widths."""
    with torch.no_grad():
        before = context.problem.twin("anchor").module(context.batch[0])
    return loss + 0.1 * (outputs - before).square().mean()


def widening_near(parts: Parts) -> Widening:
    return Widening(parts, ClientRule(near))


def experiment(**changes: Any) -> Experiment:
    model: dict[str, Any] = {"name": "mlp", "hidden": WIDTHS} | changes.pop("model", {})
    if model["name"] != "mlp":
        del model["hidden"]
    made: dict[str, Any] = {
        "rounds": ROUNDS,
        "data": {
            "dataset": "digits",
            "partition": {"name": "iid", "clients": 4},
            "validation": 0.2,
            "validation_from": "client",
        },
        "model": model,
        "algorithm": {"name": f"{FILE}:widening"},
        "local": {"lr": 0.1, "batch_size": 50, "lr_scale": {"head": 0.5}},
        "record": {"clients": True},
        "checkpoint": {"seconds": 0},
    }
    return Experiment(**{**made, **changes})


def layers(module: nn.Module) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)]


def widths(round: int) -> list[tuple[int, int]]:
    first, second = WIDTHS[0] + round, WIDTHS[1] + 2 * round
    return [(INPUTS, first), (first, second), (second, CLASSES)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grown") / "run"
    experiment().run(directory, report=False)
    return directory


def test_the_files_of_a_run_have_the_widths_of_their_round(whole: Path) -> None:
    result = load_result(whole)
    assert layers(result.model) == widths(ROUNDS)
    assert layers(result.best_model) == widths(result.summary["best"]["round"])
    cost = result.summary["model"]
    assert cost["parameters"] == cost["trainable"] == sum(n * (m + 1) for m, n in widths(ROUNDS))
    assert cost["multiply_adds"] == sum(n * m for m, n in widths(ROUNDS))
    losses = [line["test_loss"] for line in result.metrics]
    assert losses[ROUNDS] < losses[1]
    assert result.metrics[ROUNDS]["clients_accuracy_mean_before"] > 0
    payload = checkpoint.load_latest(whole / "checkpoint").payload  # type: ignore[union-attr]
    assert payload["state"]["varied"]["settings"] == {"hidden": [n for _, n in widths(ROUNDS)[:2]]}


TOGETHER = ("in groups", "vectorized")  # clients train as one computation, which rounds differently
ENGINES: dict[str, Any] = {
    "processes": {"name": "processes", "workers": 2},
    "in groups": {"name": "processes", "workers": 2, "group": 3},
    "vectorized": "vectorized",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_other_engines_train_the_same_model(engine: str, whole: Path, tmp_path: Path) -> None:
    other = experiment(engine=ENGINES[engine]).run(tmp_path / "run", report=False)
    if engine in TOGETHER:
        tree, expected = (checkpoint.read_model(d / "model.safetensors")[0] for d in (other.directory, whole))
        torch.testing.assert_close(tree, expected, rtol=1e-4, atol=1e-5)
    else:
        assert outcome(other) == outcome(load_result(whole))


def test_the_second_module_of_a_rule_has_the_same_widths(tmp_path: Path) -> None:
    result = experiment(algorithm=f"{FILE}:widening_near", rounds=2).run(tmp_path / "run", report=False)
    assert layers(result.model) == widths(2)
    assert result.summary["failures"] == {}


def test_a_run_stopped_between_two_widths_resumes_exactly(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        experiment().run(tmp_path / "run", report=False, progress=Stopping(2))
    assert outcome(resume(tmp_path / "run", report=False)) == outcome(load_result(whole))


def test_a_resume_with_edited_settings_takes_the_widths_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        experiment().run(tmp_path / "run", report=False, progress=Stopping(2))
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    config.write_text(text.replace('name = "mlp"', 'name = "mlp"\nbottleneck = 5'))
    with pytest.raises(RunDirectoryError, match="the checkpoint does not hold a model of this run"):
        resume(tmp_path / "run", report=False, accept_changes=True)
    config.write_text(text.replace("lr = 0.1\n", "lr = 0.05\n"))
    assert config.read_text() != text
    edited = resume(tmp_path / "run", report=False, accept_changes=True)
    assert layers(edited.model) == widths(ROUNDS)


def test_it_predicts_is_exported_and_reported(whole: Path, tmp_path: Path) -> None:
    from PIL import Image

    from fedlens.pages.run_page import write_report

    Image.new("L", (8, 8), 200).save(tmp_path / "one.png")
    result = load_result(whole)
    (row,) = result.predict(tmp_path / "one.png", round="last", device="cpu")
    assert row["fault"] is None
    file = result.export(tmp_path / "model.pt2", round="last")
    exported = torch.export.load(file).module()
    shapes = {name: tuple(value.shape) for name, value in exported.state_dict().items()}
    assert (widths(ROUNDS)[0][1], INPUTS) in shapes.values()
    write_report(whole)
    parameters = f"{result.summary['model']['parameters']:,}"
    assert parameters in (whole / "report.html").read_text()


def test_weights_of_a_run_keep_their_widths(whole: Path, tmp_path: Path) -> None:
    later = experiment(model={"weights": f"run:{whole}"}, algorithm="fedavg", rounds=1)
    with pytest.raises(KeyboardInterrupt):
        later.run(tmp_path / "run", report=False, progress=Stopping(0))
    notes = load_result(tmp_path / "run").summary["notes"]
    assert f"model.hidden = [7, 9]: the widths of run:{whole}" in notes
    result = resume(tmp_path / "run", report=False)
    assert layers(result.model) == widths(ROUNDS)
    assert result.config["model"]["hidden"] == [n for _, n in widths(ROUNDS)[:2]]
    assert result.metrics[0]["test_loss"] == pytest.approx(load_result(whole).metrics[-1]["test_loss"])
    with pytest.raises(ConfigError, match="weights of another network"):
        experiment(model={"name": "small-cnn", "weights": f"run:{whole}"}, algorithm="fedavg").run(
            tmp_path / "no"
        )


REFUSED = {
    "freeze": {"model": {"freeze": ["1"]}},
    "cache_features": {"model": {"freeze": ["1"], "cache_features": True}},
    "updates": {"record": {"updates": {"every": 1}}},
    "local_models": {"record": {"local_models": {"every": 1}}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_needs_models_of_the_same_shapes_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="changes the shapes of the model") as caught:
        experiment(**REFUSED[key]).run(tmp_path / "run")
    assert key in str(caught.value) or "freeze" in str(caught.value)


def test_analyses_are_refused(whole: Path) -> None:
    with pytest.raises(RunDirectoryError, match="changes the shapes of the model, and analyses compare"):
        analyze(whole)


SPEC = ModelSpec(mlp, "mlp", {"hidden": WIDTHS}, (1, 8, 8), CLASSES, seed=0)


def test_a_worker_keeps_one_module_of_a_varied_model(tmp_path: Path) -> None:
    scratch: dict[Any, Any] = {}
    first = module_in(SPEC, scratch, CPU)
    assert module_in(SPEC, scratch, CPU) is first
    for round in (1, 2, 2, 1):
        payload = {"varied": {"settings": {"hidden": [n for _, n in widths(round)[:2]]}}}
        kept = module_in(SPEC.of(payload), scratch, CPU)
        assert layers(kept.module) == widths(round)
        assert module_in(SPEC.of(payload), scratch, CPU) is kept  # of a spec that is another object
        assert len(scratch) == 1
    assert module_in(SPEC.of(payload), scratch, CPU, which="anchor") is not kept
    assert len(scratch) == 2


def test_a_client_s_own_leaves_begin_as_those_of_the_varied_model() -> None:
    from fedlens.core.protocol import Client
    from fedlens.core.random import Secrets

    client = Client(0, None, {}, Secrets((0,)), {}, CPU)
    for spec in (SPEC, SPEC.varied(settings={"hidden": [6, 2]}), SPEC):
        own = own_leaves(spec, frozenset({"3.weight"}), client)
        assert torch.equal(own["3.weight"], tree_of(spec.build())["3.weight"])
    assert len(client.scratch) == 1


def test_a_varied_model_says_how_it_was_varied() -> None:
    prepared = replace(SPEC, prepare=Preparation(bottleneck=5), fixed={"1.weight": torch.zeros(4, 64)})
    once = prepared.varied(settings={"hidden": [5, 3]}, prepare={"bottleneck": 7})
    twice = once.varied(settings={"hidden": [6, 3]})
    assert layers(twice.build()) == [(64, 6), (6, 3), (3, 7), (7, 10)]
    assert (twice.origin, twice.fixed) == (prepared, {})
    assert twice.varying == {"varied": {"settings": {"hidden": [6, 3]}, "prepare": {"bottleneck": 7}}}
    assert prepared.of(twice.varying) == twice
    assert prepared.of({}) is prepared
    assert prepared.varying == {}
    assert twice.leaves == spec_of(twice.build())
    with pytest.raises(ConfigError, match="'mlp' has no keys that could change, and bottleneck should"):
        SPEC.varied(prepare={"bottleneck": 3})


def test_weights_of_a_run_keep_widths_that_its_preparation_had(tmp_path: Path) -> None:
    before = experiment(algorithm="fedma", local={"lr": 0.1}, rounds=1).run(tmp_path / "before", report=False)
    grown = [n for _, n in layers(before.model)[:2]]
    assert grown != WIDTHS
    later = experiment(model={"weights": f"run:{before.directory}"}, algorithm="fedavg", rounds=1)
    result = later.run(tmp_path / "later", report=False)
    assert layers(result.model) == layers(before.model)
    assert result.config["model"]["hidden_widths"] == grown
    assert result.metrics[0]["test_loss"] == pytest.approx(before.metrics[-1]["test_loss"])
