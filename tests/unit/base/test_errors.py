"""Errors: the sentence, its parts, and what survives the way through a pickle."""

import pickle

import pytest

from fedlens.base.errors import ConfigError, DataError, FedlensError, RunDirectoryError, RunFailed, nearest


@pytest.mark.parametrize("kind", [FedlensError, ConfigError, DataError, RunDirectoryError, RunFailed])
def test_an_error_keeps_its_parts(kind) -> None:
    error = kind("it is wrong.", where="here", hint="do that.")
    assert str(error) == "it is wrong (here); do that."
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.what, back.where, back.hint) == (str(error), "it is wrong", "here", "do that")
    assert back.exit_code == (1 if kind is RunFailed else 2)


def test_parts_may_be_left_out() -> None:
    assert str(FedlensError("no")) == "no."
    assert str(FedlensError("no", where="x")) == "no (x)."
    assert str(FedlensError("no", hint="do")) == "no; do."


def test_the_nearest_name() -> None:
    assert nearest("fedav", ["fedavg", "fedprox"]) == "did you mean 'fedavg'"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
