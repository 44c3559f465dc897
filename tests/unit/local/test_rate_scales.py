"""`local.lr_scale`: which factor a leaf takes."""

from itertools import permutations

from fedlens.local.rate_scales import rate_scales

LEAVES = ["body.0.weight", "body.0.bias", "body.01.weight", "out.weight", "out.bias"]


def test_the_longest_name_counts_in_any_order() -> None:
    factors = {"body": 2.0, "body.0": 3.0, "body.0.bias": 5.0}
    for order in permutations(factors):
        named = {name: factors[name] for name in order}
        assert rate_scales(named, LEAVES, "out") == (3.0, 5.0, 2.0, 1.0, 1.0)


def test_the_head_is_the_name_of_the_classifier() -> None:
    assert rate_scales({"head": 10.0, "out.bias": 20.0}, LEAVES, "out") == (1.0, 1.0, 1.0, 10.0, 20.0)
    assert rate_scales({"head": 10.0}, ["weight", "bias"], "") == (10.0, 10.0)  # the model is its classifier
    assert rate_scales({}, LEAVES, "out") == rate_scales(None, LEAVES, "out") == ()
