"""Vertical learning: what has to be equal to what, against bare loops over whole images, in float64."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from fedlens.algorithms.vertical import Vertical, vertical
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.tree import tree_of
from fedlens.engines.processes import processes
from fedlens.models.prepare import Preparation
from tests.identity.identity_kit import close, same
from tests.identity.party_kit import CLASSES, WINDOWS, PartyWorld, algorithm, course, of, world

SGD = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 8}
LABELS = 1


def begun(made: Vertical) -> nn.Module:
    """The composed network with the initial weights."""
    module = made.composed.build(initial=False)
    module.load_state_dict(made.init(made.parts.model, made.parts.federation)["model"])
    return module


def step(module: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(images), labels).backward()
    optimizer.step()


def regression(there: PartyWorld, made: Vertical, batches: list[tuple[str, ...]]) -> nn.Linear:
    """Logistic regression on all pixels, from the parties' initial weights, after these batches."""
    first = begun(made).state_dict()
    bare = nn.Linear(16, CLASSES).double()
    with torch.no_grad():
        for k, window in enumerate(WINDOWS):
            of(bare.weight.view(CLASSES, 4, 4), window).copy_(
                first[f"bottoms.{k}.1.weight"].view(CLASSES, 2, 2)
            )
        bare.bias.copy_(first["top.bias"])
    sgd = torch.optim.SGD(bare.parameters(), 0.2, 0.9, weight_decay=0.01)
    for ids in batches:
        images, labels = there.batch(ids)
        step(bare, sgd, images.flatten(1), labels)
    return bare


def in_windows(bare: nn.Linear) -> dict[str, Tensor]:
    weight = bare.weight.detach().view(CLASSES, 4, 4)
    parts = {f"bottoms.{k}.1.weight": of(weight, w).flatten(1) for k, w in enumerate(WINDOWS)}
    return {**parts, "top.bias": bare.bias.detach()}


def test_linear_bottoms_are_logistic_regression_on_all_pixels() -> None:
    there = world(40)
    made = algorithm(there, SGD)
    run = course(made, there, 10)
    assert len(there.batches) == 50
    assert all(t.sums["batches"] == 5 * 4 and t.sums["examples"] == 40 for t in run.tallies[:-1])
    close(run.final, in_windows(regression(there, made, there.batches)))


def test_batches_go_through_the_common_examples_in_another_order_each_round() -> None:
    there = world(40)
    course(algorithm(there, SGD), there, 2)
    first, second = (
        [name for batch in part for name in batch] for part in (there.batches[:5], there.batches[5:])
    )
    common = set.intersection(*(set(rows.ids) for rows in there.parties))
    assert set(first) == set(second) == common
    assert first != second


class Blocks(nn.Module):
    """One network whose first two layers are block-diagonal, with the weights of a composed one."""

    def __init__(self, made: Vertical) -> None:
        super().__init__()
        first, hidden, width = begun(made).state_dict(), 5, made.width
        self.order = torch.cat([of(torch.arange(16).view(4, 4), window).flatten() for window in WINDOWS])
        self.below, self.above = (
            nn.Linear(16, 4 * hidden).double(),
            nn.Linear(4 * hidden, 4 * width, bias=False).double(),
        )
        weights = [[first[f"bottoms.{k}.{at}.weight"] for k in range(4)] for at in (1, 3)]
        masks = [torch.block_diag(*(torch.ones_like(w) for w in each)) for each in weights]
        with torch.no_grad():
            self.below.weight.copy_(torch.block_diag(*weights[0]))
            self.below.bias.copy_(torch.cat([first[f"bottoms.{k}.1.bias"] for k in range(4)]))
            self.above.weight.copy_(torch.block_diag(*weights[1]))
        for layer, mask in zip((self.below, self.above), masks, strict=True):
            layer.weight.register_hook(lambda gradient, mask=mask: gradient * mask)
        self.top = nn.Sequential(nn.Linear(4 * width, 6), nn.ReLU(), nn.Linear(6, CLASSES)).double()
        self.top.load_state_dict({n.removeprefix("top.layers."): v for n, v in first.items() if "top" in n})

    def forward(self, images: Tensor) -> Tensor:
        return self.top(self.above(torch.tanh(self.below(images.flatten(1)[:, self.order]))))


def test_networks_side_by_side_are_one_with_block_diagonal_layers() -> None:
    there = world(40)
    made = algorithm(
        there, {**SGD, "optimizer": "adam", "momentum": 0}, 5, top="concat", width=4, hidden=(6,)
    )
    run, bare = course(made, there, 4), Blocks(made)
    adam = torch.optim.Adam(bare.parameters(), 0.2, weight_decay=0.01)
    for ids in there.batches:
        step(bare, adam, *there.batch(ids))
    final = run.final
    expected = {
        "below": torch.block_diag(*(final[f"bottoms.{k}.1.weight"] for k in range(4))),
        "above": torch.block_diag(*(final[f"bottoms.{k}.3.weight"] for k in range(4))),
        "top": final["top.layers.2.weight"],
    }
    found = {"below": bare.below.weight, "above": bare.above.weight, "top": bare.top[2].weight}
    close(
        {n: v.detach() for n, v in found.items()}, expected, rtol=1e-9, atol=1e-11
    )  # Adam divides by small numbers


@pytest.mark.parametrize(
    "settings", [{}, {"top": "sum", "width": 4, "hidden": (6,)}], ids=["sum", "sum-hidden"]
)
def test_the_composed_network_is_what_was_trained_and_measured(settings: Any) -> None:
    there = world()
    made = algorithm(there, SGD, 5, **settings)
    run = course(made, there, 2)
    spec, tree = made.model(run.states[-1])
    module, trained = spec.build(initial=False), begun(made)
    module.load_state_dict(tree)
    sgd = torch.optim.SGD(trained.parameters(), 0.2, 0.9, weight_decay=0.01)
    for ids in there.batches:
        step(trained, sgd, *there.batch(ids))
    close(tree_of(module), tree_of(trained), rtol=1e-10, atol=1e-12)
    images, answers = there.tested
    with torch.no_grad():
        accuracy = float((module(images).argmax(1) == answers).double().mean())
    assert run.metrics["test_accuracy"] == accuracy


def test_a_missing_party_is_replaced_by_its_mean_over_training() -> None:
    there = world()
    made = algorithm(there, SGD)
    run = course(made, there, 3)
    module = made.composed.build(initial=False)
    module.load_state_dict(run.final)
    common = sorted(set.intersection(*(set(rows.ids) for rows in there.parties)))
    (seen, _), (images, answers) = there.batch(common), there.tested
    assert isinstance(module.bottoms, nn.ModuleList)
    with torch.no_grad():
        for k in range(4):
            each = [bottom(of(images, w)) for bottom, w in zip(module.bottoms, WINDOWS, strict=True)]
            each[k] = module.bottoms[k](of(seen, WINDOWS[k])).mean(0).expand_as(each[k])
            right = (module.top(torch.stack(each)).argmax(1) == answers).double().mean()
            assert run.metrics[f"without.{k}"] == float(right)
    assert len({run.metrics[f"without.{k}"] for k in range(4)}) > 1


@pytest.mark.parametrize("align", ["psi", "ids"])
@pytest.mark.parametrize("party", range(4))
def test_the_order_of_a_partys_rows_changes_no_bit(align: str, party: int) -> None:
    there = world(align=align)
    rows = there.parties[party]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    moved = there.having(**{f"p{party}": rows.ordered(order)})
    runs = [course(algorithm(each, SGD, 5, top="concat"), each, 2) for each in (there, moved)]
    assert same(runs[0].final, runs[1].final)
    assert runs[0].metrics == runs[1].metrics


def test_rows_outside_the_intersection_change_no_bit() -> None:
    there = world()
    common = set.intersection(*(set(rows.ids) for rows in there.parties))
    others = {}
    for k, rows in enumerate(there.parties):
        kept = torch.tensor([at for at, name in enumerate(rows.ids) if name in common])
        left = rows.ordered(kept)
        extra = None if left.targets is None else torch.cat([left.targets, torch.tensor([0])])
        images = torch.cat([left.images, torch.full((1, 1, 2, 2), 9.0, dtype=torch.float64)])
        others[f"p{k}"] = replace(left, ids=(*left.ids, f"only-{k}"), images=images, targets=extra)
    other = there.having(**others)
    runs = [course(algorithm(each, SGD, 5), each, 2) for each in (there, other)]
    assert same(runs[0].final, runs[1].final)
    assert runs[0].metrics == runs[1].metrics


MISSED = ("embed", 1, 2, 3)  # the forward pass of a party, and its backward pass of step 1


@pytest.fixture(scope="module")
def clean() -> list[tuple[str, ...]]:
    """The batches of a run in which no one fails."""
    there = world(40)
    course(algorithm(there, SGD), there, 2)
    return list(there.batches)


def test_a_batch_that_a_party_misses_is_skipped_by_all(clean: list[tuple[str, ...]]) -> None:
    there = world(40)
    made = algorithm(there, SGD)
    run = course(made, there, 2, failing=[("embed", 1, 0, 3)])
    assert there.batches == clean[1:]
    assert (run.metrics["batches_skipped"], run.metrics["steps_missed"]) == (1, 0)
    close(run.final, in_windows(regression(there, made, there.batches)))


def test_a_batch_that_the_label_party_misses_is_a_run_without_it(clean: list[tuple[str, ...]]) -> None:
    there = world(40)
    run = course(made := algorithm(there, SGD), there, 2, failing=[("label", 1, 2, LABELS)])
    assert there.batches == [*clean[:2], *clean[3:]]
    assert (run.metrics["batches_skipped"], run.metrics["steps_missed"]) == (1, 0)
    close(run.final, in_windows(regression(there, made, there.batches)))


def test_a_party_that_misses_a_backward_pass_keeps_its_old_bottom(clean: list[tuple[str, ...]]) -> None:
    there = world(40)
    made = algorithm(there, {**SGD, "momentum": 0, "weight_decay": 0})
    run = course(made, there, 1, failing=[MISSED])
    assert there.batches == [*clean[:2], *clean[3:5]]
    assert (run.metrics["batches_skipped"], run.metrics["steps_missed"]) == (1, 1)
    assert sum(run.tallies[0].failures[3].values()) == 1
    bare = begun(made)
    for at, ids in enumerate(there.batches):
        images, labels = there.batch(ids)
        own = list(bare.parameters())
        gradients = torch.autograd.grad(nn.functional.cross_entropy(bare(images), labels), own)
        with torch.no_grad():
            for (name, weight), gradient in zip(bare.named_parameters(), gradients, strict=True):
                if (at, name.startswith("bottoms.3")) != (1, True):
                    weight -= 0.2 * gradient
    close(run.final, tree_of(bare))


def test_a_party_that_is_missing_all_the_time_stops_training_and_is_replaced() -> None:
    there = world()
    run = course(
        algorithm(there, SGD),
        there,
        2,
        [("embed", 2, at, 0) for at in range(4)] + [("embed-held", 2, None, 0)],
    )
    assert same(run.states[1]["model"], run.states[2]["model"])
    assert run.metrics["batches_skipped"] == 4
    assert run.metrics["test_accuracy"] == run.metrics["without.0"]


def test_an_intersection_that_failed_is_tried_again_in_the_next_round() -> None:
    there = world()
    run = course(algorithm(there, SGD), there, 2, [("remask", 1, None, 2)])
    assert same(run.states[0]["model"], run.states[1]["model"])
    assert run.states[2]["shared"] == 30


@pytest.mark.parametrize("align", ["psi", "ids"])
def test_the_intersection_is_the_plain_one(align: str) -> None:
    there = world(align=align)
    run = course(algorithm(there, SGD), there, 1)
    common = sorted(set.intersection(*(set(rows.ids) for rows in there.parties)))
    assert len(common) == run.states[-1]["shared"] == 30
    for k, rows in enumerate(there.parties):
        state = run.clients.get(k)
        assert [rows.ids[at] for at in state["positions"].tolist()] == common
        assert state.keys() == {"positions", "bottom", "top"} - ({"top"} if k != LABELS else set())


def test_repeated_ids_and_an_empty_intersection_end_the_run() -> None:
    there, repeated = world(), world(5)
    rows = there.parties[2]
    again = there.having(p2=replace(rows, ids=(rows.ids[0], *rows.ids[:-1])))
    with pytest.raises(RunFailed, match="1 examples of party 'party 2' repeat the id of another"):
        course(algorithm(again, SGD), again, 1)
    strange = repeated.having(p0=replace(repeated.parties[0], ids=tuple(f"x{k}" for k in range(11))))
    with pytest.raises(RunFailed, match="no example is held by all parties"):
        course(algorithm(strange, SGD), strange, 1)


@pytest.mark.parametrize("chosen", [(LABELS,), (LABELS, 3)])
def test_some_of_the_parties_train_without_the_others(chosen: tuple[int, ...]) -> None:
    there = world()
    made = algorithm(there, SGD, parties=chosen)
    run = course(made, there, 3)
    common = set.intersection(*(set(there.parties[k].ids) for k in chosen))
    assert {name for batch in there.batches for name in batch} == common
    assert len(common) > 30 or len(chosen) > 1
    bare = begun(made)
    sgd = torch.optim.SGD(bare.parameters(), 0.2, 0.9, weight_decay=0.01)
    for ids in there.batches:
        step(bare, sgd, *there.batch(ids))
    close(run.final, tree_of(bare))


def test_the_label_party_alone_sends_nothing_and_masks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    there = world()
    made = algorithm(there, SGD, parties=(LABELS,))
    assert course(made, there, 1).states[-1]["shared"] == len(there.parties[LABELS].ids)
    assert made.discloses == ("To save the model, the label party shows it, which counts no bytes.",)
    assert made.notes == ()


@pytest.mark.nightly
def test_workers_give_the_same_bits() -> None:
    there = world()
    here, workers = (
        course(algorithm(there, SGD, 5), there, 2, engine=engine) for engine in (None, processes(workers=2))
    )
    assert same(here.final, workers.final)
    assert here.metrics == workers.metrics


def test_parties_with_data_of_their_own_get_a_file_each() -> None:
    there = world()
    made = algorithm(there, SGD, 5, parties=(LABELS, 3))
    assert made.files(made.init(made.parts.model, there.info)) == {}
    own = replace(made, facts=replace(made.facts, windows=None))
    run = course(own, there, 1)
    files = {name: load(content) for name, content in own.files(run.states[-1]).items()}
    assert files.keys() == {"party-1.safetensors", "party-3.safetensors"}
    last = {n.replace("bottoms.1.", "bottom."): v for n, v in run.final.items() if n.startswith("bottoms.1.")}
    assert same(files["party-3.safetensors"], last)
    assert files["party-1.safetensors"].keys() >= {"top.bias", "bottom.1.weight"}
    module = own.composed.build(initial=False)
    module.load_state_dict(run.final)
    images, answers = there.tested
    with pytest.raises(ConfigError, match="images of their own"):
        module(images)
    logits = module([of(images, WINDOWS[k]) for k in (LABELS, 3)])
    assert float((logits.argmax(1) == answers).double().mean()) == run.metrics["test_accuracy"]


def test_a_party_with_a_single_example_leaves_a_batch_of_one() -> None:
    there = world(1, 4)
    alone = there.parties[2]
    at = torch.tensor([k for k, name in enumerate(alone.ids) if name in there.parties[0].ids])
    one = there.having(p2=alone.ordered(at))
    run = course(algorithm(one, SGD), one, 2)
    assert len(one.parties[2]) == run.states[-1]["shared"] == 1
    assert one.batches == [(one.parties[2].ids[0],)] * 2


def test_bytes_are_those_of_the_formula() -> None:
    there = world(40, 5)
    run = course(algorithm(there, SGD, 5, top="concat", width=6), there, 2)
    steps, others, lists = 5, 3, 45
    training = steps * 2 * others * 8 * 6 * 8  # steps, both ways, parties, B, d, bytes of float64
    aligning = others * 32 * 3 * lists + others * 8 * 40  # both lists, the label party's twice; places
    assert [t.bytes_peer for t in run.tallies] == [training + aligning, training, 0]


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"parties": (0,)}, "algorithm.parties"),
        ({"parties": (1, 4)}, "algorithm.parties"),
        ({"width": 7}, "algorithm.width"),
    ],
)
def test_what_does_not_fit_is_refused(settings: Any, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        algorithm(world(), SGD, **settings)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"measure": ("@test", "@train")}, "evaluation.train"),
        ({"measure_clients": "all"}, "evaluation.clients"),
        ({"federation": replace(world().info, parties=None)}, "data.parties"),
    ],
)
def test_what_parties_do_not_have_is_refused(changes: Any, where: str) -> None:
    parts = replace(algorithm(world(), SGD).parts, **changes)
    with pytest.raises(ConfigError) as caught:
        vertical(parts)
    assert caught.value.where == where


def test_initial_weights_are_refused() -> None:
    parts = algorithm(world(), SGD).parts
    model = replace(parts.model, prepare=Preparation(weights="imagenet"))
    with pytest.raises(ConfigError) as caught:
        vertical(replace(parts, model=model))
    assert caught.value.where == "model.weights"
