"""XML that remembers its lines, so that a fault can be found again in the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from fedlens.core.errors import DataError


@dataclass
class Element:
    """One element: its name, the line where it begins, its text, and what is in it."""

    tag: str
    line: int
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        """The children called `tag`."""
        return [child for child in self.children if child.tag == tag]

    def first(self, tag: str) -> Element | None:
        """The first child called `tag`."""
        return next((child for child in self.children if child.tag == tag), None)


def parse_xml(content: bytes, where: str) -> Element:
    """The root element of an XML file.

    A document type declaration is refused: annotations have none, and through its entities a file of a few
    lines can ask for gigabytes, or for another file. Raises `DataError` with the line where the file is broken.

    >>> root = parse_xml(b"<a>\\n<b> 5 </b></a>", "a.xml")
    >>> root.tag, root.children[0].text, root.children[0].line
    ('a', '5', 2)
    """
    if not content.strip():
        raise DataError("the file is empty", where=where, hint="write it again, or remove it")
    parser = expat.ParserCreate()
    top = Element("", 0)
    open_ones = [top]

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, parser.CurrentLineNumber)
        open_ones[-1].children.append(element)
        open_ones.append(element)

    def end(tag: str) -> None:
        element = open_ones.pop()
        element.text = element.text.strip()

    def text(more: str) -> None:
        open_ones[-1].text += more

    def doctype(name: str, system: str | None, public: str | None, has_internal: bool) -> None:
        what = "it has a document type declaration (<!DOCTYPE>), which is not read"
        raise DataError(
            what, where=f"{where}, line {parser.CurrentLineNumber}", hint="remove the declaration"
        )

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = text
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        reason = expat.ErrorString(error.code)
        what = f"the XML is broken: {reason} (column {error.offset + 1})"
        raise DataError(
            what, where=f"{where}, line {error.lineno}", hint="write the file again, in UTF-8"
        ) from error
    except (LookupError, ValueError) as error:  # an encoding that is declared and not known
        raise DataError(f"the XML cannot be read: {error}", where=where, hint="save it in UTF-8") from error
    return top.children[0]


def read_xml(path: Path) -> Element:
    """The root element of the file `path`; see `parse_xml`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror}", where=str(path), hint="see that it is there"
        ) from error
    return parse_xml(content, str(path))
