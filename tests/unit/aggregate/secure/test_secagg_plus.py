"""SecAgg+: its graph, the sums of those who last, and what its bounds do not allow."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlens.aggregate.secure.keys import SecureSumRefused, Terms, Transcript
from fedlens.aggregate.secure.secagg_client import SEALED_BYTES
from fedlens.aggregate.secure.secagg_plus import SparseTerms, graph_for
from fedlens.aggregate.secure.secagg_server import MASKED, SHARES, UNMASK
from fedlens.api import Experiment
from fedlens.base.errors import ConfigError
from fedlens.core.protocol import Ask, Reply
from fedlens.core.random import Secrets
from tests.unit.aggregate.secure.secagg_kit import STEPS, SumFederation, layout_of
from tests.unit.aggregate.secure.test_secagg_settings import built

stats = pytest.importorskip("scipy.stats")
N = 20
TABLE = [pytest.param(seed, 2 + seed % 7, marks=pytest.mark.nightly) for seed in range(7, 400)]
MANY = {
    "rounds": 1,
    "model": "linear",
    "select": {"clients_per_round": 200},
    "local": {"lr": 0.1, "batch_size": 20},
    "engine": "inline",
    "data": {
        "dataset": {"name": "synthetic", "shape": [1, 4, 4], "train": 1000, "test": 20},
        "partition": {"name": "iid", "clients": 200},
    },
}
BOUNDS = {"corrupt": 0.02, "dropout": 0.02}


class SparseFederation(SumFederation):
    """Twenty clients with six neighbours each, of whom three shares give a secret."""

    degree, held = 6, 3

    @property
    def terms(self) -> Terms:
        return SparseTerms(**vars(super().terms), degree=self.degree, held=self.held)

    @property
    def near(self) -> Mapping[Any, Sequence[Any]]:
        """The neighbours of each client, itself included, in the round that was asked."""
        sent = next(ask.shared["secagg"] for ask, _ in self.view if ask.op == SHARES)
        return Transcript.of(self.terms, sent).near


@pytest.mark.parametrize(("seed", "most"), [*enumerate([2, 3, 4, 4, 5, 6, 8]), *TABLE])
def test_the_sum_is_that_of_those_who_are_in_for_random_fates(seed: int, most: int) -> None:
    draw = random.Random(seed)
    fates = [draw.choice([0, 1, 2, 3, *[4] * most]) for _ in range(N)]
    lasting = [[k for k, fate in enumerate(fates) if fate > step] for step in range(len(STEPS))]
    federation = SparseFederation(N, seed=seed)
    enough = min(map(len, lasting)) >= federation.terms.needed(N)
    refused = None
    try:
        total, n = federation.drive(federation.asked(), lambda op, k: fates[k] <= STEPS.index(op))
    except SecureSumRefused as error:
        refused = str(error)
    if not enough:
        assert refused
        return
    if any(len(set(federation.near[k]) & set(lasting[3])) < 3 for k in lasting[1]):
        assert "shares of a client's secret" in str(refused)
        return
    assert refused is None
    assert n == len(lasting[2])
    assert np.array_equal(total, federation.plain(lasting[2]))


def test_a_sum_needs_enough_neighbours_of_each_client() -> None:
    """Of the neighbours of one client two are left, itself included, so that nobody can take its mask away."""
    federation = SparseFederation(N)
    gone: set[int] = set()

    def lost(op: str, client: int) -> bool:
        if op == UNMASK and not gone:
            gone.update(sorted(set(federation.near[0]) - {0})[1:])
        return op == UNMASK and client in gone

    with pytest.raises(SecureSumRefused, match=r"there are 2 shares of a client's secret.*and 3 must last"):
        federation.drive(federation.asked(), lost)
    assert len(gone) == 5


def test_an_answer_with_fewer_shares_than_neighbours_is_left_out() -> None:
    """Neighbours that left make answers of several sizes, so that the schema of the ask has the largest alone."""
    federation = SparseFederation(N)

    def replied(ask: Ask, answer: Any) -> Any:
        if ask.op != UNMASK or not isinstance(answer, Reply) or answer.client != 5:
            return answer
        return replace(answer, payload={"shares": answer.payload["shares"][:-33]})

    total, n = federation.drive(federation.asked(), lambda op, k: op == MASKED and k == 0, replied=replied)
    assert n == N - 1
    assert np.array_equal(total, federation.plain(range(1, N)))


def test_all_others_as_neighbours_give_secagg() -> None:
    federation = SparseFederation(N)
    federation.degree, federation.held = N - 1, Terms(0.51, "", "").needed(N)
    plain = SumFederation(N)
    assert federation.drive(federation.asked())[0].tolist() == plain.drive(plain.asked())[0].tolist()
    for (ask, answers), (other, others) in zip(federation.view, plain.view, strict=True):
        assert ask.op == other.op
        assert [{k: v.shape for k, v in a.payload.items() if k != "seen"} for a in answers] == [
            {k: v.shape for k, v in a.payload.items() if k != "seen"} for a in others
        ]


def test_each_client_seals_shares_for_its_neighbours_alone() -> None:
    federation = SparseFederation(N)
    federation.drive(federation.asked())
    sent = next(answers for ask, answers in federation.view if ask.op == SHARES)
    assert {len(answer.payload["sealed"]) for answer in sent} == {7 * SEALED_BYTES}


def test_the_graph_is_drawn_from_what_all_publish_and_is_regular_and_mutual() -> None:
    terms, members = SparseTerms(0.6, "", "", degree=6, held=3), list(range(N))
    near = terms.near(members, members, b"one")
    assert {len(found) for found in near.values()} == {7}
    assert all(one in near[other] for one in members for other in near[one])
    assert near != terms.near(members, members, b"two")


def test_masked_words_are_uniform() -> None:
    federation = SparseFederation(N, layout=layout_of(size=20_000), entropy=random.Random(0).randbytes)
    for site in federation.sites:
        site.secrets = Secrets((0, site.id))  # the same in every run of the test
        site.words[:-1] = 0
    federation.drive(federation.asked())
    words = next(answers for ask, answers in federation.view if ask.op == MASKED)
    counts = np.bincount(words[0].payload["vector"].numpy().view(np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 0.01


@pytest.mark.parametrize(
    ("clients", "dropout", "degree"),
    [(10, 0.45, None), (20, 0.45, None), (100, 0.45, 78), (200, 0.45, 94), (1000, 0.1, 46)],
)
def test_the_degree_follows_from_the_exact_tails(clients: int, dropout: float, degree: int | None) -> None:
    found = graph_for(clients, 0.1, dropout, 40, 20)
    assert (found.degree if found else None) == degree


def test_more_corrupt_clients_and_more_that_drop_out_need_more_neighbours() -> None:
    degrees = [graph_for(1000, corrupt, 0.1, 40, 20) for corrupt in (0.0, 0.1, 0.2)]
    assert [found.degree for found in degrees if found] == sorted(
        {found.degree for found in degrees if found}
    )
    assert len({found.shares for found in degrees if found}) == 3


@pytest.mark.parametrize(("clients", "said"), [(10, "do not hold"), (100, "as neighbours its bounds hold")])
def test_small_cohorts_are_refused(clients: int, said: str) -> None:
    data: dict[str, Any] = {**MANY["data"], "partition": {"name": "iid", "clients": clients}}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=rf"for {clients} clients a round.*{said}") as refused:
        built(
            aggregate={"name": "secagg-plus", "dropout": 0.3},
            data=data,
            select={"clients_per_round": clients},
        )
    assert refused.value.where == "select"


def test_real_sites_are_refused() -> None:
    settings = {name: MANY[name] for name in ("data", "select")}
    made = built(aggregate={"name": "secagg-plus", **BOUNDS}, **settings).algorithm
    info = replace(made.parts.federation, contract="ab" * 32)
    with pytest.raises(
        ConfigError, match="SecAggPlus runs in simulations alone: its bounds hold against a server"
    ):
        made.aggregate.fitted(made.train, 200, info)


def test_fedavg_equals_quantized_to_the_bit(tmp_path: Path) -> None:
    models = [
        Experiment(**MANY, aggregate=aggregate).run(tmp_path / aggregate["name"]).model.state_dict()
        for aggregate in ({"name": "quantized"}, {"name": "secagg-plus", **BOUNDS})
    ]
    assert all(torch.equal(leaf, models[1][name]) for name, leaf in models[0].items())
