"""Client-level privacy with blind sums: the same clipped mean, up to the rounding that the clip leaves room for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens import Experiment, Observer, resume
from fedlens.aggregate.secure.encoding import SumLayout
from fedlens.aggregate.secure.quantized import quantized
from fedlens.algorithms.private_averaging import summed_blindly
from fedlens.base.errors import ConfigError, RunFailed
from fedlens.core.tree import Leaf, norm
from fedlens.local.client_privacy import PrivateMean
from fedlens.privacy.settings import PrivacySettings
from fedlens.run.journal_file import JournalFile

SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "model": "linear",
    "local": {"lr": 0.5, "steps": 3},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 8}},
    "engine": "inline",
    "privacy": {"clip": 0.05, "noise_multiplier": 0.0, "delta": 1e-3, "noise": "seeded"},
    "select": "all",
}
SUMS = {name: {"name": name, "weighting": "uniform", "bits": 20} for name in ("quantized", "secagg")}


def models(where: Path, **changes: Any) -> list[dict[str, torch.Tensor]]:
    found: list[dict[str, torch.Tensor]] = []

    class Releasing(Observer):
        def released(self, round: int, state: Any, tally: Any) -> None:
            found.append({name: value.clone() for name, value in state["model"].items()})

    Experiment(**{**SETTINGS, **changes}).run(where, report=False, progress=Releasing())
    return found


@pytest.mark.parametrize("name", SUMS)
def test_a_blind_sum_of_clipped_updates_is_their_mean(name: str, tmp_path: Path) -> None:
    plain, blind = models(tmp_path / "plain"), models(tmp_path / name, aggregate=SUMS[name])
    # Rounding moves each of 650 words by at most half a step of C / 2^20, and the clip gives way by as much.
    most = 2 * 650**0.5 * 0.05 / 2**21
    for before, after, summed in zip(plain[:-1], plain[1:], blind[1:], strict=True):
        moved = {key: after[key] - before[key] for key in after}
        assert float(norm({key: summed[key] - after[key] for key in after})) <= 3 * most
        assert float(norm(moved)) > 100 * most


def test_the_clip_leaves_room_for_the_rounding() -> None:
    privacy = PrivacySettings(clip=0.05, noise_multiplier=1.0, delta=1e-3)
    spec = {"w": Leaf("weight", (1000, 1000), torch.float32, True)}
    _, mechanism = summed_blindly(quantized(bits=16), PrivateMean(privacy, "all", 8, 8.0), spec)
    assert mechanism.rounding == 1000 * 0.05 / 2**17
    long = torch.tensor([2.0], dtype=torch.float64)
    factors, _ = mechanism.limit(long, {})
    assert (
        float(long * factors) + mechanism.rounding <= 0.05 < float(long * factors) + 1.1 * mechanism.rounding
    )


def test_secagg_opens_the_sum_of_quantized_to_the_bit(tmp_path: Path) -> None:
    private = {**SETTINGS["privacy"], "noise_multiplier": 1.0}
    one, other = (models(tmp_path / name, aggregate=SUMS[name], privacy=private) for name in SUMS)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)


def test_secagg_opens_the_sum_of_noised_examples_to_the_bit(tmp_path: Path) -> None:
    private = {**SETTINGS["privacy"], "unit": "example", "clip": 1.0, "noise_multiplier": 1.0}
    more = {"data": {**SETTINGS["data"], "normalize": "unit"}, "privacy": private}
    one, other = (models(tmp_path / name, aggregate=SUMS[name], **more) for name in SUMS)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a)
    plain = models(tmp_path / "plain", **more)
    assert all(
        torch.allclose(a[key], b[key], atol=1e-5) for a, b in zip(one, plain, strict=True) for key in a
    )
    rows = [json.loads(line) for line in (tmp_path / "secagg/privacy.jsonl").read_text().splitlines()]
    assert len(rows) == 8 * 3  # training alone adds noise, not the other asks of a secure sum
    assert "local_loss" not in (tmp_path / "secagg/metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"select": {"name": "poisson", "fraction": 0.5}}, "sums over cohorts of one size"),
        ({"privacy": {**SETTINGS["privacy"], "clip": "adaptive"}}, "the range of a secure sum is fixed"),
        ({"aggregate": {**SUMS["quantized"], "bits": 3}}, "nothing is left of the clip"),
        ({"aggregate": {**SUMS["quantized"], "range": 8.0}}, "clipped to 0.05, .*and aggregate.range says 8"),
        ({"aggregate": {**SUMS["quantized"], "range": {"update": 2.0}}}, "aggregate.range says 2"),
        ({"aggregate": {**SUMS["quantized"], "weighting": "examples"}}, "the uniform mean of updates"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        Experiment(**{**SETTINGS, "aggregate": SUMS["quantized"], **changes}).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


SECRET = {
    **SETTINGS,
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 30}},
    "select": {"name": "uniform", "clients_per_round": 5},
    "privacy": {**SETTINGS["privacy"], "noise_multiplier": 1.0, "noise": "system"},
    "aggregate": SUMS["secagg"],
}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", ["attempt", "held", "masked-sum"])
def test_a_private_secure_sum_goes_on_after_a_kill(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cohort that was masked is never asked again, nor a second sum of it released: its round is noise alone."""
    note = JournalFile.note

    def killed(self: JournalFile, round: int, name: str, payload: Any) -> None:
        note(self, round, name, payload)
        if (round, name) == (2, after):
            raise Killed

    run = Experiment(**{**SECRET, "algorithm": "moon", "model": {"name": "mlp", "hidden": 8}})
    with monkeypatch.context() as patched:
        patched.setattr(JournalFile, "note", killed)
        with pytest.raises(Killed):
            run.run(tmp_path / "run", report=False)
    resume(tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run/privacy.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (tmp_path / "run/private.jsonl").read_text().splitlines()]
    assert [event["round"] for event in events] == [row["round"] for row in rows] == [1, 2, 3]
    assert [len(row["replied"]) for row in rows] == [5, 0 if after == "masked-sum" else 5, 5]


@pytest.mark.parametrize("skipped", [0, 1])
def test_why_a_secure_sum_failed_is_in_the_private_file(
    skipped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, calls = SumLayout.encode, [0]

    def failing(self: SumLayout, payload: Any, metrics: Any) -> Any:
        calls[0] += 1
        if 5 < calls[0] <= 8:
            raise ValueError("loss holds a value beyond its range")
        return encode(self, payload, metrics)

    monkeypatch.setattr(SumLayout, "encode", failing)
    run = Experiment(**{**SECRET, "max_skipped": skipped})
    if skipped:
        run.run(tmp_path / "run", report=False)
    else:
        with pytest.raises(RunFailed, match=r"private\.jsonl says why"):
            run.run(tmp_path / "run", report=False)
    files = {path.name: path.read_text() for path in (tmp_path / "run").glob("*.json*")}
    assert [name for name, text in files.items() if "2 survivors" in text] == ["private.jsonl"]
    assert "private.jsonl says why" in files["metrics.jsonl" if skipped else "summary.json"]
