"""Exports a model of a run as one file that needs no fedlens: ONNX, a PyTorch program, or safetensors."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fedlens import __version__
from fedlens.base.errors import ConfigError, RunFailed, told
from fedlens.data.catalogue import restriction
from fedlens.files.atomic_files import fsync_directory, refused, write_atomically
from fedlens.run import checkpoint
from fedlens.tasks.evaluation_size import FULL
from fedlens.use.trained_model import TrainedModel

Format = Literal["onnx", "pt2", "safetensors"]
FORMATS: tuple[Format, ...] = get_args(Format)
EXTRA = ("onnx", "onnxscript", "onnxruntime")  # the packages of the extra `export`
IMAGES, TOKENS = "images", "tokens"  # names of the input
_ONE_FILE = 2**31 - 2**20  # bytes of weights in one ONNX file, whose size is a signed 32-bit number
_TOLERANCE = 1e-4  # between the exported model and the run's
_ROUNDINGS = 10  # of the run's own model, by which the exported one may differ where that is more
_OPSET = 18


@dataclass(frozen=True)
class Exported:
    """What `export` has written.

    Attributes:
        file: the model.
        facts: what the JSON file beside it says.
        error: the largest difference between the exported model's outputs and those of the run's model on one and
            on three random images; None for safetensors, which has no graph.
    """

    file: Path
    facts: dict[str, Any]
    error: float | None

    @property
    def json_file(self) -> Path:
        """The file with the facts."""
        return json_beside(self.file)


class TextGraph(nn.Module):
    """The model of texts as it is exported: from tokens int64 [n, T] to the predictions of the task, by name."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model, self.trained = trained.module, [trained]

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """The predictions, sorted by name."""
        (trained,) = self.trained
        prediction = trained.task.graph(self.model, tokens)
        return {name: prediction[name] for name in sorted(prediction)}


class Graph(nn.Module):
    """The model as it is exported: from images uint8 [n, C, H, W] to the predictions of the task, by name."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model = trained.module
        self.trained = [trained]  # in a list: its module is registered above
        # The arithmetic of `fedlens.data.normalize`.
        mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (trained.mean, trained.std))
        self.scale = nn.Buffer((1 / (255 * std)).float())
        self.shift = nn.Buffer((-mean / std).float())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The predictions, sorted by name."""
        (trained,) = self.trained
        prediction = trained.task.graph(self.model, images.float() * self.scale + self.shift)
        return {name: prediction[name] for name in sorted(prediction)}


def export(trained: TrainedModel, file: Path, format: str | None = None, force: bool = False) -> Exported:
    """Writes a model of a run as one file, and `FILE.json` with the classes, the preprocessing and the data's licence.

    | format | contents |
    |---|---|
    | onnx | a graph for ONNX Runtime and other programs |
    | pt2 | a program of `torch.export`, which `torch.export.load` reads |
    | safetensors | the weights by name, without a graph |

    A graph takes `images`, uint8 [n, C, H, W] of any n, normalizes them itself, and returns the task's predictions by
    name, for classification `class`, int64 [n], and `scores`, float32 [n, classes]. Of text it takes `tokens`, int64
    [n, T]. It is run on one and on three random inputs before the file gets its name. Weights of an ONNX model above
    2 GB are in `FILE.data`.

    Args:
        format: by default the ending of `file`.
        force: whether an existing file is replaced.

    Raises `ConfigError` if the format is unknown or does not fit the ending, if the file exists, or if packages are
    missing; `RunFailed` if the model cannot be exported, the exported one computes something else, or the disk refuses.
    """
    chosen = _check(file, format, force)
    facts = _facts(trained, chosen, file.name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _moved_when_done(file) as temporary:
            error = _write(trained, chosen, temporary, facts)
    except OSError as failure:
        raise refused(failure, "the exported model", file) from failure
    write_atomically(json_beside(file), (json.dumps(facts, indent=2) + "\n").encode())
    return Exported(file, facts, error)


def json_beside(file: Path) -> Path:
    """`FILE.json` of an exported model.

    >>> json_beside(Path("a/model.onnx"))
    PosixPath('a/model.onnx.json')
    """
    return file.with_name(f"{file.name}.json")


def _check(file: Path, format: str | None, force: bool) -> Format:
    """The format. Raises `ConfigError` if the file cannot be written in it."""
    ending = file.suffix.removeprefix(".").lower()
    chosen = next((known for known in FORMATS if known == (format or ending)), None)
    if chosen is None:
        unknown = format or ending
        what = (
            f"unknown format '{unknown}'" if unknown else "the file name has no ending that says its format"
        )
        raise ConfigError(what, where=str(file), hint=f"choose from: {', '.join(FORMATS)}")
    if ending != chosen:
        what = f"the format is {chosen}, but the file does not end in .{chosen}"
        raise ConfigError(what, where=str(file), hint=f"name it {file.stem}.{chosen}")
    if file.is_dir():
        raise ConfigError(
            "the path is a directory", where=str(file), hint=f"name a file in it: model.{chosen}"
        )
    if not force:
        for path in (file, json_beside(file)):
            if os.path.lexists(path):
                hint = "choose another name, or pass --force to replace it"
                raise ConfigError("the file already exists", where=str(path), hint=hint)
    missing = [name for name in EXTRA if find_spec(name) is None] if chosen == "onnx" else []
    if missing:
        what = f"export to ONNX needs {' and '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed"
        raise ConfigError(what, hint="pip install 'fedlens[export]', or take --format pt2")
    return chosen


def _facts(trained: TrainedModel, format: Format, name: str) -> dict[str, Any]:
    """What a user of the file has to know."""
    facts: dict[str, Any] = {
        "file": name,
        "format": format,
        "model": trained.name,
        "kind": trained.kind,
        "classes": list(trained.classes),
        "dataset": trained.dataset,
        "licence": trained.licence,
        "notice": restriction(trained.dataset, trained.licence),
        **_preprocessing(trained, format),
        "round": trained.round,
        "run": trained.path.resolve().parent.name,
        "fedlens": __version__,
        "torch": str(torch.__version__),
    }
    if trained.size != FULL:  # the graph is one forward pass at the stored size
        facts["evaluation_size"] = asdict(trained.size)
    if format != "safetensors":
        with torch.inference_mode():
            example = _random_inputs(trained, 1)
            prediction = _graph(trained)(example)
        kind = str(example.dtype).removeprefix("torch.")
        facts["input"] = {"name": _input(trained), "type": kind, "shape": ["n", *trained.shape]}
        facts["outputs"] = [
            {"name": key, "type": str(value.dtype).removeprefix("torch."), "shape": ["n", *value.shape[1:]]}
            for key, value in prediction.items()
        ]
    return facts


def _preprocessing(trained: TrainedModel, format: Format) -> dict[str, Any]:
    """What is done with an input before the model gets it."""
    if trained.decoded_as is None:
        return {"tokens": trained.shape[0], "vocabulary": trained.vocabulary}
    form = trained.form
    return {
        "size": [form.height, form.width],
        "channels": form.channels,
        "fit": form.fit,
        "upright": form.upright,
        "inverted": form.inverted,
        "mean": list(trained.mean),
        "std": list(trained.std),
        "normalizes": format != "safetensors",
    }


def _graph(trained: TrainedModel) -> nn.Module:
    return Graph(trained) if trained.decoded_as is not None else TextGraph(trained)


def _input(trained: TrainedModel) -> str:
    return IMAGES if trained.decoded_as is not None else TOKENS


def _random_inputs(trained: TrainedModel, n: int) -> Tensor:
    """Tokens int64 [n, T], or images uint8 [n, C, H, W] around the mean of the training images; always the same.

    Of uniform noise a trained model is often certain, and its probabilities, 0 and 1, would hide errors.
    """
    generator = torch.Generator().manual_seed(n)
    if trained.decoded_as is None:
        return torch.randint(trained.vocabulary or 1, (n, *trained.shape), generator=generator)
    drawn = torch.randn(n, *trained.shape, generator=generator)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (trained.mean, trained.std))
    return (255 * (mean + std * drawn)).clamp(0, 255).to(torch.uint8)


@contextmanager
def _moved_when_done(file: Path) -> Iterator[Path]:
    """A file of the same name in a temporary folder beside it, moved to its place when the block ends without an error.

    All files of the folder are moved: ONNX may write two, and names the second in the first.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{file.name}.", dir=file.parent))
    try:
        yield folder / file.name
        for path in sorted(folder.iterdir(), reverse=True):  # the weights before the graph that names them
            os.replace(path, file.with_name(path.name))
        fsync_directory(file.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(trained: TrainedModel, format: Format, file: Path, facts: dict[str, Any]) -> float | None:
    """Writes the file; returns the error of its outputs."""
    if format == "safetensors":
        notice = {"notice": facts["notice"]} if facts["notice"] else {}
        checkpoint.write_model(file, trained.tree(), {**trained.about, **notice})
        return None
    graph = _graph(trained).eval()
    try:
        if format == "pt2":
            return _write_program(trained, graph, file, facts)
        return _write_onnx(trained, graph, file, facts)
    except (OSError, RunFailed):
        raise
    except Exception as error:  # an exporter raises any exception for a model that it does not support
        raise RunFailed(
            f"PyTorch cannot export the model '{trained.name}' as {format}: {told(error)}",
            where=str(trained.path),
            hint="take --format safetensors, which has the weights alone",
        ) from error


def _write_program(trained: TrainedModel, graph: nn.Module, file: Path, facts: dict[str, Any]) -> float:
    """Writes a program of `torch.export`, and runs it."""
    free = {_input(trained): {0: torch.export.Dim("n", min=1)}}
    # With two inputs: with one, a network that reads the batch size as a number would be fixed to 1.
    with _tracing(trained):
        program = torch.export.export(graph, (_random_inputs(trained, 2),), dynamic_shapes=free)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)  # it names folders of this machine
    torch.export.save(program, file, extra_files={"fedlens.json": json.dumps(facts)})
    loaded = torch.export.load(file).module()
    return _error(trained, graph, lambda images: loaded(images))


def _write_onnx(trained: TrainedModel, graph: nn.Module, file: Path, facts: dict[str, Any]) -> float:
    """Writes an ONNX model, and runs it in ONNX Runtime."""
    import onnxruntime

    names = [output["name"] for output in facts["outputs"]]
    name = _input(trained)
    with _tracing(trained):
        program = torch.onnx.export(
            graph,
            (_random_inputs(trained, 2),),
            dynamo=True,
            input_names=[name],
            output_names=names,
            dynamic_shapes={name: {0: torch.export.Dim("n", min=1)}},
            opset_version=_OPSET,
            verbose=False,
        )
    assert program is not None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, which name folders of this machine
    program.model.producer_name, program.model.producer_version = "fedlens", __version__
    program.model.doc_string = facts["notice"] or ""
    program.model.metadata_props.update(
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    )
    nbytes = sum(value.nbytes for value in graph.state_dict().values())
    program.save(file, external_data=nbytes > _ONE_FILE)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> dict[str, Tensor]:
        return dict(
            zip(names, map(torch.from_numpy, session.run(names, {name: images.numpy()})), strict=True)
        )

    return _error(trained, graph, run)


@contextmanager
def _tracing(trained: TrainedModel) -> Iterator[None]:
    """Without warnings for text: PyTorch's own code for the export of recurrent layers causes several."""
    with warnings.catch_warnings():
        if trained.decoded_as is None:
            warnings.simplefilter("ignore")
        yield


def _error(trained: TrainedModel, graph: nn.Module, run: Callable[[Tensor], Mapping[str, Tensor]]) -> float:
    """The largest difference of the outputs on one and on three images.

    Raises `RunFailed` if it is above 1e-4 and above ten times the rounding error of the run's own model, which is its
    difference from float64. A model whose activations cancel out, such as one after few steps with batch
    normalization, has rounding errors of more than 1e-4 by itself.
    """
    largest = 0.0
    for n in (1, 3):
        images = _random_inputs(trained, n)
        with torch.inference_mode():
            expected, exported = graph(images), run(images)
        for name, value in expected.items():
            if value.shape != exported[name].shape or value.dtype != exported[name].dtype:
                what = f"returns '{name}' as {_described(exported[name])} instead of {_described(value)}"
                raise RunFailed(f"the exported model {what}", where=str(trained.path))
            if not value.is_floating_point():
                continue  # the class of two equal scores may differ
            if not torch.allclose(exported[name], value, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
                off = float((exported[name] - value).abs().max())
                if not off <= _ROUNDINGS * _rounding(graph, images, name):
                    what = f"the exported model computes something else: '{name}' differs by {off:.3g}"
                    raise RunFailed(what, where=str(trained.path), hint="take another format")
            largest = max(largest, float((exported[name] - value).abs().nan_to_num().max()))
    return largest


def _rounding(graph: nn.Module, images: Tensor, name: str) -> float:
    """The largest rounding error of an output in float32; 0 if the model cannot compute in float64."""
    try:
        with torch.inference_mode():
            exact = copy.deepcopy(graph).double()(images)[name]
            return float((exact - graph(images)[name]).abs().max())
    except Exception:  # whatever a user's own model raises
        return 0.0


def _described(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
