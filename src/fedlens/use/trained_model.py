"""A model of a finished run with all that its use needs: classes, preprocessing, task, and the licence of the data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError, DecodingError, RunDirectoryError
from fedlens.base.registry import INSTANCE
from fedlens.base.shell_command import quoted_command
from fedlens.core.arithmetic import PLAIN
from fedlens.core.protocol import ModelSpec
from fedlens.core.states import state_at_server
from fedlens.core.tensorfile import read_metadata
from fedlens.data.catalogue import CATALOGUE, UNKNOWN
from fedlens.data.decoding import ImageForm
from fedlens.data.vertical.feature_partition import load_partition
from fedlens.files.text_files import parsed_fact
from fedlens.local.personal_leaves import PERSONAL
from fedlens.run import checkpoint
from fedlens.run.run_state import RunState
from fedlens.run.rundir import RunDir, federated_beside
from fedlens.run.state_files import StateFiles
from fedlens.tasks.evaluation_size import FULL, EvaluationSize, evaluation_size
from fedlens.tasks.registry import TASKS
from fedlens.tasks.task import Task
from fedlens.use.results import read_model_file

_PERSONAL = ("fedbn", "local-only")  # of runs whose model files do not list the personal leaves
_TUNED = "finetune"


@dataclass(frozen=True)
class ChosenRound:
    """Which of the run's models it is.

    Attributes:
        name: "best" or "last".
        metric, on: of the best round: the metric and the data ("validation" or "test") that it was chosen by; None if
            the run does not say.
    """

    name: str
    metric: str | None = None
    on: str | None = None


@dataclass(frozen=True)
class TrainedModel:
    """A model of a run.

    Attributes:
        path: the model file.
        kind: of the data: what is predicted.
        round: the round after which it was the global model; None if the run does not say.
        module: in evaluation mode, on the device. It takes normalized images, float32 [n, C, H, W], or tokens,
            int64 [n, T].
        about: the metadata of the file.
        task: what predicts and draws.
        classes: the name of each class.
        shape: of one input: (C, H, W) of an image, or (T,) of a text.
        decoded_as: how image files are decoded; None for text. See `form`.
        mean, std: of the normalization, one number per channel, of images scaled to [0, 1]; empty for text.
        licence: of the data that it was trained on.
        vocabulary: the number of different tokens of texts; None for images.
        notes: what the user has to know about this model, in sentences.
        size: at which images are evaluated, as in the run.
        chosen: whether it is the model of the best or of the last round.
        device: what it computes on.
    """

    path: Path
    kind: str
    round: int | None
    module: nn.Module
    about: Mapping[str, str]
    task: Task
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    decoded_as: ImageForm | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    licence: str
    vocabulary: int | None = None
    notes: tuple[str, ...] = ()
    size: EvaluationSize = FULL
    chosen: ChosenRound = ChosenRound("last")
    device: str = "cpu"

    @property
    def form(self) -> ImageForm:
        """How image files are decoded. Raises `RunDirectoryError` for a model of texts."""
        return self.require_images()

    def require_images(self) -> ImageForm:
        """How image files are decoded. Raises `RunDirectoryError` for a model of texts."""
        if self.decoded_as is None:
            raise RunDirectoryError(
                "the model takes text, and only image files can be predicted",
                where=str(self.path),
                hint="'fedlens export' writes a file that takes tokens",
            )
        return self.decoded_as

    @property
    def dataset(self) -> str:
        """The name of the dataset; of a user's own function, without the folder of its file."""
        return self.about["dataset"].rpartition(os.sep)[2]

    @property
    def name(self) -> str:
        """The name of the model; of a user's own function, without the folder of its file."""
        return str(parsed_fact(self.about, "model", self.path)["name"]).rpartition(os.sep)[2]

    def outputs(self, inputs: Tensor) -> Any:
        """The outputs for normalized images, float32 [n, C, H, W], at `evaluation.size`, or tokens, int64 [n, T].

        They lie on the device; the inputs may lie elsewhere.
        """
        with PLAIN.on(torch.device(self.device)):
            return self.size(self.task, self.module, inputs.to(self.device), None)

    def on(self, device: str) -> TrainedModel:
        """The model on this device, with the same module, which moves there."""
        return replace(self, module=self.module.to(device), device=device)

    def tree(self) -> dict[str, Tensor]:
        """The weights and buffers by name."""
        return dict(self.module.state_dict())


def read_trained(
    run: RunDir,
    round: str | int | None = None,
    model: ModelSpec | None = None,
    accept_changes: bool = False,
    client: str | None = None,
) -> TrainedModel:
    """Reads a model of a finished run. The run's data are not needed.

    Args:
        client: for a run in which parts of the model stay at the clients: whose parts are taken, from the checkpoint of
            the last round; the name of a client of the partition.
        round: "best", "last", or a round of which the run keeps the model. None: "best" if the run has it, else "last".
        model: builds the module, where the run's model was given as an object.
        accept_changes: execute Python files of the user's own although they were edited since the run trained.

    Raises `ConfigError` if `round` is neither or the run has no such client; `RunDirectoryError` if the run has no
    model of that round, if a Python file of the user's own was edited, if the run takes neither images nor text, or if
    it trains personal models and no `client` is named, or one that never trained; `DataError` if the model file is
    corrupt.
    """
    path, notes = _model_path(run, "last" if client is not None and round is None else round)
    config = run.read_config()
    algorithm = str(config.get("algorithm", {}).get("name"))
    try:
        module, about, more = read_model_file(path, model, accept_changes)
    except ConfigError as error:
        if model is None and config.get("model", {}).get("name") == INSTANCE:
            hint = f'in Python: load_result("{run.path}", model=...) with an equal object, then .predict or .export'
            raise ConfigError(error.what, where=error.where, hint=hint) from None
        raise
    try:
        personal = _personal(path, about, algorithm, client)
        if client is not None:
            more = [*more, _load_own(run, path, module, personal, client)]
        return _trained(run, path, module, about, config, algorithm, [*notes, *more])
    except (KeyError, ValueError) as error:
        what = f"the metadata of the model are incomplete: {type(error).__name__}: {error}"
        raise RunDirectoryError(what, where=str(path), hint="train the model again") from error


def parsed_round(text: str | None) -> str | int | None:
    """The `round` of `read_trained` from an option: a number if it is one.

    >>> parsed_round("12"), parsed_round("best"), parsed_round(None)
    (12, 'best', None)
    """
    return int(text) if text is not None and text.isdecimal() else text


def _trained(
    run: RunDir,
    path: Path,
    module: nn.Module,
    about: Mapping[str, str],
    config: Mapping[str, Any],
    algorithm: str,
    notes: list[str],
) -> TrainedModel:
    if algorithm == _TUNED:
        notes.append("this is the global model; the models that clients fine-tune are not kept")
    preprocessing = parsed_fact(about, "preprocessing", path)
    shape = parsed_fact(about, "model", path)["input_shape"]
    text = about.get("kind") == "language"
    if len(shape) != 3 and not text:
        what = f"the model takes inputs of shape {shape}, which are neither images nor text"
        raise RunDirectoryError(what, where=str(run.path), hint="take a run on images or text")
    if not text and "fit" not in preprocessing:  # of an earlier version, which did not write the form
        fit = config.get("data", {}).get("dataset", {}).get("fit", "crop")
        channels, height, width = shape
        preprocessing |= ImageForm(channels, height, width, fit).table()
    facts = CATALOGUE.get(about["dataset"])
    kind = about.get("kind") or (facts.task if facts else next(iter(TASKS)))
    settings = {"name": kind, **parsed_fact({"task": "{}", **about}, "task", path)}
    task: Task = TASKS.find(settings.pop("name"), where=str(path))(**settings)
    number = _round_of(run, path)
    return TrainedModel(
        path,
        kind,
        number,
        module,
        about,
        task,
        tuple(parsed_fact(about, "classes", path)),
        tuple(shape),
        None if text else ImageForm.of(preprocessing),
        tuple(preprocessing.get("mean", ())),
        tuple(preprocessing.get("std", ())),
        about.get("licence") or (facts.licence if facts else None) or UNKNOWN,
        preprocessing.get("vocabulary"),
        tuple(notes),
        evaluation_size(config.get("evaluation", {}).get("size", "full"), task, shape),
        _chosen(run, path, number),
    )


def _chosen(run: RunDir, path: Path, round: int | None) -> ChosenRound:
    """Whether a model file is of the best or of the last round, and what the run says of the choice."""
    if path != run.best_path:
        return ChosenRound("last")
    best = (run.read_summary() or {}).get("best")
    if not isinstance(best, Mapping) or best.get("round") != round or not best.get("chosen_on"):
        return ChosenRound("best")
    on = str(best["chosen_on"])
    return ChosenRound("best", str(best.get("metric")).removeprefix(f"{on}_"), on)


def _personal(path: Path, about: Mapping[str, str], algorithm: str, client: str | None) -> list[str]:
    """The leaves that stay at the clients. Raises `RunDirectoryError` if there are some and no client is named."""
    personal: list[str] = parsed_fact({"personal": "[]", **about}, "personal", path)
    own = bool(personal) or ("personal" not in about and algorithm in _PERSONAL)
    if client is not None and not personal:
        raise RunDirectoryError(
            f"client '{client}' has no model of its own in this run: its model file lists no personal parts",
            where=str(path),
            hint="leave out the client",
        )
    if client is None and own:
        other = "use a run with one global model, e.g. algorithm.name = 'fedavg'"
        if algorithm == "local-only" and (federated := federated_beside(path.parent)):
            other = f"use the federated run beside it, {federated}"
        hint = f"name a client with --client ID for the model of that client, or {other}"
        more = f" and {len(personal) - 1} more parameters" if len(personal) > 1 else ""
        raise RunDirectoryError(
            f"'{algorithm}' trains a model for each client, and the run's file has only the initial values of "
            + (f"'{personal[0]}'{more}" if personal else "the personal layers"),
            where=str(path),
            hint=hint,
        )
    return personal


def _load_own(run: RunDir, path: Path, module: nn.Module, personal: Sequence[str], client: str) -> str:
    """Loads a client's own leaves from the last checkpoint into the module, and returns a note that says so."""
    ids = list(load_partition(run.partition_path).ids)
    if client not in ids:
        raise ConfigError(
            f"the run has no client '{client}'",
            where="client",
            hint=f"it has {len(ids)}: {', '.join(ids[:5])}, ...",
        )
    with run.lock():
        loaded = checkpoint.load_latest(run.checkpoint_path)
        if loaded is None or loaded.round != _round_of(run, path):
            raise RunDirectoryError(
                "the run has no checkpoint of this round, which has the clients' own parts of the model",
                where=str(run.path),
                hint="take the last round of a run whose checkpoints are still there",
            )
        number, saved = ids.index(client), RunState.of(loaded.payload).clients.saved()
        key = saved.keys.get(number)
        state = saved.states.get(number, {}) if key is None else StateFiles(run.states_path).get(key)
        own = state_at_server(state, client).get(PERSONAL, {})
    if missing := [name for name in personal if name not in own]:
        raise RunDirectoryError(
            f"client '{client}' never trained, so it has no '{missing[0]}' of its own",
            where=str(run.path),
            hint="name a client that took part",
        )
    module.load_state_dict({**module.state_dict(), **{name: own[name] for name in personal}})
    return (
        f"this is the model of client '{client}', with its own {len(personal)} parameters of the last round"
    )


def _model_path(run: RunDir, round: str | int | None) -> tuple[Path, list[str]]:
    """The model file of a round, and notes on the choice."""
    if not run.model_path.exists():
        status = (run.read_summary() or {}).get("status")
        ended = {
            "failed": "failed",
            "interrupted": "was interrupted",
            "paused": "is paused",
            "finished": "has lost its model file",
        }
        raise RunDirectoryError(
            f"the run {ended.get(str(status), 'has not ended')}, so it has no model",
            where=str(run.path),
            hint=f"{quoted_command('resume', run.path)} finishes it",
        )
    best = run.best_path if run.best_path.exists() else None
    if round == "last":
        return run.model_path, []
    if round is None:
        note = "the run has no best round, so this is the last model"
        return (best, []) if best else (run.model_path, [note])
    if round == "best" and best is not None:
        return best, []
    if isinstance(round, str) and round != "best":
        what, hint = f"the round is '{round}', but must be best, last or a number", "take --round best"
        raise ConfigError(what, where="round", hint=hint)
    kept = {_round_of(run, path): path for path in (run.model_path, best) if path is not None}
    if round in kept:
        return kept[round], []
    what = "the run has no best round" if round == "best" else f"the run keeps no model of round {round}"
    numbers = " and ".join(str(number) for number in sorted(n for n in kept if n is not None))
    hint = f"it keeps the models of the best and the last round: {numbers}"
    raise RunDirectoryError(what, where=str(run.path), hint=hint)


def _round_of(run: RunDir, path: Path) -> int | None:
    """The round of a model file: in its metadata, or of earlier versions in summary.json."""
    try:
        stated = read_metadata(path).get("round")
        if stated is not None:
            return int(stated)
    except (OSError, ValueError, DecodingError):
        return None  # reading the model says what is wrong
    summary = run.read_summary() or {}
    found = summary.get("rounds_done") if path == run.model_path else (summary.get("best") or {}).get("round")
    return None if found is None else int(found)
