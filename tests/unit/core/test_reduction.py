"""Folding: plain sums in the order given, and nothing that looks at a reply's memory."""

import torch

from fedlens.core.protocol import Reduce
from fedlens.core.reduction import add_reply

REDUCE = Reduce({"x": "sum", "n": "max"}, weight="k")


def payload(weight: float, value: float, count: int) -> dict:
    return {"x": {"w": torch.full((3,), value)}, "n": {"c": torch.tensor(count)}, "k": weight}


def test_replies_and_blocks_of_them_add_up_to_the_same() -> None:
    replies = [payload(1.0, 4.0, 2), payload(3.0, 8.0, 7), payload(2.0, -1.0, 5)]
    one_by_one: dict = {}
    for reply in replies:
        add_reply(one_by_one, REDUCE, reply)
    block: dict = {}
    add_reply(block, REDUCE, replies[1])
    add_reply(block, REDUCE, replies[2])
    in_blocks: dict = {}
    add_reply(in_blocks, REDUCE, replies[0])
    add_reply(in_blocks, REDUCE, block, reduced=True)
    for total in (one_by_one, in_blocks):
        assert total["x"]["w"].tolist() == [4.0 + 24.0 - 2.0] * 3
        assert (total["n"]["c"].item(), total["k"], total["replies"]) == (7, 6.0, 3)


def test_numbers_are_reduced_too_and_plain_sums_know_no_weights() -> None:
    reduce = Reduce({"x": "plain", "tau": "sum", "z": "plain"}, weight="k")
    replies = [payload(w, v, 1) | {"tau": t, "z": 2.0} for w, v, t in ((1.0, 4.0, 10.0), (3.0, 8.0, 2.0))]
    block: dict = {}
    add_reply(block, reduce, replies[1])
    for total in ({}, {}):
        add_reply(total, reduce, replies[0])
        add_reply(total, reduce, block, reduced=True)
        assert total["x"]["w"].tolist() == [12.0] * 3
        assert (total["tau"], total["z"], total["k"]) == (16.0, 4.0, 4.0)


def test_a_total_is_never_a_replys_own_tensor() -> None:
    """It would lie in a worker's memory, which is wanted back."""
    for reduced in (False, True):
        reply, total = payload(1.0, 4.0, 2) | {"replies": 1}, {}
        add_reply(total, REDUCE, reply, reduced=reduced)
        reply["x"]["w"].zero_()
        reply["n"]["c"].zero_()
        assert total["x"]["w"].tolist() == [4.0] * 3
        assert total["n"]["c"].item() == 2


def test_reduction_changes_no_reply() -> None:
    first, second, total = payload(1.0, 4.0, 2), payload(3.0, 8.0, 7), {}
    add_reply(total, REDUCE, first)
    add_reply(total, REDUCE, second)
    assert first["x"]["w"].tolist() == [4.0] * 3
    assert second["x"]["w"].tolist() == [8.0] * 3
    assert (first["n"]["c"].item(), second["n"]["c"].item()) == (2, 7)


def test_the_first_reply_that_is_given_becomes_the_total_in_its_own_memory() -> None:
    how = Reduce({"x": "sum", "y": "sum"})
    first = {"x": {"w": torch.tensor([4.0])}, "y": {"w": torch.tensor([4.0])}, "weight": 3.0}
    total: dict = {}
    add_reply(total, how, first, donated={"x"})
    assert total["x"]["w"].data_ptr() == first["x"]["w"].data_ptr()
    assert float(first["y"]["w"]) == 4.0
    assert float(total["x"]["w"]) == float(total["y"]["w"]) == 12.0
    add_reply(
        total, how, {"x": {"w": torch.ones(1)}, "y": {"w": torch.ones(1)}, "weight": 2.0}, donated={"x"}
    )
    assert float(total["x"]["w"]) == float(total["y"]["w"]) == 14.0


def test_a_given_tree_may_have_no_leaf() -> None:
    """Where all of a model is the clients' own nothing of it is sent."""
    total: dict = {}
    for _ in range(2):
        add_reply(total, Reduce({"x": "sum"}), {"x": {}, "weight": 1.0}, donated={"x"})
    assert total["x"] == {}
