"""Runs that differ in the seed alone are one row and one curve; clients are compared by name."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlens.cli.main import app
from fedlens.pages.compare import compare, curve_figure, write_comparison
from fedlens.pages.run_page import write_report
from fedlens.results.comparison import Comparison, client_table, readable
from fedlens.results.figures.chart import Chart
from fedlens.results.figures.picture import chart_picture
from tests.unit.pages.reading import assert_self_contained, read_page
from tests.unit.results.fake_run import line, make_run

PARTITION = {"digest": "p", "held_out_digest": "h", "examples": 100, "clients": 3, "emd": 1.0}


def run(
    root: Path,
    seed: int,
    accuracy: float,
    algorithm: str = "fedavg",
    clients: dict[str, float] | None = None,
    config: dict[str, Any] | None = None,
    losses: tuple[float, ...] = (),
    own: tuple[float, ...] = (),
    **more: Any,
) -> Path:
    metrics = [line(k, test_accuracy=accuracy * k / 2) for k in range(3)]
    for name, values in (("test_loss", losses), ("eta_g", own)):
        for at, value in zip(metrics, values, strict=False):
            at[name] = value
    settings = {"seed": seed, "seeds": {"data": 0, "partition": 0, "initialization": seed}, **(config or {})}
    run_id = more.pop("run_id", f"{algorithm}-{accuracy}-{seed}")
    summary = {"seed": seed, "partition": PARTITION, **more.pop("summary", {})}
    path = make_run(
        root, run_id=run_id, algorithm=algorithm, metrics=metrics, config=settings, summary=summary, **more
    )
    if clients:
        rows = [
            {"round": 2, "client": name, "validation_examples": 20, "validation_accuracy": value}
            for name, value in clients.items()
        ]
        (path / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def three(root: Path) -> list[Path]:
    return [run(root, seed, accuracy) for seed, accuracy in enumerate((0.8, 0.9, 0.7))]


def test_runs_that_differ_in_the_seed_alone_are_one_row(tmp_path: Path) -> None:
    (row,) = compare(three(tmp_path))
    assert (row["runs"], row["seeds"], row["seed"], row["run"]) == (3, [0, 1, 2], None, "digits")
    assert row["final"] == pytest.approx(0.8)
    assert row["std"]["final"] == pytest.approx(statistics.stdev((0.8, 0.9, 0.7)))
    assert len(row["directories"]) == 3
    (text,) = readable([row])
    assert (text["runs"], text["final accuracy"]) == ("3", "80.0 % ± 10.0")


def test_a_row_of_several_seeds_has_no_seed_in_its_name_and_says_what_its_spread_is(tmp_path: Path) -> None:
    for seed in range(3):
        run(tmp_path, seed, 0.8, name=f"prox-mu0.1-seed{seed + 9}")
    alone = run(tmp_path / "alone", 0, 0.9, "fedprox", name="prox-seed0")
    (row, single) = Comparison.of([tmp_path]).rows
    assert {row["run"], single["run"]} == {"prox-mu0.1", "prox-seed0"}
    note = "note: ± is the sample standard deviation over the seeds of the row"
    assert note in CliRunner().invoke(app, ["compare", str(tmp_path)]).stdout.splitlines()
    assert "note" not in CliRunner().invoke(app, ["compare", str(alone)]).stdout


def test_own_algorithms_are_shown_without_their_folder_unless_only_that_differs(tmp_path: Path) -> None:
    mine, other, plain = (
        run(tmp_path / str(k), 0, 0.8, algorithm, name=f"run {k}", run_id=f"r{k}")
        for k, algorithm in enumerate(("/a/my_prox.py:my_prox", "/b/my_prox.py:my_prox", "fedavg"))
    )
    assert [row["algorithm"] for row in compare([mine, plain])] == ["my_prox.py:my_prox", "fedavg"]
    both = [row["algorithm"] for row in compare([mine, other, plain])]
    assert both == ["/a/my_prox.py:my_prox", "/b/my_prox.py:my_prox", "fedavg"]


def test_parts_of_your_own_are_named_beside_the_algorithm(tmp_path: Path) -> None:
    kept, trimmed = {"name": "/a/memory.py:kept", "mu": 0.1}, {"name": "robust.means:TrimmedMean"}
    both = run(tmp_path, 0, 0.8, config={"client": [{"name": "proximal"}, kept], "aggregate": trimmed})
    one = run(tmp_path, 0, 0.7, config={"client": kept, "server": {"name": "adam"}})
    plain, bound = run(tmp_path, 0, 0.6), run(tmp_path, 0, 0.9, "centralized", config={"client": kept})
    rows = compare([both, one, plain, bound])
    names = ["fedavg + kept + TrimmedMean", "fedavg + kept", "fedavg", "centralized"]
    assert [row["algorithm"] for row in rows] == names
    assert [row["run"] for row in rows] == [
        *(f"digits ({name})" for name in names[:3]),
        "digits (centralized + kept)",
    ]
    assert "<b>fedavg + kept + TrimmedMean</b> on" in write_report(both).read_text()


def test_each_shows_them_singly(tmp_path: Path) -> None:
    rows = compare(three(tmp_path), each=True)
    assert [row["final"] for row in rows] == pytest.approx([0.8, 0.9, 0.7])
    assert "runs" not in readable(rows)[0]
    said = CliRunner().invoke(app, ["compare", str(tmp_path), "--each", "--json"])
    assert len(json.loads(said.stdout)) == 3
    assert len(json.loads(CliRunner().invoke(app, ["compare", str(tmp_path), "--json"]).stdout)) == 1


def test_name_and_engine_join_but_any_other_setting_parts(tmp_path: Path) -> None:
    first = run(tmp_path, 0, 0.8)
    other = run(tmp_path, 1, 0.9, name="other", config={"engine": {"name": "inline"}})
    assert [row["runs"] for row in compare([first, other])] == [2]
    changed = run(tmp_path, 1, 0.95, config={"local": {"lr": 0.7}})
    assert [row["runs"] for row in compare([first, changed])] == [1, 1]


def test_a_repeated_seed_and_an_unfinished_run_are_rows_of_their_own(tmp_path: Path) -> None:
    runs = [*three(tmp_path), run(tmp_path, 1, 0.6), run(tmp_path, 3, 0.5, summary={"status": "interrupted"})]
    rows = compare(runs)
    assert [row["runs"] for row in rows] == [3, 1, 1]
    assert [row["status"] for row in rows] == ["finished", "finished", "interrupted"]


def test_relative_accuracy_goes_by_seed(tmp_path: Path) -> None:
    bounds = [run(tmp_path, seed, value, "centralized", name="c") for seed, value in enumerate((0.8, 1.0))]
    row, bound = compare([*three(tmp_path), *bounds])
    assert row["relative_accuracy"] == pytest.approx((0.8 / 0.8 + 0.9 / 1.0) / 2)
    assert row["note"].startswith(
        "relative to a centralized run for 2 of 3 seeds only; no relative accuracy: "
    )
    assert bound["runs"] == 2


def test_the_curve_of_several_seeds_is_their_mean_with_a_band(tmp_path: Path) -> None:
    html = write_comparison(three(tmp_path), tmp_path / "c.html").read_text("utf-8")
    assert_self_contained(html)
    page = read_page(html)
    band, mean = page.figures[0]["data"]
    assert mean["y"] == pytest.approx([0, 0.4, 0.8])
    assert band["x"] == [0, 1, 2, 2, 1, 0]
    assert band["y"] == pytest.approx([0, 0.45, 0.9, 0.7, 0.35, 0])
    assert (band["legendgroup"], band["showlegend"]) == (mean["name"], False)
    views = [json.loads(value or "") for name, value in page.attributes if name == "data-data"]
    assert [len(x) for x in views[1]["x"]] == [6, 3]
    assert "3 runs compared" in page.words


CLIENTS = {"mercy": 0.5, "oak": 0.9, "<i>": 0.7}


def study(root: Path) -> list[Path]:
    """Two seeds of a federated run, and its baselines; and a run on another partition."""
    made = [run(root, seed, 0.8, clients={k: v + seed / 10 for k, v in CLIENTS.items()}) for seed in (0, 1)]
    made.append(run(root, 0, 0.9, "centralized", {"mercy": 0.8, "oak": 0.9, "<i>": 0.9}, name="pool"))
    made.append(run(root, 0, 0.9, "local-only", {"mercy": 0.7, "oak": 0.6, "<i>": 0.7}, name="alone"))
    config = {"data": {"dataset": "digits", "partition": {"name": "iid", "clients": 3}, "validation": 0.0}}
    clients, summary = {"mercy": 0.1}, {"partition": PARTITION | {"digest": "q"}}
    return [*made, run(root, 0, 0.85, "fedprox", clients, config, name="elsewhere", summary=summary)]


def test_clients_are_rows_the_worst_first_with_differences_to_both_baselines(tmp_path: Path) -> None:
    head, rows = client_table(Comparison.of(study(tmp_path)).groups)
    assert head == ["client", "held out", "digits", "vs centralized", "vs local-only", "pool", "alone"]
    assert rows == [
        ["mercy", "20", "55.0 %", "-25.0", "-15.0", "80.0 %", "70.0 %"],
        ["<i>", "20", "75.0 %", "-15.0", "+5.0", "90.0 %", "70.0 %"],
        ["oak", "20", "95.0 %", "+5.0", "+35.0", "90.0 %", "60.0 %"],
    ]


def test_the_clients_are_on_the_page_on_the_terminal_and_in_json(tmp_path: Path) -> None:
    paths = list(map(str, study(tmp_path)))
    page = read_page(write_comparison(paths, tmp_path / "c.html").read_text("utf-8"))
    assert "mercy 20 55.0 % -25.0 -15.0" in page.words
    assert "<i> 20 75.0 %" in page.words
    said = CliRunner().invoke(app, ["compare", *paths])
    assert said.stdout.splitlines()[-4].startswith("client  held out  digits  vs centralized")
    rows = json.loads(CliRunner().invoke(app, ["compare", *paths, "--json"]).stdout)
    assert rows[0]["clients"][0]["client"] == "mercy"
    assert rows[0]["clients"][0]["to_centralized"] == pytest.approx(-0.25)
    assert rows[0]["clients"][0]["to_local_only"] == pytest.approx(-0.15)


def test_a_client_that_one_seed_did_not_measure_has_no_mean(tmp_path: Path) -> None:
    fewer = {name: value for name, value in CLIENTS.items() if name != "oak"}
    paths = [run(tmp_path, seed, 0.8, clients=clients) for seed, clients in enumerate((CLIENTS, fewer))]
    assert [client["client"] for client in compare(paths)[0]["clients"]] == ["mercy", "<i>"]


def test_the_worst_client_of_few_is_named(tmp_path: Path) -> None:
    path = run(tmp_path, 0, 0.8, clients=CLIENTS)
    spread = {"clients_accuracy_mean": 0.7, "clients_accuracy_worst_decile": 0.5}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line(k, **spread)) + "\n" for k in range(3)))
    summary = json.loads((path / "summary.json").read_text())
    worst = {"client": "mercy", "value": 0.5}
    clients = {"round": 2, "metric": "accuracy", "measured": 3, "mean": 0.7, "worst": worst}
    (path / "summary.json").write_text(json.dumps(summary | {"clients": clients}))
    assert readable(compare([path]))[0]["worst client"] == "50.0 % (mercy)"


def test_a_run_whose_clients_cannot_be_compared_has_a_note(tmp_path: Path) -> None:
    paths = study(tmp_path)
    said = Comparison.of(paths).notes
    assert [
        note
        for note in said
        if note.startswith("elsewhere: its clients have other images than those of digits")
    ]
    summary = {"partition": PARTITION | {"held_out_digest": "another"}}
    other = run(tmp_path, 0, 0.85, "fedprox", CLIENTS, name="halves", summary=summary)
    said = Comparison.of([*paths[:1], other]).notes
    assert any(
        note.startswith("halves: its clients hold out other images than those of digits") for note in said
    )
    same = run(tmp_path, 0, 0.85, "fedprox", CLIENTS, name="same")
    assert not any(note.startswith("same: its clients") for note in Comparison.of([*paths[:1], same]).notes)


def test_rows_of_the_same_name_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    paths = [run(tmp_path, seed, 0.8, name="digits") for seed in (0, 1)]
    paths += [run(tmp_path, seed, 0.8, "fedprox", name="digits") for seed in (0, 1)]
    assert [row["run"] for row in Comparison.of(paths).rows] == ["digits (fedavg)", "digits (fedprox)"]


def test_the_column_says_that_its_round_was_chosen_by_validation(tmp_path: Path) -> None:
    path = run(tmp_path, 0, 0.8)
    assert "best accuracy" in readable(Comparison.of([path]).rows)[0]
    summary = json.loads((path / "summary.json").read_text())
    summary["best"] = {"round": 1, "metric": "validation_accuracy", "value": 0.5, "chosen_on": "validation"}
    (path / "summary.json").write_text(json.dumps(summary))
    assert "accuracy at best validation round" in readable(Comparison.of([path]).rows)[0]


def test_the_plot_has_the_mean_and_the_band_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'fedlens[plot]'")
    bound = run(tmp_path, 0, 0.95, "centralized")
    comparison = Comparison.of([*three(tmp_path), bound])
    figure = curve_figure(comparison)
    picture = chart_picture(Chart("", "", [figure]))
    axes = picture.axes[0]
    mean, dashed = axes.lines
    assert mean.get_ydata() == pytest.approx([0, 0.4, 0.8])
    names = [text.get_text().strip() for text in picture.legends[0].get_texts()]
    assert names == [row["run"] for row in comparison.rows]
    assert (mean.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert mean.get_color() != dashed.get_color()
    (band,) = axes.collections
    edges = band.get_paths()[0].vertices
    at_end = edges[edges[:, 0] == 2][:, 1]
    assert (at_end.min(), at_end.max()) == pytest.approx((0.7, 0.9))


def test_a_plot_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'fedlens[plot]'")
    runs = [str(path) for path in three(tmp_path)]
    for name, start in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")):
        result = CliRunner().invoke(app, ["compare", *runs, "--plot", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert f"picture: {tmp_path / name}" in result.output.replace("\n", "")
        assert (tmp_path / name).read_bytes().startswith(start)


def test_one_more_metric_is_a_column_of_its_last_values(tmp_path: Path) -> None:
    alike = [str(run(tmp_path, k, 0.8, losses=(3.0, 2.0, loss))) for k, loss in enumerate((1.0, 3.0))]
    other = str(run(tmp_path, 0, 0.9, "mine", own=(1.5, 2.5)))
    result = CliRunner().invoke(app, ["compare", *alike, other, "--metric", "loss"])
    assert re.search(r"final accuracy .* final loss\n", result.output), result.output
    assert re.search(r"fedavg .* 2 ± 1\.414\n", result.output)
    own = CliRunner().invoke(app, ["compare", *alike, other, "--metric", "eta_g", "--json"])
    rows = {row["algorithm"]: row for row in json.loads(own.output)}
    assert (rows["mine"]["final_eta_g"], rows["fedavg"]["final_eta_g"]) == (2.5, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plot", "a.gif"], "unknown file format '.gif'"),
        (["--plot", "a.png", "--metric", "miou"], "choose one of: accuracy, loss"),
        (["--metric", "miou"], "no run has values of 'miou'"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_refused(tmp_path: Path, options: list[str], words: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'fedlens[plot]'")
    result = CliRunner().invoke(app, ["compare", str(run(tmp_path, 0, 0.8)), *options])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
