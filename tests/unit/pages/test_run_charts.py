"""What an algorithm declares for the page of its run, on that page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedlens.api import Experiment
from fedlens.core.algorithm_base import ClientGraph, OwnCurve
from fedlens.pages.run_page import write_report
from tests.unit.pages.reading import Page, assert_self_contained, read_page
from tests.unit.results.fake_run import class_counts, line, make_run

RING = ClientGraph("In each mixing", 4, [(0, 1, 0.3), (1, 2, 0.3), (2, 3, 0.3), (0, 3, 0.1)])


def page_of(
    root: Path, *, curves: list[OwnCurve], graphs: list[ClientGraph], **made: Any
) -> tuple[str, Page]:
    shown = {
        "curves": [curve._asdict() for curve in curves],
        "graphs": [graph._asdict() for graph in graphs],
    }
    run = make_run(root, summary={"shown": shown}, **made)
    html = write_report(run).read_text(encoding="utf-8")
    assert_self_contained(html)
    return html, read_page(html)


def test_the_numbers_that_an_algorithm_declares_are_curves_of_its_page(tmp_path: Path) -> None:
    rows = [line(at, consensus_distance=at / 2, peers_accuracy_worst=0.1) for at in range(6)]
    curves = [
        OwnCurve("consensus_distance", "how far apart", {"consensus_distance": "distance"}),
        OwnCurve("accuracy", "of peers", {"peers_accuracy_worst": "worst", "test_accuracy": "mean model"}),
        OwnCurve("loss", "never measured", {"peers_loss_worst": "worst"}),
    ]
    _, page = page_of(tmp_path, curves=curves, graphs=[], rounds=5, metrics=rows)
    assert page.trace("distance", 2)["y"] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert page.trace("mean model", 3)["y"] == pytest.approx([row["test_accuracy"] for row in rows])
    assert page.trace("worst", 3)["y"] == [0.1] * 6
    assert page.figures[3]["layout"]["yaxis"]["tickformat"].endswith("%")
    assert "Consensus distance: how far apart" in page.words
    assert "never measured" not in page.words


def test_a_curve_of_many_lines_shows_each_in_a_color_of_its_own(tmp_path: Path) -> None:
    lines = {f"units_{k}": f"layer {k}" for k in range(9)}
    rows = [line(at, **dict.fromkeys(lines, float(at))) for at in range(3)]
    _, page = page_of(
        tmp_path, curves=[OwnCurve("units", "each hidden layer", lines)], graphs=[], rounds=2, metrics=rows
    )
    colors = {page.trace(name, 2)["line"]["color"] for name in lines.values()}
    assert len(colors) == 9


def test_the_page_draws_who_sends_to_whom_with_weights_as_widths(tmp_path: Path) -> None:
    html, page = page_of(tmp_path, curves=[], graphs=[RING], counts=class_counts(4))
    widths = [float(width) for width in re.findall(r'<line [^>]*stroke-width="([\d.]+)"', html)]
    assert widths == [4.5, 4.5, 4.5, 1.5]
    (first,) = re.findall(r"<line ([^>]*)><title>0 and 1: 0.3<", html)
    assert 'x1="0.0" y1="-120.0" x2="120.0" y2="-0.0"' in first
    assert html.count("<circle ") == html.count("<text ") == 4
    assert "The wider a line, the larger its weight, from 0.1 to 0.3." in page.words
    assert "Clients that are joined send to each other." in page.words
    assert "Which clients send to which." in page.words  # what the page contains
    assert "marker" not in html.split("Who sends to whom")[1].split("</section>")[0]


def test_directed_edges_are_arrows_and_each_graph_has_its_title(tmp_path: Path) -> None:
    graphs = [ClientGraph(f"Mixing {k} of each 2", 3, [(0, k, 0.5)], directed=True) for k in (1, 2)]
    html, page = page_of(tmp_path, curves=[], graphs=graphs, counts=class_counts(3))
    for k in (1, 2):
        assert f'marker-end="url(#arrow-{k})"><title>0 to {k}: 0.5<' in html
        assert f'id="arrow-{k}"' in html
        assert f"Mixing {k} of each 2" in page.words
    assert "Every line has the weight 0.5." in page.words


def test_many_clients_have_no_names_and_a_graph_without_edges_is_dots(tmp_path: Path) -> None:
    html, page = page_of(tmp_path, curves=[], graphs=[ClientGraph("9,999 edges, too many to draw", 40, [])])
    assert html.count("<circle ") == 40
    assert "<line " not in html
    assert "<text " not in html
    assert "too many to draw" in page.words
    assert "weight" not in page.words


def test_a_run_that_declares_nothing_has_no_such_card(tmp_path: Path) -> None:
    assert "Who sends to whom" not in read_page(write_report(make_run(tmp_path)).read_text()).words


def test_bytes_between_clients_stand_with_the_others(tmp_path: Path) -> None:
    rows = [line(at, bytes_peer=1_000_000) for at in range(4)]
    words = read_page(write_report(make_run(tmp_path, rounds=3, metrics=rows)).read_text()).words
    assert "sent up, 4.0 MB between clients" in words
    assert "Sent between clients 4.0 MB" in words


GKT = {"name": "fedgkt", "client": {"name": "mlp", "hidden": 8}, "cut": "1"}


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("dsgd", "The mean of the peers' models after"),
        ("fedavg", "The global model after"),
        (GKT | {"extractors": 1}, "The server's network behind some clients' layers after"),
        (GKT, "no evaluation.npz: the server's network behind some clients' layers may be several models"),
    ],
    ids=["dsgd", "fedavg", "fedgkt, one client", "fedgkt"],
)
def test_the_page_says_which_model_was_tested(algorithm: Any, said: str, tmp_path: Path) -> None:
    data = {"dataset": "digits", "partition": {"name": "iid", "clients": 3}}
    made = Experiment(
        rounds=1, data=data, local={"lr": 0.1}, model={"name": "mlp", "hidden": 8}, algorithm=algorithm
    )
    page = write_report(made.run(tmp_path / "run").directory).read_text(encoding="utf-8")
    assert said in read_page(page).words
