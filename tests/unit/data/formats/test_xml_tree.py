from __future__ import annotations

from pathlib import Path

import pytest

from fedlens.base.errors import DataError
from fedlens.data.formats.voc_xml import parse_xml, text_of


def test_comments_and_cdata_do_not_cut_a_text() -> None:
    root = parse_xml(b"<?go on?><a><!-- one --><b> 1<!-- two -->2<![CDATA[<3]]> </b><c/></a>", "a.xml")
    assert [child.tag for child in root] == ["b", "c"]
    assert (text_of(root, "b"), text_of(root, "c"), text_of(root, "d")) == ("12<3", "", None)


def test_a_default_namespace_does_not_rename_elements() -> None:
    root = parse_xml(b'<a xmlns="http://example.org/voc">\n<b>5</b></a>', "a.xml")
    assert (root.tag, text_of(root, "b"), root.find("b").sourceline) == ("a", "5", 2)


def test_entities_are_refused_before_they_are_expanded(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    laughs = "".join(f"<!ENTITY l{at} '{f'&l{at - 1};' * 10}'>" for at in range(1, 30))
    for declared, used in (
        (f"<!ENTITY l0 'ha'>{laughs}", "&l29;"),
        (f"<!ENTITY x SYSTEM '{(tmp_path / 'secret').as_uri()}'>", "&x;"),
        (f"<!ENTITY % x SYSTEM '{(tmp_path / 'secret').as_uri()}'> %x;", ""),
    ):
        text = f"<?xml version='1.0'?>\n<!DOCTYPE a [{declared}]>\n<a>{used}</a>"
        with pytest.raises(DataError) as refused:
            parse_xml(text.encode(), "a.xml")
        assert str(refused.value).startswith(
            "it has a document type declaration (<!DOCTYPE>), which is not allowed"
        )
        assert "a.xml, line 2" in str(refused.value)
        assert "secret" not in str(refused.value)
    for nested in ("<a b='&l29;'/>", "<a>" * 100_000):
        with pytest.raises(DataError, match="document type declaration"):
            parse_xml(f"<!DOCTYPE a [<!ENTITY l0 'ha'>{laughs}]>\n{nested}".encode(), "a.xml")
