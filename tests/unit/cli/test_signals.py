from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from fedlens.cli.signals import Stop, stopped_by_signals, stopping


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_interrupts_once_and_then_lets_the_command_stop(number: signal.Signals) -> None:
    saved = 0

    def stop_and_save() -> None:
        nonlocal saved
        try:
            signal.raise_signal(number)
        finally:
            for _ in range(20):
                signal.raise_signal(number)
                saved += 1

    with stopped_by_signals():
        with pytest.raises(KeyboardInterrupt):
            stop_and_save()
        for _ in range(20):
            signal.raise_signal(number)  # the command ends, and nothing is being handled
    assert saved == 20


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopped_by_signals():
        inner = signal.getsignal(signal.SIGTERM)
        with stopped_by_signals():
            assert signal.getsignal(signal.SIGTERM) is inner
        assert isinstance(inner, Stop)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stopped_by_signals():
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_an_interruption_that_was_swallowed_can_be_repeated() -> None:
    now = 0.0
    stop = Stop(clock=lambda: now)
    with pytest.raises(KeyboardInterrupt):
        stop(2, None)
    stop(2, None)
    now = 11.0
    with pytest.raises(KeyboardInterrupt):
        stop(2, None)


def test_an_error_while_saving_does_not_hide_that_the_command_is_stopping() -> None:
    try:
        try:
            raise KeyboardInterrupt
        finally:
            try:
                raise OSError
            except OSError:
                assert stopping()
    except KeyboardInterrupt:
        pass
    assert not stopping()
