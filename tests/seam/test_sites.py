"""A run whose data are at sites: the files of a simulation, but for what the server does not have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedlens import Experiment, resume
from fedlens.analyses.replay import replay
from fedlens.base.errors import ConfigError, DataError, DecodingError, RunFailed
from fedlens.core.engine_base import EngineBase
from fedlens.core.wire.census import ChannelSums, CountedClient, SiteCensus
from fedlens.core.wire.message import Message
from fedlens.data.partition.roster import Roster
from fedlens.data.sites import SiteDatasets
from fedlens.data.vertical.feature_partition import load_partition
from fedlens.engines.links.post import Post
from fedlens.engines.network import NetworkEngine
from fedlens.files import jsonl
from fedlens.identity.keys import KeyPair
from fedlens.pages.run_page import write_report
from fedlens.results.run import Run
from fedlens.run.build import Built, build
from fedlens.run.rundir import RunDir
from fedlens.settings.config_source import Source
from fedlens.settings.plan import plan_of
from tests.unit.engines.loopback import Clock, LoopbackLink

COMMON: dict[str, Any] = {
    "rounds": 4,
    "algorithm": "scaffold",
    "model": "mlp",
    "local": {"lr": 0.1, "steps": 2, "batch_size": 8},
    "checkpoint": {"seconds": 0},
    "seed": 3,
}
TIMES = ("seconds", "elapsed")
SPLIT = {"validation": 0.2, "validation_from": "client"}
SIMULATED = {
    **COMMON,
    "evaluation": {"clients": "all"},
    "data": {
        "dataset": "digits",
        "partition": {"name": "dirichlet-classwise", "clients": 4, "alpha": 1.0},
        **SPLIT,
    },
    "engine": "inline",
}


def simulated(**changes: Any) -> Built:
    return build(plan_of(Source({**SIMULATED, **changes})), Path(), download=False)


def form(made: Built) -> dict[str, Any]:
    data = made.client_data.dataset
    moments = {"mean": list(data.mean), "std": list(data.std)}
    return {
        "name": "sites",
        "classes": list(data.classes),
        "input_shape": [1, 8, 8],
        **moments,
        "test": "digits",
    }


def at_sites(made: Built, **changes: Any) -> dict[str, Any]:
    settings = {
        **COMMON,
        "evaluation": {"clients": "all"},
        "data": {"dataset": form(made), **SPLIT},
        "engine": {"name": "network", "max_share": 1.0, "patience": 5.0},
    }
    return settings | changes


def roster_of(made: Built) -> Roster:
    held = made.federation.held_out
    assert held is not None
    sizes = zip(made.partition.sizes().tolist(), held.tolist(), strict=True)
    return Roster.of(SiteCensus(f"s{k}", [CountedClient(f"s{k}", *each)]) for k, each in enumerate(sizes))


class Sites:
    """The sites of a run, which outlive its server."""

    def __init__(self, made: Built, roster: Roster | None = None) -> None:
        self.made, self.roster, self.clock, self.attempt = made, roster or roster_of(made), Clock(), 0
        takes = made.algorithm.takes
        self.sites = LoopbackLink(made.program, self.roster, self.clock, takes=takes).sites

    def __call__(self, engine: EngineBase) -> Roster:
        assert isinstance(engine, NetworkEngine)
        self.engine, self.attempt = engine, self.attempt + 1
        self.link = LoopbackLink(self.made.program, self.roster, self.clock)
        self.link.sites = self.sites
        engine.attach(
            Post(self.link, KeyPair.make(), bytes(32), "run", self.attempt), self.roster, self.clock
        )
        return self.roster


def lines(directory: Path) -> list[dict[str, Any]]:
    """The metrics, without times, and without those of held-out examples in one place, which a server lacks."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in TIMES and not k.startswith("validation_")} for row in rows
    ]


def test_a_run_over_sites_is_that_of_a_simulation_also_when_resumed(tmp_path: Path) -> None:
    made = simulated()
    expected = Experiment(**SIMULATED).run(tmp_path / "here")
    sites = Sites(made)
    Experiment(**at_sites(made)).run(tmp_path / "there", connect=sites, until=2)
    found = resume(tmp_path / "there", connect=sites)
    assert lines(found.directory) == lines(expected.directory)
    one, other = (load_file(result.directory / "model.safetensors") for result in (found, expected))
    assert all(torch.equal(one[leaf], other[leaf]) for leaf in other)
    assert not (found.directory / "partition.npz").exists()
    saved = load_partition(RunDir.open(found.directory).partition_path)
    assert saved.digest == sites.roster.digest
    assert isinstance(saved, Roster)
    # The sites may drop what no checkpoint names.
    last = {k: site.asked[-1].details["keep"] for k, site in sites.sites.items()}
    assert all(1 <= len(kept) <= 3 for kept in last.values())
    assert all(handle in sites.sites[k].states for k, kept in last.items() for handle in kept)


def test_a_run_without_test_images_at_the_server_ends_with_what_the_sites_measure(tmp_path: Path) -> None:
    made = simulated(algorithm="fedavg")
    with_test, data = (
        at_sites(made, algorithm="fedavg"),
        {key: v for key, v in form(made).items() if key != "test"},
    )
    settings = {**with_test, "data": {"dataset": data, **SPLIT}}
    alone = Experiment(**settings).run(tmp_path / "alone", connect=Sites(made)).directory
    both = Experiment(**with_test).run(tmp_path / "both", connect=Sites(made)).directory
    measured = [{key: row[key] for key in row if key.startswith("clients_")} for row in lines(both)]
    assert [{key: row[key] for key in row if key.startswith("clients_")} for row in lines(alone)] == measured
    assert measured[-1]
    assert not (alone / "evaluation.npz").exists()
    assert (both / "evaluation.npz").exists()
    rows = [row for row in jsonl.read(alone / "clients.jsonl") if row["round"] == COMMON["rounds"]]
    right = sum(row.get("validation_accuracy", 0) * row.get("validation_examples", 0) for row in rows)
    mean = right / sum(row.get("validation_examples", 0) for row in rows)
    run = Run(alone)
    assert run.final("accuracy") == (COMMON["rounds"], pytest.approx(mean))
    page = " ".join(write_report(alone).read_text().split())
    for said in ("The server has no test images", "encrypted on the way", "can be computed back"):
        assert said in page
    for wrong in (
        "not evaluated yet",
        "Nothing was encrypted",
        "a model of its own",
        "names of the classes, those",
    ):
        assert wrong not in page


def test_too_few_sites_end_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    made = simulated()
    sites = Sites(made)
    whole = Experiment(**at_sites(made)).run(tmp_path / "whole", connect=Sites(made))

    def first(engine: EngineBase) -> Roster:
        found = sites(engine)
        trained = count()

        def leaves(ask: Message) -> None:
            """Three sites leave after two rounds of four."""
            if ask.fields.operation == "train" and next(trained) == 8:
                sites.link.away = {"s0", "s1", "s3"}

        sites.link.fault = leaves
        return found

    with pytest.raises(RunFailed, match="clients of 1 site took part"):
        Experiment(**at_sites(made)).run(tmp_path / "run", connect=first)
    again = resume(tmp_path / "run", connect=sites)
    assert lines(again.directory) == lines(whole.directory)


def test_a_round_that_one_site_would_decide_is_skipped(tmp_path: Path) -> None:
    made = simulated(algorithm="fedavg")
    sites, sizes = Sites(made), made.partition.sizes()
    light, heavy = int(sizes.argmin()), int(sizes.argmax())
    most = (sizes.max() / sizes.sum() + sizes.max() / (sizes.sum() - sizes.min())) / 2

    def connect(engine: EngineBase) -> Roster:
        found = sites(engine)
        lost = lambda ask: ask.fields.client == f"s{light}" and ask.fields.round == 2  # noqa: E731
        sites.link.fault = lambda ask: "lost" if lost(ask) and ask.fields.operation == "train" else None
        return found

    engine = {"name": "network", "max_share": float(most), "patience": 5.0, "deadline": 30.0}
    settings = at_sites(made, algorithm="fedavg", engine=engine, max_skipped=1)
    run = Experiment(**settings).run(tmp_path / "run", connect=connect).directory
    skipped = [line.get("skipped") for line in lines(run)]
    assert [bool(reason) for reason in skipped] == [False, False, True, False, False]
    assert f"'s{heavy}' has" in skipped[2]
    assert replay(run, lambda built: made.source).difference is None


def test_a_round_does_not_begin_without_its_sites(tmp_path: Path) -> None:
    made = simulated()
    sites = Sites(made)

    def without(engine: EngineBase) -> Roster:
        found = sites(engine)
        sites.link.away = {"s0", "s1", "s3"}
        return found

    with pytest.raises(RunFailed, match="1 of 4 sites are there, and a round needs 2"):
        Experiment(**at_sites(made)).run(tmp_path / "run", connect=without)
    trained = [ask for site in sites.sites.values() for ask in site.asked if ask.fields.operation == "train"]
    assert not trained


def test_another_roster_is_refused(tmp_path: Path) -> None:
    made = simulated()
    Experiment(**at_sites(made)).run(tmp_path / "run", connect=Sites(made), until=1)
    other = Roster.of(SiteCensus(f"s{k}", [CountedClient(f"s{k}", 7 + k, 2)]) for k in range(4))
    with pytest.raises(Exception, match="different partition"):
        resume(tmp_path / "run", connect=Sites(made, other))


def test_the_server_has_the_data_of_no_client() -> None:
    made = simulated()
    sites = Sites(made)
    planned = plan_of(Source(at_sites(made)))
    engine = planned.engine()
    there = build(planned, Path(), download=False, engine=engine, roster=sites(engine))
    assert isinstance(there.client_data, SiteDatasets)
    assert there.federation.sizes.tolist() == made.federation.sizes.tolist()
    assert there.federation.held == {"@test": 360}
    assert "the label" in " ".join(made.algorithm.discloses)
    assert "the label" not in " ".join(there.algorithm.discloses)
    with pytest.raises(DataError, match="the examples of 's1' are at its site"):
        there.client_data.data_of(1)
    with pytest.raises(KeyError):
        there.client_data.data_of("@train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["data"].update(partition={"name": "iid", "clients": 4}), "in one place"),
        (lambda s: s["evaluation"].update(train=True), "in one place"),
        (lambda s: s["data"].update(validation_from="global"), "in one place"),
        (lambda s: s.update(algorithm="centralized"), "in one place"),
        (lambda s: s.update(algorithm={"name": "fedma"}), "every site refuses"),
        (lambda s: s.update(engine="inline"), "belong together"),
        (
            lambda s: s["data"].update(dataset="digits", partition={"name": "iid", "clients": 4}),
            "belong together",
        ),
        (
            lambda s: (s["data"]["dataset"].pop("test"), s["evaluation"].update(clients="none")),
            "nothing measures",
        ),
        (lambda s: s["data"].update(validation=0.0, validation_from="global"), "none are held out"),
        (lambda s: s["data"]["dataset"].update(classes=["a", "b"]), "other classes"),
        (lambda s: s["data"]["dataset"].update(std=[0.0]), "above 0"),
        (lambda s: s["data"]["dataset"].pop("std"), "together"),
    ],
)
def test_what_does_not_fit_sites_is_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    made = simulated()
    settings = at_sites(made)
    change(settings)

    def built() -> None:
        planned = plan_of(Source(settings))
        engine = planned.engine()
        roster = Sites(made)(engine) if isinstance(engine, NetworkEngine) else None
        build(planned, Path(), download=False, engine=engine, roster=roster)

    with pytest.raises(ConfigError, match=message):
        built()


def test_a_run_without_sites_is_told_to_serve(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fedlens serve"):
        Experiment(**at_sites(simulated())).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_sites_sum_the_mean_and_the_deviation() -> None:
    images = [np.full(10, 0.25), np.arange(30) / 30]
    told = [
        SiteCensus(
            name,
            [CountedClient(name, 1)],
            sums=ChannelSums(1, len(x), (float(x.sum()),), (float((x**2).sum()),)),
        )
        for name, x in zip("ab", images, strict=True)
    ]
    roster = Roster.of(SiteCensus.from_plain(one.site, one.to_plain()) for one in told)
    pooled = np.concatenate(images)
    assert roster.moments is not None
    assert np.allclose(np.array(roster.moments)[:, 0], [pooled.mean(), pooled.std()])
    with pytest.raises(DataError, match="others did not"):
        Roster.of([told[0], SiteCensus("c", [CountedClient("c", 1)])])


@pytest.mark.parametrize(
    "told",
    [
        {"clients": []},
        {"clients": [["b", 1, 0]]},
        {"clients": [["a", 1, 0], ["a", 2, 0]]},
        {"clients": [["a", -1, 0]]},
        {"clients": [["a", 2**60, 0]]},
        {"clients": [["a", 1.5, 0]]},
        {"versions": {"torch": 2}},
        {"contract": None},
        {"sums": [1, 10, [20.0], [1.0]]},
        {"sums": [1, 10, [2.0], [3.0]]},
    ],
)
def test_a_census_that_is_none_is_refused(told: Mapping[str, Any]) -> None:
    good = SiteCensus(
        "a", [CountedClient("a", 1), CountedClient("a/left", 2)], {"torch": "2"}, "ff"
    ).to_plain()
    SiteCensus.from_plain("a", good)
    with pytest.raises(DecodingError, match="census of 'a'"):
        SiteCensus.from_plain("a", {**good, **told})


def test_a_site_comes_back_with_at_most_what_it_had(tmp_path: Path) -> None:
    roster = Roster.of([SiteCensus("a", [CountedClient("a", 5, 2)], contract="ff")])
    roster.save(tmp_path / "roster.json")
    assert Roster.load(tmp_path / "roster.json").digest == roster.digest
    for counted in (CountedClient("a", 4, 1), CountedClient("a", 7)):  # a site counts all, the server divides
        roster.check_returned(SiteCensus("a", [counted], contract="ff"))
    for census, what in (
        (SiteCensus("a", [CountedClient("a", 8)], contract="ff"), "more examples"),
        (SiteCensus("a", [CountedClient("a/x", 1)], contract="ff"), "other clients"),
        (SiteCensus("a", [CountedClient("a", 1)], contract="00"), "another experiment"),
    ):
        with pytest.raises(DataError, match=what):
            roster.check_returned(census)
    (tmp_path / "roster.json").write_text("{}")
    with pytest.raises(DataError, match="not a readable roster"):
        Roster.load(tmp_path / "roster.json")
