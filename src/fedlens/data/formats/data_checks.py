"""Checks data as a whole: names that look alike, few images of a class, one image in two splits or classes."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from fedlens.base.threads import map_threads
from fedlens.data.diagnostics import Findings, shortened
from fedlens.data.images import file_sha256

_NAMED = 3  # pairs that the message names

FEW = 5  # a class or client with fewer images is listed
_LINES = 3  # of a table that a warning names
_LISTED = 10  # names that a warning lists
_SHOWN = 60  # characters of a name in a warning
_COMPARED = 1000  # with more names, only the same spelling in another form is looked for
_LONGEST = 40  # characters of a name that is compared letter by letter
_SURROGATE = re.compile("[\ud800-\udfff]")
_APOSTROPHES = re.compile("['\u2018\u2019`\u00b4]")
_SEPARATORS = re.compile(r"[\s_\-.,;:/|&()\[\]\"\u2010-\u2015]+")
_RARE = 0.1  # of the images of the other name: below it, a name may be a misspelling


def check_leaks(
    root: Path, names: Sequence[str], splits: Sequence[str], findings: Findings, published: bool = False
) -> None:
    """Adds one problem of the whole set if images are in more than one split: their number, and the first few.

    It is a warning if the splits are `published`: CIFAR-100 has ten such images.

    An image is in two splits if its file is, or if two files have the same content; see `same_content`.
    """
    groups = same_content(root, names, splits)
    if not groups:
        return
    pairs = []
    for group in groups[:_NAMED]:
        first, *others = sorted(group, key=lambda row: splits[row] != "train")
        second = next(row for row in others if splits[row] != splits[first])
        twin = f"the same as '{names[second]}' ({splits[second]})"
        also = f"in {splits[second]} too" if names[first] == names[second] else twin
        pairs.append(f"'{names[first]}' ({splits[first]}) is {also}")
    more = f", and {len(groups) - _NAMED:,} more" if len(groups) > _NAMED else ""
    count = f"{len(groups):,} images are" if len(groups) > 1 else "1 image is"
    what = f"{count} in more than one split, a leak: {', '.join(pairs)}{more}"
    (findings.warn if published else findings.add_whole)(root, what, "keep each in one split only")


def check_contradictions(
    root: Path,
    names: Sequence[str],
    labels: Sequence[str],
    clients: Sequence[str] | None,
    findings: Findings,
) -> None:
    """Adds a warning for each group of files with the same content and different labels: one label must be wrong.

    Args:
        root: the folder of the images.
        names: [n], the files below `root`.
        labels: [n], the class of each, or all of its classes, as text.
        clients: [n], the client of each; None if there are none.
        findings: gets the warnings.
    """
    for group in same_content(root, names, labels):
        first, *others = group
        second = next(row for row in others if labels[row] != labels[first])
        if clients is not None:  # of another client, if one of these has another label
            apart = (row for row in others if labels[row] != labels[first] and clients[row] != clients[first])
            second = next(apart, second)
        files = (
            f"'{names[row]}' ({'' if clients is None else f'{clients[row]}, '}{labels[row]})"
            for row in (first, second)
        )
        more = f"; {len(group):,} files have this content" if len(group) > 2 else ""
        what = f"the same image has different labels: {' and '.join(files)}{more}"
        findings.warn(root / names[second], what, "correct the label of one, or remove one of them")


def same_content(root: Path, names: Sequence[str], splits: Sequence[str]) -> list[list[int]]:
    """Groups of rows that have the same image and are not all in one split, in the order of their first rows.

    Files are compared by SHA-256 if their size occurs in several splits; of all other files only the size is
    read. Files that cannot be read are skipped.
    """
    unique = list(dict.fromkeys(names))
    sizes = {name: _size(root / name) for name in unique}
    splits_of_size: defaultdict[int | None, set[str]] = defaultdict(set)
    for name, split in zip(names, splits, strict=True):
        splits_of_size[sizes[name]].add(split)
    candidates = [name for name in unique if sizes[name] and len(splits_of_size[sizes[name]]) > 1]
    digests = dict(zip(candidates, _digests(root, candidates), strict=True))
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for row, name in enumerate(names):
        if (digest := digests.get(name)) is not None:
            groups[digest].append(row)
    return [rows for rows in groups.values() if len({splits[row] for row in rows}) > 1]


def _digests(root: Path, names: Iterable[str]) -> list[bytes | None]:
    def digest(name: str) -> bytes | None:
        try:
            return file_sha256(root / name)
        except OSError:
            return None

    return map_threads(digest, names)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def check_names(
    kind: str,
    counts: Mapping[str, int],
    where: object,
    findings: Findings,
    lines: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Adds a warning for near names, and one for names with fewer than five images.

    Args:
        kind: "class" or "client".
        counts: the number of images of each name.
        where: the table or folder that the names come from.
        lines: the lines of the table with each name; of a near name, the first three are named.

    >>> findings = Findings()
    >>> check_names("class", {"dog": 90, "dogg": 2, "cat": 80}, "scans.csv", findings)
    >>> print(*findings.warnings, sep="\\n")
    scans.csv: the class 'dogg' (2 images) looks like 'dog' (90 images); if they are the same, use one spelling.
    scans.csv: 1 class has fewer than 5 images: 'dogg' 2; check the spelling, or add images.
    """
    plural = "classes" if kind == "class" else f"{kind}s"
    pairs = sorted(near_names(counts), key=lambda pair: (counts[pair[0]], pair))
    for rare, usual in pairs[:_LISTED]:
        names = (f"'{shortened(name, _SHOWN)}' ({_images(counts[name])})" for name in (rare, usual))
        what = f"the {kind} {' looks like '.join(names)}"
        place = f"{where}{_first_lines((lines or {}).get(rare, ()))}"
        findings.warn(place, what, "if they are the same, use one spelling", alike=True)
    if len(pairs) > _LISTED:
        findings.warn(
            where,
            f"{len(pairs) - _LISTED:,} more {plural} look like another",
            "check the spelling",
            alike=True,
        )
    few = sorted(
        (name for name, count in counts.items() if count < FEW), key=lambda name: (counts[name], name)
    )
    if few:
        shown = ", ".join(f"'{shortened(name, _SHOWN)}' {counts[name]}" for name in few[:_LISTED])
        more = f" and {len(few) - _LISTED:,} more" if len(few) > _LISTED else ""
        number = f"1 {kind} has" if len(few) == 1 else f"{len(few):,} {plural} have"
        what = f"{number} fewer than {FEW} images: {shown}{more}"
        findings.warn(where, what, "check the spelling, or add images")


def check_unicode(kind: str, names: Iterable[str], where: object, findings: Findings) -> None:
    """Adds a problem of the whole set for each name with a lone surrogate, half of a character.

    JSON can contain one, and a file name that is not UTF-8 is read with one. No file in UTF-8 can, so no page and no
    table with such a name could be written.

    >>> findings = Findings()
    >>> check_unicode("class", ["cat", "d\\udc00g"], "a.json", findings)
    >>> findings.found[0].what
    "the name of the class 'd\\\\udc00g' has half of a character, \\\\udc00"
    """
    for name in names:
        half = _SURROGATE.search(name)
        if half is not None:
            shown = shortened(name, _SHOWN).encode("ascii", "backslashreplace").decode()
            what = f"the name of the {kind} '{shown}' has half of a character, {ascii(half[0])[1:-1]}"
            findings.add_whole(where, what, "write it in UTF-8, or rename it")


def near_names(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(rarer, more frequent) of each pair of names that may be meant to be one.

    | names | near |
    |---|---|
    | the same but for case, accents, white space, hyphens, punctuation or Unicode form | always |
    | one letter added, left out, changed or exchanged (two from 8 letters on) | if one of them is rare: fewer than
    five images, or fewer than a tenth of the other |
    | different digits, a different part of one or two letters, a Roman number, another last letter | never |

    >>> list(near_names({"Mainz": 90, "mainz": 2, "site1": 50, "site2": 1}))
    [('mainz', 'Mainz')]
    """
    by_form: defaultdict[str, list[str]] = defaultdict(list)
    for name in counts:
        by_form[_form(name)].append(name)
    for names in by_form.values():
        usual, *others = sorted(names, key=lambda name: (-counts[name], name))
        yield from ((other, usual) for other in others)
    if len(by_form) > _COMPARED:
        return
    forms = {form: max(names, key=lambda name: (counts[name], name)) for form, names in by_form.items()}
    for first, second in _candidates([form for form in forms if 3 <= len(form) <= _LONGEST]):
        rare, usual = sorted((forms[first], forms[second]), key=lambda name: (counts[name], name))
        few, many = counts[rare], counts[usual]
        if (few < FEW or few < _RARE * many) and few < many and _misspelt(first, second):
            yield rare, usual


def _form(name: str) -> str:
    """A name without case, accents, apostrophes, and the kind of its separators and punctuation.

    >>> _form("St. Mary's"), _form("st mary\u2019s"), _form("...")
    ('st marys', 'st marys', '...')
    """
    words = re.sub(r"(?<=[a-zß-ÿ])(?=[A-Z][a-z])", " ", name)  # siteA and siteB stay words of their own
    decomposed = unicodedata.normalize("NFKD", words).casefold()
    letters = "".join(c for c in decomposed if not unicodedata.combining(c))
    form = " ".join(_SEPARATORS.split(_APOSTROPHES.sub("", letters))).strip()
    return form or name


def _candidates(forms: list[str]) -> set[tuple[str, str]]:
    """Pairs that may be at most two edits apart: those that leave the same letters after at most two deletions."""
    of_rest: defaultdict[str, list[str]] = defaultdict(list)
    for form in forms:
        for number in range(1 + _allowed(form)):
            for gone in combinations(range(len(form)), number):
                of_rest["".join(c for at, c in enumerate(form) if at not in gone)].append(form)
    pairs = set()
    for close in of_rest.values():
        pairs |= {(a, b) if a < b else (b, a) for a, b in combinations(set(close), 2)}
    return pairs


def _allowed(form: str) -> int:
    """How many edits a misspelling of this length has at most."""
    return 1 if len(form) < 8 else 2


def _misspelt(first: str, second: str) -> bool:
    if re.findall(r"\d+", first) != re.findall(r"\d+", second):
        return False
    if len(first) == len(second) and (len(first) == 3 or first[:-1] == second[:-1]):
        return False  # cat and bat, ward a and ward b
    words = first.split(), second.split()
    if len(words[0]) == len(words[1]):
        different = [word for pair in zip(*words, strict=True) if pair[0] != pair[1] for word in pair]
        if any(len(word) < 3 or re.fullmatch("[ivx]+", word) for word in different):
            return False
    return _edits(first, second) <= min(_allowed(first), _allowed(second))


def _edits(first: str, second: str) -> int:
    """Letters added, left out, changed, or exchanged with their neighbour (optimal string alignment)."""
    rows = [list(range(len(second) + 1))]
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and (a, b) == (second[j - 2], first[i - 2]):
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def _first_lines(lines: Sequence[int]) -> str:
    """The first lines, to be written after the name of a file.

    >>> _first_lines([7]), _first_lines([9, 7]), _first_lines([4, 3, 2, 1, 5])
    (', line 7', ', lines 7 and 9', ', lines 1, 2, 3 and 2 more')
    """
    if not lines:
        return ""
    shown = [f"{line}" for line in sorted(lines)[:_LINES]]
    if len(lines) == 1:
        return f", line {shown[0]}"
    if len(lines) > _LINES:
        return f", lines {', '.join(shown)} and {len(lines) - _LINES:,} more"
    return f", lines {', '.join(shown[:-1])} and {shown[-1]}"


def _images(count: int) -> str:
    return f"{count:,} image{'s' * (count != 1)}"
