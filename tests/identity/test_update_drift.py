"""Client drift against hand-computed values, and against the definitions on random updates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedlens.analyses.client_drift import ALL, drift, orthogonal_cosine, updates_of
from fedlens.base.errors import ConfigError
from fedlens.core.tree import spec_of, tree_of


def flat(*values: float) -> dict[str, Tensor]:
    return {"layer.weight": torch.tensor(values, dtype=torch.float32)}


def test_equal_updates_agree() -> None:
    found = drift([flat(3, 4)] * 5, [1] * 5).total
    assert found.norms == (5,) * 5
    assert found.distances == pytest.approx((0,) * 5, abs=1e-12)
    assert found.cosines == pytest.approx((1,) * 5)
    assert (found.mean_norm, found.diversity, found.agreeing) == pytest.approx((5, 1, 5))


def test_equal_updates_of_unequal_weights_count_as_kish_has_it() -> None:
    found = drift([flat(3, 4)] * 2, [30, 10]).total
    assert found.agreeing == pytest.approx(1 / (0.75**2 + 0.25**2))
    assert found.diversity == pytest.approx(1)


def test_orthogonal_updates_count_as_one() -> None:
    found = drift([flat(2, 0, 0), flat(0, 2, 0), flat(0, 0, 2)], [1, 1, 1]).total
    assert found.agreeing == pytest.approx(1)
    assert found.diversity == pytest.approx(3)
    assert found.cosines == pytest.approx((3**-0.5,) * 3)
    assert found.distances == pytest.approx(((16 / 9 + 8 / 9) ** 0.5,) * 3)
    assert drift([flat(2, 0), flat(0, 7)], [1, 5]).total.agreeing == pytest.approx(1)


def test_the_cosine_of_orthogonal_updates_is_not_0_but_their_part_in_the_mean() -> None:
    for weights in ([1, 1, 1, 1], [5, 1, 2]):
        updates = [flat(*(2.0 * (k == j) for j in range(len(weights)))) for k in range(len(weights))]
        cosines = [c or 0.0 for c in drift(updates, weights).total.cosines]
        mean = sum(w * c for w, c in zip(weights, cosines, strict=True)) / sum(weights)
        assert orthogonal_cosine(weights) == pytest.approx(mean)


def test_opposite_updates_cancel() -> None:
    found = drift([flat(1, 0), flat(-1, 0)], [1, 1]).total
    assert (found.mean_norm, found.agreeing, found.diversity, found.cosines) == (0, 0, None, (None, None))
    still = drift([flat(0, 0), flat(2, 0)], [1, 1]).total
    assert still.cosines == (None, 1)


def test_the_weighted_mean_of_the_weights_is_the_reference() -> None:
    # d = 0.75 (4, 0) + 0.25 (0, 4) = (3, 1)
    found = drift([flat(4, 0), flat(0, 4)], [3, 1]).total
    assert found.mean_norm == pytest.approx(10**0.5)
    assert found.distances == pytest.approx((2**0.5, 18**0.5))
    assert found.cosines == pytest.approx((3 / 10**0.5, 1 / 10**0.5))
    assert found.diversity == pytest.approx(16 / 10)


def test_layers_add_up_to_the_model() -> None:
    g = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (3, 2), "a.bias": (3,), "b.0.weight": (2, 3), "scale": ()}
    updates = [{name: torch.randn(shape, generator=g) for name, shape in shapes.items()} for _ in range(4)]
    for update in updates:
        update["a.count"] = torch.tensor(3)
    found = drift(updates, [1, 2, 3, 4])
    assert [each["layer"] for each in found.rows()] == [ALL, "a", "b.0", "scale"]
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for each, prefix in ((found.total, ""), (found.layers[0], "a."), (found.layers[1], "b.0.")):
        rows = torch.stack(
            [
                torch.cat([u[name].flatten() for name in shapes if name.startswith(prefix)]).double()
                for u in updates
            ]
        )
        mean = p @ rows
        assert each.norms == pytest.approx(rows.norm(dim=1).tolist())
        assert each.distances == pytest.approx((rows - mean).norm(dim=1).tolist())
        assert each.cosines == pytest.approx(torch.cosine_similarity(rows, mean[None]).tolist())
        assert each.diversity == pytest.approx(float(p @ rows.square().sum(1) / mean.square().sum()))
        assert each.agreeing == pytest.approx(
            float(mean.square().sum() / (p**2 @ rows.square().sum(1))), rel=1e-9
        )


def test_updates_are_of_the_trained_weights() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net[0].bias.requires_grad_(False)
    before = tree_of(net)
    after = {name: value + 1 for name, value in before.items()}
    (update,) = updates_of([after], before, spec_of(net))
    assert list(update) == ["0.weight", "1.weight", "1.bias"]
    for value in update.values():
        torch.testing.assert_close(value, torch.ones_like(value))


@pytest.mark.parametrize(
    ("updates", "weights", "message"),
    [
        ([], [], "no update"),
        ([{"layer.count": torch.tensor(1)}], [1], "no update"),
        ([flat(1), flat(1, 2)], [1, 1], "update 1 has other leaves"),
        ([flat(1)], [1, 2], "do not fit"),
        ([flat(1)], [float("nan")], "do not fit"),
    ],
)
def test_updates_that_do_not_fit_are_refused(updates, weights, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drift(updates, weights)
