"""Audits of runs with client-level privacy: planted faults are found, and the honest mechanism is not accused."""

from typing import Any

import pytest
import torch

from fedlens.analyses.privacy_audit import AuditedRuns, audit_one_run, audit_runs, verdict
from fedlens.base.errors import ConfigError
from fedlens.local import client_privacy
from fedlens.local.client_privacy import PrivateMean
from fedlens.run.build import Built, build, data_directory
from fedlens.settings.config import read_config
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan

PRIVACY: dict[str, Any] = {"clip": 0.1, "noise_multiplier": 1.0, "delta": 1e-5, "noise": "seeded"}
TOY: dict[str, Any] = {
    "rounds": 1,
    "model": "linear",
    "local": {"lr": 0.1, "steps": 1},
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 2}, "normalize": "unit"},
    "select": "all",
    "privacy": PRIVACY,
    "engine": "inline",
}


def toy(clients: int = 2, **changes: Any) -> Built:
    data = {**TOY["data"], "partition": {"name": "iid", "clients": clients}}
    values = {**TOY, "data": data, **changes}
    return build(plan(read_config(values), Source(values)), data_directory(None), False)


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noised, limit = client_privacy._noised, PrivateMean.limit
    if fault == "no noise":
        monkeypatch.setattr(client_privacy, "_noised", lambda v, share, noise: noised(v, share, None))
    elif fault == "noise by cohort":
        monkeypatch.setattr(client_privacy, "_noised", lambda v, share, noise: noised(v, share, noise / 10))
    elif fault == "2 C":
        monkeypatch.setattr(PrivateMean, "limit", lambda self, n, p: (2 * limit(self, n, p)[0], {}))


FAULTS = ["no noise", "noise by cohort", "2 C"]


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_planted_faults_are_found_and_the_honest_mechanism_is_not(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(fault, monkeypatch)
    found = audit_runs(toy(privacy={**PRIVACY, "noise_multiplier": 0.7}), 140)
    assert found["violation"] == (fault != "none")
    sentence = verdict(found, "epsilon = 6.8")[1]
    assert sentence.startswith("No violation of more than 0." if fault == "none" else "Violation found")


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_1000_runs_at_epsilon_2(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit misses 2 C with probability 0.0014. With 10 clients seed 0 is such a case, so here it is seed 1."""
    plant(fault, monkeypatch)
    found = audit_runs(toy(10, seed=1, privacy={**PRIVACY, "noise_multiplier": 2.0}), 1000)
    assert found["violation"] == (fault != "none")


@pytest.mark.nightly
def test_the_scores_of_many_runs_have_the_mean_and_the_deviation_of_the_release() -> None:
    """Over 4,000 runs, so that a bias that an audit of 1,000 runs would hide is seen."""
    with AuditedRuns(toy(2, privacy={**PRIVACY, "noise_multiplier": 2.0}), 1) as audited:
        scores, present = audited.run(4000)
    for group, mean in ((scores[present], 1.0), (scores[~present], 0.0)):
        assert abs(group.mean() - mean) < 4 * 2.0 / len(group) ** 0.5
        assert group.std() == pytest.approx(2.0, rel=0.06)


@pytest.mark.parametrize("fault", ["none", "no noise"])
def test_one_run_finds_what_its_guesses_can_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    found = audit_one_run(toy(200, privacy={**PRIVACY, "noise_multiplier": 2.0}))
    assert (found["canaries"], found["guesses"]) == (200, 100)
    assert found["violation"] == (fault != "none")
    assert found["most_epsilon"] >= found["epsilon_at_least"]


@pytest.mark.parametrize(
    ("changes", "inside", "outside"),
    [
        ({}, 1.0, 0.0),
        ({"select": {"name": "uniform", "clients_per_round": 2}}, 2 / 3, -2 / 3),
        ({"rounds": 2, "algorithm": "fedadam"}, 2.0, 0.0),
        ({"aggregate": {"name": "quantized", "weighting": "uniform"}}, 1.0, 0.0),
    ],
)
def test_a_score_is_the_rounds_in_which_a_canary_was_drawn(
    changes: dict[str, Any], inside: float, outside: float
) -> None:
    small = {**PRIVACY, "noise_multiplier": 1e-6}
    with AuditedRuns(toy(3, privacy=small, **changes), 1) as audited:
        scores, present = audited.run(60)
    tolerance = 1e-3 if "select" not in changes else 0.35
    assert scores[present].mean() == pytest.approx(inside, abs=tolerance)
    assert scores[~present].mean() == pytest.approx(outside, abs=tolerance)
    assert abs(torch.tensor(scores)).max() < 2.001


@pytest.mark.parametrize(
    ("privacy", "where"),
    [
        ({"clip": "adaptive", "noise_multiplier": 0.05}, "privacy.clip"),
        ({"noise_multiplier": 0.0}, "noise_mult"),
        ({"mechanism": "tree"}, "privacy.mechanism"),
    ],
)
def test_what_an_audit_cannot_test_is_refused(privacy: dict[str, Any], where: str) -> None:
    select = "once-each" if "mechanism" in privacy else TOY["select"]
    with pytest.raises(ConfigError) as error:
        AuditedRuns(toy(privacy={**PRIVACY, **privacy}, select=select), 1)
    assert where in str(error.value.where)
