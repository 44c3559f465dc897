"""Which clients are named as clearly below the others: the exact test, and how rarely chance names one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from fedlens.pages.low_clients import Answers, below_with_every_model, exact_p


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


@pytest.mark.parametrize(
    ("right", "images", "others_right", "others"), [(6, 10, 38, 40), (0, 3, 5, 9), (4, 4, 7, 7)]
)
def test_with_one_class_it_is_fishers_exact_test(
    right: int, images: int, others_right: int, others: int
) -> None:
    table = [[right, images - right], [others_right, others - others_right]]
    expected = stats.fisher_exact(table, alternative="less").pvalue
    assert exact_p(column(right), column(images), column(others_right), column(others)) == pytest.approx(
        expected
    )


def test_with_several_classes_it_counts_all_ways_to_share_out_the_right_images_of_each_class() -> None:
    # Class 0: 2 of 3 right against 3 of 3; class 1: 1 of 2 against 2 of 2. Every choice of the client's images counts.
    classes = [([1, 1, 1, 1, 1, 0], 3), ([1, 1, 1, 0], 2)]
    sums = [[sum(chosen) for chosen in itertools.combinations(bits, m)] for bits, m in classes]
    ways = [a + b for a, b in itertools.product(*sums)]
    expected = np.mean([way <= 3 for way in ways])
    assert exact_p(column(2, 1), column(3, 2), column(3, 2), column(3, 2)) == pytest.approx(expected)


def answers(
    rng: np.random.Generator, sizes: list[int], shares: list[float], classes: int = 4, shared: bool = True
) -> Answers:
    owner = np.repeat(np.arange(len(sizes)), sizes)
    right = (rng.random(len(owner)) < np.repeat(shares, sizes)).astype(np.float64)
    return Answers.of(owner, rng.integers(0, classes, len(owner)), right, shared)


def test_chance_alone_names_a_client_in_fewer_than_five_of_a_hundred_federations() -> None:
    # Small and large clients, a hard task, and one model: several would have to agree.
    rng, named = np.random.default_rng(0), 0
    for _ in range(400):
        one = answers(rng, [4, 8, 15, 20, 40, 100], [0.7] * 6)
        named += bool(below_with_every_model({"federated": one}))
    assert named <= 0.05 * 400


def test_a_mislabelled_client_is_named_and_one_with_few_images_is_not() -> None:
    rng, named = np.random.default_rng(1), []
    for _ in range(50):
        shares = [0.97, 0.97, 0.6, 0.97, 0.97]
        each = {model: answers(rng, [100, 60, 50, 30, 9], shares) for model in ("federated", "local-only")}
        named.append(sorted(below_with_every_model(each)))
    assert sum(names == [2] for names in named) >= 40
    assert not any(4 in names for names in named)


def test_a_client_is_not_named_if_one_model_knows_it_or_never_saw_it() -> None:
    rng = np.random.default_rng(2)
    low, alike = answers(rng, [60, 60, 60], [1, 1, 0.5]), answers(rng, [60, 60, 60], [0.6, 0.6, 0.6])
    assert list(below_with_every_model({"federated": low, "centralized": low})) == [2]
    assert not below_with_every_model({"federated": low, "centralized": alike})
    unseen = Answers(low.images[:2], low.right[:2])
    assert not below_with_every_model({"federated": low, "iid": unseen})
    assert not below_with_every_model({})


def test_many_images_do_not_make_a_small_gap_a_clear_one() -> None:
    assert list(
        below_with_every_model(
            {"federated": answers(np.random.default_rng(3), [3000] * 4, [0.97] * 3 + [0.8])}
        )
    )
    assert not below_with_every_model(
        {"federated": answers(np.random.default_rng(3), [3000] * 4, [0.97] * 3 + [0.9])}
    )


def test_a_client_is_not_named_if_the_others_differ_as_much() -> None:
    rng = np.random.default_rng(4)
    assert list(below_with_every_model({"federated": answers(rng, [300] * 6, [0.8] * 5 + [0.6])})) == [5]
    sizes, shares = [300] * 6, [0.7, 0.75, 0.8, 0.85, 0.9, 0.6]
    for shared, named in (
        (True, []),
        (False, [5]),
    ):  # models of the clients' own differ by how much they trained on
        each = answers(np.random.default_rng(5), sizes, shares, shared=shared)
        assert list(below_with_every_model({"local-only": each})) == named


def test_two_clients_cannot_say_which_of_them_is_wrong() -> None:
    assert not below_with_every_model(
        {"federated": answers(np.random.default_rng(5), [100, 100], [0.97, 0.5])}
    )


def test_a_client_of_difficult_classes_is_compared_on_these_classes() -> None:
    # Class 1 is hard for everybody, and client 3 has hardly anything else.
    owner = np.repeat([0, 1, 2, 3], 200)
    label = np.concatenate([np.arange(600) % 10 == 0, np.arange(200) % 10 != 0]).astype(np.int64)
    right = np.where(label == 1, np.arange(800) // 10 % 2, 1.0)
    assert right[:600].mean() - right[600:].mean() > 0.3
    assert not below_with_every_model({"federated": Answers.of(owner, label, right)})
    one_class = Answers.of(owner, np.zeros_like(label), right)
    assert list(below_with_every_model({"federated": one_class})) == [3]


def test_a_class_that_only_one_client_has_says_nothing() -> None:
    owner = np.repeat([0, 1, 2], 40)
    right = (owner < 2).astype(np.float64)
    assert list(below_with_every_model({"federated": Answers.of(owner, np.zeros_like(owner), right)})) == [2]
    assert not below_with_every_model({"federated": Answers.of(owner, owner // 2, right)})


def test_means_over_seeds_are_rounded_in_favour_of_the_client() -> None:
    half = column(5.5), column(10), column(37.5), column(40)
    kinder = column(6), column(10), column(37), column(40)
    assert exact_p(*half) == pytest.approx(exact_p(*kinder))


def test_the_others_are_weighed_by_the_clients_mix_of_classes() -> None:
    # Others: class 0 always right, class 1 half; the client has 10 and 30 images of them.
    owner = np.repeat([0, 1, 2], [40, 40, 40])
    label = np.concatenate([np.tile([0, 0, 1, 1], 20), np.repeat([0, 1], [10, 30])])
    right = np.concatenate([np.tile([1.0, 1.0, 1.0, 0.0], 20), np.zeros(40)])
    (found,) = below_with_every_model({"federated": Answers.of(owner, label, right)}).values()
    assert found["federated"].others == pytest.approx((10 * 1.0 + 30 * 0.5) / 40)
    assert (found["federated"].share, found["federated"].images) == (0.0, 40)
