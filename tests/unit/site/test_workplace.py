"""Sites that read their own files and build the experiment themselves: the bits of a simulation over the same data."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from fedlens import Experiment
from fedlens.base.errors import ConfigError, DataError
from fedlens.core.engine_base import EngineBase
from fedlens.core.protocol import Program
from fedlens.data.dataset import Dataset
from fedlens.data.datasets.digits import digits
from fedlens.data.partition.partition import Partition
from fedlens.data.partition.roster import Roster
from fedlens.engines.executor import Executor
from fedlens.engines.inline import inline
from fedlens.engines.links.post import Post
from fedlens.engines.network import NetworkEngine
from fedlens.identity.keys import KeyPair
from fedlens.models.registry import MODELS
from fedlens.models.simple import small_cnn
from fedlens.run.build import build
from fedlens.settings.plan import Plan
from fedlens.site.local_data import LocalData
from fedlens.site.workplace import Workplace
from fedlens.tasks.classification import Classification
from tests.contract.contract_kit import nightly_but
from tests.unit.engines.loopback import Clock, LoopbackLink, Site
from tests.unit.site import drawn
from tests.unit.site.site_kit import opened, plan_at_server, workplace, write_images, write_site
from tests.unit.tasks import detection_kit

SITES = ("a", "b", "c")
COMMON: dict[str, Any] = {
    "rounds": 2,
    "model": "mlp",
    "local": {"lr": 0.1, "steps": 2, "batch_size": 8},
    "evaluation": {"clients": "all"},
    "seed": 3,
}
SPLIT = {"validation": 0.2, "validation_from": "client"}
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "scaffold": {},
    "fedbn": {"model": {"name": "small-cnn", "norm": "batch"}},
    "moon": {},
    "feddyn": {},
    "fedavgm": {"model": {"name": "small-cnn", "freeze": "backbone", "cache_features": True}},
}
FORM: Mapping[str, Any] = {
    "name": "sites",
    "classes": [str(t) for t in range(10)],
    "input_shape": [1, 8, 8],
    "mean": list(digits(Path(), False, 0).mean),
    "std": list(digits(Path(), False, 0).std),
}
WORDS = ("nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def owners() -> NDArray[np.int64]:
    """The site of each digit."""
    return np.random.default_rng(0).integers(0, len(SITES), 1437)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, owners: NDArray[np.int64]) -> dict[str, Path]:
    """A folder for each site, with the images of its digits. Site b calls them by words of its own."""
    train = digits(Path(), False, 0).train
    made = {}
    for k, site in enumerate(SITES):
        made[site] = tmp_path_factory.mktemp(site)
        labels = [WORDS[t] if site == "b" else str(t) for t in train.targets[owners == k]]
        write_images(made[site] / "scans", train.inputs[owners == k, 0], labels, {"patient": labels})
        write_site(
            made[site], {"labels": {word: str(t) for t, word in enumerate(WORDS)}} if site == "b" else {}
        )
    return made


def at_sites(**changes: Any) -> dict[str, Any]:
    return {
        **COMMON,
        "data": {"dataset": {**FORM, "test": "digits"}, **SPLIT},
        "engine": {"name": "network", "max_share": 1.0, "patience": 5.0},
        **changes,
    }


class Computing(Site):
    """A site that computes in its workplace."""

    place: Workplace

    def __post_init__(self) -> None:
        self.program = self.place.program
        self.executor = Executor(self.program)


class Connected:
    """Connects an engine to workplaces."""

    def __init__(self, roster: Roster, places: Mapping[str, Workplace]) -> None:
        self.roster, self.places = roster, places

    def __call__(self, engine: EngineBase) -> Roster:
        assert isinstance(engine, NetworkEngine)
        clock = Clock()
        link = LoopbackLink(Program({}, None, 0), self.roster, clock)  # type: ignore[arg-type]
        for name, place in self.places.items():
            computing = type("At", (Computing,), {"place": place})
            link.sites[name] = computing(name, place.program, self.roster, takes=place.takes)
        engine.attach(Post(link, KeyPair.make(), bytes(32), "run", 1), self.roster, clock)
        return self.roster


@pytest.mark.parametrize("algorithm", nightly_but({"scaffold", "fedbn"}, ALGORITHMS))
def test_sites_give_the_bits_of_a_simulation(
    algorithm: str, folders: dict[str, Path], owners: NDArray[np.int64], tmp_path: Path
) -> None:
    Partition.of_owners(owners, SITES, dataset="digits").save(tmp_path / "split.npz")
    split = {"name": "file", "path": str(tmp_path / "split.npz")}
    more = {"algorithm": algorithm, **ALGORITHMS[algorithm]}
    here = Experiment(
        **{**COMMON, **more, "data": {"dataset": "digits", "partition": split, **SPLIT}, "engine": "inline"}
    ).run(tmp_path / "here")
    settings = at_sites(**more)
    roster, places = opened(plan_at_server(settings), folders)
    there = Experiment(**settings).run(
        tmp_path / "there", connect=Connected(roster, dict(zip(SITES, places, strict=True)))
    )
    one, other = (load_file(result.directory / "model.safetensors") for result in (here, there))
    assert all(torch.equal(one[leaf], other[leaf]) for leaf in one)
    rows = [clients_of(result.directory) for result in (here, there)]
    assert rows[0] == rows[1] != []


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "feddyn", "weighting": "examples"}},
        {"algorithm": {"name": "fedir", "target": "population"}},
        {"algorithm": "mime"},
        {"algorithm": "feddane"},
        {"algorithm": {"name": "finetune", "epochs": 1}},
        {"algorithm": "fednova", "local": {"lr": 0.1, "epochs": 3, "stragglers": 0.5}},
        {"algorithm": "fedadam", "local": {"lr": 0.1, "lr_schedule": "cosine", "lr_change": "step"}},
        {
            "algorithm": "fedavg",
            "aggregate": {"name": "quantized", "bits": 20},
            "evaluation": {"clients": "none"},
        },
        {"algorithm": {"name": "dsgd", "topology": {"name": "complete"}}},
        {"algorithm": "gradient-tracking"},
        {
            "algorithm": {"name": "fedgkt", "client": {"name": "small-cnn", "norm": "none"}, "cut": "0"},
            "model": {"name": "small-cnn", "norm": "none"},
        },
    ],
    ids=str,
)
def test_a_site_takes_what_the_server_asks(changes: dict[str, Any], folders: dict[str, Path]) -> None:
    planned = plan_at_server(at_sites(**changes))
    roster, (place, *_) = opened(planned, folders)
    algorithm = build(planned, Path(), False, inline(device="cpu"), roster=roster).algorithm
    asked = {op: algorithm.takes(op) for op in algorithm.ops}
    assert {op: place.takes(op) for op in place.built.algorithm.ops} == asked
    assert any(asked.values())


@pytest.mark.parametrize(
    ("kind", "read", "model"),
    [
        ("segmentation", drawn.masks, f"{drawn.__file__}:convolutions"),
        ("detection", drawn.boxes, f"{detection_kit.__file__}:grid_detector"),
    ],
    ids=["masks", "boxes"],
)
def test_masks_and_boxes_give_the_bits_of_a_simulation(
    kind: str, read: Callable[..., Dataset], model: str, tmp_path: Path
) -> None:
    whole = read()
    more = {**COMMON, "model": model}
    here = Experiment(
        **{**more, "data": {"dataset": read, "partition": "natural", **SPLIT}, "engine": "inline"}
    ).run(tmp_path / "here")
    form = {
        "name": "sites",
        "kind": kind,
        "classes": list(whole.classes),
        "input_shape": [*whole.input_shape],
    }
    form |= {"mean": list(whole.mean), "std": list(whole.std), "test": f"{drawn.__file__}:{read.__name__}"}
    settings = at_sites(model=model, data={"dataset": form, **SPLIT})
    file = Path(model.rpartition(":")[0])
    folders = {}
    for site in SITES:
        named = {"name": f"{drawn.__file__}:{read.__name__}", "client": site}
        labels = {f"the {name}": name for name in whole.classes} if site == "b" else {}
        folders[site] = tmp_path / site
        write_site(
            folders[site],
            {"dataset": named, "labels": labels},
            {str(file): hashlib.sha256(file.read_bytes()).hexdigest()},
        )
    roster, places = opened(plan_at_server(settings), folders)
    there = Experiment(**settings).run(
        tmp_path / "there", connect=Connected(roster, dict(zip(SITES, places, strict=True)))
    )
    one, other = (load_file(result.directory / "model.safetensors") for result in (here, there))
    assert all(torch.equal(one[leaf], other[leaf]) for leaf in one)
    assert clients_of(here.directory) == clients_of(there.directory) != []


def test_a_site_begins_with_weights_that_it_approved(
    folders: dict[str, Path], owners: NDArray[np.int64], tmp_path: Path
) -> None:
    """FedBN starts from the normalization of the initial model, which no message carries."""
    leaves = small_cnn((1, 8, 8), 10, norm="batch").state_dict()
    drawn_leaves = {
        name: torch.rand_like(leaf) if leaf.is_floating_point() else leaf for name, leaf in leaves.items()
    }
    save_file(drawn_leaves, tmp_path / "start.safetensors")
    digest = hashlib.sha256((tmp_path / "start.safetensors").read_bytes()).hexdigest()
    model = {"name": "small-cnn", "norm": "batch", "weights": str(tmp_path / "start.safetensors")}
    more = {"algorithm": "fedbn", "model": model}
    Partition.of_owners(owners, SITES, dataset="digits").save(tmp_path / "split.npz")
    split = {"name": "file", "path": str(tmp_path / "split.npz")}
    here = Experiment(
        **{**COMMON, **more, "data": {"dataset": "digits", "partition": split, **SPLIT}, "engine": "inline"}
    ).run(tmp_path / "here")
    settings, approving = at_sites(**more), {}
    for site, folder in folders.items():
        approving[site] = tmp_path / site
        shutil.copytree(folder / "scans", approving[site] / "scans")
        (approving[site] / "weights").mkdir()
        shutil.copy(tmp_path / "start.safetensors", approving[site] / "weights")
        labels = {word: str(t) for t, word in enumerate(WORDS)} if site == "b" else {}
        write_site(approving[site], {"labels": labels}, {"weights/start.safetensors": digest})
    roster, places = opened(plan_at_server(settings), approving)
    there = Experiment(**settings).run(
        tmp_path / "there", connect=Connected(roster, dict(zip(SITES, places, strict=True)))
    )
    one, other = (load_file(result.directory / "model.safetensors") for result in (here, there))
    assert all(torch.equal(one[leaf], other[leaf]) for leaf in one)
    assert clients_of(here.directory) == clients_of(there.directory) != []
    save_file(leaves, approving["a"] / "weights" / "start.safetensors")
    with pytest.raises(ConfigError, match="has the SHA-256"):
        opened(plan_at_server(settings), {"a": approving["a"]})


def test_an_operation_finds_fedlens_own_names_alone_and_the_threads_of_the_site(
    folders: dict[str, Path],
) -> None:
    _, places = opened(plan_at_server(at_sites()), folders)
    before = torch.get_num_threads()
    torch.set_num_threads(threads := 2)
    with places[0].computing():
        assert torch.get_num_threads() == 1
        with pytest.raises(ConfigError, match="not fedlens's own"):
            MODELS.find("subprocess:getoutput")
    assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert places[0].takes("train") is not None
    assert places[0].takes("evaluate") is None


def test_three_patients_move_the_model_of_their_site_by_three_clips_at_most(tmp_path: Path) -> None:
    """One step over all n images without noise: lr C / n for each patient of the site's own table."""
    train, clip, n = digits(Path(), False, 0).train, 0.01, 30
    owners, labels = [f"P{i % 3}" for i in range(n)], [str(t) for t in train.targets[:n]]
    write_images(tmp_path / "a" / "scans", train.inputs[:n, 0], labels, {"patient": owners})
    write_site(tmp_path / "a")

    def planned(column: str) -> tuple[dict[str, Any], Plan]:
        settings = at_sites(
            rounds=1,
            model="linear",
            data={"dataset": {**FORM, "test": "digits"}, "normalize": "unit"},
            local={"lr": 1.0, "steps": 1, "batch_size": "all"},
            evaluation={"clients": "none"},
            engine={"name": "network", "max_share": 1.0, "min_sites": 1},
            privacy={
                "unit": "example",
                "clip": clip,
                "noise_multiplier": 0.0,
                "delta": 1e-3,
                "column": column,
            },
        )
        return settings, plan_at_server(settings)

    settings, plan = planned("patient")
    roster, (place,) = opened(plan, {"a": tmp_path / "a"})
    server = build(plan, Path(), False, place.built.engine, roster=roster)
    first = server.algorithm.init(server.model, server.federation)["model"]
    ran = Experiment(**settings).run(tmp_path / "run", connect=Connected(roster, {"a": place}), report=False)
    last = load_file(ran.directory / "model.safetensors")
    moved = torch.cat([(last[name] - leaf).double().flatten() for name, leaf in first.items()]).norm()
    assert 1.01 < float(moved) / (clip / n) <= 3 * (1 + 1e-5)
    with pytest.raises(ConfigError, match="have no column 'patent'"):
        opened(planned("patent")[1], {"a": tmp_path / "a"})


def test_an_experiment_that_pools_data_is_refused(folders: dict[str, Path]) -> None:
    planned = plan_at_server(at_sites(algorithm="centralized", evaluation={}))
    with pytest.raises(ConfigError, match="in one place"):
        opened(planned, folders)


def test_single_examples_are_sent_only_where_min_examples_is_1(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scans").symlink_to(folders["a"] / "scans")
    network = {"name": "small-cnn", "norm": "none"}
    fedgkt = {"name": "fedgkt", "client": network, "cut": "0"}
    planned = plan_at_server(at_sites(algorithm=fedgkt, model=network, evaluation={}))
    write_site(tmp_path)
    opened(planned, {"a": tmp_path})
    write_site(tmp_path, allow={"min_examples": 8})
    with pytest.raises(ConfigError, match="sends numbers of single examples, and min_examples is 8"):
        opened(planned, {"a": tmp_path})
    write_site(tmp_path, {"persons": "patient"}, allow={"min_persons": 2})
    with pytest.raises(ConfigError, match="sends numbers of single examples, and min_persons is 2"):
        opened(planned, {"a": tmp_path})
    write_site(tmp_path, allow={"min_examples": 8})
    opened(plan_at_server(at_sites()), {"a": tmp_path})
    monkeypatch.setattr(Classification, "measures_single_examples", True)
    opened(plan_at_server(at_sites(evaluation={})), {"a": tmp_path})
    with pytest.raises(ConfigError, match="measures single examples, and min_examples is 8"):
        opened(plan_at_server(at_sites()), {"a": tmp_path})
    write_site(
        tmp_path, allow={"min_examples": 8, "report_metrics": "totals"}
    )  # which are of no single example
    opened(plan_at_server(at_sites()), {"a": tmp_path})


def test_a_site_that_sends_totals_alone_ends_the_metrics_by_class_of_all_and_changes_no_number(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    settings = at_sites(algorithm={"name": "finetune", "epochs": 1}, data={"dataset": FORM, **SPLIT})
    lines, clients, models = [], [], []
    for name, allow in (("all", {}), ("totals", {"report_metrics": "totals"})):
        there = {site: tmp_path / name / site for site in SITES}
        for site, folder in there.items():
            folder.mkdir(parents=True)
            (folder / "scans").symlink_to(folders[site] / "scans")
            labels = {"labels": {word: str(t) for t, word in enumerate(WORDS)}} if site == "b" else {}
            write_site(folder, labels, allow=allow if site == "b" else {})
        roster, places = opened(plan_at_server(settings), there)
        connect = Connected(roster, dict(zip(SITES, places, strict=True)))
        ran = Experiment(**settings).run(tmp_path / f"run-{name}", connect=connect, report=False)
        lines.append(json.loads((ran.directory / "metrics.jsonl").read_text().splitlines()[-1]))
        clients.append(clients_of(ran.directory))
        models.append(load_file(ran.directory / "model.safetensors"))
    assert all(torch.equal(models[0][leaf], models[1][leaf]) for leaf in models[0])
    gone = {"accuracy_balanced", "calibration_error"}

    def of_class(row: Mapping[str, Any]) -> set[str]:
        return {name for name in row if any(each in name for each in gone)}

    assert {f"validation_{name}" for name in gone} < of_class(lines[0])
    assert of_class(lines[1]) == set()
    same = lines[0].keys() - of_class(lines[0])
    kept = [
        {name: line[name] for name in same if name.startswith(("validation_", "clients_"))} for line in lines
    ]
    assert kept[0] == kept[1]
    assert {"validation_accuracy", "clients_accuracy_mean_before"} <= kept[0].keys()
    for whole, sent in zip(*clients, strict=True):
        less = of_class(whole) if whole["client"] == "b" else set()
        assert sent == {name: value for name, value in whole.items() if name not in less}


def test_held_out_images_are_the_same_in_all_of_a_run(folders: dict[str, Path], tmp_path: Path) -> None:
    for site in ("a", "b"):  # folders of their own, without notes of other tests
        (tmp_path / site).mkdir()
        (tmp_path / site / "scans").symlink_to(folders["a"] / "scans")
        write_site(tmp_path / site)
    planned = plan_at_server(at_sites())
    roster, (place, _) = opened(planned, {site: tmp_path / site for site in ("a", "b")})
    assert workplace(place.local, roster).rounds == 2
    sizes = roster.examples + roster.held_out
    other = replace(roster, ids=("0", *roster.ids), sites=("0", *roster.sites),
                    examples=np.array([7, *sizes]), held_out=np.zeros(3, np.int64))  # fmt: skip
    with pytest.raises(DataError, match="other images of this site would be held out"):
        workplace(place.local, other)
    # Another run has an approval of its own.
    workplace(LocalData.open(place.local.contract, "a", tmp_path / "a", "run-2"), other)


def test_sizes_whose_sum_overflows_are_refused(folders: dict[str, Path]) -> None:
    roster, (place,) = opened(plan_at_server(at_sites(rounds=5)), {"a": folders["a"]})
    more = np.array([*(roster.examples + roster.held_out), *[2**62] * 4])
    huge = {"examples": more, "held_out": np.zeros_like(more), "mean": None, "std": None, "images": 0}
    with pytest.raises(DataError, match="not readable"):
        Workplace.open(place.local, {"a": 0}, huge)


def clients_of(directory: Path) -> list[dict[str, Any]]:
    """What the clients measured on their held-out examples, without times."""
    lines = map(json.loads, (directory / "clients.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]
