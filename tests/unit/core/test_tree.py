"""Trees and their specs: roles, copies, and what is loaded where."""

import hashlib
import struct

import pytest
import torch
from torch import nn

from fedlens.core.tree import Leaf, add, all_finite, count, digest, load_into, norm, part, spec_of, tree_of


def module() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    made[2].requires_grad_(False)
    return made


def test_the_spec_names_every_role() -> None:
    spec = spec_of(module())
    assert list(spec) == list(module().state_dict())
    assert spec["0.weight"] == Leaf("weight", (2, 3), torch.float32, True)
    assert spec["1.weight"] == Leaf("weight", (2,), torch.float32, True)
    assert spec["1.running_var"] == Leaf("buffer", (2,), torch.float32, False)
    assert spec["1.num_batches_tracked"] == Leaf("counter", (), torch.int64, False)
    assert spec["2.weight"] == Leaf("weight", (2, 2), torch.float32, False)
    assert part(spec, "weight", trainable=True) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert part(spec, "buffer", "counter") == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert count(spec) == 6 + 2 + 2 + 2 + 4


def test_a_boolean_buffer_is_a_counter_and_a_hidden_one_is_no_leaf() -> None:
    made = nn.Linear(2, 1)
    made.register_buffer("mask", torch.tensor([True, False]))
    made.register_buffer("cache", torch.zeros(3), persistent=False)
    spec = spec_of(made)
    assert spec["mask"].role == "counter"
    assert "cache" not in spec
    assert "cache" not in tree_of(made)


def test_tree_of_copies_and_load_into_copies_back() -> None:
    made = module()
    tree = tree_of(made)
    with torch.no_grad():
        made[0].weight.zero_()
    assert tree["0.weight"].abs().sum() > 0
    load_into(made, tree)
    assert torch.equal(made[0].weight, tree["0.weight"])
    tree["0.weight"].zero_()
    assert made[0].weight.abs().sum() > 0
    assert made[0].weight.requires_grad
    assert not made[2].weight.requires_grad


def test_loading_a_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        load_into(nn.Linear(1, 1), {"nothing": torch.zeros(1)})


def test_the_norm_of_single_precision_leaves_is_taken_in_double() -> None:
    assert norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}).dtype == torch.float64
    assert norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}).item() == 5.0


def test_whole_numbers_and_empty_tensors_are_finite() -> None:
    assert all_finite([])
    assert all_finite([torch.empty(0), torch.tensor(3), torch.tensor(True)])
    assert not all_finite([torch.ones(3), torch.tensor(float("-inf"))])
    assert not all_finite([torch.tensor([1.0, float("nan"), 2.0], dtype=torch.bfloat16)])


def test_the_digest_is_the_same_on_every_machine() -> None:
    tree = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor(7)}
    by_hand = (
        b"a|torch.int64|()|" + struct.pack("<q", 7) + b"b|torch.float32|(2,)|" + struct.pack("<2f", 1, 2)
    )
    assert digest(tree) == hashlib.sha256(by_hand).hexdigest()
    assert digest({}) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_add_scales_the_second_alone() -> None:
    made = add({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([16.0, 32.0])}, scale=-0.125)
    assert made["w"].tolist() == [-1.0, -2.0]
