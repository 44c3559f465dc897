import numpy as np
import pytest

from fedlens.data.datasets.text import LETTER_NAMES, LETTERS, SPACE, letter_ids, words


def test_the_vocabulary_is_leafs() -> None:
    """80 characters in the order of their codes: the first, the last, and how many of each kind."""
    assert len(LETTERS) == len(set(LETTERS)) == len(set(LETTER_NAMES)) == 80
    assert list(LETTERS) == sorted(LETTERS)
    assert LETTERS.startswith("\n !\"&'(),-.0123456789:;>?A")
    assert LETTERS.endswith("Z[]abcdefghijklmnopqrstuvwxyz}")
    assert LETTER_NAMES[:2] == ("newline", "space")


def test_each_letter_has_its_place_as_its_id() -> None:
    ids, unknown = letter_ids(LETTERS)
    np.testing.assert_array_equal(ids, np.arange(80))
    assert (ids.dtype, unknown) == (np.int16, 0)


@pytest.mark.parametrize("stranger", ["<", "$", "_", "\t", "é", "\x7f", "\x80", "😀", "\ud800"])
def test_a_character_that_is_not_in_it_is_a_space_and_counted(stranger: str) -> None:
    ids, unknown = letter_ids(f"a{stranger}b{stranger}")
    assert ids.tolist() == [LETTERS.index("a"), SPACE, LETTERS.index("b"), SPACE]
    assert unknown == 2


def test_no_text_has_no_ids() -> None:
    assert letter_ids("")[0].shape == (0,)


def test_words_are_leafs() -> None:
    assert words("@Bob: DON'T!! (really)  http://x.y/z_1 Ünï") == [
        "bob", "don't", "!", "!", "really", "http", "x", ".", "y", "z_1", "ünï",
    ]  # fmt: skip
    assert words(" -:- ") == []
