"""Every algorithm on a GPU, clients one after the other and in groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.contract_kit import ALGORITHMS, SERVER_TRAINS, SOLVERS, WITHOUT_SELECT
from tests.gpu.device_kit import GROUP_NORM, agree, both, near, small, tiers

# One algorithm of each kind: a server step, a state at clients, weights of its own, two exchanges, a solver, models
# that stay at clients, a server that trains, layers cut off, layers that grow, parties, peers, and pooled data. Groups
# below have others. All algorithms, and their other settings, run in the nightly tier.
FIRST_OF_A_KIND = (
    "fedadam", "feddyn", "fednova", "feddane", "liadmm", "fedbn", "fedgkt", "splitfed", "fedma", "vertical", "push-sum",
    "centralized",
)  # fmt: skip


@pytest.mark.parametrize(("algorithm", "rounds"), tiers(FIRST_OF_A_KIND, ALGORITHMS))
def test_one_client_after_the_other_has_the_processors_bits(
    algorithm: str, rounds: int, tmp_path: Path
) -> None:
    """With batch normalization, dropout, a frozen layer, augmentation and momentum in one."""
    here, there = both(tmp_path, small(algorithm, rounds=rounds))
    agree(there, here)


# Those that train together; the engine refuses the others.
STACKED = set(ALGORITHMS) - SOLVERS - {"admm-sgd-last", "fedbn", "local-only", "remembering"} - WITHOUT_SELECT
STACKED |= {"liadmm-training"}
STACKED -= {name for name in ALGORITHMS if name.startswith("split")} | SERVER_TRAINS | {"fedma", "fednas"}
# Of different makes: a loss of its own, states, full gradients in a group, two exchanges.
# Three forward passes are in test_group_waits.py.
CHOSEN = ("fedir", "scaffold-full-gradient", "mime")


@pytest.mark.parametrize(("algorithm", "rounds"), tiers(CHOSEN, sorted(STACKED)))
def test_groups_of_clients_agree_with_the_processors(algorithm: str, rounds: int, tmp_path: Path) -> None:
    """Two clients of different sizes at once, with convolutions and group normalization."""
    here, there = both(tmp_path, small(algorithm, model=GROUP_NORM, rounds=rounds), "vectorized")
    near(there, here, 1e-5 if algorithm == "feddane" else 1e-6)
