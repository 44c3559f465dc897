"""The cost of a run: the rows of table 3 of He et al. 2021 (FedCV), measured."""

from __future__ import annotations

from fedlens.base.format import count, duration, finite, millions, size
from fedlens.results.run import Run


def efficiency(run: Run) -> list[tuple[str, str]]:
    """Name and value of each row: parameters, multiply-adds, rounds, bytes and time.

    Multiply-adds are those of a forward pass for one example. Bytes are those of all clients of a round together.
    """
    rounds = run.rounds_done
    down, up, seconds = run.total("bytes_down"), run.total("bytes_up"), run.seconds()
    peer = run.total("bytes_peer") or 0.0
    parameters, trainable = (finite(run.recorded("model", key)) for key in ("parameters", "trainable"))

    def a_round(total: float | None) -> float | None:
        return total / rounds if total is not None and rounds else None

    sent = None if down is None and up is None else (down or 0.0) + (up or 0.0) + peer
    return [
        ("Parameters", count(parameters)),
        ("Trainable parameters", count(trainable)),
        (_multiply_adds_of(run), millions(finite(run.recorded("model", "multiply_adds")))),
        ("Communication rounds", count(rounds)),
        ("Sent down a round, to all clients", size(a_round(down))),
        ("Sent up a round, by all clients", size(a_round(up))),
        *([("Sent a round between clients", size(a_round(peer)))] if peer else []),
        ("Sent in all rounds, down and up" + (", and between clients" if peer else ""), size(sent)),
        ("Time a round", duration(a_round(seconds))),
        ("Total time", duration(seconds)),
    ]


def _multiply_adds_of(run: Run) -> str:
    shape = run.recorded("model", "input_shape")
    if not isinstance(shape, list) or not shape:
        return "Multiply-adds, one forward pass"
    if len(shape) == 1:
        return f"Multiply-adds, one input of {shape[0]}"
    return f"Multiply-adds, one {'×'.join(map(str, shape))} input"
