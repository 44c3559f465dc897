"""examples.npz: the predictions of the model files, exact after a resume, and no change of the run itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlens import Experiment, Result, resume
from fedlens.base.errors import RunDirectoryError
from fedlens.data.normalize import normalize
from fedlens.observers.example_predictions import LOWEST, PIXELS, ExamplePredictions, found_boxes
from fedlens.run.progress import ProgressBase
from fedlens.run.rundir import RunDir
from fedlens.use.trained_model import read_trained
from tests.unit.use import placed_kit as kit

pytestmark = pytest.mark.usefixtures("quick_workers")


def examples_of(result: Result) -> ExamplePredictions:
    return ExamplePredictions.read(result.directory / "examples.npz")


@pytest.fixture(scope="module")
def boxes_run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    torch.set_num_threads(1)
    return kit.run(tmp_path_factory.mktemp("boxes") / "run", kit.boxes, "spots")


def predicted(result: Result, round: str, index: np.ndarray) -> list[dict[str, np.ndarray]]:
    """What the model file of this round predicts for these test images, one at a time."""
    trained, test = read_trained(RunDir.open(result.directory), round), kit.boxes().test
    images = torch.from_numpy(test.inputs[index])
    with torch.inference_mode():
        outputs = trained.outputs(normalize(images, trained.mean, trained.std))
        found = trained.task.predict(outputs)
    return [{name: value[k].numpy() for name, value in found.items()} for k in range(len(index))]


def test_eight_test_images_are_spread_evenly_over_the_test_data(boxes_run: Result) -> None:
    given = examples_of(boxes_run)
    assert given.index.tolist() == [0, 2, 5, 7, 10, 12, 15, 17]
    images, _, truth = kit.scenes(20, 1)
    assert np.array_equal(given.images, images[given.index])
    for k, at in enumerate(given.index.tolist()):
        assert np.array_equal(given.truth["boxes"][given.truth["image"] == k], truth.boxes_of(at))
        assert np.array_equal(given.truth["labels"][given.truth["image"] == k], truth.labels_of(at))


@pytest.mark.parametrize("stage", ["best", "last"])
def test_the_boxes_are_those_of_the_model_file_of_the_round(boxes_run: Result, stage: str) -> None:
    given = examples_of(boxes_run)
    answer = given.answers[stage]
    for k, one in enumerate(predicted(boxes_run, stage, given.index)):
        own = answer["image"] == k
        kept = one["scores"] >= LOWEST
        assert np.array_equal(answer["scores"][own], one["scores"][kept])
        assert np.array_equal(answer["boxes"][own], one["boxes"][kept])
        assert np.array_equal(answer["labels"][own], one["labels"][kept])
    assert given.rounds["last"] == 4
    assert given.rounds["best"] == boxes_run.summary["best"]["round"]


def test_the_first_predictions_are_those_of_the_initial_model(boxes_run: Result) -> None:
    given = examples_of(boxes_run)
    assert given.rounds["first"] == 0
    model = kit.Spots(2).eval()
    data = kit.boxes()
    inputs = normalize(torch.from_numpy(data.test.inputs[given.index[:1]]), data.mean, data.std)
    (one,) = model(inputs)
    own = given.answers["first"]["image"] == 0
    assert np.array_equal(given.answers["first"]["boxes"][own], one["boxes"].detach().numpy())


def test_the_run_has_the_same_bits_with_and_without_examples(boxes_run: Result, tmp_path: Path) -> None:
    without = kit.run(tmp_path / "run", kit.boxes, "spots", record={"images": False})
    assert not (without.directory / "examples.npz").exists()
    name = "model.safetensors"
    assert (without.directory / name).read_bytes() == (boxes_run.directory / name).read_bytes()
    values = [
        [{k: v for k, v in line.items() if k not in ("seconds", "elapsed")} for line in one.metrics]
        for one in (without, boxes_run)
    ]
    assert values[0] == values[1]


def arrays(given: ExamplePredictions) -> dict[str, Any]:
    parts = {"images": given.images, "index": given.index, **given.truth}
    for stage, answer in given.answers.items():
        parts |= {f"{stage}.{name}": array for name, array in answer.items()}
    return parts


def assert_equal(one: ExamplePredictions, other: ExamplePredictions) -> None:
    assert one.rounds == other.rounds
    assert arrays(one).keys() == arrays(other).keys()
    for name, array in arrays(one).items():
        assert np.array_equal(array, arrays(other)[name]), name


class StopsAfter(ProgressBase):
    """Stops the run like a person with Ctrl-C, after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def round_done(self, metrics: dict[str, Any]) -> None:
        if metrics["round"] == self.round:
            raise KeyboardInterrupt


def stopped(path: Path, round: int) -> None:
    """A run of four rounds that is stopped after one; its data and model can be found again."""
    settings: dict[str, Any] = {
        "rounds": 4,
        "model": f"{kit.__file__}:spots",
        "local": {"lr": 0.05, "batch_size": 8},
        "data": {"dataset": f"{kit.__file__}:boxes", "partition": {"name": "iid", "clients": 2}},
        "engine": "inline",
        "record": {"images": True},
    }
    Experiment(**settings).run(path, progress=StopsAfter(round), report=False)


@pytest.mark.parametrize("stop", [0, 2])
def test_a_resumed_run_has_the_same_predictions(boxes_run: Result, tmp_path: Path, stop: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        stopped(tmp_path / "run", stop)
    assert set(ExamplePredictions.read(tmp_path / "run" / "examples.npz").rounds) == {"first"}
    assert_equal(examples_of(resume(tmp_path / "run", report=False)), examples_of(boxes_run))


def test_without_the_first_predictions_a_resumed_run_has_the_others(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        stopped(tmp_path / "run", 1)
    (tmp_path / "run" / "examples.npz").write_bytes(b"damaged")
    assert set(examples_of(resume(tmp_path / "run", report=False)).rounds) == {"best", "last"}


def test_workers_in_processes_give_the_same_predictions(boxes_run: Result, tmp_path: Path) -> None:
    engine = {"name": "processes", "workers": 2}
    assert_equal(
        examples_of(kit.run(tmp_path / "run", kit.boxes, "spots", engine=engine)), examples_of(boxes_run)
    )


def test_resuming_without_images_removes_the_predictions(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        stopped(tmp_path / "run", 1)
    assert (tmp_path / "run" / "examples.npz").exists()
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("images = true", "images = false"))
    resume(tmp_path / "run", report=False)
    assert not (tmp_path / "run" / "examples.npz").exists()


def test_a_detector_that_gives_nan_has_no_boxes(tmp_path: Path) -> None:
    given = examples_of(kit.run(tmp_path / "run", kit.boxes, "lost", rounds=1))
    assert len(given.answers["last"]["boxes"]) == 0
    assert len(given.truth["boxes"]) > 0


def test_large_images_are_kept_smaller_with_their_boxes(tmp_path: Path) -> None:
    given = examples_of(kit.run(tmp_path / "run", kit.large_boxes, "spots", rounds=1))
    assert given.images.nbytes <= PIXELS
    height, width = given.images.shape[2:]
    assert width / height == pytest.approx(4 / 3, abs=0.01)
    truth = kit.scenes(20, 1, 300, 400)[2]
    expected = truth.boxes_of(0) * np.array([width / 400, height / 300] * 2)
    assert given.truth["boxes"][given.truth["image"] == 0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("algorithm", ["local-only", "centralized"])
def test_only_a_global_model_predicts_examples(tmp_path: Path, algorithm: str) -> None:
    more = {"validation": 0.2, "validation_from": "client"}
    result = kit.run(tmp_path / "run", kit.boxes, "spots", rounds=1, algorithm=algorithm, more=more)
    assert (result.directory / "examples.npz").exists() == (algorithm == "centralized")


def test_a_classifier_has_no_examples(tmp_path: Path) -> None:
    data = {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}
    result = Experiment(rounds=1, model="linear", local={"lr": 0.1}, data=data).run(tmp_path / "run")
    assert not (result.directory / "examples.npz").exists()


def test_a_task_whose_predictions_fail_ends_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from fedlens.tasks.detection import Detection\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Own(Detection):\n"
        "    def predict(self, outputs):\n"
        "        raise RuntimeError('no boxes today')\n"
    )

    class Notes(ProgressBase):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def note(self, sentence: str) -> None:
            self.notes.append(sentence)

    listener = Notes()
    result = Experiment(
        rounds=1,
        model=f"{kit.__file__}:spots",
        task={"name": f"{file}:Own"},
        local={"lr": 0.05},
        data={"dataset": kit.boxes, "partition": {"name": "iid", "clients": 2}},
        engine="inline",
        record={"images": True},
    ).run(tmp_path / "run", progress=listener, report=False)
    assert result.summary["status"] == "finished"
    assert next(note for note in listener.notes if "no boxes today" in note) == (
        "the page shows no example predictions of the first round: RuntimeError: no boxes today (own.py, line 6)"
    )


# ---- the file


def of_masks() -> ExamplePredictions:
    mask = np.zeros((2, 4, 5), np.uint8)
    answers = {"first": {"class": mask}, "last": {"class": mask + 1}}
    images, index = np.zeros((2, 3, 4, 5), np.uint8), np.array([0, 3])
    rounds = {"first": 0, "last": 4}
    return ExamplePredictions("masks", ("a", "b"), index, images, {"class": mask}, answers, rounds)


def of_boxes() -> ExamplePredictions:
    found = {
        "boxes": np.array([[0, 0, 2, 3]], np.float32),
        "labels": np.array([1]),
        "image": np.array([1]),
    }
    answers = {"last": {**found, "scores": np.array([0.5], np.float32)}}
    images, index = np.zeros((2, 3, 4, 5), np.uint8), np.array([0, 3])
    return ExamplePredictions("boxes", ("a", "b"), index, images, found, answers, {"last": 4})


@pytest.mark.parametrize("given", [of_masks(), of_boxes()], ids=["masks", "boxes"])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, given: ExamplePredictions) -> None:
    given.write(tmp_path / "examples.npz")
    read = ExamplePredictions.read(tmp_path / "examples.npz")
    assert_equal(read, given)
    assert (read.annotates, read.classes) == (given.annotates, given.classes)


@pytest.mark.parametrize(
    ("given", "part", "name", "value"),
    [
        (of_masks(), "truth", "class", np.zeros((2, 4, 4), np.uint8)),
        (of_masks(), "last", "class", np.zeros((2, 4, 5), np.int64)),
        (of_boxes(), "truth", "boxes", np.zeros((1, 3), np.float32)),
        (of_boxes(), "last", "labels", np.array([2])),
        (of_boxes(), "last", "image", np.array([2])),
        (of_boxes(), "last", "scores", np.array([np.nan], np.float32)),
        (of_boxes(), "last", "boxes", np.full((1, 4), np.inf, np.float32)),
    ],
)
def test_a_file_of_wrong_values_is_corrupt(
    tmp_path: Path, given: ExamplePredictions, part: str, name: str, value: np.ndarray
) -> None:
    if part == "truth":
        wrong = replace(given, truth={**given.truth, name: value})
    else:
        wrong = replace(given, answers={**given.answers, part: {**given.answers[part], name: value}})
    wrong.write(tmp_path / "examples.npz")
    with pytest.raises(
        RunDirectoryError, match=f"examples.npz is corrupt: the values of '{part}' are not valid"
    ):
        ExamplePredictions.read(tmp_path / "examples.npz")


def test_boxes_of_no_object_are_left_out_and_the_highest_score_comes_first() -> None:
    boxes = np.zeros((5, 4), np.float32)
    labels, scores = np.array([0, 1, -1, 0, 1]), np.array([0.3, 0.9, 0.8, np.nan, 0.3])
    assert found_boxes(boxes, labels, scores, 0.0, 10).tolist() == [1, 0, 4]
    assert found_boxes(boxes, labels, scores, 0.3, 2).tolist() == [1, 0]
    assert found_boxes(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0), 0.0, 3).tolist() == []
