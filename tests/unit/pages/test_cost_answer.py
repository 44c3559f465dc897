"""What federation costs: differences, intervals, verdicts and the sentences, from runs with known numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedlens.cli.cost import show
from fedlens.pages.cost.answer import cost_answer
from fedlens.pages.cost.measures import NOT_MEASURED, byte_rows, cards, side_by_side
from fedlens.pages.cost.next_steps import next_steps
from fedlens.pages.cost.page import CLIENTS_SHOWN, write_cost_page
from fedlens.results.statistics import UNSURE, difference
from fedlens.studies.cost_study import CostResult
from tests.unit.pages.reading import Page, assert_self_contained, read_page
from tests.unit.results.fake_run import class_counts, line, make_run

HELD_OUT = 100
WORK = {"rounds": 2, "clients": 3, "cohort": 2, "images": 90, "passes": 4.0, "batch": 10, "steps": 18}
# By role and client, the accuracy with each seed.
AT_CLIENTS = {
    "federated": {"mercy": (0.5, 0.52, 0.54), "oak": (0.9, 0.91, 0.92), "<b>": (0.8, 0.7, 0.9)},
    "centralized": {"mercy": (0.8, 0.83, 0.83), "oak": (0.9, 0.9, 0.93), "<b>": (0.9, 0.9, 0.9)},
    "local-only": {"mercy": (0.7, 0.73, 0.72), "oak": (0.6, 0.62, 0.61), "<b>": (0.75, 0.75, 0.75)},
}
TEST = {"federated": (0.90, 0.91, 0.92), "iid": (0.95, 0.95, 0.96), "centralized": (0.97, 0.97, 0.97)}


def study(
    directory: Path, seeds: int = 3, clients: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """A cost directory with finished runs, and what was planned; `changes` are summaries of runs by their names."""
    clients = AT_CLIENTS if clients is None else clients
    rows = []
    for seed in range(seeds):
        for role in ("federated", "iid", "centralized", "local-only"):
            name = f"{role}-seed{seed}"
            rows.append({"name": name, "role": role, "seed": seed, "error": None})
            accuracy = (
                {"test_accuracy": TEST[role][seed]}
                if role in TEST
                else {"test_accuracy": ..., "test_loss": ...}
            )
            if role == "local-only":
                accuracy |= {"validation_accuracy": 0.7}
            metrics = [line(0, **accuracy), line(1, **accuracy), line(2, **accuracy)]
            path = make_run(
                directory, name="x", run_id=name, algorithm=role, metrics=metrics, counts=class_counts(3)
            )
            path.rename(directory / name)
            measured = [
                {
                    "round": 2, "client": client, "validation_examples": HELD_OUT,
                    "validation_loss": 1.0, "validation_accuracy": values[seed],
                }
                for client, values in clients.get(role, {}).items()
            ]  # fmt: skip
            (directory / name / "clients.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in measured)
            )
            if name in changes:
                (directory / name / "summary.json").write_text(json.dumps(changes[name]))
    return {"name": "scans", "seeds": list(range(seeds)), "work": WORK, "notes": ["A note."], "runs": rows}


def page_of(directory: Path, answer: dict[str, Any]) -> Page:
    html = write_cost_page(directory, answer).read_text("utf-8")
    assert_self_contained(re.sub(r'<a href="[\w-]+/report.html">', "<a>", html))  # links to its own runs
    return read_page(html)


def test_what_the_runs_note_on_their_data_is_on_the_page_and_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = ["the client 'mercy' (2 images) looks like 'Mercy'", *(f"skipped {k}.png" for k in range(5))]
    said = {name: {"status": "finished", "notes": notes} for name in ("federated-seed0", "iid-seed0")}
    answer = cost_answer(tmp_path, study(tmp_path, seeds=1, **said))
    assert answer["data_notes"] == notes
    words = page_of(tmp_path, answer).words.replace("' mercy '", "'mercy'")
    assert f"The data and the run {' '.join(notes[:5])} 1 more note {notes[5]}" in words
    show(CostResult(tmp_path, answer), quiet=False)
    printed = capsys.readouterr().out
    assert "Notes on the data and the runs:\n  the client 'mercy'" in printed
    assert "  skipped 3.png\n  and 1 more, on the page\n" in printed


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    first, second = {0: 0.9, 1: 0.85, 2: 0.95, 7: 0.1}, {0: 0.8, 1: 0.84, 2: 0.91, 9: 0.2}
    found = difference(first, second)
    assert found is not None
    values = np.array([0.1, 0.01, 0.04])
    low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((values.mean(), low, high))
    assert found.seeds == 3
    assert found.sign == 0


def test_one_seed_has_no_interval_and_no_seed_no_difference() -> None:
    found = difference({0: 0.9}, {0: 0.8})
    assert found is not None
    assert (found.low, found.high, found.sign) == (None, None, None)
    assert difference({0: 0.9}, {1: 0.8}) is None


def test_an_interval_is_at_least_one_image_wide_and_within_what_is_possible() -> None:
    found = difference({0: 0.9, 1: 0.9}, {0: 0.8, 1: 0.8}, resolution=0.2)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((-0.1, 0.3))
    wide = difference({0: 1.0, 1: 0.0}, {0: 0.0, 1: 0.5}, most=1.0)
    assert wide is not None
    assert (wide.low, wide.high) == (-1.0, 1.0)


def test_the_overall_differences_and_values(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path))
    assert answer["overall"]["federated"]["test"] == pytest.approx({"mean": 0.91, "std": 0.01, "n": 3})
    assert answer["differences"]["partition"]["mean"] == pytest.approx(-0.13 / 3)
    assert answer["differences"]["partition"]["sign"] == -1
    assert answer["differences"]["federation"]["mean"] == pytest.approx(-0.06)
    joining = np.mean(
        [
            np.subtract(AT_CLIENTS["federated"][c], AT_CLIENTS["local-only"][c])
            for c in ("mercy", "oak", "<b>")
        ]
    )
    assert answer["differences"]["joining"]["mean"] == pytest.approx(joining)


def test_clients_are_named_the_worst_first_with_who_gains_and_who_loses(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path))
    rows = answer["clients"]
    assert [row["client"] for row in rows] == ["mercy", "<b>", "oak"]
    assert [row["verdict"] for row in rows] == ["loses", UNSURE, "gains"]
    assert rows[0]["vs_centralized"]["mean"] == pytest.approx(-0.3)
    assert rows[0]["held_out"] == HELD_OUT


def test_it_answers_in_words(tmp_path: Path) -> None:
    said = cost_answer(tmp_path, study(tmp_path))["sentences"]
    assert said[0] == (
        "Federation as a whole makes test accuracy 6.0 points lower than centralized training (95 % interval -8.5 to "
        "-3.5, 3 seeds)."
    )
    assert said[1].startswith(
        "The partition makes test accuracy 4.3 points lower than with IID clients (95 % interval -5.8 to -2.9, "
        "3 seeds): "
    )
    assert said[1].endswith("91.0 % instead of 95.3 % with IID clients and 97.0 % centralized.")
    assert said[2] == (
        "mercy does worst: 52.0 % on its 100 held-out images (95 % interval 42 to 62; 82.0 % with the centralized "
        "model, 71.7 % with a model of its own)."
    )
    assert said[3] == "Of 3 clients, 1 gains by joining, 1 loses, and 1 shows no clear difference."


def test_one_seed_says_that_it_is_one(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path, seeds=1))
    assert answer["sentences"][1].startswith(
        "The partition makes test accuracy 5.0 points lower than with IID clients (1 seed, no interval): 90.0 % instead"
    )
    assert "1 seed cannot say" in answer["sentences"][3]
    assert {row["verdict"] for row in answer["clients"]} == {None}
    assert "there is no interval" in page_of(tmp_path, answer).words


def test_two_seeds_have_no_interval_anywhere(tmp_path: Path) -> None:
    """The interval of a t test with two seeds spans most of what is possible."""
    answer = cost_answer(tmp_path, study(tmp_path, seeds=2))
    compared = [row[key] for row in answer["clients"] for key in ("vs_centralized", "vs_local_only")]
    for each in (*answer["differences"].values(), *compared):
        assert (each["seeds"], each["low"], each["high"], each["sign"]) == (2, None, None, None)
    assert "4.5 points lower than with IID clients (2 seeds, no interval)" in answer["sentences"][1]
    assert "2 seeds cannot say how certain that is (--seeds 3)" in answer["sentences"][3]
    words = page_of(tmp_path, answer).words
    assert "With 2 seeds there is no interval. Run it with --seeds 3 or more." in words
    assert "interval is in brackets" not in words
    assert "--seeds 3" not in next_steps({**answer, "command": {"recipe": "digits"}})[0]["command"], (
        "the default"
    )


def test_an_interval_that_says_nothing_has_a_sentence(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path, clients=small(federated=0.9, other=0.5)))
    held_out(tmp_path, 9)
    few = cost_answer(tmp_path, {key: answer[key] for key in ("name", "seeds", "work", "notes", "runs")})
    assert [row["vs_local_only"]["high"] - row["vs_local_only"]["low"] > 0.3 for row in few["clients"]] == [
        True,
        True,
    ]
    said = "Intervals wider than 30 points (mercy and oak) do not say how large a difference is"
    assert said in page_of(tmp_path, few).words
    assert "Intervals wider" not in page_of(tmp_path, answer).words


def test_each_row_of_cards_has_one_measure_of_all_four_models(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path))
    (test, tested), (clients, at_clients) = cards(answer)
    assert (test, clients) == ("Test accuracy", "The clients' mean accuracy on held-out images")
    names = ["Federated", "IID clients", "Centralized", "Local-only"]
    assert [name for name, _, _ in tested] == [name for name, _, _ in at_clients] == names
    assert [value for _, value, _ in tested] == ["91.0 % ± 1.0", "95.3 % ± 0.6", "97.0 % ± 0.0", NOT_MEASURED]
    assert tested[3][2] == "no run recorded it"
    # Each client counts the same, whatever the images that it holds out.
    means = {role: np.mean(list(of.values())) for role, of in AT_CLIENTS.items()}
    values = {name: value.split(" ±")[0] for name, value, _ in at_clients}
    assert values["Federated"] == f"{100 * means['federated']:.1f} %"
    assert values["Local-only"] == f"{100 * means['local-only']:.1f} %"
    assert values["IID clients"] == NOT_MEASURED
    head, rows = side_by_side(answer)
    assert head[1:] == ["federated", "IID clients", "centralized", "local-only"]
    assert [row[0] for row in rows] == list(answer["measures"].values())
    words = page_of(tmp_path, answer).words
    for row in (tested, at_clients):
        for name, value, what in row:
            assert f"{name} {value} {what}" in words


def test_the_list_of_contents_has_the_folder_above_the_body(tmp_path: Path) -> None:
    words = page_of(tmp_path, cost_answer(tmp_path, study(tmp_path))).words
    assert f"1 file path, such as {tmp_path}." in words.partition("What this page contains")[2]


def test_the_table_has_the_bytes_of_one_client(tmp_path: Path) -> None:
    """Two clients of three take part in each of two rounds; evaluations at the clients are left out."""
    about = study(tmp_path)
    for path in tmp_path.glob("federated-*/metrics.jsonl"):
        lines = [line(0, clients=0), line(1, clients=2), line(2, clients=2)]
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
        summary = json.loads((path.parent / "summary.json").read_text())
        summary["partition"]["clients"] = 3
        of_clients = {
            "train": {"asks": 4, "replies": 4, "bytes_down": 3_000, "bytes_up": 6_000},
            "gradient": {"asks": 4, "replies": 4, "bytes_down": 1_000, "bytes_up": 2_000},
            "evaluate-own": {"asks": 9, "replies": 9, "bytes_down": 900, "bytes_up": 90},
        }
        summary["traffic"] = {"clients": of_clients, "server": {"evaluate": ["@test"]}}
        (path.parent / "summary.json").write_text(json.dumps(summary))
    answer = cost_answer(tmp_path, about)
    sent = answer["bytes_per_client"]
    assert sent["federated"] == pytest.approx(
        {
            "down_round": 1_000, "up_round": 2_000, "down": 4_000 / 3, "up": 8_000 / 3,
            "measuring_down": 100, "measuring_up": 10,
        }
    )  # fmt: skip
    assert sent["centralized"] is None
    rows = {row[0]: row[1] for row in byte_rows(answer)}
    assert rows["sent to a client, per round"] == "1.0 kB"
    assert rows["sent by a client, in all rounds"] == "2.7 kB"
    assert "up to 100 B more to a client and 10 B back" in page_of(tmp_path, answer).words


def with_twin(tmp_path: Path, *values: float) -> str:
    """The sentence on the partition with these values of the IID twin."""
    about = study(tmp_path)
    for seed, value in enumerate(values):
        path = tmp_path / f"iid-seed{seed}" / "metrics.jsonl"
        path.write_text("".join(json.dumps(line(k, test_accuracy=value)) + "\n" for k in range(3)))
    return str(cost_answer(tmp_path, about)["sentences"][1])


def test_a_gain_is_called_higher(tmp_path: Path) -> None:
    said = with_twin(tmp_path, 0.8, 0.81, 0.82)
    assert said.startswith(
        "The partition makes test accuracy 10.0 points higher than with IID clients (95 % interval +10.0 to +10.0, "
        "3 seeds): 91.0 %"
    )


def test_a_difference_around_zero_is_uncertain(tmp_path: Path) -> None:
    said = with_twin(tmp_path, 0.85, 0.86, 0.99)
    assert said.startswith(
        f"The partition makes {UNSURE} to test accuracy: +1.0 points (95 % interval -16.2 to +18.2, "
        "3 seeds): 91.0 %"
    )


def test_unfinished_runs_are_rows_and_take_no_part(tmp_path: Path) -> None:
    about = study(tmp_path, **{"iid-seed1": {"status": "interrupted"}})
    about["runs"][2]["error"] = "out of memory"  # centralized-seed0
    answer = cost_answer(tmp_path, about)
    assert answer["differences"]["partition"]["seeds"] == 2
    assert answer["differences"]["federation"]["seeds"] == 2
    assert [answer["runs"][k]["status"] for k in (2, 5)] == ["failed", "interrupted"]
    page = page_of(tmp_path, answer)
    assert "2 runs of 12 did not finish" in page.words
    assert "centralized-seed0: out of memory" in page.words


def test_a_run_with_warnings_is_marked(tmp_path: Path) -> None:
    warning = {
        "since": 1,
        "until": 2,
        "sentence": "3 of 4 clients sent values that are not finite.",
        "try": "Less.",
    }
    about = study(tmp_path, **{"iid-seed1": {"status": "finished", "warnings": [warning]}})
    answer = cost_answer(tmp_path, about)
    assert [row["warnings"] for row in answer["runs"]] == [0] * 5 + [1] + [0] * 6
    assert "finished 1 warning" in page_of(tmp_path, answer).words


def test_nothing_finished_is_an_answer_without_numbers(tmp_path: Path) -> None:
    about = study(tmp_path, seeds=1, clients={})
    for row in about["runs"]:
        row["error"] = "no"
    answer = cost_answer(tmp_path, about)
    assert answer["sentences"] == []
    assert "4 runs of 4 did not finish" in page_of(tmp_path, answer).words


def test_the_page_has_three_curves_on_one_axis_with_bands_and_every_client(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path))
    page = page_of(tmp_path, answer)
    traces = page.figures[0]["data"]
    lines = [trace["name"] for trace in traces if "fill" not in trace]
    assert lines == ["federated", "IID clients", "centralized"]
    assert [trace["legendgroup"] for trace in traces if "fill" in trace] == lines
    assert "federated - IID clients test accuracy -4.3 -5.8 to -2.9 lower" in page.words
    assert "mercy" in page.words
    assert "<b>" in page.words
    assert "b" not in page.tags[page.tags.index("table") :], "a client's name is not markup"
    assert "centralized-seed2/report.html" in page.loads


def test_many_clients_fill_no_endless_table(tmp_path: Path) -> None:
    clients = {role: {f"c{k}": (0.5, 0.6, 0.7) for k in range(CLIENTS_SHOWN + 5)} for role in AT_CLIENTS}
    page = page_of(tmp_path, cost_answer(tmp_path, study(tmp_path, clients=clients)))
    assert "5 more clients in cost.json." in page.words


def small(*, federated: float, other: float) -> dict[str, Any]:
    """Two clients of whom the second is alike, the same in each of 3 seeds."""
    return {
        "federated": {"mercy": (federated,) * 3, "oak": (0.9,) * 3},
        "local-only": {"mercy": (other,) * 3, "oak": (0.9,) * 3},
    }


def held_out(directory: Path, images: int) -> None:
    for path in directory.glob("*/clients.jsonl"):
        path.write_text(
            path.read_text().replace(f'"validation_examples": {HELD_OUT}', f'"validation_examples": {images}')
        )


@pytest.mark.parametrize(("images", "says"), [(29, UNSURE), (2900, "gains")])
def test_a_few_images_that_are_the_same_in_every_seed_are_no_gain(
    tmp_path: Path, images: int, says: str
) -> None:
    about = study(tmp_path, clients=small(federated=26 / 29, other=22 / 29))
    held_out(tmp_path, images)
    row = cost_answer(tmp_path, about)["clients"][0]
    assert (row["client"], row["verdict"]) == ("mercy", says)


def test_a_worst_client_with_few_held_out_images_is_not_told_apart_from_the_others(tmp_path: Path) -> None:
    about = study(tmp_path, clients=small(federated=0.7, other=0.7))
    held_out(tmp_path, 9)
    answer = cost_answer(tmp_path, about)
    said = next(s for s in answer["sentences"] if s.startswith("mercy"))
    assert "mercy has the lowest value: 70.0 % on its 9 held-out images (95 % interval 38 to 90" in said
    assert "cannot be told apart from oak; hold out more images (data.validation = 0.4)" in said
    assert any("data.validation=0.4" in step["command"] for step in answer["next_steps"])


def with_curve(directory: Path, role: str, values: list[float], **more: list[float]) -> dict[str, Any]:
    """A study whose runs of one role have this curve."""
    about = study(directory)
    for seed in range(3):
        lines = [
            line(k, test_accuracy=value, **{key: each[k] for key, each in more.items()})
            for k, value in enumerate(values)
        ]
        path = directory / f"{role}-seed{seed}" / "metrics.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return cost_answer(directory, about)


UNTIL = [0.5 + 0.04 * k for k in range(10)] + [0.9] * 5


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (
            [0.89, 0.88, 0.87, 0.85, 0.81],
            "lost 9.0 points in its last 5 rounds (seed 0): its final value is noise",
        ),
        ([0.91, 0.92, 0.93, 0.94, 0.95], "still gained 5.0 points in its last 5 rounds"),
        ([0.95, 0.9, 0.94, 0.88, 0.93], "moved up and down by 7.0 points"),
    ],
)
def test_a_curve_that_is_not_at_rest_is_a_warning_under_the_headline(
    tmp_path: Path, end: list[float], says: str
) -> None:
    answer = with_curve(tmp_path, "centralized", [*UNTIL, 0.9, *end])
    assert answer["warnings"][0].startswith(f"The centralized reference {says}")
    assert says in page_of(tmp_path, answer).words


def test_curves_at_rest_are_no_warning_and_a_reference_below_is_one(tmp_path: Path) -> None:
    assert with_curve(tmp_path / "a", "centralized", [*UNTIL, *[0.97] * 20])["warnings"] == []
    below = with_curve(tmp_path / "b", "centralized", [*UNTIL, *[0.85] * 20])["warnings"]
    assert below == [
        "The centralized reference ends 6.0 points below the federated run: it is not an upper bound here. Tune "
        "local.lr for it, or train more rounds."
    ]


def test_a_reference_whose_test_loss_rises_while_training_loss_falls_overfits(tmp_path: Path) -> None:
    losses = {"test_loss": [2.0, 1.0, 0.5, 0.6, 0.8], "local_loss": [2.0, 1.0, 0.5, 0.2, 0.1]}
    said = with_curve(tmp_path / "a", "centralized", [0.97] * 5, **losses)["warnings"]
    assert said[0].startswith(
        "The centralized reference overfits: its test loss rose from 0.5 in round 2 to 0.8"
    )
    losses["local_loss"][-1] = 0.7
    assert with_curve(tmp_path / "b", "centralized", [0.97] * 5, **losses)["warnings"] == []


def test_one_client_does_better(tmp_path: Path) -> None:
    answer = cost_answer(tmp_path, study(tmp_path, seeds=1, clients=small(federated=0.8, other=0.7)))
    assert answer["sentences"][-1].startswith("1 of 2 clients does better in the federation")


def test_models_that_find_no_objects_are_no_basis_of_a_comparison(tmp_path: Path) -> None:
    about = study(tmp_path, seeds=1)
    for path in tmp_path.glob("*/*.json*"):
        path.write_text(
            re.sub(r'_accuracy": 0\.', '_map50": 0.0', path.read_text()).replace("accuracy", "map50")
        )
    said = cost_answer(tmp_path, about)["warnings"]
    assert not any("next to nothing" in text for text in said), "a mAP of 9.7 % is some"
    for path in tmp_path.glob("*/*.json*"):
        path.write_text(path.read_text().replace('_map50": 0.0', '_map50": 0.00'))
    said = cost_answer(tmp_path, about)["warnings"]
    assert said[0].startswith(
        "The models have learned next to nothing (mAP at IoU 0.5 1.0 % at most): the diff"
    )


@pytest.mark.parametrize(("until", "marked"), [(2, 1), (1, 0)])
def test_shared_models_that_end_at_chance_are_no_basis_of_a_comparison(
    tmp_path: Path, until: int, marked: int
) -> None:
    warning = {
        "kind": "accuracy-at-chance", "metric": "test_accuracy", "since": 1, "until": until, "sentence": "", "try": "",
    }  # fmt: skip
    summary = {"status": "finished", "warnings": [warning]}
    runs = {f"{role}-seed{seed}": summary for role in TEST for seed in range(3)}
    said = cost_answer(tmp_path, study(tmp_path, seeds=2, **runs))["warnings"]
    assert (
        sum(text.startswith("The models have learned next to nothing (accuracy") for text in said) == marked
    )
    runs["iid-seed1"] = {"status": "finished"}
    said = cost_answer(tmp_path / "other", study(tmp_path / "other", seeds=2, **runs))["warnings"]
    assert not any("learned next to nothing" in text for text in said), "one run has learned"


def test_a_reference_that_overfits_is_not_to_train_for_both_fewer_and_more_rounds(tmp_path: Path) -> None:
    losses = {"test_loss": [2.0, 1.0, 0.5, 0.6, 0.8], "local_loss": [2.0, 1.0, 0.5, 0.2, 0.1]}
    below = " ".join(with_curve(tmp_path / "a", "centralized", [0.85] * 5, **losses)["warnings"])
    assert "Try fewer rounds" in below
    assert "more rounds" not in below
    gaining = with_curve(tmp_path / "b", "centralized", [0.9, 0.92, 0.93, 0.95, 0.99], **losses)
    assert gaining["work"]["rounds"] == 2
    said = " ".join([*gaining["warnings"], *(step["why"] for step in gaining["next_steps"])])
    assert "Try more rounds" in said
    assert "Try augmentation (data.augment)." in said
    assert "fewer rounds" not in said


def test_a_mean_that_is_clear_where_no_client_is_gets_the_reason(tmp_path: Path) -> None:
    clients = {
        "federated": dict.fromkeys("abc", (0.8, 0.81, 0.82)),
        "local-only": dict.fromkeys("abc", (0.77, 0.78, 0.79)),
    }
    (said,) = (
        sentence
        for sentence in cost_answer(tmp_path, study(tmp_path, clients=clients))["sentences"]
        if "by joining" in sentence
    )
    assert said.startswith(
        "Of 3 clients, 0 gain by joining, 0 lose, and 3 show no clear difference. Their mean is"
    )
    assert "clearly higher all the same, +3.0 points (95 % interval +3.0 to +3.0)" in said
    assert said.endswith("that of one client also the chance of its few held-out images.")


def test_a_client_below_its_largest_class_is_marked(tmp_path: Path) -> None:
    about = study(tmp_path)
    about["work"] = {**WORK, "largest_class": {"mercy": 0.6, "oak": 0.5, "<b>": 0.5}}
    words = page_of(tmp_path, cost_answer(tmp_path, about)).words
    assert "! 52.0 %" in words
    assert "! 91.0 %" not in words
    assert "always naming the client's largest class" in words


def test_suggestions_follow_from_the_numbers(tmp_path: Path) -> None:
    about = study(tmp_path)
    about["work"] = {**WORK, "algorithm": "fedavg", "lr": 0.1}
    about["command"] = {"recipe": "my scans.toml", "changes": ["rounds=9"], "out": None, "data_dir": None}
    found = {**cost_answer(tmp_path, about), "emd": 0.9}
    (step,) = next_steps(found)
    assert step["command"] == (
        "fedlens cost 'my scans.toml' --set rounds=9 --set algorithm.name=feddyn --set algorithm.alpha=0.5 "
        "--out runs/scans-cost-feddyn"
    )
    assert next_steps({**found, "emd": 0.05}) == []
    assert (
        "model.norm=batch"
        in next_steps({**found, "emd": 0.05, "work": {**about["work"], "norm": "none"}})[0]["command"]
    )


def test_a_score_that_is_no_share_of_images_has_no_binomial_interval(tmp_path: Path) -> None:
    planned = study(tmp_path)
    with_accuracy = cost_answer(tmp_path, planned)
    for path in (path for kind in ("*.json", "*.jsonl") for path in tmp_path.rglob(kind)):
        path.write_text(path.read_text("utf-8").replace("accuracy", "average_precision"), "utf-8")
    answer = cost_answer(tmp_path, planned)
    assert answer["metric"] == "average_precision"
    assert all(row["interval"] is not None for row in with_accuracy["clients"])
    assert all(row["interval"] is None for row in answer["clients"])
    narrow, wide = (
        [row["vs_local_only"]["high"] - row["vs_local_only"]["low"] for row in each["clients"]]
        for each in (answer, with_accuracy)
    )
    assert all(a < b for a, b in zip(narrow, wide, strict=True))
    said = " ".join(answer["sentences"])
    assert "average precision" in said
    assert "accuracy" not in said
    assert "points" in said
