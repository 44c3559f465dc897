"""The dossier of an experiment says what its settings say, and nothing that one of them contradicts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.errors import ConfigError, RunDirectoryError
from fedlens.base.format import size
from fedlens.core.wire.terms import ExperimentTerms
from fedlens.files.chained_log import read_chained
from fedlens.server.dossier import write_dossier
from fedlens.server.retention import ServedRuns
from fedlens.settings.config_source import Source
from tests.unit.identity.federation_kit import federation_in, joined
from tests.unit.server.serve_kit import NAMES, Wards

MEASURED = {"evaluation": {"clients": "all"}}
AT_SERVER = {"evaluation": {"clients": "none"}}
SECURE = {**AT_SERVER, "aggregate": "secagg"}
PRIVATE = {**AT_SERVER, "privacy": {"clip": 0.1, "noise_multiplier": 2.0, "delta": 1e-3}}
SEEDED = {**AT_SERVER, "privacy": {**PRIVATE["privacy"], "noise": "seeded"}}
GKT = {**MEASURED, "algorithm": {"name": "fedgkt", "client": "mlp", "cut": "1"}}


def settings(**changes: Any) -> Source:
    dataset = {"name": "sites", "classes": ["no", "yes"], "input_shape": [1, 8, 8]}
    if "evaluation" in changes and changes["evaluation"]["clients"] == "none":
        dataset |= {"test": {"name": "synthetic", "shape": [1, 8, 8], "classes": 2, "train": 1, "test": 1}}
        dataset["classes"] = ["class 0", "class 1"]
    held = {"validation": 0.2, "validation_from": "client"} if "privacy" not in changes else {}
    values = {
        "name": "wards",
        "rounds": 5,
        "data": {"dataset": dataset, "normalize": "unit", **held},
        "model": "mlp",
        **({} if changes.get("algorithm") == "push-sum" else {"select": "all"}),
        "local": {"lr": 0.1, "epochs": 3, "batch_size": 16},
        "engine": {"name": "network", "max_share": 0.4},
        **(changes or MEASURED),
    }
    return Source(values)


def text_of(source: Source | Path, folder: Path) -> str:
    markdown, page = write_dossier(folder / "out", federation_in(folder), source, clients=3)
    assert page.name == "dossier.html"
    return markdown.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "says", "never"),
    [
        (
            MEASURED,
            ["Secure sums:** none", "no noise is added", "plain update", "at most 40 %", "sums over the held-out",
             "`update.1.weight float32[", "`metrics.loss number`",
             "a sum for one class may be of one image", "'totals' or false sends fewer fields",
             "without sums for classes", "a table \\[privacy\\]"],
            ["epsilon", "Kept at the site", "another seed", "Test images at the server",
             "once for each local step", "Single images", "the sum of all pixels", "has withdrawn"],
        ),
        (
            {**MEASURED, "algorithm": "scaffold", "record": {"updates": {"every": 5}}},
            ["Kept at the site:** the state of a client: variate", "mean gradient", "recordings at the server"],
            ["Single images"],
        ),
        (
            PRIVATE,
            ["The unit is one client", "After 5 rounds the model is", "clipped updates", "at most what epsilon = ",
             "not against the server"],
            ["no noise is added", "a table \\[privacy\\]", "one image decide a sum", "sums over the held-out"],
        ),
        (
            SECURE,
            ["no update of a single one", "nobody sees which site did", "aggregate.range", "| agree: its signature",
             "sum of few", "Sites sign their keys", "`signature uint8[64]`", "with another seed"],
            ["the server reads what each client sends", "plain update", "log (", "one image decide a sum"],
        ),
        (SEEDED, ["Nothing is promised", "a table \\[privacy\\] with noise = 'system'"], ["at most what epsilon"]),
        ({**MEASURED, "algorithm": "push-sum"}, ["once for each local step"], ["Single images"]),
        (
            GKT,
            ["letters[0][1].targets int64[", "Single images", "images can be reconstructed",
             "Numbers computed from each of them are sent", "min\\_examples is 1"],
            ["They stay at the sites", "plain update"],
        ),
    ],
)  # fmt: skip
def test_the_text_follows_the_settings(
    changes: dict[str, Any], says: list[str], never: list[str], tmp_path: Path
) -> None:
    text = text_of(settings(**changes), tmp_path)
    assert [words for words in says if words not in text] == []
    assert [words for words in never if words in text] == []


def test_it_names_the_accepted_sites_and_lists_what_nobody_has_said(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    terms = ExperimentTerms("2099-01-31", "0a" * 32)
    told, _ = write_dossier(tmp_path / "out", federation, settings(), terms=terms)
    draft = told.read_text()
    first = draft.partition("## Purpose")[0]
    assert "Write it again after step 4" in first
    assert "No site is accepted yet" in first
    assert "--until" not in first
    joined(federation, "ward-a", tmp_path)
    joined(federation, "ward-b", tmp_path)
    joined(federation, "ward-c", tmp_path)
    federation.revoke("ward-b", drop=False)
    for path in write_dossier(tmp_path / "out", federation, settings()):
        text = path.read_text()
        assert "ward-a, ward-c. Each receives" in text
        assert "ward-b" not in text
        assert text.count("to be filled in (") == 16
        assert "due 365 days after" in text
        assert "Write it again with these options" in text
    ServedRuns(federation.folder).keep(30)
    told, _ = write_dossier(tmp_path / "out", federation, settings(), purpose="Find nodules.", terms=terms)
    text = told.read_text()
    assert "**Purpose:** Find nodules.\n" in text
    assert "due 30 days after" in text
    assert "2099-01-31, in UTC" in text
    assert "SHA-256 " + "0a" * 32 in text
    assert "Write it again" not in text
    points = text.partition("## Open points")[2].splitlines()[4:]
    marked = re.findall(r"\*\*(.+):\*\* \*\*to be filled in \((\d+)\)", text)
    assert [tuple(line.split(" | ")[:2]) for line in points] == [(f"| {n}", name) for name, n in marked]
    assert all(line.split(" | ")[2].strip(" |") for line in points)
    assert f"with a number: {len(points)} points are open" in text
    drafted = dict(re.findall(r"\*\*(.+):\*\* \*\*to be filled in \((\d+)\)", draft))
    assert len(drafted) == len(marked) + 2  # the purpose, and the sites
    assert drafted.items() >= {(name, n) for name, n in marked}  # notes on a draft keep their numbers
    assert "| census, once before round 1: how many images it has | the settings" in text
    assert "`clients[1].examples number`" in text
    assert f"| ward-a | {federation.words(federation.site('ward-a'))} |" in text


def test_a_draft_with_too_few_sites_says_so(tmp_path: Path) -> None:
    federation = federation_in(tmp_path)
    for name in ("ward-a", "ward-b"):
        joined(federation, name, tmp_path)
    source = settings(**SECURE)
    source.values["engine"]["min_sites"] = 3
    told, _ = write_dossier(tmp_path / "out", federation, source)
    text = told.read_text()
    assert "2 sites are accepted, and the run needs 3 (engine.min\\_sites)" in text
    assert "Write it again after step 4" in text
    assert "&gt;" not in text


def test_names_cannot_be_markup(tmp_path: Path) -> None:
    source = settings()
    source.values["data"]["dataset"]["classes"] = ["<b>no</b>", "yes | no"]
    markdown, page = write_dossier(
        tmp_path / "out", federation_in(tmp_path), source, purpose="<script>x</script>"
    )
    for text in (markdown.read_text(), page.read_text()):
        assert "&lt;b&gt;no" in text
        assert "<b>no" not in text
        assert "<script>x" not in text
    assert "yes \\| no" in markdown.read_text()


def test_a_run_gives_its_sites_images_and_messages(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    with wards.at_work():
        run = wards.serve(until="2099-01-31").directory
    markdown, _ = write_dossier(tmp_path / "out", wards.federation.registry, run)
    text = markdown.read_text()
    assert "finished after 3 rounds" in text
    assert f"{', '.join(NAMES)}. Each receives" in text
    assert "1,437 images of 3 clients at 3 sites" in text
    assert "**Last day:** 2099-01-31, in UTC" in text
    lines = [line for line, _, _ in read_chained(run / "answers.jsonl")]
    fields = {line["id"]: line["fields"] for line in lines if line.get("kind") == "fields"}
    answers = {line["operation"]: line for line in lines if "operation" in line}
    assert "train" in answers
    for op, line in answers.items():  # the dossier has the words and the sizes of the logs
        (row,) = re.findall(rf"^\| {op}[:\s].*\| (.+ \| .+) \|$", text, re.M)[:1]
        assert row == ", ".join(f"`{one}`" for one in fields[line["fields"]]) + f" | {size(line['bytes'])}"
        for site in NAMES:
            sent = [
                each["bytes"] for each in lines if (each.get("site"), each.get("operation")) == (site, op)
            ]
            assert re.search(rf"^\| {site} \| {op} \| .* \| {len(sent)} \| {size(sum(sent))} \|$", text, re.M)
    assert "- **Purpose:** see the dossier that was written before the run" in text


def test_what_serve_refuses_has_no_dossier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not at sites"):
        text_of(
            Source(
                {
                    "rounds": 1,
                    "model": "mlp",
                    "local": {"lr": 1.0},
                    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 3}},
                }
            ),
            tmp_path,
        )
    (tmp_path / "other").mkdir()
    with pytest.raises(RunDirectoryError):
        text_of(tmp_path / "other", tmp_path / "other")
