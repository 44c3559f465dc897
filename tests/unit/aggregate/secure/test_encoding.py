"""A reply as words: their sum at the limit of overflow, values beyond their range, and replies that are not valid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedlens.aggregate.secure.encoding import SumLayout
from fedlens.base.errors import ConfigError
from fedlens.core.schema import Field, NumberField, Schema, TensorField, TreeField
from fedlens.core.stacked import StackedTrees

RANGES = {"update": 0.5, "buffers": 8.0, "loss": 4.0, "tau": 10.0, "variate": 3.0}
METRICS = {"loss": 6.0, "examples": 3.0, "batches": 2.0}


def layout(bits: int = 16, cohort: int = 4, dtype: torch.dtype = torch.float64, **more: Field) -> SumLayout:
    fields: dict[str, Field] = {
        "update": TreeField({"w": ((2, 2), dtype), "b": ((), dtype)}),
        "buffers": TreeField({"mean": ((3,), dtype)}),
        "counters": TreeField({"n": ((), torch.int64)}),
        "weight": NumberField(above=0, most=10.0),
        "tau": NumberField(above=0),
        "variate": TreeField({"w": ((2,), dtype)}),
    }
    return SumLayout(
        Schema({**fields, **more}), {"tau": "mean", "variate": "sum"}, RANGES, bits=bits, cohort=cohort
    )


def reply(weight: float = 10.0, value: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Every value is `value` times its range."""
    return {
        "update": {
            "w": torch.full((2, 2), 0.5 * value, dtype=dtype),
            "b": torch.tensor(-0.5 * value, dtype=dtype),
        },
        "buffers": {"mean": torch.full((3,), 8.0 * value, dtype=dtype)},
        "counters": {"n": torch.tensor(7)},
        "weight": weight,
        "tau": 10.0 * abs(value),
        "variate": {"w": torch.full((2,), 3.0 * value, dtype=dtype)},
    }


@pytest.mark.parametrize(
    ("bits", "cohort", "modulus"),
    [(16, 32767, 32), (16, 32768, 64), (20, 2047, 32), (20, 2048, 64), (46, 2**17 - 1, 64)],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_sum_at_the_limit_of_overflow_is_exact(bits: int, cohort: int, modulus: int, sign: float) -> None:
    """Every client at the end of each range: cohort x 2^bits in every word, of either sign."""
    made = layout(bits, cohort)
    assert made.modulus_bits == modulus
    words = made.encode(reply(value=sign), {**METRICS, "loss": sign * 12.0})
    total = words * made.unsigned(cohort)  # what adding it so often gives, modulo 2^32 or 2^64
    assert made.fault(total, cohort) is None
    update, loss = made.decode(total, cohort)
    expected = reply(value=sign)
    assert torch.equal(update.update["w"], expected["update"]["w"])
    assert torch.equal(update.update["b"], expected["update"]["b"])
    assert torch.equal(update.buffers["mean"], expected["buffers"]["mean"])
    assert torch.equal(update.more["variate"]["w"], cohort * expected["variate"]["w"])  # a plain sum
    assert (update.more["tau"], update.weight, update.replies, loss) == (
        10.0,
        10.0 * cohort,
        cohort,
        sign * 4.0,
    )
    assert update.counters == {}


def test_one_client_more_would_overflow() -> None:
    made = layout(16, 32767)
    words = made.encode(reply(), METRICS)
    assert made.fault(words * made.unsigned(32767), 32767) is None
    assert made.fault(words * made.unsigned(32768), 32768) is not None


def test_a_cohort_that_may_overflow_64_bits_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as refused:
        layout(46, 2**17)
    assert "131,072 clients at 46 bits needs 131,072 x 2^46 = 9,223,372,036,854,775,808" in str(refused.value)
    assert refused.value.where == "aggregate.bits"
    assert layout(45, 2**17).modulus_bits == 64
    assert "aggregate.bits = 45 or less" in str(refused.value.hint)


def test_weighted_means_are_weighted_and_sums_are_not() -> None:
    made = layout(30)
    replies = [reply(10.0, 0.5), reply(4.0, -0.25), reply(1.0, 1.0)]
    losses = [3.0, 6.0, 9.0]
    total = np.zeros(made.words, made.unsigned)
    for one, mean in zip(replies, losses, strict=True):
        total += made.encode(one, {**METRICS, "loss": mean})
    update, loss = made.decode(total, 3)
    mean = (10 * 0.5 - 4 * 0.25 + 1) / 15
    close = {"rtol": 0.0, "atol": 3 * 8 * 2.0**-30}
    expected = reply(value=mean)
    torch.testing.assert_close(update.update, expected["update"], **close)
    torch.testing.assert_close(update.buffers, expected["buffers"], **close)
    torch.testing.assert_close(update.more["variate"]["w"], torch.full((2,), 3.75).double(), **close)
    assert update.more["tau"] == pytest.approx((10 * 5 + 4 * 2.5 + 10) / 15, abs=1e-7)
    assert loss == pytest.approx((10 * 1 + 4 * 2 + 3) / 15, abs=1e-7)  # means over 3 examples
    assert update.weight == pytest.approx(15, abs=1e-7)


@pytest.mark.parametrize("name", ["update", "buffers", "variate", "tau", "loss"])
def test_a_value_beyond_its_range_is_an_error_that_names_field_and_range(name: str) -> None:
    made, bad, metrics = layout(), reply(), dict(METRICS)
    for sign in (1.0, -1.0) if name != "tau" else (1.0,):
        beyond = sign * RANGES[name] * 1.0001
        if name == "loss":
            metrics["loss"] = 3.0 * beyond
        elif name == "tau":
            bad["tau"] = beyond
        else:
            leaf = next(iter(bad[name]))
            bad[name][leaf] = bad[name][leaf].clone()
            bad[name][leaf].view(-1)[0] = beyond
        with pytest.raises(ValueError) as failed:  # noqa: PT011
            made.encode(bad, metrics)
        assert (
            str(failed.value)
            == f"{name} holds a value beyond its range of {RANGES[name]:g} (aggregate.range.{name})"
        )
        assert f"{beyond:g}" not in str(failed.value)


@pytest.mark.parametrize("weight", [1e-5, 7.6e-5])
def test_a_weight_that_rounds_to_0_is_an_error(weight: float) -> None:
    with pytest.raises(ValueError, match="weight rounds to 0 at 16 bits"):
        layout().encode(reply(weight), METRICS)
    assert layout().encode(reply(7.7e-5), METRICS)[-1] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_an_error(bad: float) -> None:
    made, broken = layout(), reply()
    broken["update"]["w"][1, 1] = bad
    with pytest.raises(ValueError, match="update holds NaN or Inf"):
        made.encode(broken, METRICS)
    with pytest.raises(ValueError, match="its metric 'loss' holds NaN or Inf"):
        made.encode(reply(), {**METRICS, "loss": bad})
    with pytest.raises(ValueError, match="lacks b"):
        made.encode({**reply(), "update": {"w": torch.zeros(2, 2).double()}}, METRICS)


def test_words_that_are_no_sum_of_so_many_vectors() -> None:
    made = layout()
    total = made.encode(reply(), METRICS) + made.encode(reply(), METRICS)
    assert made.fault(total, 2) is None
    assert "no sum of 1 vectors" in str(made.fault(total, 1))
    shifted = total.copy()
    shifted[3] += 2**31 - 1
    assert "beyond 2 x 2^16" in str(made.fault(shifted, 2))
    assert "weights" in str(made.fault(np.zeros_like(total), 2))
    assert "words hold 4 at most" in str(made.fault(total, 5))
    assert "12 words where 13" in str(made.fault(total[:-1], 2))


def test_a_tensor_or_an_unannounced_field_cannot_be_summed() -> None:
    with pytest.raises(ConfigError, match="the field 'noise', and the server sees sums"):
        layout(noise=NumberField())
    with pytest.raises(ConfigError, match="the field 'variate', and the server sees sums"):
        layout(variate=TensorField((2,), torch.float64))


def test_rows_of_a_group_and_other_layouts_give_the_same_words() -> None:
    made = layout(dtype=torch.float32)
    one = reply(value=0.3, dtype=torch.float32)
    words = made.encode(one, METRICS)
    stacked = StackedTrees({name: torch.stack([leaf * 0.1, leaf]) for name, leaf in one["update"].items()})
    assert np.array_equal(made.encode({**one, "update": stacked.row(1)}, METRICS), words)
    turned = {"w": one["update"]["w"].T.contiguous().T, "b": one["update"]["b"]}
    assert np.array_equal(made.encode({**one, "update": turned}, METRICS), words)
    assert made.schema.fault({"vector": torch.from_numpy(words.view("int32"))}) is None
    assert "outside" in str(made.schema.fault({"vector": torch.from_numpy(words.view("int32")) * 10}))
