from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlens.base.errors import RunDirectoryError
from fedlens.pages.compare import write_comparison
from fedlens.pages.partition_page import write_page
from fedlens.pages.plotly_figures import draw
from fedlens.pages.run_page import write_report
from fedlens.results.figures.chart import Series, curves, share_limits
from tests.unit.pages.reading import Page, assert_self_contained, read_page
from tests.unit.results.fake_run import class_counts, line, make_partition, make_run

EVIL = "</script><script>alert(1)</script><b>&amp;\"'"


def page_of(run: Path) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    html = path.read_text(encoding="utf-8")
    assert_self_contained(html)
    return read_page(html)


def test_a_finished_run_tells_what_it_was_and_how_well_it_did(tmp_path: Path) -> None:
    words = page_of(make_run(tmp_path, rounds=30, counts=class_counts())).words
    for said in (
        "digits finished",
        "fedavg on digits with small-cnn (28,938 parameters), partitioned by shards",
        "Final accuracy 84.6 % on test, after round 30",
        "chosen on test",
        "Rounds 30 of 30",
        "Clients per round 5 of 20",
        "Time 45 s 1.5 s per round",
        "Data sent down 5.4 MB 5.4 MB sent up",
        "2026-11-20 10:15 UTC",
        "fedlens run runs/digits/20261120-101500/config.toml",
        "fedlens run digits --set local.lr=0.05",
        "Examples per second of training 300",
    ):
        assert said in words
    assert "Failures" not in words
    assert "resume" not in words


def test_every_setting_and_the_environment_are_there(tmp_path: Path) -> None:
    words = page_of(make_run(tmp_path)).words
    for said in (
        "partition.classes_per_client 2",
        "lr 0.05",
        "momentum 0.9",
        "every 1",
        "clients no",
        "seed 0",
    ):
        assert said in words
    assert "torch 2.10.0" in words
    assert "hardware.cores 2" in words


def test_the_curves_are_the_metrics(tmp_path: Path) -> None:
    rows = [line(at, validation_accuracy=0.3, train_loss=1.0) for at in range(6)]
    page = page_of(make_run(tmp_path, rounds=5, metrics=rows))
    accuracy = page.trace("test")
    assert accuracy["x"] == [0, 1, 2, 3, 4, 5]
    assert accuracy["y"] == pytest.approx([row["test_accuracy"] for row in rows])
    assert page.trace("validation")["y"] == [0.3] * 6
    assert page.trace("seen by clients", 1)["y"][:2] == [None, pytest.approx(rows[1]["local_loss"])]
    assert page.trace("training", 1)["y"] == [1.0] * 6
    assert page.figures[0]["layout"]["hovermode"] == "x unified"
    assert page.figures[0]["layout"]["yaxis"]["tickformat"].endswith("%")


def test_best_that_was_chosen_on_validation_shows_the_test_value_of_that_round(tmp_path: Path) -> None:
    rows = [line(at, test_accuracy=at / 10, validation_accuracy=0.9 if at == 2 else 0.1) for at in range(6)]
    best = {"round": 2, "metric": "validation_accuracy", "value": 0.9, "chosen_on": "validation"}
    page = page_of(make_run(tmp_path, rounds=5, metrics=rows, summary={"best": best}))
    assert "Best accuracy 20.0 % round 2, chosen on validation" in page.words
    assert page.trace("best, chosen on validation")["y"] == [0.2]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("failed", "The run failed The loss is NaN everywhere The last completed round is 4 of 30."),
        ("interrupted", "Continue with: fedlens resume runs/digits/20261120-101500"),
    ],
)
def test_what_went_wrong_stands_before_everything_else(tmp_path: Path, status: str, said: str) -> None:
    error = "the loss is NaN everywhere" if status == "failed" else None
    rows = [line(at) for at in range(5)]
    run = make_run(tmp_path, metrics=rows, summary={"status": status, "error": error})
    words = page_of(run).words
    assert said in words
    assert words.index(said) < words.index("Final accuracy")


def test_a_run_without_a_summary_is_running_or_was_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path, metrics=[line(at) for at in range(4)], summary={}, counts=class_counts())
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"round": 4, "test_acc')
    words = page_of(run).words
    assert "digits running" in words
    assert f"fedlens resume {run}" in words
    assert "Rounds 3 of 30" in words
    assert "Time 4.5 s" in words


def test_only_round_0(tmp_path: Path) -> None:
    words = page_of(make_run(tmp_path, metrics=[line(0)], summary={})).words
    assert "Final accuracy 10.0 % on test, untrained" in words
    assert "Best accuracy – not known yet" in words


def test_no_round_at_all(tmp_path: Path) -> None:
    run = make_run(tmp_path, metrics=[], summary={})
    (run / "metrics.jsonl").unlink()
    (run / "environment.json").unlink()
    page = page_of(run)
    assert "No round has been evaluated yet." in page.words
    assert page.figures == []
    assert (run / "report.html").stat().st_size < 100_000


def test_rounds_without_evaluation_and_values_that_are_null(tmp_path: Path) -> None:
    bare: dict[str, Any] = {"test_loss": ..., "test_accuracy": ...}
    rows = [line(0), line(1, **bare), line(2, test_loss=None), line(3, **bare), line(4, local_loss=None)]
    page = page_of(make_run(tmp_path, metrics=rows))
    assert page.trace("test")["x"] == [0, 2, 4]
    assert page.trace("test", 1)["y"][1] is None
    assert page.trace("seen by clients", 1)["y"][-1] is None


def test_all_values_null_draw_no_empty_chart(tmp_path: Path) -> None:
    rows = [line(at, test_loss=None, test_accuracy=None, local_loss=None) for at in range(3)]
    page = page_of(make_run(tmp_path, metrics=rows, summary={"final": None, "best": None}))
    assert page.figures == []
    assert "Final accuracy –" in page.words


def test_a_task_with_metrics_of_its_own(tmp_path: Path) -> None:
    rows = [
        {"round": at, "test_loss": 1.0, "test_miou": 0.1 * at, "test_perplexity": 90.0 - at, "clients": 3}
        for at in range(5)
    ]
    page = page_of(make_run(tmp_path, metrics=rows, summary={"best": None}))
    assert "Final miou 40.0 % on test, after round 4" in page.words
    assert [figure["data"][0]["y"][0] for figure in page.figures] == [0.0, 1.0, 90.0]


def test_who_has_what_comes_from_the_partition(tmp_path: Path) -> None:
    counts = class_counts(20)
    page = page_of(make_run(tmp_path, counts=counts, classes=[f"kind {k}" for k in range(10)]))
    bars = [trace for trace in page.traces() if trace["type"] == "bar" and trace.get("name")]
    assert [bar["name"] for bar in bars] == [f"kind {k}" for k in range(10)]
    assert np.array_equal(np.array([bar["y"] for bar in bars]).T, counts)
    assert "Examples per client 90" in page.words


def test_no_file_is_read_but_the_partition(tmp_path: Path) -> None:
    """Class names travel with it: neither the model nor a file of counts is needed."""
    run = make_run(tmp_path, counts=class_counts(3, 2), classes=["sandal", "sneaker"])
    assert {path.name for path in run.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "environment.json",
        "summary.json",
        "partition.npz",
    }
    assert "sneaker" in page_of(run).words


def test_a_partition_whose_classes_were_not_counted_shows_its_sizes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    replace(make_partition(class_counts(30, even=False)), census=None).save(run / "partition.npz")
    page = page_of(run)
    assert "Only sizes are shown, because the classes were not counted." in page.words
    assert page.figures[-1]["data"][0]["x"] == list(range(1, 31))


@pytest.mark.parametrize("name", ["partition.npz", "model.safetensors"])
def test_a_damaged_side_file_costs_its_picture_and_no_more(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, counts=class_counts())
    (run / name).write_bytes(b"\x07damaged")
    words = page_of(run).words
    assert "Final accuracy" in words
    assert ("Data per client" in words) == (name != "partition.npz")


def test_failures_by_client_and_reason_the_most_frequent_first(tmp_path: Path) -> None:
    failures = {"3": {"late": 1}, "17": {"update is not finite": 4, "late": 2}}
    words = page_of(make_run(tmp_path, summary={"failures": failures})).words
    assert "7 replies were lost or rejected, from 2 clients;" in words
    assert "17 update is not finite 4 17 late 2 3 late 1" in words


def test_what_left_the_clients_is_told_and_nothing_is_said_of_nothing(tmp_path: Path) -> None:
    title = "What left the clients"
    told = ["Each client's class counts, once.", "Its <b>mean</b> feature."]
    row = {
        "down": {"model": 650, "lr": 1},
        "up": {"update": 650, "weight": 1, "empty": 0},
        "measured": ["loss"],
    }
    counts = {"asks": 9, "replies": 8, "bytes_down": 2600, "bytes_up": 2604, "rounds": [1, 3]}
    summary = {
        "disclosures": told,
        "traffic": {"clients": {"train": row | counts}},
        "pooled": ["The size of each."],
    }
    words = page_of(make_run(tmp_path, name="told", summary=summary)).words
    assert f"{told[0]} {told[1]} Beside these messages: The size of each." in words
    assert (
        "train 1–3 model (650 values), lr update (650 values), weight; metrics: loss 8 2.6 kB 2.6 kB" in words
    )
    plain = "Nothing was encrypted, summed securely or made private."
    secure = make_run(tmp_path, name="secure", summary=summary, config={"aggregate": {"name": "secagg"}})
    private = make_run(tmp_path, name="private", summary={**summary, "privacy": {"sentence": "Private."}})
    assert plain in words
    assert plain not in page_of(secure).words
    assert plain not in page_of(private).words
    for name, summary in (("none", {"disclosures": []}), ("old", {}), ("odd", {"disclosures": "a word"})):
        assert title not in page_of(make_run(tmp_path, name=name, summary=summary)).words


def test_very_many_failures_are_cut(tmp_path: Path) -> None:
    failures = {str(k): {"late": 1} for k in range(2000)}
    assert (
        "And 1,950 more lines in summary.json."
        in page_of(make_run(tmp_path, summary={"failures": failures})).words
    )


def test_nothing_that_a_user_names_becomes_markup(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        name="evil",
        counts=class_counts(3, 2),
        classes=[EVIL, "plain"],
        config={
            "name": EVIL,
            "data": {"dataset": EVIL, "partition": {"name": EVIL, EVIL: EVIL}},
            EVIL: {EVIL: EVIL},
        },
        summary={"name": EVIL, "error": EVIL, "status": "failed", "algorithm": EVIL, "run_id": EVIL}
        | {"failures": {EVIL: {EVIL: 1}}, "directory": EVIL, "partition": {"digest": EVIL}},
    )
    (run / "environment.json").write_text(
        json.dumps({"command": EVIL, EVIL: EVIL, "started": EVIL}), encoding="utf-8"
    )
    page = page_of(run)
    assert not [script for script in page.scripts if "alert(1)" in script]
    # Plotly reads markup in names, so they are escaped in the figures once more.
    names = [trace["name"] for trace in page.traces() if trace["type"] == "bar" and trace.get("name")]
    assert names[0].startswith("&lt;/script&gt;")
    assert page.words.count(EVIL) >= 10


def test_plotly_is_in_the_page_once_packed_and_of_the_tested_version(tmp_path: Path) -> None:
    offline = pytest.importorskip("plotly.offline")
    run = make_run(tmp_path, counts=class_counts())
    page = page_of(run)
    packed, drawing = page.scripts
    code = gzip.decompress(base64.b64decode(packed)).decode()
    assert f"plotly.js (cartesian - minified) v{offline.get_plotlyjs_version()}" in code
    assert "DecompressionStream" in drawing
    assert (run / "report.html").stat().st_size < 1_000_000


def test_a_browser_that_cannot_unpack_the_figures_says_so(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert ("id", "no-figures") in page.attributes
    assert "This browser cannot show the figures" in page.words


def test_the_licence_of_plotly_is_beside_it() -> None:
    folder = files("fedlens.pages").joinpath("plotly")
    assert folder.joinpath("LICENSE.txt").read_text(encoding="utf-8").startswith("MIT License")
    assert folder.joinpath("plotly-cartesian.min.js.gz").is_file()


def test_a_page_is_written_without_the_plotly_package(tmp_path: Path) -> None:
    run = make_run(tmp_path, counts=class_counts())
    code = (
        "import sys; from pathlib import Path; from fedlens.pages.run_page import write_report; "
        "write_report(Path(sys.argv[1])); print([m for m in ('plotly', 'pandas', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_plotly_accepts_every_figure(tmp_path: Path) -> None:
    go = pytest.importorskip("plotly.graph_objects")
    uneven = make_run(tmp_path / "a", counts=class_counts(400, 30, even=False), rounds=3)
    even = make_run(tmp_path / "b", counts=class_counts(12))
    compared = write_comparison([uneven, even], tmp_path / "compared.html").read_text(encoding="utf-8")
    partition = make_partition(class_counts(9), features={"blur": np.arange(9.0)})
    alone = write_page(partition, tmp_path / "partition.html").read_text(encoding="utf-8")
    figures = [*page_of(uneven).figures, *page_of(even).figures]
    figures += [*read_page(compared).figures, *read_page(alone).figures]
    assert len(figures) == 6 + 6 + 2 + 5
    # The page fills its colours in; plotly is asked about everything else.
    for figure in figures:
        go.Figure(json.loads(re.sub(r"var\(--[\w-]+\)", "#123456", json.dumps(figure))))


def test_the_page_follows_the_colour_scheme(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert "prefers-color-scheme: dark" in page.styles
    assert page.trace("test")["line"]["color"] == "var(--test)"


def test_a_report_is_written_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path, rounds=2)
    (run / "report.html").write_text("old", encoding="utf-8")
    assert page_of(run).figures
    assert {path.name for path in run.iterdir()} >= {"report.html"}
    assert not [path.name for path in run.iterdir() if "part" in path.suffix or path.name.endswith("~")]


def test_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        write_report(tmp_path)
    with pytest.raises(RunDirectoryError, match="the directory does not exist"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize("top", [0.008, 0.4, 1.0])
def test_an_axis_of_shares_has_no_tick_below_0(top: float) -> None:
    low, high = share_limits([0.0, top])
    assert -0.01 * high <= low < 0 < top < high, "room for a marker, but less than to a tick"


def test_a_logarithmic_axis_has_few_labels_however_far_a_loss_jumps() -> None:
    def axis(top: float) -> dict[str, Any]:
        figure = curves([Series([0, 1, 2], [0.5, None, top])], "loss", "Loss", "")
        axis: dict[str, Any] = draw(figure)["layout"]["yaxis"]
        return axis

    assert axis(500.0)["dtick"] == 1
    assert axis(1e30)["nticks"] == 7
    assert "dtick" not in axis(1e30)
