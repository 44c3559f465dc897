"""Aggregates of one function: the update, statistics, counters and fields; what a wrong function is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedlens.aggregate import custom
from fedlens.aggregate.custom import ByColumn, ByWeights, Rows, blocks
from fedlens.aggregate.mean import Aggregate, AggregateContext, Mean
from fedlens.base.errors import ConfigError, HookError
from fedlens.base.registry import load_file
from fedlens.core.protocol import Answer, Ask, Failure, Id, Reply
from fedlens.core.reduction import How, Refusal, Update
from fedlens.core.stacked import StackedTrees

OWN = load_file(Path(__file__).parents[3] / "docs" / "examples" / "own_aggregate.py")
CTX = AggregateContext(1, 1, None, None)  # type: ignore[arg-type]
FIELDS: dict[str, How] = {"tree": "sum", "number": "mean", "total": "sum"}
N = 5


def reply(slot: int, weight: float | None = None) -> Reply:
    draw = torch.Generator().manual_seed(slot)
    w = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    payload = {
        "update": {"w": w, "b": w[0].clone()},
        "buffers": {"m": w.abs()},
        "counters": {"n": torch.tensor([7, 2, 9, 4, 5][slot])},
        "weight": 1.0 + slot if weight is None else weight,
        "tree": {"c": 2 * w},
        "number": float(w[0, 0]),
        "total": float(w[1, 1]),
    }
    return Reply(Id(1, 0, slot), slot, payload)


REPLIES = [reply(slot) for slot in range(N)]
ANSWERS = [*REPLIES[:2], Failure(Id(1, 0, 9), 9, "lost"), *REPLIES[2:]]


def stacked(name: str, leaf: str) -> Tensor:
    return torch.stack([r.payload[name][leaf] for r in REPLIES])


class Given(ByWeights):
    def __init__(self, make: Callable[[Rows], Any]) -> None:
        self.make = make

    def weights(self, rows: Rows) -> Any:
        return self.make(rows)


class Columns(ByColumn):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.make = make

    def column(self, block: Tensor) -> Any:
        return self.make(block)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_the_weights_of_the_mean_give_the_mean() -> None:
    mine = Given(lambda rows: rows.weight / rows.weight.sum()).aggregate(ANSWERS, FIELDS, CTX)
    wanted = Mean().aggregate(ANSWERS, dict.fromkeys(FIELDS, "mean"))
    assert isinstance(mine, Update)
    assert wanted is not None
    for name in ("update", "buffers", "counters"):
        close(vars(mine)[name], vars(wanted)[name])
    close(mine.more["number"], wanted.more["number"])
    close(mine.more["tree"]["c"], N * wanted.more["tree"]["c"])
    close(mine.more["total"], N * wanted.more["total"])
    assert (mine.replies, mine.weight) == (N, 15.0)


def test_equal_weights_give_the_plain_sum_of_a_summed_field() -> None:
    mine = Given(lambda rows: torch.full((N,), 1 / N)).aggregate(ANSWERS, FIELDS, CTX)
    plain = Mean().aggregate(ANSWERS, FIELDS)
    assert isinstance(mine, Update)
    assert plain is not None
    torch.testing.assert_close(mine.more["tree"]["c"], plain.more["tree"]["c"], rtol=1e-6, atol=1e-6)


def test_a_reply_of_weight_zero_has_no_part_in_anything() -> None:
    chosen = torch.tensor([0.25, 0.75, 0.0, 0.0, 0.0])
    mine = Given(lambda rows: chosen).aggregate(ANSWERS, FIELDS, CTX)
    assert isinstance(mine, Update)
    close(mine.update["w"], 0.25 * stacked("update", "w")[0] + 0.75 * stacked("update", "w")[1])
    close(mine.more["tree"]["c"], N * (0.25 * stacked("tree", "c")[0] + 0.75 * stacked("tree", "c")[1]))
    assert mine.counters == {"n": torch.tensor(7)}
    assert mine.replies == N


def test_weights_below_one_shorten_the_update_and_leave_statistics_a_mean() -> None:
    whole, half = (
        Given(lambda rows, total=total: total * rows.weight / 15).aggregate(ANSWERS, FIELDS, CTX)
        for total in (1.0, 0.5)
    )
    assert isinstance(whole, Update)
    assert isinstance(half, Update)
    close(half.update["w"], whole.update["w"] / 2)
    close(half.buffers, whole.buffers)
    close(half.more["tree"], whole.more["tree"])


@pytest.mark.parametrize("width", [1, 3, 7, 2**22])
def test_a_column_is_every_part_of_the_reply_whatever_the_block(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom, "_BLOCK", N * width)
    seen: list[int] = []

    def median(block: Tensor) -> Tensor:
        seen.append(block.shape[1])
        return block.median(dim=0).values

    mine = Columns(median).aggregate(ANSWERS, FIELDS, CTX)
    assert isinstance(mine, Update)
    for part, leaf in (("update", "w"), ("update", "b"), ("buffers", "m"), ("counters", "n")):
        assert torch.equal(vars(mine)[part][leaf], stacked(part, leaf).median(dim=0).values)
    assert torch.equal(mine.more["tree"]["c"], N * stacked("tree", "c").median(dim=0).values)
    assert mine.more["number"] == sorted(r.payload["number"] for r in REPLIES)[2]
    assert mine.more["total"] == N * sorted(r.payload["total"] for r in REPLIES)[2]
    assert mine.counters["n"].dtype == torch.int64
    assert max(seen) == min(width, 12)


def test_replies_are_not_changed_and_rows_of_a_group_are_rows() -> None:
    group = StackedTrees({"w": stacked("update", "w"), "b": stacked("update", "b")}).rows()
    answers = [
        Reply(r.id, r.client, {**r.payload, "update": row}) for r, row in zip(REPLIES, group, strict=True)
    ]
    for rule in (OWN.Median(), OWN.GeometricMedian(), Columns(lambda block: block.mul_(2)[0])):
        assert torch.equal(
            rule.aggregate(answers, FIELDS, CTX).update["w"], rule.aggregate(REPLIES, FIELDS, CTX).update["w"]
        )
    for before, row in zip([reply(slot) for slot in range(N)], group, strict=True):
        assert torch.equal(row["w"], before.payload["update"]["w"])


def test_a_block_is_never_a_second_copy_of_all_replies() -> None:
    trees = [{"w": torch.zeros(3_000_000)} for _ in range(3)]
    assert max(block.numel() for _, _, block in blocks(trees)) <= 2**22
    assert sum(block.shape[1] for _, _, block in blocks(trees)) == 3_000_000


def test_rows_know_norms_products_and_distances() -> None:
    rows = Rows(REPLIES, CTX)
    flat = torch.cat([stacked("update", leaf).flatten(1) for leaf in ("w", "b")], dim=1)
    close(rows.norms, flat.norm(dim=1))
    close(rows.products, flat @ flat.T)
    torch.testing.assert_close(rows.distances(torch.eye(N, dtype=torch.float64)), torch.cdist(flat, flat))
    weights = rows.weight / rows.weight.sum()
    close(rows.distances(weights), (flat - weights @ flat).norm(dim=1))
    close(rows.distances_to(REPLIES[0].payload["update"]), (flat - flat[0]).norm(dim=1))
    assert rows.weight.tolist() == [1, 2, 3, 4, 5]


def test_the_documented_geometric_median_is_where_no_step_shortens_the_distances() -> None:
    rows = Rows([reply(slot, 1.0) for slot in range(N)], CTX)
    weights = rows.weight / rows.weight.sum()
    least = rows.distances(OWN.GeometricMedian().weights(rows)).sum()
    assert least < rows.distances(weights).sum()
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        other = torch.rand(N, generator=draw, dtype=torch.float64)
        assert rows.distances(other / other.sum()).sum() >= least * (1 - 1e-3)


def test_the_documented_clipping_moves_at_most_its_radius() -> None:
    rule = OWN.CenteredClipping(radius=0.5)
    center = {"w": torch.full((3, 4), 0.1, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
    ctx = AggregateContext(2, 9, None, None, {"v": center})  # type: ignore[arg-type]
    update = rule.aggregate(REPLIES, {}, ctx)
    for leaf, v in center.items():
        away = [r.payload["update"][leaf] - v for r in REPLIES]
        scales = (0.5 / Rows(REPLIES, ctx).distances_to(center)).clamp(max=1)
        wanted = v + sum(
            (1 + k) / 15 * scales[k] * delta for k, delta in enumerate(away)
        )  # weights 1 to 5 of 15
        close(update.update[leaf], wanted)
    assert update.state["v"] is update.update


def test_no_reply_is_no_update_and_a_refusal_is_passed_on() -> None:
    few = Refusal("too few")
    for rule in (Given(lambda rows: few), Columns(lambda block: few)):
        assert rule.aggregate(ANSWERS[2:3], FIELDS, CTX) is None
        assert rule.aggregate(ANSWERS, FIELDS, CTX) is few


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Given(lambda rows: None), "`weights` of Given returned a NoneType ("),
        (Given(lambda rows: rows.weight[1:]), "`weights` of Given returned a tensor of the shape [4] ("),
        (Given(lambda rows: rows.weight / 0), "`weights` of Given returned values that are not finite ("),
        (Given(lambda rows: rows.weight), "returned weights of which the smallest is 1 and the sum 15 ("),
        (Given(lambda rows: 0 * rows.weight), "returned weights of which the smallest is 0 and the sum 0 ("),
        (Given(lambda rows: rows.weight / 10 - 0.2), "of which the smallest is -0.1 and the sum 0.5 ("),
        (Columns(lambda block: block), "`column` of Columns returned a tensor of the shape [5, 12] ("),
        (Columns(lambda block: 0.0), "`column` of Columns returned a float ("),
    ],
)
def test_a_wrong_result_is_named_with_its_place(rule: Any, said: str) -> None:
    with pytest.raises(HookError) as caught:
        rule.aggregate(ANSWERS, FIELDS, CTX)
    assert said in str(caught.value)
    assert "(test_custom.py, line " in str(caught.value)


def test_a_wrong_signature_is_named_where_the_class_is_made() -> None:
    with pytest.raises(ConfigError) as caught:

        class Short(ByColumn):
            def column(self) -> Tensor:  # type: ignore[override]
                return torch.zeros(1)

    assert "`column` of the aggregate Short (test_custom.py, line " in str(caught.value)
    assert str(caught.value).endswith(
        "takes (self), and fedlens calls it with (self, block); write: def column(self, block)."
    )


@dataclass(frozen=True)
class AdaptiveClip(ByWeights):
    """Updates are cut to a length that follows the clients' (arXiv 1905.03871), as a rule with a number for memory."""

    target: float = 0.5

    def init(self, weights: Any, federation: Any) -> Any:
        return {"clip": 1.0}

    def weights(self, rows: Rows) -> Tensor:
        return rows.weight / rows.weight.sum() * (rows.state["clip"] / rows.norms).clamp(max=1)

    def finish(self, rows: Rows, update: Update) -> Update:
        within = (rows.norms <= rows.state["clip"]).double().mean()
        clip = rows.state["clip"] * float(torch.exp(-0.2 * (within - self.target)))
        return Update(**vars(update) | {"state": {"clip": clip}})


def test_an_adaptive_clip_finds_the_middle_of_the_norms() -> None:
    rule, state = AdaptiveClip(), AdaptiveClip().init(None, None)
    for round in range(1, 60):
        update = rule.aggregate(REPLIES, {}, AggregateContext(round, 99, None, None, state))  # type: ignore[arg-type]
        assert isinstance(update, Update)
        assert update.state is not None
        state = update.state
    assert sorted(Rows(REPLIES, CTX).norms.tolist())[1] < state["clip"] < sorted(Rows(REPLIES, CTX).norms)[3]


class ReadsEachAnswer(Aggregate):
    def aggregate(self, answers, fields, ctx):  # type: ignore[no-untyped-def]
        return [answer.payload for answer in answers]


@pytest.mark.parametrize(("good", "message"), [(False, "0: its loss is NaN"), (True, "'payload'")])
def test_an_aggregate_that_fails_without_a_good_reply_says_first_why_there_is_none(
    good: bool, message: str
) -> None:
    exchange = ReadsEachAnswer().exchange(Ask("train", []), {}, CTX)
    next(exchange)
    before: list[Answer] = [Reply(Id(1, 0, 1), 1, {})] if good else []
    failure = Failure(Id(1, 0, 0), 0, "its loss is NaN")
    with pytest.raises(AttributeError if good else HookError, match=message):
        exchange.send(iter([*before, failure]))
