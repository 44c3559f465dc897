"""What the pages promise, tried."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedlens import Experiment
from fedlens.base.registry import load_file
from fedlens.cli.main import app
from fedlens.local.rules import LocalContext
from tools.settings_tables import PAGES as SETTINGS
from tools.settings_tables import TABLE, rendered, tables

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "clipped_fedavg.py"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def digits(*overrides: str) -> Experiment:
    return Experiment.load(
        "digits", ["rounds=2", "select.clients_per_round=3", "evaluation.every=2", *overrides]
    )


def weights(experiment: Experiment, out: Path) -> dict[str, torch.Tensor]:
    return dict(experiment.run(out).model.state_dict())


def test_the_example_is_fedavg_where_no_update_reaches_the_bound(tmp_path: Path) -> None:
    clipped = digits(f"algorithm.name={EXAMPLE}:clipped_fedavg", "algorithm.norm=1e9")
    ours, fedavg = weights(clipped, tmp_path / "clipped"), weights(digits(), tmp_path / "fedavg")
    assert all(torch.equal(ours[name], fedavg[name]) for name in fedavg)


@pytest.mark.usefixtures("quick_workers")
def test_the_example_runs_on_the_other_engine_too(tmp_path: Path) -> None:
    clipped = digits(f"algorithm.name={EXAMPLE}:clipped_fedavg", "algorithm.norm=0.1")
    here = weights(clipped, tmp_path / "inline")
    there = weights(
        clipped.with_settings("engine.name=processes", "engine.workers=2"), tmp_path / "processes"
    )
    assert all(torch.equal(here[name], there[name]) for name in here)


def test_the_example_bounds_what_a_client_sends() -> None:
    clip = load_file(EXAMPLE).clip
    context = LocalContext(["w", "b"], [torch.zeros(3), torch.zeros(2)], {}, {}, 0.1, 1)
    far = [torch.full((3,), 2.0), torch.full((2,), -1.0)]
    reply, state = clip(far, context, norm=0.5)
    assert state is None
    sent = torch.cat([reply["update"]["w"], reply["update"]["b"]])
    assert sent.norm().item() == pytest.approx(0.5)
    assert torch.allclose(sent, -torch.cat(far) * 0.5 / torch.cat(far).norm())
    still, _ = clip([torch.zeros(3), torch.zeros(2)], context, norm=0.5)
    assert all(torch.equal(leaf, torch.zeros_like(leaf)) for leaf in still["update"].values())


def test_the_tutorials_rule_is_fedprox_and_without_a_pull_fedavg(tmp_path: Path) -> None:
    def run(name: str, mu: float | None = None) -> dict[str, torch.Tensor]:
        given = [] if mu is None else [f"algorithm.mu={mu}"]
        return weights(digits(f"algorithm.name={name}", *given), tmp_path / f"{Path(name).stem}-{mu}")

    mine = f"{EXAMPLE.with_name('my_prox.py')}:my_prox"
    ours, fedprox, fedavg = run(mine, 0.5), run("fedprox", 0.5), run("fedavg")
    assert all(torch.allclose(ours[name], fedprox[name], atol=1e-6) for name in ours)
    assert not all(torch.allclose(ours[name], fedavg[name], atol=1e-6) for name in ours)
    without = run(mine, 0.0)
    assert all(torch.equal(without[name], fedavg[name]) for name in ours)


def test_the_page_shows_the_file_that_is_tested() -> None:
    page = (ROOT / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
    assert f'\n--8<-- "examples/{EXAMPLE.name}"\n' in page


def test_the_pages_of_settings_have_every_setting_once() -> None:
    pages = [path.read_text(encoding="utf-8") for path in SETTINGS]
    assert pages == [rendered(page) for page in pages], "run: python -m tools.settings_tables"
    assert sorted(match[2] for page in pages for match in TABLE.finditer(page)) == sorted(tables())


def test_seeds_need_no_value_since_they_derive_from_one() -> None:
    assert tables()["seeds"][0] == "`data`: synthetic data, and the choice of held-out examples"


def _commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [(page.name, line[2:].strip()) for line in lines if line.startswith("$ ")]
    return found


@pytest.mark.parametrize(("page", "command"), [c for c in _commands() if c[1].startswith("fedlens run")])
def test_a_run_that_a_page_shows_is_one_that_starts(page: str, command: str) -> None:
    _, _, recipe, *words = shlex.split(command)
    if recipe.endswith("/config.toml"):
        return  # of a run; see test_what_a_tutorial_shows_runs
    recipe = str(EXAMPLE.with_name(Path(recipe).name)) if recipe.endswith(".toml") else recipe
    overrides = [words[k + 1] for k, word in enumerate(words) if word == "--set"]
    overrides = [
        re.sub(r"=(?:docs/examples/)?(\w+\.py):", rf"={EXAMPLE.parent}/\1:", text) for text in overrides
    ]
    options = {word for word in words if word.startswith("--")}
    assert options <= {"--set", "--out", "--rounds", "--seed", "--download"}
    from fedlens.settings.config_source import read_source
    from fedlens.settings.plan import plan

    plan(Experiment.load(recipe, overrides).config, read_source(recipe, overrides))


def test_every_verb_that_a_page_shows_is_there() -> None:
    shown = [shlex.split(command)[1:] for _, command in _commands() if command.startswith("fedlens ")]
    verbs = {
        tuple(words[: 2 if words[0] in ("data", "partition", "bench", "federation", "site") else 1])
        for words in shown
    }
    assert verbs
    for words in verbs:
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, words


def test_every_make_target_that_a_page_shows_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {command.split()[1] for _, command in _commands() if command.startswith("make ")}
    assert {"demo", "test", "check"} <= targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_every_docstring_example_is_collected() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    collected = {ROOT / path for path in settings["ini_options"]["testpaths"]}
    ignored = {
        ROOT / option.removeprefix("--ignore=")
        for option in settings["ini_options"]["addopts"]
        if option.startswith("--ignore=")
    }
    for folder in ("benchmarks", "docs", "src", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            if re.search(r"^ *>>> ", file.read_text(encoding="utf-8"), flags=re.MULTILINE):
                assert collected & set(file.parents), file
                assert not ignored & set(file.parents), file
