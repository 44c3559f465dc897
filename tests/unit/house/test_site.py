"""The documentation site: equations, short names, the API pages, and nothing that is fetched from elsewhere."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement

import fedlens
from fedlens.base.registry import load_file
from tools.algorithm_pages import EQUATIONS, rows

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"

pytest.importorskip("latex2mathml", reason="the docs' tools: pip install 'fedlens[dev]'")
slugify = pytest.importorskip("markdown.extensions.toc").slugify
hooks = load_file(DOCS / "theme" / "hooks.py")
fenced = load_file(DOCS / "theme" / "docstrings.py").fenced


@pytest.mark.parametrize("name", sorted(EQUATIONS))
def test_the_equations_of_a_page_become_mathml(name: str) -> None:
    assert name in {row.name for row in rows()}
    for who, latex in EQUATIONS[name].items():
        for drawn in [
            hooks.mathml(latex, block=True),
            *(hooks.mathml(k, False) for k in re.findall(r"\$(.+?)\$", who)),
        ]:
            assert "<math" in drawn


def test_an_equation_with_an_unknown_command_fails_the_build() -> None:
    for block in (True, False):
        with pytest.raises(hooks.PluginError, match="nonsense"):
            hooks.mathml(r"w + \nonsense{x}", block)


def test_every_algorithm_has_equations() -> None:
    assert {row.name for row in rows()} == set(EQUATIONS)


def test_parts_of_an_equation_may_wrap() -> None:
    assert hooks.mathml(r"a \qquad b", block=True).count("<math") == 2
    assert hooks.mathml(r"a \allowbreak {} + b \qquad c", block=True).count("<math") == 3


def test_marked_mathematics_is_drawn_and_code_is_not() -> None:
    page = r'<p><span class="arithmatex">\(w\)</span> <code>$w$</code></p>'
    drawn = hooks.on_page_content(page, None, None, None)
    assert re.fullmatch(r"<p><math.*<mi>w</mi>.*</math> <code>\$w\$</code></p>", drawn)


def test_a_paper_is_named_the_first_time_with_its_title_and_never_in_code() -> None:
    page = "<p>hsu2019, hsu2019 and <code>hsu2019</code></p>"
    title = "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification"
    named = f'<p><abbr title="{title}">Hsu et al. 2019</abbr>, Hsu et al. 2019 and <code>hsu2019</code></p>'
    assert hooks.spelled(page) == named


def test_examples_of_docstrings_are_code() -> None:
    text = "Adds.\n\n>>> 1 + 1  # doctest: +SKIP\n2\n\nNo more."
    assert fenced(text) == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nNo more."
    assert fenced("Adds.\n>>> 1 + 1\n2") == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```"


API = [
    name
    for page in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
]


@pytest.mark.parametrize("name", API)
def test_an_api_page_shows_what_is_there(name: str) -> None:
    module, _, thing = name.rpartition(".")
    found = importlib.import_module(module)
    alias = re.search(
        rf'^{thing} = .*\n"""\S', inspect.getsource(found), flags=re.MULTILINE
    )  # has no __doc__
    assert (getattr(found, thing).__doc__ or "").strip() or alias


def test_the_api_pages_show_each_thing_once_and_all_that_fedlens_exports() -> None:
    assert len(API) == len(set(API))
    exported = {getattr(fedlens, name) for name in fedlens.__all__ if name != "__version__"}
    exported = {thing for thing in exported if not isinstance(thing, ModuleType)}
    assert {f"{thing.__module__}.{thing.__name__}" for thing in exported} <= set(API)


def _outside_code(page: Path) -> str:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`]*`", "", text)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/theme/partials"])
def test_a_link_that_mkdocs_does_not_see_has_a_target(name: str) -> None:
    if name.endswith(".md"):
        folder, text = ROOT, _outside_code(ROOT / name)
        links = re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", text)
    else:  # templates, with the addresses of built pages
        folder, text = DOCS, "".join(part.read_text(encoding="utf-8") for part in (ROOT / name).iterdir())
        links = re.findall(r"{{ '([^']*)' \| url }}#?([^\"]*)", text.replace(".html'", ".md'"))
    assert links
    for path, anchor in links:
        target = folder / path if path else ROOT / name
        assert target.is_file(), path
        headings = re.findall(r"^#+ (.+)$", _outside_code(target) if anchor else "", flags=re.MULTILINE)
        assert not anchor or anchor in {slugify(heading, "-") for heading in headings}, (path, anchor)


def test_pages_link_in_markdown_which_mkdocs_checks() -> None:
    for page in DOCS.rglob("*.md"):
        assert not re.search(r"<(?:a|img)\s[^>]*(?:href|src)=", _outside_code(page)), page


def test_nothing_is_fetched_from_elsewhere() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    assert "offline" in config["plugins"]
    assert config["theme"]["font"] is False
    packed = [*config["extra"]["polyfills"], *config["extra_css"]]
    assert any("iframe-worker" in path for path in packed), "the plugin `offline` would fetch it"
    assert all((DOCS / "theme" / path).is_file() for path in packed)
    assert "://" not in re.sub(r"#.*", "", text)


def test_a_new_release_of_the_tools_does_not_stop_the_hooks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {found.name: found for found in map(Requirement, project["optional-dependencies"]["dev"])}
    assert not needed["mkdocs"].specifier.contains("2.0", prereleases=True)
    assert not needed["mkdocs-material"].specifier.contains("10.0", prereleases=True)
