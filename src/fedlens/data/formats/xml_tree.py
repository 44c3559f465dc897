"""Safe XML parsing with lxml: elements know their line (`sourceline`), and nothing outside the file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlens.base.errors import DataError
from fedlens.data.formats.texts import read_bytes

Element = Any  # of lxml, which has no types


def parse_xml(content: bytes, where: str) -> Element:
    """The root element of an XML file, an `lxml.etree` element without comments.

    A document type declaration is refused: annotations have none, and its entities let a file of a few lines expand
    to gigabytes, or read another file. Raises `DataError` with the line of the error if the XML is invalid.

    >>> root = parse_xml(b"<a>\\n<b> 5 </b></a>", "a.xml")
    >>> root.tag, text_of(root, "b"), root.find("b").sourceline
    ('a', '5', 2)
    """
    from lxml import etree  # here, because only VOC's formats need it

    if not content.strip():
        raise DataError("the file is empty", where=where, hint="write it again, or remove it")
    parser = etree.XMLParser(
        resolve_entities=False, load_dtd=False, no_network=True, remove_comments=True, remove_pis=True
    )
    try:
        root = etree.fromstring(content, parser)
    except etree.XMLSyntaxError as error:
        if b"<!DOCTYPE" in content:  # the likely cause of other errors, such as endless entities
            raise _declaration(content, where) from error
        first = parser.error_log[0]
        what = f"the XML is invalid: {first.message.strip()} (column {first.column})"
        place = f"{where}, line {first.line}"
        raise DataError(what, where=place, hint="write the file again, in UTF-8") from error
    if root.getroottree().docinfo.doctype:
        raise _declaration(content, where)
    for element in root.iter("*"):  # some tools write a namespace before the names
        if element.tag[0] == "{":
            element.tag = etree.QName(element).localname
    return root


def _declaration(content: bytes, where: str) -> DataError:
    line = content[: max(content.find(b"<!DOCTYPE"), 0)].count(b"\n") + 1
    what = "it has a document type declaration (<!DOCTYPE>), which is not allowed"
    return DataError(what, where=f"{where}, line {line}", hint="remove the declaration")


def read_xml(path: Path) -> Element:
    """The root element of the file `path`; see `parse_xml`."""
    return parse_xml(read_bytes(path), str(path))


def text_of(element: Element, tag: str) -> str | None:
    """The text of the first child called `tag`, without spaces around it; None if there is no such child."""
    text: str | None = element.findtext(tag)
    return None if text is None else text.strip()
