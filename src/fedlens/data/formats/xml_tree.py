"""Safe XML parsing with lxml: elements know their line (`sourceline`), and nothing outside the file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlens.core.errors import DataError

Element = Any  # lxml's; it comes without types


def parse_xml(content: bytes, where: str) -> Element:
    """The root element of an XML file, an `lxml.etree` element without comments.

    A document type declaration is refused: annotations have none, and through its entities a file of a few
    lines can ask for gigabytes, or for another file. Raises `DataError` with the line where the file is broken.

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
        if b"<!DOCTYPE" in content:  # the likely cause of what else is wrong, such as endless entities
            raise _declaration(content, where) from error
        first = parser.error_log[0]
        what = f"the XML is broken: {first.message.strip()} (column {first.column})"
        raise DataError(
            what, where=f"{where}, line {first.line}", hint="write the file again, in UTF-8"
        ) from error
    if root.getroottree().docinfo.doctype:
        raise _declaration(content, where)
    for element in root.iter("*"):  # names count, not the namespace that a tool puts them in
        if element.tag[0] == "{":
            element.tag = etree.QName(element).localname
    return root


def _declaration(content: bytes, where: str) -> DataError:
    line = content[: max(content.find(b"<!DOCTYPE"), 0)].count(b"\n") + 1
    what = "it has a document type declaration (<!DOCTYPE>), which is not read"
    return DataError(what, where=f"{where}, line {line}", hint="remove the declaration")


def read_xml(path: Path) -> Element:
    """The root element of the file `path`; see `parse_xml`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror}", where=str(path), hint="see that it is there"
        ) from error
    return parse_xml(content, str(path))


def text_of(element: Element, tag: str) -> str | None:
    """The text of the first child called `tag`, without spaces around it; None if there is no such child."""
    text: str | None = element.findtext(tag)
    return None if text is None else text.strip()
