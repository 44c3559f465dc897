"""What `mkdocs build` does beyond its plugins.

Equations become MathML, a notebook becomes a page, and the short names of papers are spelled out. None of it needs a
network, or a script in the page.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

from fedlens.studies.reproductions import PAPERS

_MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', flags=re.DOTALL)
_PLAIN = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<math.*?</math>|<[^>]*>)", flags=re.DOTALL)
_SHORT = re.compile(rf"\b({'|'.join(PAPERS)})\b")
_BREAKPOINTS = {"76.25em": "72em", "76.234375em": "71.984375em"}
_NOTEBOOK = re.compile(r"<!-- notebook: (\S+\.ipynb) -->")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Puts the cells of a notebook where a page says `<!-- notebook: FILE -->`."""
    folder = Path(config.docs_dir) / Path(page.file.src_uri).parent
    return _NOTEBOOK.sub(lambda match: notebook(folder / match[1]), markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Turns `$...$` and `$$...$$`, which arithmatex has marked, into MathML, and spells papers out."""
    drawn = _MATH.sub(lambda match: mathml(html.unescape(match[3]), block=match[2] == "["), content)
    return spelled(drawn)


def on_post_build(config: Any) -> None:
    """Shows the tabs and the menu from 1,152 pixels on, instead of material's 1,220: many laptops are narrower."""
    assets = Path(config.site_dir) / "assets"
    for file in [*assets.glob("stylesheets/main.*.css"), *assets.glob("javascripts/bundle.*.js")]:
        text = file.read_text(encoding="utf-8")
        for wide, less in _BREAKPOINTS.items():
            text = text.replace(wide, less)
        file.write_text(text, encoding="utf-8")


def mathml(latex: str, block: bool) -> str:
    """The equation in MathML; it may wrap to the next line at `\\qquad` and `\\allowbreak`.

    Raises `PluginError`, which fails the build, if a command of LaTeX has no MathML.

    >>> mathml("w", block=False)
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><mi>w</mi></mrow></math>'
    """
    if block:
        parts = [
            "".join(convert(piece.strip(), display="block") for piece in part.split(r"\allowbreak"))
            for part in latex.split(r"\qquad")
        ]
        drawn = f'<div class="equation">{"".join(f"<div>{part}</div>" for part in parts)}</div>'
    else:
        drawn = convert(latex.strip())
    if "\\" in drawn or "merror" in drawn:  # latex2mathml keeps an unknown command as text
        raise PluginError(f"The equation has a command that latex2mathml does not know: {latex.strip()}")
    return drawn


def spelled(content: str) -> str:
    """The page with "Hsu et al. 2019" in place of the short name, but for code; the first one has its title.

    >>> spelled("<p>hsu2020 and <code>hsu2020</code></p>")
    '<p><abbr title="Federated Visual ... Distribution">Hsu et al. 2020</abbr> and <code>hsu2020</code></p>'
    """
    seen: set[str] = set()

    def name(match: re.Match[str]) -> str:
        paper = PAPERS[match[1]]
        if match[1] in seen:
            return paper.authors
        seen.add(match[1])
        return f'<abbr title="{paper.title}">{paper.authors}</abbr>'

    # Every second piece is markup or code.
    return "".join(
        piece if k % 2 else _SHORT.sub(name, piece) for k, piece in enumerate(_PLAIN.split(content))
    )


def notebook(path: Path) -> str:
    """The cells of a notebook in Markdown: text, code, and what each cell printed and showed."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source:
            parts += [_fenced("python", source), *(_output(output) for output in cell["outputs"])]
    return "\n\n".join(parts)


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _fenced("text", "".join(output["text"]))
    shown = {kind: "".join(text) for kind, text in output["data"].items()}
    if "image/svg+xml" in shown:
        picture = re.sub(r"^.*?(?=<svg)", "", shown["image/svg+xml"], flags=re.DOTALL)
        return _raw(picture)
    if "image/png" in shown:
        return _raw(f'<img alt="" src="data:image/png;base64,{shown["image/png"].strip()}">')
    if "text/html" in shown:
        return _raw(re.sub(r"<style.*?</style>", "", shown["text/html"], flags=re.DOTALL))
    return _fenced("text", shown["text/plain"])


def _raw(markup: str) -> str:
    # Without empty lines, which would end the block for Markdown.
    lines = "\n".join(line.strip() for line in markup.splitlines() if line.strip())
    return f'<div class="output">{lines}</div>'


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
