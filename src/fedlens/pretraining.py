"""Pre-training: a run whose result is a file of weights, with a picture of its data and a card beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedlens.analyses.opened_run import open_run
from fedlens.api import Experiment, resume
from fedlens.base.errors import ConfigError, DataError, RunDirectoryError
from fedlens.base.format import many
from fedlens.base.shell_command import setting, shell_command
from fedlens.core.random import Rng
from fedlens.data.catalogue import AUTO, is_published
from fedlens.files.atomic_files import read_regular, refuse_link, write_atomically
from fedlens.files.text_files import parsed_fact
from fedlens.models.prepare import Preparation
from fedlens.pages.contact_sheet import png, sheet_of_views
from fedlens.result import Result
from fedlens.results.run import Run
from fedlens.run import checkpoint
from fedlens.run.changes import defining
from fedlens.run.observer import observer_of
from fedlens.run.progress import Progress, ProgressBase
from fedlens.run.rundir import RunDir
from fedlens.settings.keys import diff
from fedlens.use.export import export, json_beside
from fedlens.use.trained_model import TrainedModel

if TYPE_CHECKING:
    from fedlens.run.build import Built

_ENDING = ".safetensors"
_NOT_OF_NETWORK = {"name", *Preparation.model_fields} - {"norm", "bottleneck"}
_UNSHOWN = "No training images are shown, because they are your own; `--set record.images=true` draws them."
_SHOWN, _COLUMNS = 48, 12  # images of the contact sheet, and how many in a row


@dataclass(frozen=True)
class PretrainedFiles:
    """The files of a pre-training, all beside the weights.

    >>> PretrainedFiles(Path("a/weights.safetensors")).run
    PosixPath('a/weights.run')
    """

    weights: Path

    @property
    def facts(self) -> Path:
        """Classes, preprocessing and licence, as JSON; `fedlens export` writes the same."""
        return json_beside(self.weights)

    @property
    def card(self) -> Path:
        """How the weights came about, in Markdown."""
        return self.weights.with_suffix(".md")

    @property
    def sheet(self) -> Path:
        """A picture of training images."""
        return self.weights.with_suffix(".png")

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.weights.with_suffix(".run")


@dataclass(frozen=True)
class Pretrained:
    """What `pretrain` has made: its files, the result of its run, and whether it wrote any file."""

    files: PretrainedFiles
    result: Result
    written: bool


def pretrain(
    recipe_or_file: str | Path | Experiment,
    out: Path | str,
    overrides: Sequence[str] = (),
    *,
    data_dir: Path | str | None = None,
    download: bool = False,
    progress: Progress | None = None,
    report: bool = True,
    force: bool = False,
    accept_changes: bool = False,
) -> Pretrained:
    """Trains a model, and writes the weights of the last round as one file that `model.weights` takes.

    Of `weights.safetensors`, the run directory is `weights.run`, `weights.png` shows training images after
    augmentation, the views of an image below each other, `weights.safetensors.json` has the preprocessing and the
    licence, and `weights.md` says how the weights came about. The same call continues an interrupted run to the same
    bits. Once all is written, it changes nothing.

    Args:
        recipe_or_file: of any run, central or federated, with labels or without.
        out: the file of weights, ending in `.safetensors`.
        overrides: such as `"local.lr=0.1"`.
        data_dir, download, progress, report: as in `Experiment.run`.
        force: replaces existing files; a finished run is not repeated.
        accept_changes: as in `fedlens.resume`: continue although files of the run, or Python files of your own, were
            edited since it trained.

    Raises `ConfigError` before training if `out` cannot be written, if a file is there and not `force`, or if the
    algorithm makes a model for each client, or the model is an object; `RunDirectoryError` if the run directory has a
    run with other settings, was edited, or another process trains in it.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp()) / "weights.safetensors"
    >>> made = pretrain("digits", out, ["rounds=1"], report=False)
    >>> sorted(path.name for path in out.parent.iterdir())
    ['weights.md', 'weights.png', 'weights.run', 'weights.safetensors', 'weights.safetensors.json']
    >>> pretrain("digits", out, ["rounds=1"]).written
    False
    """
    files = PretrainedFiles(Path(out).expanduser())
    _check_path(files)
    experiment = recipe_or_file
    if not isinstance(experiment, Experiment):
        experiment = Experiment.load(experiment)
    experiment = experiment.with_settings(*overrides)
    if isinstance(experiment.config.model["name"], nn.Module):
        raise ConfigError(
            "the model is an object, which the run directory cannot hold, so the same call could not continue",
            where="model",
            hint="pass a function that makes it: Experiment(model=make_net, ...)",
        )
    settings = _asked(experiment)
    refuse_link(files.run)
    started = (files.run / "config.toml").is_file()
    if started:
        _check_same_settings(files.run, settings)
    else:
        _remove_unstarted(files, settings)
    done = started and _finished(files.run)
    if done and not force and _complete(files):
        observer_of(progress or ProgressBase()).note(f"{files.weights} is already written")
        return Pretrained(files, Result(files.run), False)
    if not force:
        _refuse_existing(files, started)
    if started:
        how: dict[str, Any] = {"data_dir": data_dir, "accept_changes": accept_changes}
        result = resume(files.run, progress=progress, report=report, **how)
        if not files.sheet.is_file():
            _draw_sheet(files, open_run(files.run, **how).built)
    else:
        before = partial(_begin, files, settings)
        run = partial(experiment.run, files.run, data_dir=data_dir, download=download, progress=progress)
        result = run(report=report, before=before)
    _write(files, accept_changes)
    return Pretrained(files, result, True)


def _check_path(files: PretrainedFiles) -> None:
    """Raises `ConfigError` if the weights cannot get this name."""
    out, where = files.weights, str(files.weights)
    if out.suffix != _ENDING:
        ending = f"ends in '{out.suffix}'" if out.suffix else "has no ending"
        hint = f"name it {out.stem}{_ENDING}"
        raise ConfigError(f"the file of weights {ending}, but must end in {_ENDING}", where=where, hint=hint)
    if out.is_dir():
        hint = f"name a file in it: {out / 'weights'}{_ENDING}"
        raise ConfigError("the path of the weights is a directory", where=where, hint=hint)
    folder = next(parent for parent in out.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a directory", where=where, hint="choose another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the directory {folder} is not writable", where=where, hint="choose another path")


def _refuse_existing(files: PretrainedFiles, started: bool) -> None:
    """Raises `ConfigError` if a file would be replaced that this pre-training did not write."""
    # Before the run was started, none of them was there.
    names = (files.weights,) if started else (files.weights, files.facts, files.card, files.sheet)
    for path in names if not (started and _holds_weights_of(files)) else ():
        if os.path.lexists(path):
            hint = "choose another name, or pass --force to replace it"
            raise ConfigError("the file already exists", where=str(path), hint=hint)


def _remove_unstarted(files: PretrainedFiles, settings: Mapping[str, Any]) -> None:
    """Removes what a call with these settings left that was stopped before its run began."""
    run = RunDir(files.run)
    names = {path.name for path in files.run.iterdir()} if files.run.is_dir() else set()
    if "pretraining.json" in names <= {".lock", "pretraining.json"} and run.read_pretraining() == settings:
        files.sheet.unlink(missing_ok=True)
        for name in names:
            (files.run / name).unlink()
        files.run.rmdir()


def _asked(experiment: Experiment) -> dict[str, Any]:
    """The settings as they were given, before defaults and data fill in more, as JSON gives them back."""
    settings: dict[str, Any] = json.loads(json.dumps(defining(experiment.config)))
    return settings


def _check_same_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises `RunDirectoryError` if the run in this directory was started with other settings."""
    another = "choose another name for --out, or move the run directory away"
    before = RunDir.open(path).read_pretraining()
    if before is None:
        what = "the run directory contains a run that 'fedlens pretrain' did not start"
        raise RunDirectoryError(what, where=str(path), hint=another)
    changes = sorted(f"{key} was {old!r} and is {new!r}" for key, old, new in diff(before, settings))
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise RunDirectoryError(
            f"the run directory contains a run with other settings: {'; '.join(changes[:3])}{more}",
            where=str(path),
            hint=another,
        )


def _finished(path: Path) -> bool:
    return Run.open(path).status == "finished"


def _complete(files: PretrainedFiles) -> bool:
    """Whether the weights are those of the run, with what is written beside them at the end."""
    if not (files.facts.is_file() and files.card.is_file()):
        return False
    pictured = f"({files.sheet.name})" in read_regular(files.card).decode()  # there is no picture of texts
    return (files.sheet.is_file() or not pictured) and _holds_weights_of(files)


def _holds_weights_of(files: PretrainedFiles) -> bool:
    """Whether the file of weights has the tensors of the run's last model."""
    try:
        ours, _ = checkpoint.read_model(files.weights)
        trained, _ = checkpoint.read_model(files.run / "model.safetensors")
    except (OSError, DataError, RunDirectoryError):
        return False
    return ours.keys() == trained.keys() and all(torch.equal(ours[name], trained[name]) for name in ours)


def _begin(files: PretrainedFiles, settings: Mapping[str, Any], built: Built, run: RunDir) -> None:
    """Refuses what makes no weights, draws training images, and writes the settings down."""
    if built.algorithm.personal:
        with suppress(OSError):  # nothing was started
            (run.path / ".lock").unlink()
            run.path.rmdir()
        raise ConfigError(
            f"'{built.config.algorithm['name']}' makes a model for each client, so there are no weights of all",
            where="algorithm.name",
            hint="choose an algorithm with one global model, such as 'fedavg' or 'centralized'",
        )
    _draw_sheet(files, built)
    run.write_pretraining(settings)


def _draw_sheet(files: PretrainedFiles, built: Built) -> None:
    """Writes the contact sheet of training images; none for text, and where the run keeps no images."""
    views = training_images(built) if built.config.keeps_images else None
    if views is not None:
        write_atomically(files.sheet, png(sheet_of_views(views, _COLUMNS)))


def training_images(built: Built, count: int = _SHOWN) -> NDArray[np.uint8] | None:
    """Random training images after augmentation, uint8 [n, views, C, H, W], n at most `count`; None for text."""
    data = built.client_data.dataset
    train = built.client_data.data_of("@train")
    if data.kind == "language" or len(train) == 0:
        return None
    rng = Rng((built.config.seeds.training, "contact sheet"))
    at = torch.randperm(len(train), generator=rng.torch("images"))[:count]
    shown = replace(train.take(at), prefetch=0)
    images, _ = next(iter(shown.batches(len(at), rng)))
    images = images if images.dim() == 5 else images.unsqueeze(1)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    pixels: NDArray[np.uint8] = (images * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8).numpy()
    return pixels


def _write(files: PretrainedFiles, accept_changes: bool) -> None:
    """Writes the weights and what is beside them, from the finished run."""
    run = Run.open(files.run)
    trained = run.model("last", accept_changes=accept_changes)
    write_atomically(files.card, _card(files, trained, run).encode())
    export(trained, files.weights, force=True)  # the last, so that a kill before it leaves no weights


def _card(files: PretrainedFiles, trained: TrainedModel, run: Run) -> str:
    """How the weights came about, in Markdown."""
    summary, environment, config = run.summary, run.environment, run.config
    totals, partition, final = summary["totals"], summary["partition"], summary["final"] or {}
    seen, examples, clients = totals["examples"], partition["examples"], many(partition["clients"], "client")
    rows = [
        ("Model", f"`{trained.name}`, {summary['model']['parameters']:,} parameters with the task's layers"),
        ("Task", f"`{parsed_fact(trained.about, 'task', trained.path)['name']}`"),
        ("Data", f"`{trained.dataset}`, {examples:,} training examples of {clients}"),
        ("Licence of the data", trained.licence),
        ("Algorithm", f"`{summary['algorithm']}`, {summary['rounds_done']:,} rounds"),
        ("Examples seen", f"{seen:,}, {seen / max(1, examples):.4g} epochs of the training data"),
        ("Time", f"{totals['seconds']:.0f} s"),
        ("Seed", str(config.get("seed", 0))),
        ("Versions", f"fedlens {environment.get('fedlens')}, PyTorch {environment.get('torch')}"),
        ("Revision", (environment.get("git") or {}).get("revision") or "not known"),
        ("Settings", f"[config.toml]({files.run.name}/config.toml)"),
    ]
    metrics = [
        (name, f"{value:.4g}")
        for name, value in final.items()
        if name.startswith(("test_", "validation_")) and isinstance(value, float)
    ]
    warnings = [f"- {warning['sentence']}" for warning in summary.get("warnings", ())]
    parts = [
        f"# {files.weights.name}",
        _table(("", ""), rows),
        f"![Training images, the views of each below each other]({files.sheet.name})" * files.sheet.is_file(),
        _UNSHOWN * (config.get("record", {}).get("images") == AUTO and not is_published(trained.dataset)),
        f"## Metrics after round {final.get('round', summary['rounds_done'])}" if metrics else "",
        _table(("metric", "value"), metrics) if metrics else "",
        "\n".join(["## Warnings", "", *warnings]) if warnings else "",
        "## Use",
        f"```console\n$ {_use(files, config, trained.name)}\n```",
        "A classifier with another number of classes is drawn anew. Segmentation and detection take the weights into "
        f"their backbone. [{files.facts.name}]({files.facts.name}) has the preprocessing.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _use(files: PretrainedFiles, config: Mapping[str, Any], name: str) -> str:
    """The command that starts a run from the weights, with the model of this run, without its start and its head."""
    model = config["model"] if isinstance(config["model"], Mapping) else {}
    own = {f"model.{key}": value for key, value in sorted(model.items()) if key not in _NOT_OF_NETWORK}
    table = {"model": name, **own, "model.weights": str(files.weights)}
    return shell_command("run", "RECIPE", changes=[setting(key, value) for key, value in table.items()])


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {name} | {value} |" for name, value in lines)
