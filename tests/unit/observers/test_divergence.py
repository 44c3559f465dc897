"""Which lines of a run are a divergence, and which are not."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.base.errors import RunFailed
from fedlens.core.driver import Tally
from fedlens.core.protocol import Ask, Id, Reply
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.dataset import Dataset, Examples
from fedlens.data.federated import federate
from fedlens.data.partition.iid import iid
from fedlens.observers.chance import Chance, chance_levels
from fedlens.observers.divergence import Divergence, Extremes, text_of
from fedlens.run.failed_round import NotFiniteReplies, diverged

TEN = Chance(classes=10, examples=1000, share=0.1)
WHO = Extremes(("mainz", 5.0, 1.5), ("fulda", 9.0))


def lines(metric: str, *values: float | None) -> list[dict[str, Any]]:
    return [{"round": k, **({} if v is None else {metric: v})} for k, v in enumerate(values)]


def kinds(watch: Divergence) -> list[tuple[str, int, int]]:
    return [(w["kind"], w["since"], w["until"]) for w in watch.warnings]


def followed(given: list[dict[str, Any]], rounds: int = 12, **more: Any) -> Divergence:
    watch = Divergence(rounds, 0.5, chance={"test_accuracy": TEN}, **more)
    for line in given:
        watch.after(line, WHO)
    return watch


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("metric", ["test_loss", "validation_loss", "train_loss", "local_loss"])
def test_a_loss_that_is_not_finite_is_reported_at_once(metric: str, value: float) -> None:
    watch = Divergence(9, 0.5)
    told = [watch.after(line, WHO) for line in lines(metric, 2.0, 1.0, value, value, 1.0, value)]
    assert [len(new) for new in told] == [0, 0, 1, 0, 0, 0]
    assert kinds(watch) == [("loss-not-finite", 2, 5)]
    first = 0 if metric == "local_loss" else 2  # a round without an evaluation does not clear what stood out
    assert text_of(told[2][0]) == (
        f"The {metric.replace('_', ' ')} of round 2 is not finite. Largest update: client 'mainz' in round {first} "
        f"(norm 5); largest local loss: client 'fulda' in round {first} (9). Try local.lr = 0.05 (a tenth), or set "
        "local.clip_norm."
    )


def test_rounds_with_replies_that_are_not_finite_are_counted_in_a_row() -> None:
    """Half of the clients is enough; the count survives a checkpoint, and a good round ends it."""
    half, few = NotFiniteReplies(("a", "b"), 4), NotFiniteReplies(("a",), 4)
    watch = Divergence(9, 5.0, patience=2)
    for round, replies in enumerate([half, few, half, half], 1):
        watch.refuse()
        watch = Divergence(9, 5.0, patience=2, state=watch.state)
        told = watch.after({"round": round}, WHO, not_finite=replies)
        assert [w["kind"] for w in told] == ([] if round > 1 else ["replies-not-finite"])
    with pytest.raises(RunFailed, match=r"2 of 4 clients sent .*: 'a', 'b'; round 4 is number 2 in a row"):
        watch.refuse()
    Divergence(9, 5.0, patience=0, state=watch.state).refuse()
    Divergence(9, 5.0, patience=3, state=watch.state).refuse()
    assert kinds(watch) == [("replies-not-finite", 1, 4)]


def test_what_the_other_half_of_the_clients_sent_explains_no_jump_of_the_loss() -> None:
    half, watch = NotFiniteReplies(("a", "b"), 4), Divergence(9, 5.0)
    for line in lines("test_loss", 1.0, 900.0, 900.0, 900.0):
        told = watch.after(line, WHO, not_finite=half if line["round"] else None)
    assert [(w["kind"], w["clients"]) for w in told] == [("loss-jump", [])]
    assert "Largest" not in told[0]["sentence"]


def test_an_untrained_model_without_a_loss_is_no_divergence() -> None:
    assert kinds(followed(lines("test_loss", math.nan, 2.0, 1.0))) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((2.0, 1.0, 150, 160, 170, 180), [("loss-jump", 2, 5)]),
        ((2.0, 300, 300, 300), [("loss-jump", 1, 3)]),  # from the first round on
        ((2.0, 1.0, 150, None, 160, None, 170), [("loss-jump", 2, 6)]),  # measured in every second round
        ((2.0, 1.0, 150, 160, 1.0, 150, 160), []),  # it recovered
        ((2.0, 1.0, 99, 99, 99, 99), []),
        ((2.0, 1e-7, 1e-4, 1e-4, 1e-4), []),  # of a loss that is nothing, a hundredfold is nothing
        ((2.0, 1.0, 150, 160, 170, 1.0, 1.0), [("loss-jump", 2, 4)]),
        ((0.0, 0.5, 0.5, 0.5), []),
        ((-3.0, -2.0, -1.0, -1.0), []),
    ],
)
def test_a_loss_jumps_when_it_is_a_hundred_times_the_lowest_for_three_measured_rounds(
    values: tuple[float | None, ...], expected: list[tuple[str, int, int]]
) -> None:
    assert kinds(followed(lines("test_loss", *values))) == expected


def test_the_local_loss_is_compared_with_its_median_as_each_round_has_other_clients() -> None:
    easy = [0.5, 0.001, 0.6, 0.5, 0.4, 0.6]
    assert kinds(followed(lines("local_loss", *easy))) == []
    growing = [2.0 * 3**k for k in range(12)]
    assert kinds(followed(lines("local_loss", *growing))) == [("loss-jump", 8, 11)]


@pytest.mark.parametrize(
    ("values", "rounds", "expected"),
    [
        ((0.1, *[0.1] * 4), 12, [("accuracy-at-chance", 1, 4)]),
        ((0.1, *[0.1] * 3), 12, []),
        ((0.1, *[0.1] * 3), 3, [("accuracy-at-chance", 1, 3)]),
        ((0.1, *[0.1] * 2), 2, []),  # too short to tell
        ((0.1, 0.1, 0.1, 0.5, 0.1, 0.1, 0.1), 12, []),
        ((0.1, 0.5, 0.8, 0.1, 0.1, 0.02, 0.1), 12, [("accuracy-at-chance", 3, 6)]),
        ((0.1, *[None] * 11, 0.1), 12, [("accuracy-at-chance", 1, 12)]),  # measured at the end alone
        ((0.1, *[0.13] * 12), 12, []),
    ],
)
def test_accuracy_is_at_chance_for_a_third_of_the_run(
    values: tuple[float | None, ...], rounds: int, expected: list[tuple[str, int, int]]
) -> None:
    assert kinds(followed(lines("test_accuracy", *values), rounds)) == expected


@pytest.mark.parametrize(
    ("scores", "rounds", "metric"),
    [
        ({"test_map50": 0.012, "test_map": 0.003}, 3, "test_map50"),
        ({"validation_map50": 0.0}, 3, "validation_map50"),
        ({"test_map50": 0.06}, 3, None),
        ({"test_map50": 0.012}, 4, None),  # it is not the end
        (
            {"test_mean_iou": 0.08, "test_accuracy": 0.32},
            3,
            "test_mean_iou",
        ),  # one class everywhere, 4 classes
        ({"test_mean_iou": 0.11, "test_accuracy": 0.4}, 3, None),
    ],
)
def test_a_detector_or_segmenter_without_skill_is_told_at_the_end(
    scores: dict[str, float], rounds: int, metric: str | None
) -> None:
    watch = Divergence(rounds, 0.5, mask_classes=4)
    for round in range(4):
        watch.after({"round": round, **scores}, Extremes())
    assert [(w["kind"], w["metric"], w["since"]) for w in watch.warnings] == (
        [("nothing-learned", metric, 3)] if metric else []
    )
    assert all("more local.epochs" in warning["try"] for warning in watch.warnings)


def test_a_model_that_only_says_the_most_frequent_class_is_at_chance() -> None:
    chance = Chance(classes=2, examples=200, share=0.9)
    assert [chance.has(a) for a in (0.9, 0.895, 0.905, 0.5, 0.57, 0.58)] == [
        True,
        False,
        False,
        True,
        True,
        False,
    ]


def test_chance_comes_from_the_labels_of_each_held_out_split() -> None:
    inputs = np.zeros((40, 1, 2, 2), np.uint8)
    train = Examples(inputs, np.arange(40) % 4)
    test = Examples(inputs[:10], np.array([0] * 7 + [1, 2, 3]))
    dataset = Dataset("own", train, test, ("a", "b", "c", "d"), (0.5,), (0.5,), "free", "here")
    data, _ = federate(dataset, lambda table: iid(table, 0, clients=2), validation=0.5)
    levels = chance_levels(data)
    assert levels["test_accuracy"] == Chance(classes=4, examples=10, share=0.7)
    assert levels.keys() == {"test_accuracy", "validation_accuracy"}
    assert (levels["validation_accuracy"].classes, levels["validation_accuracy"].examples) == (4, 20)
    same = Examples(inputs[:10], np.zeros(10, np.int64))  # a model that says it is always right
    alone = Dataset("own", train, same, ("a", "b", "c", "d"), (0.5,), (0.5,), "free", "here")
    data, _ = federate(alone, lambda table: iid(table, 0, clients=2), validation=0.5)
    assert chance_levels(data).keys() == {"validation_accuracy"}
    masks = Examples(inputs, np.zeros((40, 2, 2), np.uint8))
    segmentation = Dataset("own", masks, masks, ("a", "b"), (0.5,), (0.5,), "free", "here")
    assert chance_levels(ClientDatasets(segmentation, torch.arange(40), np.array([0, 40]))) == {}


def test_the_clients_since_the_last_measured_round_are_named_and_a_far_one_is_what_to_check() -> None:
    watch = Divergence(10, 0.5, clip_norm=1.0)
    given = [
        ({"round": 0, "test_loss": 2.0}, Extremes()),
        ({"round": 1, "test_loss": 1.0}, Extremes(("too early", 1e9, 1e8))),
        ({"round": 2}, Extremes(("mainz", 1e6, 1e5), ("fulda", 3.0))),
        ({"round": 3}, Extremes(("berlin", 2e6, 1.2), ("bonn", 99.0))),
        ({"round": 4, "test_loss": math.inf}, Extremes(("kiel", 1.0, 1.0))),
    ]
    for line, extremes in given:
        warned = watch.after(line, extremes)
    (warning,) = warned
    assert [(c["client"], c["round"]) for c in warning["clients"]] == [("mainz", 2), ("bonn", 3)]
    assert (
        "client 'mainz' in round 2 (norm 1e+06, 10^5 times the median of that round)" in warning["sentence"]
    )
    assert warning["try"] == (
        "Check the data of client 'mainz'; then try local.lr = 0.05 (a tenth), or lower local.clip_norm."
    )


def advice(*rounds: tuple[float, float, float]) -> str:
    """What is advised after rounds with these losses, largest norms and medians, and a loss that is not finite."""
    watch = Divergence(10, 50.0)
    for round, (loss, norm, median) in enumerate(rounds):
        new = watch.after(
            {"round": round, "test_loss": loss},
            Extremes(("mainz", norm, norm / median)) if round else Extremes(),
        )
    return str(new[-1]["try"])


def test_a_client_is_blamed_only_while_the_others_do_not_diverge() -> None:
    blamed = "Check the data of client 'mainz'; then try local.lr = 0.1, or set local.clip_norm."
    rate = "Try local.lr = 0.1, or set local.clip_norm; if client 'mainz' still stands out, check its data."
    assert advice((2.0, 0, 1), (1.5, 3.0, 2.0), (math.inf, 1e6, 3.0)) == blamed
    assert advice((2.0, 0, 1), (math.inf, 1e6, 2.0)) == rate, "there is no earlier round"
    assert advice((2.0, 0, 1), (1.5, 3.0, 2.0), (math.inf, 1e6, 21.0)) == rate, "the others diverge too"
    # The others are where they were in the round before, in which the loss had jumped already.
    assert advice((2.0, 0, 1), (900.0, 9e3, 2e3), (math.inf, 1e6, 2e3)) == rate


def test_extreme_replies_are_found_in_each_exchange_by_itself() -> None:
    """Gradients and updates have different scales."""
    tally = Tally()
    for exchange, norms in ((0, [100.0, 110.0, 120.0]), (1, [1.0, 9.0, 2.0])):
        for client, norm in enumerate(norms):
            metrics = {"loss": 10.0 * (client + 1), "examples": 10.0} if exchange else {}
            reply = Reply(Id(1, exchange, client), client, {}, metrics, norms={"update": norm})
            tally.accepted(Ask("train", []), reply)
    found = Extremes.of(tally, lambda client: f"client-{client}")
    assert found == Extremes(("client-1", 9.0, 4.5), ("client-2", 3.0))
    assert Extremes.of(Tally(), str) == Extremes()


@pytest.mark.parametrize("stop", range(12))
def test_a_run_that_goes_on_from_a_checkpoint_warns_the_same(stop: int) -> None:
    rng = np.random.default_rng(0)
    given = [
        {"round": k, "test_loss": float(v), "local_loss": float(w), "test_accuracy": 0.1}
        for k, (v, w) in enumerate(
            zip(10 ** rng.uniform(-1, 4, 12), 10 ** rng.uniform(-1, 4, 12), strict=True)
        )
    ]
    given += [
        {"round": 12 + k, "test_loss": 1e7, "local_loss": math.nan, "test_accuracy": 0.5} for k in range(4)
    ]
    whole = followed(given)
    assert len(whole.warnings) == 3
    state = json.loads(json.dumps(followed(given[:stop]).state))
    assert followed(given[stop:], state=state).state == whole.state


def test_the_state_in_a_checkpoint_does_not_change_as_the_run_goes_on() -> None:
    watch = followed(lines("test_loss", 2.0, 1.0, 900.0, 900.0))
    state = watch.state
    before = json.dumps(state)
    for line in lines("test_loss", *[900.0] * 9)[4:]:
        watch.after(line, WHO)
    assert watch.warnings
    assert json.dumps(state) == before


@pytest.mark.parametrize("lr", [3.0, 1e35])
def test_of_a_rate_above_one_a_usual_rate_is_what_to_try(lr: float) -> None:
    for given in (lines("test_loss", 2.0, math.inf), lines("test_accuracy", *[0.1] * 13)):
        watch = Divergence(12, lr, chance={"test_accuracy": TEN})
        for line in given:
            watch.after(line, WHO)
        assert watch.warnings[0]["try"] == "Try local.lr = 0.1, or set local.clip_norm."
    assert str(diverged(3, lr)).endswith(f"local.lr is {lr:g}, try 0.1, or set local.clip_norm.")
