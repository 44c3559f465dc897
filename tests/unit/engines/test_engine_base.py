"""What users of an engine may call on any engine, one of three methods included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedlens.core.driver import Driver
from fedlens.core.engine_base import BareEngine, EngineBase, EngineWork
from fedlens.core.protocol import Program
from fedlens.core.states import STATE_MEMORY
from fedlens.engines.auto import auto
from fedlens.engines.inline import inline
from fedlens.engines.processes import processes
from fedlens.engines.traits import EngineTraits, traits_of
from fedlens.run.changes import changed, defining
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from tests.unit.engines.engine_kit import OPS, NoData, answers_to, ask, expected, fresh, opened, same, vectors


class Bare:
    """An engine as a user may write one: three methods, and no base class."""

    def __init__(self) -> None:
        self.engine = inline()

    def open(self, *opened: Any) -> None:
        self.engine.open(*opened)

    def answer(self, *asked: Any) -> Any:
        return self.engine.answer(*asked)

    def close(self) -> None:
        self.engine.close()


def test_an_engine_of_three_methods_has_the_defaults() -> None:
    engine = BareEngine.wrap(Bare())
    program = Program(OPS, NoData(), 0)
    engine.warm()
    engine.check(OPS)
    assert (
        engine.choose(
            EngineWork(OPS, NoData(), [0], 1, 1, 1.0, lambda steps: pytest.fail("a trial was made"))
        )
        is None
    )
    assert (engine.table, engine.ahead, engine.state_memory) == (None, False, STATE_MEMORY)
    assert engine.applied(program) is program


def test_an_engine_of_three_methods_answers() -> None:
    engine = BareEngine.wrap(Bare())
    wanted = ask([{}, {}])
    try:
        assert same(vectors(answers_to(Driver(*opened(engine)), wanted)), expected(wanted))
    finally:
        engine.close()


@pytest.mark.parametrize("make", [inline, processes, auto])
def test_an_engine_of_fedlens_is_not_wrapped(make: Any) -> None:
    engine = make()
    assert BareEngine.wrap(engine) is engine
    assert isinstance(engine, EngineBase)
    engine.close()


def test_how_an_engine_computes_is_in_the_program() -> None:
    program = auto(precision="bf16").applied(Program(OPS, NoData(), 0))
    assert (program.device, program.arithmetic.precision) == ("cpu", "bf16")


@pytest.mark.usefixtures("quick_workers")
def test_which_engines_take_asks_ahead() -> None:
    with fresh("processes") as driver:
        assert BareEngine.wrap(driver.engine).ahead
    assert not inline().ahead
    assert not auto().ahead


EXACT = """
from fedlens.engines.inline import Inline
from fedlens.engines.traits import EngineTraits, declares

@declares(EngineTraits(exact=True, place="workers"))
def exact():
    return Inline()

def other():
    return Inline()
"""


def test_an_engine_of_ones_own_declares_that_it_is_exact(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(EXACT)
    assert traits_of({"name": f"{file}:exact"}) == EngineTraits(exact=True, place="workers")
    assert traits_of({"name": f"{file}:other"}) == traits_of({"name": "gone.py:exact"}) == EngineTraits()

    def configured(engine: str) -> Any:
        data = {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}
        return read_config(
            {"rounds": 1, "model": "linear", "local": {"lr": 0.1}, "data": data, "engine": engine}
        )

    before = defining(configured("inline"))
    assert changed(before, configured(f"{file}:exact"), Source({})) == []
    (told,) = changed(before, configured(f"{file}:other"), Source({}))
    assert (told["key"], told["before"], told["after"]) == ("engine.name", "inline", f"{file}:other")
