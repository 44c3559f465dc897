import math

import numpy as np

from fedlens.data.table import missing, numbers


def test_missing_values_of_every_kind_of_column() -> None:
    assert missing(np.array([1, 0])).tolist() == [False, False]
    assert missing(np.array([1.0, math.nan, math.inf])).tolist() == [False, True, False]
    assert missing(np.array(["a", "", " \n", "nan"])).tolist() == [False, True, True, False]
    assert missing(np.array(["a", None, math.nan, 3], object)).tolist() == [False, True, True, False]
    assert missing(np.array(["NaT", "2020-01-01"], "M8[D]")).tolist() == [True, False]


def test_numbers_of_every_kind_of_column() -> None:
    assert numbers(np.array([1, 2], np.uint8)).tolist() == [1.0, 2.0]
    np.testing.assert_array_equal(
        numbers(np.array(["1.5", " -2 ", "1e2", "", "x"])), [1.5, -2, 100, math.nan, math.nan]
    )
    np.testing.assert_array_equal(
        numbers(np.array([3, "4", None, True, [1]], object)), [3, 4, math.nan, math.nan, math.nan]
    )
    np.testing.assert_array_equal(numbers(np.array([b"1.5", b"?"])), [1.5, math.nan])
    assert np.isnan(numbers(np.array([True, False]))).all()
    assert np.isnan(numbers(np.array(["2020-01-01"], "M8[D]"))).all()
