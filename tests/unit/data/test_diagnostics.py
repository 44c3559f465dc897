import pytest

from fedlens.base.errors import DataError
from fedlens.data.diagnostics import Finding, Findings, summarized

KINDS = "abcdefghijklmnopqrstuvwxyzABCD"


def found(*examples: bool) -> Findings:
    """A finding of its own kind for each."""
    findings = Findings()
    for at, example in enumerate(examples):
        findings.add(f"{at}.png", f"fault {at} {KINDS[at]}", f"mend {at}", example=example)
    return findings


def test_a_finding_is_a_sentence() -> None:
    assert str(Finding("a.png", "the file is empty")) == "a.png: the file is empty."
    assert str(found(True).found[0]) == "0.png: fault 0 a; mend 0."


def test_a_place_is_shortened_as_a_sentence_is() -> None:
    findings = Findings()
    findings.add("n" * 9000, "s" * 9000)
    findings.warn("n" * 9000, "s" * 9000)
    assert all(len(str(finding)) < 2200 for finding in (*findings, *findings.warnings))


def test_nothing_found_is_nothing_to_say() -> None:
    assert Findings().settle("stop") == ()
    assert not Findings()


def test_one_finding_is_told_with_its_place_and_both_ways_out() -> None:
    with pytest.raises(DataError) as caught:
        found(True).settle("stop")
    assert (
        str(caught.value)
        == 'fault 0 a (0.png); mend 0; or leave them out with data.dataset.on_error = "skip".'
    )
    with pytest.raises(DataError) as caught:
        found(False).settle("skip")
    assert str(caught.value) == "fault 0 a (0.png); mend 0."


def test_many_findings_are_one_error_that_counts_them() -> None:
    with pytest.raises(DataError) as caught:
        found(*[True] * 7).settle("stop", advice="'fedlens data check' lists all")
    lines = str(caught.value).splitlines()
    assert lines[0] == "7 problems in the data"
    assert lines[1:7] == [
        *(f"  {at}.png: fault {at} {KINDS[at]}; mend {at}." for at in range(5)),
        "  And 2 more.",
    ]
    assert lines[7:] == [
        "'fedlens data check' lists all; or leave them out with data.dataset.on_error = \"skip\"."
    ]


def test_faults_of_the_whole_set_come_first_and_hide_nothing() -> None:
    with pytest.raises(DataError) as caught:
        found(True, False).settle("stop")
    assert str(caught.value).splitlines() == [
        "2 problems in the data",
        "  1.png: fault 1 b; mend 1.",
        "  0.png: fault 0 a; mend 0.",
    ]


def test_a_reader_without_the_setting_does_not_name_it() -> None:
    with pytest.raises(DataError) as caught:
        found(True).settle(None)
    assert str(caught.value) == "fault 0 a (0.png); mend 0."


def test_a_remedy_replaces_the_hint_of_every_problem() -> None:
    findings = Findings(remedy="download it again")
    findings.add("a.xml, line 3", "the object has no <name>", "name its class")
    with pytest.raises(DataError) as caught:
        findings.settle(None)
    assert str(caught.value) == "the object has no <name> (a.xml, line 3); download it again."
    findings.add("b.xml", "the file is empty", "write it again")
    with pytest.raises(DataError) as caught:
        findings.settle(None)
    assert caught.value.hint == "download it again"
    assert caught.value.what.splitlines()[1:] == [
        "  a.xml, line 3: the object has no <name>.",
        "  b.xml: the file is empty",
    ]


def test_skipping_says_what_was_skipped() -> None:
    assert found(True, True).settle("skip") == (
        "skipped 0.png: fault 0 a; mend 0.",
        "skipped 1.png: fault 1 b; mend 1.",
    )


def test_a_fault_of_the_whole_set_stops_even_where_examples_are_skipped() -> None:
    with pytest.raises(DataError) as caught:
        found(True, False, True, False).settle("skip")
    text = str(caught.value)
    assert "2 problems in the data" in text
    assert "fault 1" in text
    assert "fault 3" in text
    assert "fault 0" not in text
    assert "on_error" not in text  # it would not help


def test_very_many_skipped_are_counted_not_listed() -> None:
    notes = found(*[True] * 30).settle("skip")
    assert len(notes) == 21
    assert notes[19] == "skipped 19.png: fault 19 t; mend 19."
    assert notes[20] == "skipped 10 more; 30 in all"


def test_more_than_five_of_a_kind_are_one_line_and_bury_nothing() -> None:
    findings = Findings()
    for at in range(120):
        findings.add(f"t.csv, line {at}", f"the file 'scan {at}.png' does not exist", f"did you mean '{at}'?")
    for at in range(5):
        findings.add(f"{at}.png", "the file is empty", "copy it again")
    lines = [line for line, _ in summarized(findings)]
    first = "t.csv, line 0: the file 'scan 0.png' does not exist; did you mean '0'?."
    assert lines[0] == f"{first} 119 more of this kind."
    assert lines[1:] == [f"{at}.png: the file is empty; copy it again." for at in range(5)]
    with pytest.raises(DataError) as caught:
        findings.settle("stop")
    assert "125 problems in the data" in str(caught.value)
    assert "3.png: the file is empty" in str(caught.value)
    assert "And 1 more" in str(caught.value)
