"""`task.class_weights` and `task.label_smoothing`: training against bare loops, and what cannot go with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlens.algorithms.client_sampling import Everyone
from fedlens.algorithms.fedavg import fedavg
from fedlens.algorithms.fedir import fedir, reweighted
from fedlens.api import Experiment
from fedlens.base.errors import ConfigError
from fedlens.local.chain import chain
from fedlens.local.rules import proximal
from fedlens.tasks.classification import classification
from tests.identity.identity_kit import CLASSES, Points, close, course, epoch, mean, parts, rng_of, world

LOCAL = {"lr": 0.1, "epochs": 2, "batch_size": 3}


def bare(spec, tree, points: Points, rng, loss) -> dict[str, Tensor]:
    module: nn.Module = spec.build()
    module.load_state_dict(dict(tree))
    step, order = torch.optim.SGD(module.parameters(), lr=0.1), rng.torch("batches")
    for _ in range(2):
        for at in epoch(len(points), 3, order):
            step.zero_grad()
            loss(module(points.inputs[at]), points.targets[at], points).backward()
            step.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def balanced(outputs: Tensor, targets: Tensor, points: Points) -> Tensor:
    counts = torch.bincount(points.targets, minlength=CLASSES).double()
    weight = torch.where(counts > 0, len(points) / (CLASSES * counts), 0.0)
    return F.cross_entropy(outputs, targets, weight)


def listed(outputs: Tensor, targets: Tensor, points: Points) -> Tensor:
    return F.cross_entropy(outputs, targets, torch.tensor([1.0, 4.0, 0.5]).double())


def smoothed(outputs: Tensor, targets: Tensor, points: Points) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.2)


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({"class_weights": "balanced"}, balanced),
        ({"class_weights": [1.0, 4.0, 0.5]}, listed),
        ({"label_smoothing": 0.2}, smoothed),
    ],
)
def test_training_is_that_of_a_bare_loop(settings, loss) -> None:
    there = world()
    given = parts(there, LOCAL, task=classification(**settings), select=Everyone())
    (step,) = course(fedavg(given), there, rounds=1).steps
    trained = [
        bare(given.model, step.before["model"], there.clients[k], rng_of(step, slot), loss)
        for slot, k in enumerate(step.cohort)
    ]
    close(step.after["model"], mean(trained, [len(there.clients[k]) for k in step.cohort]))


def test_class_weights_and_fedir_in_a_chain_are_refused_together() -> None:
    rule = chain(reweighted(), proximal(mu=0.1))
    with pytest.raises(ConfigError, match=r"task.class_weights would weigh them again"):
        fedavg(parts(world(), LOCAL, task=classification(class_weights="balanced"), client=rule))


def test_class_weights_and_fedir_are_refused_together() -> None:
    there = world()
    for make in (fedir, lambda given: fedavg(given)):
        client = None if make is fedir else reweighted()
        given = parts(there, LOCAL, task=classification(class_weights="balanced"), client=client)
        with pytest.raises(ConfigError, match=r"weighs the classes in the loss, and task.class_weights"):
            make(given)


LEAST = {
    "rounds": 1,
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
    "model": "linear",
    "local": {"lr": 0.1},
}


def test_stacked_training_refuses_class_weights_and_takes_smoothing(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"the loss of a batch is not the mean of losses of its examples"):
        Experiment(**LEAST, task={"class_weights": "balanced"}, engine="vectorized").run(tmp_path / "a")
    results = [
        Experiment(**LEAST, task={"label_smoothing": 0.1}, engine=engine).run(tmp_path / engine)
        for engine in ("vectorized", "inline")
    ]
    losses = [[line["test_loss"] for line in result.metrics] for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    plain = Experiment(**LEAST, engine="inline").run(tmp_path / "plain")
    assert plain.metrics[-1]["test_loss"] != pytest.approx(losses[1][-1], rel=1e-3)


@pytest.mark.parametrize(
    ("task", "what"),
    [
        ({"label_smothing": 0.1}, "label_smoothing"),
        ({"name": "clasification"}, "classification"),
        ({"label_smoothing": 1.5}, "less than 1"),
        ({"class_weights": [1.0]}, "1 weights, but the dataset has 10 classes"),
        ({"score": "accuracy_top1"}, "accuracy_top5"),
    ],
)
def test_wrong_settings_of_a_task_are_answered_with_the_key(task, what: str, tmp_path) -> None:
    with pytest.raises(ConfigError) as error:
        Experiment(**LEAST, task=task).run(tmp_path / "run")
    assert what in str(error.value)
    assert "task" in str(error.value)


def test_the_score_chooses_the_best_round_and_the_run_keeps_the_task(tmp_path) -> None:
    result = Experiment(**LEAST, task={"score": "accuracy_balanced"}).run(tmp_path / "run")
    assert result.summary["best"]["metric"] == "test_accuracy_balanced"
    import tomllib

    table = tomllib.loads((tmp_path / "run/config.toml").read_text())["task"]
    expected = {
        "name": "classification",
        "score": "accuracy_balanced",
        "label_smoothing": 0.0,
        "class_weights": "none",
    }
    assert table == expected
