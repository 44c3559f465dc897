"""Claims as expressions over cells: what they mean, their three answers, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fedlens.base.errors import ConfigError
from fedlens.results.claims import (
    CONTRADICTS,
    SATISFIES,
    ClaimVerdict,
    check_claim,
    claim_verdicts,
    parse_claim,
)
from fedlens.results.tables import study_tables
from tests.unit.results.study_fake import results_of

HIGH, LOW, NEAR, WIDE = [0.80, 0.82, 0.81], [0.40, 0.42, 0.41], [0.80, 0.81, 0.82], [0.2, 0.9, 0.6]
ANSWERS = ("shows", "does not show", "cannot tell")
# An expression, with values by alpha and method for which it holds, is contradicted, and is left open.
FORMS: dict[str, tuple[Any, Any, Any]] = {
    "a > b": ({"a": HIGH, "b": LOW}, {"a": LOW, "b": HIGH}, {"a": HIGH, "b": WIDE}),
    "a - b > 20 points": ({"a": HIGH, "b": LOW}, {"a": HIGH, "b": NEAR}, {"a": HIGH, "b": WIDE}),
    "a > 70 %": ({"a": HIGH}, {"a": LOW}, {"a": WIDE}),
    "30 % < a < 0.5": ({"a": LOW}, {"a": HIGH}, {"a": WIDE}),
    "-5 points < a - b <= 5 points": ({"a": HIGH, "b": NEAR}, {"a": HIGH, "b": LOW}, {"a": HIGH, "b": WIDE}),
    "a >= 90 % of b": ({"a": HIGH, "b": NEAR}, {"a": LOW, "b": HIGH}, {"a": HIGH, "b": WIDE}),
    "a > b > 30 % and b < 60 %": ({"a": HIGH, "b": LOW}, {"a": HIGH, "b": NEAR}, {"a": HIGH, "b": WIDE}),
    "a(alpha=0.1) < a(alpha=1) - 10 points": (
        {0.1: {"a": LOW}, 1.0: {"a": HIGH}}, {0.1: {"a": HIGH}, 1.0: {"a": NEAR}}, {0.1: {"a": LOW}, 1.0: {"a": WIDE}}
    ),
    "a > b where alpha <= 0.5": (
        {0.1: {"a": HIGH, "b": LOW}, 1.0: {"a": LOW, "b": HIGH}},
        {0.1: {"a": LOW, "b": HIGH}, 1.0: {"a": HIGH, "b": LOW}},
        {0.1: {"a": HIGH, "b": WIDE}, 1.0: {"a": HIGH, "b": LOW}},
    ),
    "a > 60 % where alpha != 1": (
        {0.1: {"a": HIGH}, 1.0: {"a": LOW}}, {0.1: {"a": LOW}, 1.0: {"a": HIGH}}, {0.1: {"a": WIDE}, 1.0: {"a": LOW}}
    ),
}  # fmt: skip


def verdict(scores: Any, holds: str, claim: Mapping[str, Any] | None = None, **more: Any) -> ClaimVerdict:
    claims = [{"text": "A claim.", "where": "section 1", "holds": holds, **(claim or {})}]
    [found] = claim_verdicts(results_of(scores, document={"claims": claims}, **more))
    return found


@pytest.mark.parametrize("holds", FORMS)
def test_every_form_has_three_answers(holds: str) -> None:
    assert tuple(verdict(scores, holds).answer for scores in FORMS[holds]) == ANSWERS


def test_the_numbers_are_paired_over_seeds_and_have_an_interval() -> None:
    # Either method differs by 70 points from seed to seed, their difference does not.
    found = verdict({"a": [0.3, 1.0, 0.6], "b": [0.2, 0.9, 0.5]}, "a - b > 5 points")
    assert (found.answer, found.numbers) == ("shows", "a - b > 5 points: 10.0 [10.0, 10.0]")
    assert "a > 70 %: 81.0 [78.5, 83.5]" in verdict({"a": HIGH}, "a > 70 %").numbers


def test_every_selected_cell_must_satisfy_a_claim() -> None:
    scores = {alpha: {"a": HIGH, "b": NEAR if alpha == 1.0 else LOW} for alpha in (0.1, 0.5, 1.0)}
    assert verdict(scores, "a - b > 20 points where alpha < 1").answer == "shows"
    found = verdict(scores, "a - b > 20 points")
    assert found.answer == "does not show"
    assert found.numbers.startswith("a - b > 20 points at alpha 1: ")


def test_one_seed_and_missing_and_failed_runs_leave_a_claim_open() -> None:
    one = verdict({"a": [0.9], "b": [0.1]}, "a > b")
    assert (one.answer, one.reason, one.numbers) == ("cannot tell", SATISFIES, "a > b: 80.0")
    assert verdict({"a": [0.9], "b": [0.1]}, "a > b and a < b").reason == CONTRADICTS
    missing = verdict({"a": HIGH, "b": [0.1, None, 0.1]}, "a > b")
    assert (missing.answer, missing.reason) == ("cannot tell", "not run: b (not finished)")
    failed = verdict({"a": HIGH, "b": [0.1, "out of memory", 0.1]}, "a > b")
    assert (failed.answer, failed.reason) == ("cannot tell", "not run: b (out of memory)")
    assert verdict({"a": LOW, "b": [0.1, None, 0.1]}, "a > 70 % and a > b").answer == "does not show"


def test_what_the_scale_lacks_is_not_run_at_this_scale() -> None:
    scores = {0.1: {"a": HIGH}, 1.0: {"a": HIGH}}
    for holds, reason in (
        ("a > b", "no method 'b'"),
        ("a > 1 % where alpha > 5", "no case 'alpha > 5'"),
        ("a(alpha=100) > 1 %", "no case 'alpha = 100'"),
        ("a(users=10) > 1 %", "no dimension 'users'"),
    ):
        found = verdict(scores, holds, scale="smoke")
        assert (found.answer, found.reason, found.scale) == ("not run at this scale", reason, "smoke")
    assert verdict(scores, "a > 90 % and a > b").answer == "does not show"


def test_what_stands_for_a_method_or_a_case_is_found_under_the_name_of_the_paper() -> None:
    results = results_of({"small": HIGH, "b": LOW})
    cases = [{"case": "digits"}]
    entries = [replace(entry, case=cases[0]) for entry in results.info.entries]
    stand_ins = {"methods": {"large": "small"}, "cases": {"CIFAR-100": "digits"}}
    claims = [
        {"text": "t", "holds": 'large(case="CIFAR-100") > b'},
        {"text": "t", "holds": 'large > b where case != "CIFAR-100"'},
    ]
    document = {"claims": claims, "stand_ins": stand_ins}
    info = replace(results.info, cases=cases, entries=entries, dimensions={"case": "case"}, document=document)
    shown, absent = claim_verdicts(replace(results, info=info))
    assert (shown.answer, shown.numbers) == (
        "shows",
        "small (digits) > b at digits: 40.0 [40.0, 40.0]",
    )
    assert absent.answer == "not run at this scale"


def test_of_a_loss_the_smaller_is_less() -> None:
    scores = {"a": [0.5, 0.51, 0.52], "b": [1.5, 1.51, 1.53]}
    assert verdict(scores, "a < b", metric="test_loss").answer == "shows"
    found = verdict(scores, "a > b", metric="test_loss")
    assert (found.answer, found.numbers[:13]) == ("does not show", "a > b: -1.003")


def test_a_claim_and_a_cell_can_have_a_metric_of_their_own() -> None:
    results = results_of({"a": HIGH}, x={"train_accuracy": [0.9]})
    train, gap = "a > 85 %", "a(metric=train_accuracy) - a > 5 points"
    claims = [{"text": "t", "holds": train}, {"text": "t", "holds": train, "metric": "train_accuracy"},
              {"text": "t", "holds": gap}]  # fmt: skip
    info = replace(results.info, document={"claims": claims})
    verdicts = claim_verdicts(replace(results, info=info))
    assert [each.answer for each in verdicts] == ["does not show", "shows", "shows"]
    assert verdicts[2].numbers.startswith("a (train accuracy) - a > 5 points: 9.0 ")


def test_a_claim_can_be_about_a_budget_or_the_rounds_to_a_target() -> None:
    scores = {"a": [[0.5, 0.6, 0.9]] * 3, "b": [[0.1, 0.5, 0.9]] * 3, "centralized": [[1.0] * 3] * 3}
    assert verdict(scores, "a - b > 30 points").answer == "does not show"
    assert verdict(scores, "a - b > 30 points", {"at": {"rounds": 1}}).answer == "shows"
    assert verdict(scores, "a - b > 30 points", {"at": {"batches": 20}}).answer == "does not show"
    target = verdict(scores, "a < 60 % of b", {"at": {"target": 0.5}})
    assert (target.answer, target.numbers) == ("shows", "a < 60 % of b: -0.2 [-0.2, -0.2]")
    rounds = verdict(scores, "a < b", {"at": {"relative_target": 0.5}})
    assert (rounds.answer, rounds.numbers) == ("shows", "a < b: -1 [-1, -1]")
    never = verdict(scores, "a < b", {"at": {"target": 0.95}})
    assert (never.answer, never.reason) == ("cannot tell", "not run: a (target 0.95 not reached)")


def test_a_claim_can_be_about_the_noise_of_a_curve() -> None:
    scores = {"a": [[0.0, 0.5, 0.9, 0.5, 0.9]] * 3, "b": [[0.0, 0.9, 0.9, 0.9, 0.9]] * 3, "c": [[0.5]] * 3}
    noisy = verdict(scores, "a - b > 30 points", {"at": {"changes": 3}})
    assert (noisy.answer, noisy.numbers) == ("shows", "a - b > 30 points: 40.0 [40.0, 40.0]")
    assert verdict(scores, "a - b > 30 points").answer == "does not show"
    assert "c (changes 3 not reached)" in verdict(scores, "a > c", {"at": {"changes": 3}}).reason


def test_a_claim_without_an_expression_says_why() -> None:
    results = results_of({"a": HIGH}, document={"claims": [{"text": "Noisy.", "why": "no number"}, "Old."]})
    assert [each.words for each in claim_verdicts(results)] == ["not computed: no number", "not computed"]


def test_the_table_of_claims_has_verdicts_numbers_and_the_scale() -> None:
    claims = [{"text": "A is better.", "where": "section 1", "holds": "a > b"}]
    labels = {"a": "FedAvgM", "b": "FedAvg"}
    results = results_of({"a": HIGH, "b": LOW}, document={"claims": claims}, methods=labels, scale="laptop")
    table = next(table for table in study_tables(results) if table.name == "claims")
    assert table.head == ["Claim", "Verdict", "Numbers", "Scale"]
    numbers = "FedAvgM > FedAvg: 40.0 [40.0, 40.0]"
    assert [cell.text for cell in table.rows[0]] == ["A is better. (section 1)", "shows", numbers, "laptop"]
    assert "| A is better. (section 1) | shows |" in table.to_markdown()
    assert r"\begin{tabular}{llll}" in table.to_latex()
    long = replace(results.info, document={"claims": [{**claims[0], "text": "A is better. " * 9}]})
    [table] = [each for each in study_tables(replace(results, info=long)) if each.name == "claims"]
    assert r"\begin{tabular}{p{0.22\linewidth}lll}" in table.to_latex()
    assert not any(table.name == "claims" for table in study_tables(results_of({"a": HIGH})))


@pytest.mark.parametrize(
    ("holds", "problem", "character"),
    [
        ("", "expected a method or a number", 1),
        ("a >", "expected a method or a number", 4),
        ("a b > 1", "expected a method or a number", 3),
        ("a > 20 hours", "expected a method or a number", 8),
        ("a > b)", "expected a method or a number", 6),
        ("a(alpha<1) > 2", "expected a method or a number", 2),
        ("a", "expected a comparison with a method", 2),
        ("3 > 2", "expected a comparison with a method", 1),
        ("a > b where", "expected a condition such as 'alpha < 0.05'", 12),
        ("a(alpha) > b", "expected a condition such as 'alpha = 0.05'", 3),
        ("a > b where alpha = 1, alpha 2", "expected a condition such as", 23),
    ],
)
def test_an_expression_that_cannot_be_read_is_refused_at_its_place(
    holds: str, problem: str, character: int
) -> None:
    info = results_of({0.1: {"a": HIGH, "b": HIGH}}).info
    with pytest.raises(ConfigError) as error:
        check_claim(holds, info, "fig5.document.toml: claim 2")
    assert error.value.what.startswith(problem)
    assert error.value.where == f"fig5.document.toml: claim 2, character {character}"


def test_quotes_keep_words_that_would_separate_parts() -> None:
    [one] = parse_claim('"a and b" > 3 where case = "where x > 1, y"')
    assert (one.terms[0].method, one.where[0].value) == ("a and b", "where x > 1, y")
