from pathlib import Path

import pytest

from fedlens.data.diagnostics import Findings
from fedlens.data.formats import data_checks
from fedlens.data.formats.data_checks import check_contradictions, check_leaks, same_content


def write(root: Path, **contents: str) -> None:
    for name, content in contents.items():
        (root / name).write_text(content)


def test_the_same_content_in_two_splits(tmp_path: Path) -> None:
    write(tmp_path, a="xxx", b="yyy", c="xxx", d="yyy", e="zzz", f="longer")
    names, splits = list("abcdef"), ["train", "train", "test", "train", "test", "test"]
    assert same_content(tmp_path, names, splits) == [[0, 2]]  # b and d are both in train
    findings = Findings()
    check_leaks(tmp_path, names, splits, findings)
    (finding,) = findings
    assert finding.what == "1 image is in more than one split, a leak: 'a' (train) is the same as 'c' (test)"
    assert not finding.example


def test_one_file_in_two_splits(tmp_path: Path) -> None:
    write(tmp_path, a="x")
    findings = Findings()
    check_leaks(tmp_path, ["a", "a"], ["train", "validation"], findings)
    (finding,) = findings
    assert finding.what == "1 image is in more than one split, a leak: 'a' (train) is in validation too"


def test_many_are_counted_and_the_first_three_named(tmp_path: Path) -> None:
    names = [f"{at:02}{split}" for split in ("r", "s") for at in range(12)]
    for name in names:
        write(tmp_path, **{name: name[:2]})
    findings = Findings()
    check_leaks(tmp_path, names, ["train"] * 12 + ["test"] * 12, findings)
    (finding,) = findings
    assert finding.what.startswith("12 images are in more than one split")
    assert finding.what.count("is the same as") == 3
    assert finding.what.endswith("'02r' (train) is the same as '02s' (test), and 9 more")


def test_only_files_of_one_size_in_several_splits_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    digests = data_checks._digests
    monkeypatch.setattr(
        data_checks, "_digests", lambda root, names: read.extend(names) or digests(root, names)
    )
    write(tmp_path, a="xxx", b="xxx", c="yyyy", d="zzzz", e="uuuuu")
    splits = ["train", "train", "train", "test", "test"]
    assert same_content(tmp_path, list("abcde"), splits) == []
    assert read == ["c", "d"]


def test_files_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, a="x", b="")
    (tmp_path / "empty").write_text("")
    findings = Findings()
    check_leaks(tmp_path, ["a", "gone", "b", "empty"], ["train", "test", "train", "test"], findings)
    assert not len(findings)


def test_the_same_image_with_another_label_is_named_with_both_files_clients_and_labels(
    tmp_path: Path,
) -> None:
    write(tmp_path, a="xxx", b="xxx", c="xxx", d="yyy", e="yyy", f="zzz")
    names, labels = list("abcdef"), ["cat", "dog", "dog", "cat", "cat", "dog"]
    findings = Findings()
    check_contradictions(tmp_path, names, labels, ["Ulm", "Ulm", "Bonn", "Ulm", "Bonn", "Bonn"], findings)
    (warning,) = findings.warnings
    assert str(warning) == (
        f"{tmp_path / 'c'}: the same image has different labels: 'a' (Ulm, cat) and 'c' (Bonn, dog); "
        "3 files have this content; correct the label of one, or remove one of them."
    )
    assert len(findings) == 0
    findings = Findings()
    check_contradictions(tmp_path, names, labels, None, findings)
    assert "'a' (cat) and 'b' (dog)" in findings.warnings[0].what
