"""What `repr` and a notebook show of experiments, results and partitions."""

import pytest

from fedlens import Experiment
from fedlens.data.partition.partition import Partition
from fedlens.local.settings import LocalSettings

SETTINGS = {
    "rounds": 2,
    "model": "linear",
    "local": {"lr": 0.1},
    "name": "<b>wards</b>",
    "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}},
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return Experiment(**SETTINGS).run(tmp_path_factory.mktemp("runs") / "first", report=False)


def test_an_experiment_shows_what_it_trains() -> None:
    lines = repr(Experiment(**SETTINGS)).splitlines()
    assert lines[0] == "Experiment '<b>wards</b>'"
    assert "  partition  iid(clients=4)" in lines
    assert "  local      lr=0.1" in lines
    assert "  rounds     2" in lines


def test_local_settings_are_shown_in_the_order_of_the_settings() -> None:
    local = {"batch_size": 10, "momentum": 0.5, "clip_norm": 1.0, "weight_decay": 0.1, "epochs": 2, "lr": 0.1}
    shown = repr(Experiment(**{**SETTINGS, "local": local}))
    places = [shown.index(f"{name}=") for name in LocalSettings.model_fields if name in local]
    assert places == sorted(places)


def test_a_result_shows_how_it_ended_and_what_it_reached(result) -> None:
    final = result.summary["final"]
    assert "finished, round 2 of 2" in repr(result)
    assert f"test_accuracy  {final['test_accuracy']:.4g} after round 2" in repr(result)
    assert f"test_loss      {final['test_loss']:.4g} after round 2" in repr(result)
    assert f"test_accuracy_balanced {final['test_accuracy_balanced']:.4g}, " in repr(result)


def test_a_partition_shows_its_recipe_and_sizes(result) -> None:
    shown = repr(Partition.load(result.directory / "partition.npz"))
    assert "Partition of 'digits'" in shown
    assert "4: 0, 1, 2 and 1 more" in shown
    assert "iid(clients=4" in shown


def test_html_is_escaped(result) -> None:
    for thing in (Experiment(**SETTINGS), result, Partition.load(result.directory / "partition.npz")):
        page = thing._repr_html_()
        assert page.startswith("<table>")
        assert "<b>" not in page
