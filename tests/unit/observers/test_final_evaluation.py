"""evaluation.npz: the same numbers as the run's metrics, the worst mistakes of all workers, and no image unasked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fedlens
from fedlens import Experiment, Result, load_result, resume
from fedlens.carry_out import _report
from fedlens.data.dataset import Dataset
from fedlens.observers.final_evaluation import PIXELS, WORST, FinalEvaluation
from fedlens.observers.last_evaluation import final_evaluation
from fedlens.results.figures.classification_figures import Calibration, ClassResults
from fedlens.run.progress import ProgressBase
from fedlens.tasks.segmentation import Segmentation
from tests.unit.pages.reading import read_page

pytestmark = pytest.mark.usefixtures("quick_workers")

N = 2500  # test images: three requests, and each image of the last thousand is one of the first again


def digits(*args: Any) -> Dataset:
    """Digits whose test images occur twice, so that confidences are equal in different requests."""
    images = (load_digits().images * 15).astype(np.uint8)
    labels = load_digits().target.astype(np.int64)
    test = np.arange(N) % 1500
    return fedlens.dataset(images[1500:], labels[1500:], images[test], labels[test])


def large(*args: Any) -> Dataset:
    """Random photographs that are too large to be kept as they are."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60, 3, 160, 200), np.uint8), np.arange(60) % 10
    return fedlens.dataset(images[:20], labels[:20], images[20:], labels[20:], layout="channels-first")


def run(path: Path, dataset: Any = digits, **more: Any) -> Result:
    settings: dict[str, Any] = {
        "rounds": 2,
        "model": "linear",
        "local": {"lr": 0.1},
        "data": {"dataset": dataset, "partition": {"name": "iid", "clients": 4}},
        "engine": "inline",
        "record": {"images": True},
    }
    return Experiment(**(settings | more)).run(path)


def evaluation_of(result: Result) -> FinalEvaluation:
    return FinalEvaluation.read(result.directory / "evaluation.npz")


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("inline") / "run")


def sorted_by_hand(result: Result, n: int = N) -> Mapping[str, Any]:
    """The wrong test images, by a sort of the whole test set."""
    data = digits()
    mean, std = torch.tensor(data.mean).view(1, -1, 1, 1), torch.tensor(data.std).view(1, -1, 1, 1)
    images = (torch.from_numpy(data.test.inputs).float() / 255 - mean) / std
    truth = torch.from_numpy(data.test.targets)
    with torch.no_grad():
        confidence, answer = F.softmax(result.model(images), 1).max(1)
    wrong = [k for k in range(n) if answer[k] != truth[k]]
    order = sorted(wrong, key=lambda k: (-round(float(confidence[k]), 5), k))
    return {"order": order, "confidence": confidence, "answer": answer, "truth": truth}


def test_the_worst_mistakes_are_those_of_a_sort_of_the_whole_test_set(inline: Result) -> None:
    right, given = sorted_by_hand(inline), evaluation_of(inline).mistakes
    assert given["index"].tolist() == right["order"][:WORST]
    for name in ("truth", "answer", "confidence"):
        assert np.allclose(given[name], right[name][right["order"][:WORST]], atol=1e-6)
    # The test set contains some images twice: of equal confidences the earlier image comes first.
    twice = [k for k in given["index"].tolist() if k + 1500 in given["index"]]
    assert twice
    assert all(given["index"].tolist().index(k) + 1 == given["index"].tolist().index(k + 1500) for k in twice)


@pytest.mark.parametrize("engine", [{"name": "processes", "workers": 2}, {"name": "vectorized"}])
def test_the_number_of_workers_never_shows(tmp_path: Path, inline: Result, engine: dict[str, Any]) -> None:
    given, right = evaluation_of(run(tmp_path / "run", engine=engine)), evaluation_of(inline)
    exact = engine["name"] == "processes"  # training clients together changes the last bits
    for name, values in right.sums.items():
        assert np.array_equal(given.sums[name], values) if exact else given.sums[name].shape == values.shape
    for name, values in right.mistakes.items():
        close = (
            given.mistakes[name] == values if exact else np.isclose(given.mistakes[name], values, atol=1e-4)
        )
        assert close.all()
    assert given.images is not None
    assert np.array_equal(given.images, right.images)


def test_the_pictures_are_the_test_images_at_their_size(inline: Result) -> None:
    given = evaluation_of(inline)
    assert given.images is not None
    assert np.array_equal(given.images, digits().test.inputs[given.mistakes["index"]])


def test_the_file_and_the_metrics_of_the_last_round_are_one_measurement(inline: Result) -> None:
    given, last = evaluation_of(inline), inline.metrics[-1]
    results = ClassResults.of(given.classes, given.sums)
    assert given.round == last["round"] == 2
    assert results.examples.sum() == N
    assert results.correct.sum() / N == last["test_accuracy"]
    assert results.accuracy.mean() == pytest.approx(last["test_accuracy_balanced"], abs=1e-12)
    assert Calibration.of(given.sums).error == pytest.approx(last["test_calibration_error"], abs=1e-9)


def test_the_accuracy_of_each_class_is_in_the_summary_alone(inline: Result) -> None:
    given = evaluation_of(inline)
    accuracy = ClassResults.of(given.classes, given.sums).accuracy
    expected = {f"test_accuracy_{name}": value for name, value in zip(given.classes, accuracy, strict=True)}
    assert inline.summary["details"] == pytest.approx(expected)
    assert not [name for line in inline.metrics for name in line if name in expected]


def test_the_summary_says_what_the_model_costs(inline: Result) -> None:
    model = inline.summary["model"]
    assert (model["parameters"], model["trainable"]) == (650, 650)
    assert (model["multiply_adds"], model["input_shape"]) == (640, [1, 8, 8])


def contains(directory: Path, images: np.ndarray) -> bool:
    """Whether any file holds the pixels of an image, in an array or in a picture of a page."""
    contents = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    return (
        FinalEvaluation.read(directory / "evaluation.npz").images is not None
        or "data:image/png" in (directory / "report.html").read_text(encoding="utf-8")
        or any(image.tobytes() in content for content in contents for image in images)
    )


def test_without_record_images_no_pixel_is_in_the_run_directory(tmp_path: Path) -> None:
    shown, hidden = run(tmp_path / "a"), run(tmp_path / "b", record={"images": False})
    images = digits().test.inputs[evaluation_of(shown).mistakes["index"]]
    for result in (shown, hidden):
        _report(result.directory, ProgressBase())
    assert evaluation_of(hidden).mistakes["index"].tolist() == evaluation_of(shown).mistakes["index"].tolist()
    assert contains(shown.directory, images)
    assert not contains(hidden.directory, images)
    page = (hidden.directory / "report.html").read_text(encoding="utf-8")
    assert "The images are left out (record.images = false)" in page


def test_images_of_a_users_own_data_are_kept_only_if_the_settings_say_so(tmp_path: Path) -> None:
    own, published = run(tmp_path / "own", record={}), run(tmp_path / "digits", "digits", record={})
    images = digits().test.inputs[evaluation_of(own).mistakes["index"]]
    _report(own.directory, ProgressBase())
    assert not contains(own.directory, images)
    assert evaluation_of(published).images is not None
    page = read_page((own.directory / "report.html").read_text(encoding="utf-8"))
    assert 'The images are left out (your own data, record.images = "auto")' in page.words
    command = shlex.join(["fedlens", "run", f"{own.directory}/config.toml", "--set", "record.images=true"])
    assert command in page.words


def test_a_run_that_is_continued_without_images_loses_those_of_before(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "digits")
    assert evaluation_of(result).images is not None
    config = result.directory / "config.toml"
    text = config.read_text(encoding="utf-8").replace("rounds = 2", "rounds = 3")
    config.write_text(text.replace("images = true", "images = false"), encoding="utf-8")
    continued = resume(result.directory, accept_changes=True)
    assert evaluation_of(continued).round == 3
    assert evaluation_of(continued).images is None


def test_whether_images_are_kept_is_no_change_of_the_experiment(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "digits", checkpoint={"seconds": 0})
    (result.directory / "summary.json").unlink()
    config = result.directory / "config.toml"
    text = config.read_text(encoding="utf-8").replace("images = true", "images = false")
    config.write_text(text, encoding="utf-8")
    assert evaluation_of(resume(result.directory)).images is None
    assert load_result(result.directory).summary["details"]


def test_large_images_are_kept_smaller(tmp_path: Path) -> None:
    given = evaluation_of(run(tmp_path / "run", large))
    assert given.images is not None
    assert given.images.nbytes <= PIXELS
    assert given.images.shape[1:] == (3, 126, 158)


@pytest.mark.parametrize("algorithm", ["local-only", "centralized"])
def test_only_a_global_model_is_measured(tmp_path: Path, algorithm: str) -> None:
    data = {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}
    more = {"validation": 0.2, "validation_from": "client"}
    result = run(tmp_path / "run", algorithm=algorithm, data=data | more)
    assert (result.directory / "evaluation.npz").exists() == (algorithm == "centralized")
    _report(result.directory, ProgressBase())
    page = (result.directory / "report.html").read_text(encoding="utf-8")
    assert ("Each client has a model of its own" in page) == (algorithm == "local-only")


def test_a_model_that_answers_nan_shows_no_mistake(tmp_path: Path) -> None:
    from fedlens.tasks.classification import Classification

    rows = Classification().mistakes(torch.tensor([[torch.nan, 0.0], [0.0, 1.0]]), torch.tensor([1, 0]), 5)
    assert rows["index"].tolist() == [1]


def test_an_evaluation_of_ones_own_is_left_alone(tmp_path: Path) -> None:
    def own(parts: Any) -> Any:
        from fedlens.algorithms.averaging import averaging

        made = averaging(parts)

        class Twice(type(made)):  # type: ignore[misc]
            def evaluate(self, state: Any, ctx: Any) -> Any:
                first = yield from super().evaluate(state, ctx)
                yield from super().evaluate(state, ctx)
                return first

        return Twice(**{name: getattr(made, name) for name in made.__dataclass_fields__})

    result = run(tmp_path / "run", algorithm=own)
    assert result.metrics[-1]["test_accuracy"] > 0.5
    assert not (result.directory / "evaluation.npz").exists()
    assert result.summary["details"] == {}


def test_a_client_that_sent_totals_alone_has_no_row_of_the_iou_of_classes() -> None:
    task, masks = Segmentation(), torch.tensor([[[0, 1], [1, 1]]], dtype=torch.uint8)
    measured = task.measure(torch.randn(1, 2, 2, 2), masks)
    whole = task.condensed(measured)
    data = SimpleNamespace(classes=("a", "b"), kind="segmentation", input_shape=(1, 2, 2))
    built = SimpleNamespace(
        task=task,
        client_data=SimpleNamespace(dataset=data),
        config=SimpleNamespace(keeps_images=False),
        partition=SimpleNamespace(ids=("one", "other")),
    )
    kept = final_evaluation(cast("Any", built), 1, measured, {0: whole, 1: task.in_totals(whole)})
    assert kept.clients == ("one",)
    assert kept.of_clients.keys() == whole.sums.keys()
    assert final_evaluation(cast("Any", built), 1, measured, {1: task.in_totals(whole)}).clients == ()
