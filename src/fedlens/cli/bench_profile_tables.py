"""The tables of `fedlens bench profile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedlens.benchmark.profile import Profile
    from fedlens.benchmark.profile_model import ModelCost

Rows = Sequence[Sequence[str]]
_ROUND = "a round"


def heading(found: Profile) -> str:
    """What was profiled, in one line."""
    title = found.title
    engine = dict(title["engine"])
    workers = f" {found.rounds.processes} x {engine.get('threads', 1)}" if found.rounds.processes else ""
    who = f"{title['clients_per_round'] or title['clients']} of {title['clients']} clients a round"
    return (
        f"{title['name']}: {title['algorithm']}, {title['model']}, {title['dataset']}, {who}; "
        f"{engine['name']}{workers}, {title['device']}, {title['precision']}"
    )


def part_head(found: Profile) -> Sequence[str]:
    """The head of the table of parts."""
    if not found.rounds.processes:
        return "part", "ms a round", "share", "of which"
    return "part", "driver, ms", "share", f"{found.rounds.processes} workers, ms", "share", "of which"


def part_numeric(found: Profile) -> Sequence[int]:
    """Its columns of numbers."""
    return (1, 2, 3, 4) if found.rounds.processes else (1, 2)


def part_rows(found: Profile) -> Rows:
    """Where a round's time goes; the last line is their sum."""
    from fedlens.benchmark.profile_clock import by_part
    from fedlens.benchmark.profile_rounds import PARTS

    here, there = found.parts(), found.worker_parts()
    driver, workers = by_part(here, PARTS), by_part(there, PARTS)
    many, whole = found.rounds.processes, found.seconds
    # Between its operations a worker waits, checks replies, adds them up and sends.
    workers["engine"] = max(0.0, many * whole - sum(workers.values()))
    rows = []
    for part in PARTS:
        cells = [part, f"{driver[part] * 1e3:,.2f}", _share(driver[part], whole)]
        if many:
            cells += [f"{workers[part] * 1e3:,.2f}", _share(workers[part], many * whole)]
        rows.append([*cells, _of_which(part, {**here, **{k: v for k, v in there.items() if k not in here}})])
    last = [_ROUND, f"{sum(driver.values()) * 1e3:,.2f}", _share(sum(driver.values()), whole)]
    if many:
        last += [f"{sum(workers.values()) * 1e3:,.2f}", _share(sum(workers.values()), many * whole)]
    return [*rows, [*last, ""]]


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}".replace("%", " %")


def _of_which(part: str, seconds: Mapping[str, float]) -> str:
    """The larger shares of a part, by name."""
    total = sum(value for name, value in seconds.items() if name.partition(".")[0] == part)
    shares = {name.partition(".")[2]: value for name, value in seconds.items() if name.startswith(f"{part}.")}
    told = [(name, value) for name, value in shares.items() if total and value > 0.02 * total]
    return ", ".join(f"{name} {value * 1e3:,.2f}" for name, value in sorted(told, key=lambda each: -each[1]))


def remarks(found: Profile) -> list[str]:
    """What has to be known to read the table."""
    training = found.rounds.training
    pairs = len(training.timed)
    lines = [
        f"{pairs} pair{'s' * (pairs != 1)} of rounds: {found.seconds * 1e3:,.2f} ms with the clock, which the parts "
        f"add up to, {found.plain_seconds * 1e3:,.2f} without.",
        f"The clock adds {training.overhead * 100:+.1f} % in the median pair; half of the pairs say "
        f"{training.quartiles[0] * 100:+.1f} to {training.quartiles[1] * 100:+.1f} %.",
    ]
    if found.every > 1:
        once = sum(found.rounds.evaluation.timed) / len(found.rounds.evaluation.timed)
        lines.append(
            f"An evaluation takes {once * 1e3:,.1f} ms; a round has its share of the one in {found.every} rounds."
        )
    if found.rounds.processes:
        lines.append(
            "The workers timed their own parts; the time between their operations counts as 'engine'."
        )
    return lines


def model_rows(cost: ModelCost) -> Rows:
    """What the model costs."""
    parameters = f"{cost.trainable:,} trainable"
    parameters += f", {cost.frozen:,} frozen" if cost.frozen else ""
    parameters += f"; {cost.buffers:,} numbers in buffers" if cost.buffers else ""
    return [
        ("parameters", parameters),
        ("size", _bytes(cost.nbytes)),
        (
            "forward, an image",
            f"{_si(cost.forward)}FLOPs = {_si(cost.macs)}MACs (a multiply-accumulate is 2 FLOPs)",
        ),
        (
            "training, an image",
            f"{_si(cost.step_an_image)}FLOPs; a step of {cost.batch} is {_si(cost.step)}FLOPs",
        ),
        ("activations, an image", _bytes(sum(layer.activation_bytes for layer in cost.layers))),
    ]


def cost_rows(found: Profile) -> Rows:
    """What the experiment costs with it."""
    traffic, speed, memory = found.traffic, found.speed, found.memory
    share = f"{speed.round / speed.peak.flops:.1%}".replace("%", " %")
    rows = [
        ("model, checkpoint", f"{_bytes(found.rounds.model_bytes)}, {_bytes(found.rounds.checkpoint_bytes)} (files)"),
        ("sent to a client", f"{_bytes(traffic.down_a_client)}, and {_bytes(traffic.up_a_client)} back"),
        ("sent in a round", f"{_bytes(traffic.down_a_round)}, and {_bytes(traffic.up_a_round)} back"),
        (
            "sent in the run",
            f"{_bytes(traffic.down_a_run)}, and {_bytes(traffic.up_a_run)} back ({found.title['rounds']} rounds)",
        ),
    ]  # fmt: skip
    if isinstance(memory, str):
        rows.append(("memory", f"not measured: {memory}"))
    else:
        on = f"{_bytes(memory.gpu)} on the GPU; " if memory.gpu is not None else ""
        rows.append(
            (
                "memory of a client",
                f"{on}{_bytes(memory.training)} of tensors while it trains "
                f"({memory.examples} examples, batches of {memory.batch})",
            )
        )
    return [
        *rows,
        ("training", f"{speed.images:,.0f} images/s, {_si(speed.round)}FLOP/s: {share} of the peak"),
        (
            "the passes alone",
            f"{_si(speed.passes)}FLOP/s, {speed.passes / speed.peak.flops:.1%}".replace("%", " %"),
        ),
        ("the peak", f"{_si(speed.peak.flops)}FLOP/s ({speed.peak.source})"),
    ]


def layer_rows(cost: ModelCost) -> Rows:
    """A line for every layer: of the forward pass, for one image."""
    return [
        (
            layer.name,
            layer.kind,
            " x ".join(map(str, layer.output)),
            f"{layer.parameters:,}",
            f"{layer.flops:,}",
            _bytes(layer.activation_bytes),
        )
        for layer in cost.layers
    ]


def _si(value: float) -> str:
    """Four digits and a prefix: 1234567 is "1.235 M"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}"
    return f"{value:.4g} "


def _bytes(value: float) -> str:
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:,.1f} {unit}"
    return f"{value:,.0f} B"
