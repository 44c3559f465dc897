"""The list of scope: its names are in the registries, and its examples are run and do what their row says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedlens import Experiment, Result
from fedlens.aggregate.mean import AGGREGATES
from fedlens.algorithms.client_sampling import SELECTS
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.registry import load_file
from fedlens.core.reduction import Update
from fedlens.engines.registry import ENGINES
from fedlens.models.prepare import Preparation
from fedlens.privacy.settings import PrivacySettings
from fedlens.settings.config import Config
from fedlens.tasks.registry import TASKS

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLES = DOCS / "examples"
PAGE = DOCS / "scope.md"
TODAY = ("built in", "one file", "not today")
REGISTRIES = {
    "aggregate": AGGREGATES, "algorithm": ALGORITHMS, "engine": ENGINES, "select": SELECTS, "task": TASKS,
}  # fmt: skip

OWN = {"validation": 0.2, "validation_from": "client"}
MEASURED = {"clients": "all"}


def named(example: str, **settings: Any) -> dict[str, Any]:
    """A table that names a function of an example: "top_k.py:top_k"."""
    return {"name": f"{EXAMPLES}/{example}", **settings}


FLIP = {"client": named("sign_flip.py:sign_flip", clients=[0], scale=50.0)}
SPLIT = {"model": "mlp", "local": {"lr": 0.1, "batch_size": 20, "steps": 2}}
RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "attacked": FLIP,
    "defended": {**FLIP, "aggregate": named("own_aggregate.py:Median")},
    "sparse": {"aggregate": named("top_k.py:top_k", share=0.1)},
    "dense": {"aggregate": named("top_k.py:top_k", share=1.0)},
    "personal": {"algorithm": named("ditto.py:ditto", lam=0.1), "evaluation": MEASURED, "data": OWN},
    "held-out": {"evaluation": MEASURED, "data": OWN},
    "head": {
        "algorithm": named("fedrep.py:fedrep", head=5), "model": "mlp", "evaluation": MEASURED, "data": OWN
    },
    "late": {"algorithm": named("asynchronous.py:asynchronous", buffer=2, running=4), "rounds": 6},
    "asleep": {
        "select": named("availability.py:awake", clients_per_round=3, zones=2), "record": {"clients": True}
    },
    "cut low": {"algorithm": named("split_learning.py:split_learning", cut=2), **SPLIT},
    "cut high": {"algorithm": named("split_learning.py:split_learning", cut=4), **SPLIT},
    "adapters": {"model": named("low_rank.py:low_rank", rank=2)},
    "fair": {"aggregate": named("loss_weighted.py:loss_weighted", q=2.0)},
    "longer": {"client": named("fedexp.py:fedexp")},
    "even": {"aggregate": named("loss_weighted.py:loss_weighted", q=0.0)},
}  # fmt: skip
RUN_FILES = set(re.findall(r"/(\w+\.py):", str(RUNS)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """A short run of each example."""
    folder = tmp_path_factory.mktemp("runs")
    shards = {"name": "shards", "clients": 5, "classes_per_client": 4}

    def run(name: str, changes: dict[str, Any]) -> Result:
        data = {"dataset": "digits", "partition": shards, **changes.get("data", {})}
        common = {"rounds": 3, "model": "linear", "local": {"lr": 0.1, "batch_size": 20}, "engine": "inline"}
        return Experiment(**{**common, **changes, "data": data}).run(folder / name, report=False)

    return {name: run(name, changes) for name, changes in RUNS.items()}


def weights(result: Result) -> list[torch.Tensor]:
    return list(result.model.state_dict().values())


def sent(result: Result, op: str = "train") -> dict[str, int]:
    fields: dict[str, int] = result.summary["traffic"]["clients"][op]["up"]
    return fields


def test_every_example_runs_without_a_failure(runs: dict[str, Result]) -> None:
    for name, result in runs.items():
        assert result.summary["totals"]["failed"] == 0, name
        assert result.summary["status"] == "finished", name


def test_the_attack_works_on_the_mean_and_not_on_the_median(runs: dict[str, Result]) -> None:
    accuracy = {name: runs[name].metrics[-1]["test_accuracy"] for name in ("none", "attacked", "defended")}
    assert accuracy["attacked"] < accuracy["defended"] - 0.2
    assert accuracy["attacked"] < accuracy["none"] - 0.2


def test_the_sparse_update_is_a_tenth_and_the_whole_one_is_fedavg(runs: dict[str, Result]) -> None:
    assert sent(runs["sparse"], "train-compressed")["values"] == 65
    assert runs["sparse"].summary["totals"]["bytes_up"] < runs["none"].summary["totals"]["bytes_up"] / 2
    assert runs["sparse"].metrics[-1]["test_accuracy"] > runs["sparse"].metrics[0]["test_accuracy"] + 0.3
    for mine, theirs in zip(weights(runs["dense"]), weights(runs["none"]), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_dittos_global_model_is_fedavgs_and_its_clients_have_better_ones(runs: dict[str, Result]) -> None:
    for mine, theirs in zip(weights(runs["personal"]), weights(runs["held-out"]), strict=True):
        assert torch.equal(mine, theirs)
    own, shared = (runs[name].metrics[-1]["clients_accuracy_mean"] for name in ("personal", "held-out"))
    assert own > shared


def test_fedexp_lengthens_the_step_by_what_it_records(runs: dict[str, Result]) -> None:
    steps = [line["eta_g"] for line in runs["longer"].metrics[1:]]
    assert min(steps) >= 1.0
    assert max(steps) > 1.0
    assert sent(runs["longer"])["square"] == 1


def test_fedexps_step_is_that_of_the_paper() -> None:
    extrapolate = load_file(EXAMPLES / "fedexp.py").extrapolate
    update = Update({"w": torch.tensor([3.0, 4.0])}, {}, {}, {"square": torch.tensor(200.0)}, replies=2)
    ctx = SimpleNamespace(metrics={})
    assert extrapolate({}, update, ctx, eps=0.0)[1].update["w"].tolist() == [6.0, 8.0]  # 200 / (2 * 2 * 25)
    assert ctx.metrics == {"eta_g": 2.0}
    assert extrapolate({}, update, ctx, eps=75.0)[1].update["w"].tolist() == [3.0, 4.0]  # never below 1


def test_fedrep_sends_the_body_alone(runs: dict[str, Result]) -> None:
    assert sent(runs["head"])["update"] == 64 * 200 + 200 + 200 * 200 + 200
    assert (
        runs["head"].metrics[-1]["clients_accuracy_mean"] > runs["head"].metrics[0]["clients_accuracy_mean"]
    )


def test_late_replies_are_taken(runs: dict[str, Result]) -> None:
    assert [line["clients"] for line in runs["late"].metrics] == [0, 2, 2, 2, 2, 2, 2]
    late = runs["late"].summary["traffic"]["clients"]["train"]
    assert (late["asks"], late["replies"]) == (4 + 5 * 2, 6 * 2)  # two are at work when the run ends
    assert runs["late"].metrics[-1]["test_accuracy"] > runs["late"].metrics[0]["test_accuracy"] + 0.3


def test_clients_that_are_asleep_do_not_train(runs: dict[str, Result]) -> None:
    lines = (runs["asleep"].directory / "clients.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [(row["round"], int(row["client"])) for row in map(json.loads, lines)]
    assert len(rows) > 5
    assert all(client % 2 != round % 2 for round, client in rows)


def test_split_training_does_not_depend_on_the_cut(runs: dict[str, Result]) -> None:
    low, high = runs["cut low"], runs["cut high"]
    for one, other in zip(weights(low), weights(high), strict=True):
        torch.testing.assert_close(one, other)
    assert sent(low, "split")["outputs"] == 20 * 200
    assert low.metrics[-1]["test_loss"] < low.metrics[0]["test_loss"]


def test_adapters_alone_are_trained_and_sent(runs: dict[str, Result]) -> None:
    layers = ((64, 200), (200, 200), (200, 10))
    assert sent(runs["adapters"])["update"] == sum(2 * (rows + columns) for rows, columns in layers)
    assert runs["adapters"].metrics[-1]["test_loss"] < runs["adapters"].metrics[0]["test_loss"]


def test_losses_weigh_the_clients(runs: dict[str, Result]) -> None:
    for mine, theirs in zip(weights(runs["even"]), weights(runs["none"]), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(weights(runs["fair"])[0], weights(runs["none"])[0])


# ---- the pages


def listed() -> list[tuple[str, str, str]]:
    """The lines of the list of scope: subject, today, how."""
    return re.findall(r"^- (.+?) \(([^()]+)\): (.+)$", PAGE.read_text(encoding="utf-8"), re.M)


def faults(subject: str, today: str, how: str) -> list[str]:
    """What a row claims and nothing shows."""
    if today not in TODAY:
        return [f"{subject}: '{today}' is none of {TODAY}"]
    wrong = [] if subject else ["no subject"]
    files = re.findall(r"\]\(examples/(\w+\.py)\)", how)
    wrong += [
        f"{subject}: no test runs {file}"
        for file in files
        if file not in RUN_FILES or not (EXAMPLES / file).exists()
    ]
    settings = [text for text in re.findall(r"`([^`]+)`", how) if "." in text]
    wrong += [f"{subject}: there is no {text}" for text in settings if not exists(text)]
    pages: list[str] = re.findall(r"\]\((?!examples/)([^)]+)\)", how)
    wrong += [f"{subject}: there is no page {page}" for page in pages if not (DOCS / page).is_file()]
    if today == "one file" and not files:
        wrong.append(f"{subject}: no example")
    if today == "built in" and not (settings and pages):
        wrong.append(f"{subject}: no setting or no page")
    if today == "not today" and files:
        wrong.append(f"{subject}: an example shows it")
    return wrong


def exists(text: str) -> bool:
    """Whether a setting, such as `local.stragglers` or `select.name = "fixed"`, exists with this value."""
    key, _, value = text.partition(" = ")
    top, _, name = key.partition(".")
    if name == "name":
        return tomllib.loads(f"it = {value}")["it"] in list(REGISTRIES[top])
    if top in ("model", "privacy"):
        kind: Any = {"model": Preparation, "privacy": PrivacySettings}[top]
    else:
        kind = Config.model_fields[top].annotation
    return name in getattr(kind, "model_fields", {})


def test_each_line_of_the_list_is_shown_by_a_registry_or_a_test() -> None:
    rows = listed()
    assert len(rows) == sum(line.startswith("- ") for line in PAGE.read_text(encoding="utf-8").splitlines())
    assert [fault for row in rows for fault in faults(*row)] == []
    subjects = " ".join(subject for subject, _, _ in rows).lower()
    for asked in (
        "asynchronous", "compression", "robust", "attacks", "privacy", "ditto", "apfl", "fedrep", "split", "vertical",
        "peer-to-peer", "fairness", "low-rank", "without labels", "changes over rounds", "availability",
    ):  # fmt: skip
        assert asked in subjects, asked
    assert set(re.findall(r"examples/(\w+\.py)", " ".join(how for _, _, how in rows))) == RUN_FILES


@pytest.mark.parametrize(
    "row",
    [
        ("Ditto", "one file", "[gone.py](examples/gone.py)"),
        ("Ditto", "one file", "[my_prox.py](examples/my_prox.py), which no test of this table runs"),
        ("Ditto", "one file", "no example"),
        ("Ditto", "built in", '`algorithm.name = "ditto"`: [Algorithms](algorithms/index.md)'),
        ("Ditto", "built in", "`local.ditto`: [Settings](settings.md)"),
        ("Ditto", "built in", "`local.stragglers`: [Settings](gone.md)"),
        ("Ditto", "not today", "[ditto.py](examples/ditto.py)"),
        ("Ditto", "soon", ""),
    ],
)
def test_a_row_that_nothing_shows_is_found(row: tuple[str, str, str]) -> None:
    assert faults(*row) != []


def test_the_entrances_say_what_fedlens_does_today() -> None:
    root = DOCS.parent
    for page, link in ((root / "README.md", "docs/"), (DOCS / "index.md", "")):
        words = " ".join(page.read_text(encoding="utf-8").split())
        assert "experiments on data that you may bring together, or on a cluster that you trust" in words, (
            page
        )
        assert f"({link}from-a-study-to-your-sites.md)" in words, page
        assert f"({link}scope.md)" in words, page
    for page in ("which-algorithm.md", "your-own-parts.md"):
        assert "(scope.md)" in (DOCS / page).read_text(encoding="utf-8"), page
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["description"]
    nav = (root / "mkdocs.yml").read_text(encoding="utf-8")
    assert "experiments" in project
    assert "site_description: Federated learning experiments" in nav
    for page in (root / "README.md", DOCS / "index.md", root / "pyproject.toml", root / "mkdocs.yml"):
        assert "stays with its owners" not in page.read_text(encoding="utf-8"), page
