"""Every algorithm has its page, the page is what its docstring says, and what it shows is there and runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from fedlens import Experiment
from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.registry import Entry, settings_model
from fedlens.run.build import build
from fedlens.settings.config_source import read_source
from fedlens.settings.plan import plan
from tools import algorithm_pages
from tools.algorithm_pages import (
    COMMAND,
    INDEX,
    MENU,
    PAGES,
    Row,
    allowed,
    faults,
    fit,
    index,
    is_setting,
    menu,
    notation,
    page,
    rows,
)

GOOD = """FedToy: clients take one step
    less.

    It is made up.

    Fixes: Nothing | at all.

    Equation:
        client k:  w <- w - lr g      (toy2020 Eq. 1)
            indented

    Source: Toy 2020 (arXiv 2001.00001), Eq. 1.

    Weighting: Uniform.

    State: None.

    Sent: What FedAvg sends.

    Composes: Any `[select]`:

        - one
        - two

    Ranges:
        rate: 0.1 to 1;
            more | where `a | b`.
        local.epochs: 1.

    Try: algorithm.rate=0.5 "local.batch_size='all'"

    Not when: Always.

    Tests: tests/identity/test_fedprox.py::mu_of_zero tests/identity/test_fedavg.py

    Example:
        >>> 1 + 1  # doctest: +SKIP
        2
    """


def row(text: str = GOOD) -> Row:
    def factory(
        parts: object, *, rate: Annotated[float, Field(gt=0, description="how | fast")] = 0.5
    ) -> None:
        pass

    factory.__doc__ = text
    return Row("algorithm", "fedtoy", Entry("toys:fedtoy", "a toy"), factory)


@pytest.mark.parametrize("name", [row.name for row in rows()])
def test_a_docstring_has_all_that_a_page_needs(name: str) -> None:
    (found,) = [row for row in rows() if row.name == name]
    assert not faults(found), "\n".join(faults(found))


@pytest.mark.parametrize("name", [row.name for row in fit()])
def test_a_page_is_what_its_docstring_says(name: str) -> None:
    (found,) = [row for row in fit() if row.name == name]
    assert found.file.is_file(), f"run: {COMMAND}"
    assert found.file.read_text(encoding="utf-8") == page(found), f"run: {COMMAND}"


def test_every_algorithm_has_a_page_and_every_page_an_algorithm() -> None:
    assert {"fedavg", "fedavgm", "fedprox", "centralized"} <= set(ALGORITHMS) <= {row.name for row in rows()}
    assert {path.stem for path in PAGES.glob("*.md")} == {row.name for row in fit()} | {"index"}, (
        f"run: {COMMAND}"
    )


@pytest.mark.parametrize(("file", "made"), [(INDEX, index), (MENU, menu)], ids=["index", "menu"])
def test_the_index_and_the_menu_list_every_page(file: Path, made) -> None:
    text = file.read_text(encoding="utf-8")
    assert text == made(text), f"run: {COMMAND}"
    for found in fit():
        assert f"{found.name}.md" in text


def _commands() -> list[tuple[str, str]]:
    found = []
    for file in sorted(PAGES.glob("*.md")):
        text = re.sub(r" \\\n\s*", " ", file.read_text(encoding="utf-8"))
        found += [
            (file.stem, command) for command in re.findall(r"^\s*\$ (fedlens run .*)$", text, re.MULTILINE)
        ]
    return found


def test_every_page_shows_a_run() -> None:
    shown = dict(_commands())
    assert all(f".name={name}" in shown[name] for name in shown if name != "index")
    assert set(shown) == {path.stem for path in PAGES.glob("*.md")}


@pytest.mark.parametrize(("name", "command"), _commands())
def test_what_a_page_shows_is_built(name: str, command: str, tmp_path: Path) -> None:
    _, _, recipe, *words = shlex.split(command)
    assert words[::2] == ["--set"] * (len(words) // 2)
    source = read_source(recipe, words[1::2])
    assert build(plan(Experiment.load(recipe, words[1::2]).config, source), tmp_path, False).algorithm


def test_a_whole_page() -> None:
    assert not faults(row())
    text = page(row())
    assert text.startswith("---\nhide: [toc]\n---\n")
    assert "\n# FedToy\n\nClients take one step less.\n\nIt is made up.\n\n```console\n" in text
    assert (
        "\n$ fedlens run digits --set algorithm.name=fedtoy --set algorithm.rate=0.5 \\\n"
        "      --set 'local.batch_size='\"'\"'all'\"'\"''\n```\n"
    ) in text
    assert "\n## Purpose\n\nNothing | at all.\n" in text
    assert "\n```text\nclient k:  w <- w - lr g      (toy2020 Eq. 1)\n    indented\n```\n" in text
    assert "\nSource: Toy 2020 ([arXiv 2001.00001](https://arxiv.org/abs/2001.00001)), Eq. 1.\n" in text
    tests = "`tests/identity/test_fedprox.py -k mu_of_zero`, `tests/identity/test_fedavg.py`"
    assert f"\n\nTests: {tests}.\n\n## Settings\n" in text
    about = "how | fast. *Sensible:* 0.1 to 1; more | where `a | b`."
    assert f"\n- `algorithm.rate` (`0.5`, above 0): {about}\n- `local.epochs`: 1.\n" in text
    assert "\n- **Weights.** Uniform.\n- **Kept.** None.\n- **Sent.** What FedAvg sends.\n" in text
    assert text.endswith("\nAny `[select]`:\n\n- one\n- two\n\n## Avoid when\n\nAlways.\n")


def test_the_symbols_of_the_equations_are_defined() -> None:
    words = notation(r"w_i f_i(x) + \sum_{i \in S} \pi_i")
    assert words == "$f_i$: mean training loss of client $i$; $S$: cohort."
    assert "cohort" not in notation(r"F_k(w) \sum_{k \in S'_t}")
    assert notation(r"\sum_{k \in S} \frac{n_k}{n}").endswith("; $n$: examples in the cohort $S$.")
    assert notation(r"x + y") == ""
    assert "loss" not in notation(" ".join(algorithm_pages.EQUATIONS["vertical"].values())), (
        "a bottom is no loss"
    )


def test_a_page_without_settings_and_without_more_words() -> None:
    text = re.sub(r"    (Ranges|Try):\n?(.*\n)+?\n", "", GOOD)
    bare = Row("client", "fedtoy", Entry("toys:fedtoy", "a toy"), lambda: None)
    bare.factory.__doc__ = text
    assert not faults(bare)
    assert "\n$ fedlens run digits --set client.name=fedtoy\n" in page(bare)
    assert "\n## Settings\n\nNone of its own.\n\n## " in page(bare)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("FedToy: clients take one step\n    less.", "Takes one step less.", "is not 'Title: one sentence.'"),
        ("less.", "less", "is not 'Title: one sentence.'"),
        ("Fixes: Nothing | at all.", "", "there is no section 'Fixes:'"),
        ("Fixes: Nothing | at all.", "Fixes:", "the section 'Fixes:' is empty"),
        ("Sent:", "State:", "the section 'State:' is set twice"),
        ("Weighting:", "Weihgting:", "'Weihgting:' is no heading"),
        ("Try:", "Command:", "'Command:' is no heading"),
        ("        - one", "    - one", "it has to be indented: '- one'"),
        ("(toy2020", " " * 99 + "(toy2020", "more than 110 characters"),
        ("Uniform.", "All the same.", "'Weighting:' does not begin with one of By examples, Uniform, None"),
        (">>> 1 + 1", "1 + 1", "'Example:' has no line that begins with '>>>'"),
        ("algorithm.rate=0.5", "algorithm.rate", "'Try:' has 'algorithm.rate', which is not key=value"),
        ("rate: 0.1 to 1;", "rate: ", "a line that is not 'setting: range': 'rate: '"),
        ("local.epochs: 1", "rate: 1", "'Ranges:' has 'rate' twice"),
        ("local.epochs: 1", "local.epoch: 1", "'Ranges:' has 'local.epoch', and there is no such setting"),
        ("local.epochs: 1", "speed: 1", "'Ranges:' has 'speed', and there is no such setting"),
        ("rate: 0.1 to 1;", "local.lr: 0.1", "'Ranges:' says nothing of the setting 'rate'"),
        ("test_fedavg.py", "test_toy.py", "'Tests:' names tests/identity/test_toy.py, which is not there"),
        ("::mu_of_zero", "::mu_of_nine", "and no test there has that name"),
    ],
)
def test_what_is_wrong_with_a_docstring_is_said(old: str, new: str, fault: str) -> None:
    assert old in GOOD
    found = faults(row(GOOD.replace(old, new, 1)))
    assert any(fault in line for line in found), found
    assert all(line.startswith("toys:fedtoy: ") for line in found)


def test_a_factory_without_a_docstring_lacks_everything() -> None:
    bare = Row("algorithm", "fedtoy", Entry("toys:fedtoy", "a toy"), lambda parts: None)
    assert len(faults(bare)) == 11


def test_a_setting_without_a_description_is_a_fault() -> None:
    def factory(parts: object, *, rate: float = 0.5) -> None:
        pass

    factory.__doc__ = GOOD
    (fault,) = faults(Row("algorithm", "fedtoy", Entry("toys:fedtoy", "a toy"), factory))
    assert fault == "toys:fedtoy: the setting 'rate' has no Field(description=...)"


def test_a_curve_is_shown_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_pages, "EVIDENCE", tmp_path)
    (tmp_path / "curves").mkdir()
    (tmp_path / "curves" / "fedtoy.svg").touch()
    lacks = "toys:fedtoy: docs/evidence/index.json has no '{}' of the curve"
    assert faults(row()) == [lacks.format(what) for what in ("caption", "command", "cpu_seconds")]
    shown = {"command": "fedlens run digits", "caption": "Test accuracy, seeds 0 and 1", "cpu_seconds": 61}
    (tmp_path / "index.json").write_text(json.dumps({"curves": {"fedtoy": shown}}), encoding="utf-8")
    assert not faults(row())
    text = page(row())
    assert text.endswith(
        "\n## Curve\n\n![Accuracy](../evidence/curves/fedtoy.svg)\n\n"
        "Test accuracy, seeds 0 and 1. `fedlens run digits`: [Evidence](../evidence.md).\n"
    )


def test_what_a_setting_can_be_in_words() -> None:
    def factory(
        *,
        a: Annotated[float, Field(ge=0, lt=1)] = 0.5,
        b: Annotated[int | None, Field(ge=2, le=1000000)] = None,
        c: bool = False,
        d: Annotated[str, Field(pattern="x")] = "x",
        e: tuple[float, ...] = (),
        f: Literal["u", "v", "w"] | None = "v",
        g: float = 1.0,
        h: int | str = 1,
    ) -> None:
        pass

    shapes = settings_model(factory).model_json_schema()["properties"]
    assert [allowed(shapes[name]) for name in "abcdefgh"] == [
        "at least 0, below 1",
        "integer, at least 2, at most 1000000",
        "",
        "text",
        "a list of: any number",
        '`"u"`, `"v"`, `"w"`',
        "any number",
        "integer or text",
    ]


def test_a_default_is_named_once_among_the_values() -> None:
    def factory(*, rate: Annotated[Literal["a", "b", "c"], Field(description="which")] = "b") -> None:
        pass

    factory.__doc__ = GOOD
    assert '- `algorithm.rate` (`"b"`, `"a"`, `"c"`): which.' in page(
        Row("algorithm", "fedtoy", Entry("toys:fedtoy", "a toy"), factory)
    )


def test_settings_are_found_where_a_toml_file_has_them() -> None:
    there = [
        "rounds",
        "local.lr",
        "data.partition.alpha",
        "server.momentum",
        "aggregate.name",
        "data.validation",
    ]
    assert [is_setting(key) for key in there] == [True] * 6
    gone = ["round", "local.rate", "data.partition.alpa", "server.nothing", "nothing.name", "local.lr.more"]
    assert [is_setting(key) for key in gone] == [False] * 6


def test_the_menu_keeps_its_other_lines() -> None:
    text = MENU.read_text(encoding="utf-8")
    gone = re.sub(r"(?m)^ +- .+: algorithms/fed.+\n", "", text)
    assert "algorithms/fedavg.md" not in gone
    assert menu(gone) == text
    more = text.replace("algorithms/index.md\n", "algorithms/index.md\n      - Old: algorithms/old.md\n")
    assert menu(more) == text
