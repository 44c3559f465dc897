"""The card "What this page contains": what a reader learns of the data from a finished page.

The list is read from the page itself. A part of a template that shows numbers of the data carries the attribute
`data-holds`, with the words for the list; pictures, names of clients and file paths are looked for in the text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection

from fedlens.base.format import count, many

_HOLDS = re.compile(r'data-holds="([^"]*)"')
_PICTURE = re.compile(r'(?:src|href)="data:image/')
_PATH = re.compile(r"(?<![\w.:/<])(?:[A-Za-z]:)?/(?:[^\s/<>\"'`,;()\[\]]+/)+[^\s/<>\"'`,;()\[\]]*")
_TEXT, _LABEL = re.compile(r">([^<>]+)<"), re.compile(r'"(?:[^"\\]|\\.)*"')
_SHOWN = 3  # paths and names that are repeated in the list


def page_contents(body: str, clients: Collection[str] = ()) -> list[str]:
    """What the body of a page holds of the data and the machine, as sentences.

    Args:
        body: the HTML, and what stands around it.
        clients: the names of the clients, to be looked for; numbers are no names.

    >>> body = '<img src="data:image/png;base64,x"><p data-holds="The settings."></p><td>Ulm</td>'
    >>> page_contents(body, ["Ulm", "Bonn"])
    ['1 picture of the data.', 'The settings.', 'The names of 1 client of 2, such as Ulm.']
    """
    found = []
    if pictures := len(_PICTURE.findall(body)):
        found.append(f"{many(pictures, 'picture')} of the data.")
    found += [html.unescape(words) for words in dict.fromkeys(_HOLDS.findall(body))]
    shown = _labels(body)
    named = [name for name in clients if name in shown and not name.isdecimal()]
    if named:
        such = ", ".join(named[:_SHOWN])
        found.append(f"The names of {many(len(named), 'client')} of {count(len(clients))}, such as {such}.")
    text = html.unescape(re.sub(r"<style.*?</style>|<[^>]*>", " ", body, flags=re.DOTALL))
    if paths := list(dict.fromkeys(path.rstrip(".:") for path in _PATH.findall(text))):
        found.append(f"{many(len(paths), 'file path')}, such as {paths[0]}.")
    return found


def _labels(body: str) -> set[str]:
    """The texts of a page: of cells, and of labels in its figures, which are JSON."""
    cells = {html.unescape(text).strip() for text in _TEXT.findall(body)}
    return cells | {_decoded(label) for label in _LABEL.findall(body)}


def _decoded(label: str) -> str:
    try:
        return html.unescape(str(json.loads(label)))  # labels of figures are escaped once more
    except ValueError:  # not of JSON
        return label
