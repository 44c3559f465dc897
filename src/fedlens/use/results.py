"""The end of a run: its summary, its model, and reading the model back."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlens.base.errors import HookError, RunDirectoryError
from fedlens.base.format import with_own_parts
from fedlens.base.shell_command import quoted_command
from fedlens.core.measured import Measured
from fedlens.core.protocol import ModelSpec, State
from fedlens.core.tree import Tree, count, load_into
from fedlens.data.dataset import Dataset
from fedlens.files.atomic_files import write_atomically
from fedlens.files.text_files import parsed_fact
from fedlens.models.counts import multiply_adds
from fedlens.models.prepare import Preparation
from fedlens.models.registry import MODELS
from fedlens.observers.final_evaluation import FinalEvaluation
from fedlens.run import checkpoint
from fedlens.run.build import Built
from fedlens.run.call_observers import Observers
from fedlens.run.run_description import chosen_at_start, pooled_facts
from fedlens.run.run_state import RunState
from fedlens.run.rundir import RunDir, file_names
from fedlens.run.runner import Runner
from fedlens.settings.own_files import OWN_FILES, refuse_edited_since


def subject(built: Built) -> dict[str, Any]:
    """The experiment in a few words: name, rounds, clients, algorithm, dataset, model."""
    config = built.config
    return {
        "name": config.name,
        "rounds": config.rounds,
        "clients": built.federation.clients,
        "clients_per_round": built.clients_per_round,
        "algorithm": config.algorithm["name"],
        "dataset": config.data.dataset["name"],
        "model": config.model["name"],
    }


def outline(built: Built, directory: RunDir) -> dict[str, Any]:
    """The description that a listener gets before the first round."""
    config = built.config
    return {
        **subject(built),
        "algorithm": with_own_parts(config.algorithm["name"], config.client, config.server, config.aggregate),
        "parameters": built.parameters,
        "engine": built.config.engine["name"],
        "directory": str(directory.path),
        "disclosures": list(built.algorithm.discloses),
        "collapse_advice": built.task.collapse_advice,
    }


def summarize(
    built: Built, directory: RunDir, runner: Runner, status: str, error: str | None
) -> dict[str, Any]:
    """summary.json."""
    config, metrics, run_state = built.config, directory.read_metrics(), runner.run_state
    evaluated = [line for line in metrics if any(name.startswith(("test_", "validation_")) for name in line)]
    added = runner.observers.summary()
    totals = {
        name: None if runner.private.hidden else sum(line.get(name) or 0 for line in metrics)
        for name in ("examples", "bytes_up", "bytes_down", "clients", "failed")
    }
    totals |= {"bytes_peer": peer} if (peer := sum(line.get("bytes_peer") or 0 for line in metrics)) else {}
    summary = {
        "name": config.name,
        "run_id": directory.run_id,
        "status": status,
        "error": error,
        "rounds": config.rounds,
        "rounds_done": metrics[-1]["round"] if metrics else 0,
        "final": evaluated[-1] if evaluated else None,
        "details": details(built, directory, metrics[-1]["round"] if metrics else 0),
        "best": run_state.best if run_state else None,
        "totals": {
            "seconds": metrics[-1].get("elapsed") if metrics else 0.0,
            "cpu_seconds": None if runner.private.hidden else run_state.cpu_seconds if run_state else 0.0,
            **totals,
            "skipped": sum("skipped" in line for line in metrics),
        },
        "failures": {client: dict(reasons) for client, reasons in runner.failures.items()},
        "warnings": added.pop("warnings", []),
        "clients": added.pop("clients", None),
        "partition": {
            "clients": len(built.partition),
            "examples": int(built.partition.sizes().sum()),
            "digest": built.partition.digest,
            "held_out_digest": built.client_data.held_out_digest(),
            "emd": emd(built),
        },
        "model": model_cost(built, run_state),
        "algorithm": config.algorithm["name"],
        "dataset": config.data.dataset["name"],
        "notes": list(built.notes),
        "changes": list(runner.changes),
        "disclosures": list(built.algorithm.discloses),
        "pooled": pooled_facts(built, chosen_at_start(directory, built)),
        "traffic": run_state.traffic if run_state else {},
        "engine": config.engine["name"],
        "seed": config.seed,
        "directory": str(directory.path),
    }
    return {**summary, **{name: value for name, value in added.items() if name not in summary}}


def emd(built: Built) -> float:
    """The weighted mean of the clients' distances from the population (hsu2020 section 6.1)."""
    census = built.partition.census
    return float("nan") if census is None else census.emd()


def model_cost(built: Built, run_state: RunState | None) -> dict[str, Any]:
    """The size of the last model, and the multiply-adds of a forward pass for one example of `input_shape`.

    `multiply_adds` is None for a model with layers whose multiply-adds are not known.
    """
    cost: dict[str, Any] = {
        "name": built.config.model["name"],
        "parameters": built.parameters,
        "trainable": built.trainable,
        "multiply_adds": None,
        "input_shape": list(built.model.input_shape),
    }
    with suppress(Exception):  # the summary says how the run ended, even where the model is what ended it
        model = built.algorithm.composed or built.model
        if run_state is not None and built.algorithm.composed is None:
            model = model.of(built.algorithm.model(run_state.state)[0].varying)
            cost |= {"parameters": count(model.leaves), "trainable": count(model.leaves, trainable=True)}
        example = built.task.blank(1, model.input_shape)
        cost["multiply_adds"] = multiply_adds(model.build(initial=False), example)
    return cost


def details(built: Built, directory: RunDir, round: int) -> dict[str, float]:
    """The task's further metrics on the test data in the last round, such as `test_accuracy_<class>`.

    Empty if the run has not recorded its measurements of this round.
    """
    if not directory.evaluation_path.exists():
        return {}
    try:
        evaluation = FinalEvaluation.read(directory.evaluation_path)
        sums = {name: torch.from_numpy(value) for name, value in evaluation.sums.items()}
        further = built.task.details(Measured(sums), evaluation.classes)
    except (RunDirectoryError, KeyError, TypeError, ValueError):  # a damaged file costs no summary
        return {}
    return {f"test_{name}": value for name, value in further.items()} if evaluation.round == round else {}


def write_final(built: Built, directory: RunDir, observers: Observers, run_state: RunState | None) -> None:
    """Writes model.safetensors, the last model, and best.safetensors, that of the best round; tells the observers.

    If the checkpoint of the best round is corrupt, the run ends without best.safetensors, and a note says so.
    """
    assert run_state is not None
    states, problem = {"last": (run_state.round, run_state.state)}, None
    _write_model(built, directory.model_path, run_state.state, run_state.round)
    for name, content in built.algorithm.files(run_state.state).items():
        if name in file_names() or Path(name).name != name:
            raise HookError(
                f"`files` of {type(built.algorithm).__name__} names '{name}', which is a file of the run's own or no "
                "file's name",
                hint="give it another name",
            )
        write_atomically(directory.path / name, content, named=False)
    if run_state.best is not None:
        best = run_state.best["round"]
        path = checkpoint.path_of(directory.checkpoint_path, best)
        try:
            state = run_state.state if best == run_state.round else checkpoint.load(path).payload["state"]
        except RunDirectoryError as error:
            problem = f"best.safetensors was not written: {error}"
        else:
            _write_model(built, directory.best_path, state, best)
            states["best"] = best, state
    observers.ended(run_state.line, states)
    if problem is not None:
        observers.note(problem)


def _write_model(built: Built, path: Path, state: State, round: int) -> None:
    model, tree = exported(built, state)
    about = {**metadata(built, model), "round": str(round)}
    # The name is on the disk before that of the summary.
    checkpoint.write_model(path, tree, about, named=False)


def exported(built: Built, state: State) -> tuple[ModelSpec, Tree]:
    """The model of a state as model files hold it, without the layers that the task puts around it."""
    model, tree = built.algorithm.model(state)
    if model.wrapper is not built.model.wrapper:  # a model that the algorithm composes
        return model, tree
    return replace(model, wrapper=None), built.task.export(tree)


def metadata(built: Built, model: ModelSpec) -> dict[str, str]:
    """The metadata of a model file: how to build the module, the classes, the preprocessing, the data's licence.

    `personal` are the leaves that stay at the clients, of which the file has only the initial values.
    """
    data = built.client_data.dataset
    spec = {
        "name": model.name,
        "settings": dict(model.settings),
        "input_shape": list(model.input_shape),
        "classes": model.classes,
    }
    if isinstance(model.prepare, Preparation):
        spec["prepare"] = model.prepare.structure()
    preprocessing = _preprocessing(data)
    if data.parties:
        named = zip(built.partition.ids, data.of_parties, strict=True)
        preprocessing["parties"] = {str(name): _preprocessing(party) for name, party in named}
    if data.kind == "language":
        preprocessing = {"vocabulary": data.vocabulary}
    return {
        **({"varied": json.dumps(model.changes)} if model.changes else {}),
        "model": json.dumps(spec),
        "classes": json.dumps(list(data.classes)),
        "preprocessing": json.dumps(preprocessing),
        "dataset": built.config.data.dataset["name"],
        "kind": data.kind,
        "task": json.dumps(built.config.task),
        "licence": data.licence,
        "personal": json.dumps(sorted(built.algorithm.personal)),
    }


def _preprocessing(data: Dataset) -> dict[str, Any]:
    """How the images of this dataset become inputs."""
    form = {} if data.form is None else data.form.table()
    return {"scale": "1/255", "mean": list(data.mean), "std": list(data.std), **form}


def read_module(path: Path, model: ModelSpec | None = None, accept_changes: bool = False) -> nn.Module:
    """The module in a model file, in evaluation mode; see `read_model_file`."""
    return read_model_file(path, model, accept_changes)[0]


def read_model_file(
    path: Path, model: ModelSpec | None = None, accept_changes: bool = False
) -> tuple[nn.Module, dict[str, str], list[str]]:
    """The module in a model file, in evaluation mode, the file's metadata, and notes on the user's own files.

    It is built from `model`, or from the factory that the metadata name. Keys of `[model]` that work on any model come
    from the metadata in both cases.

    The user's own files that the model and the task name are executed, with `accept_changes` also if they were edited.

    Raises `RunDirectoryError` if the run has not written the file, if the factory now makes another model, or if a file
    of the user's own was edited;
    `DataError` if the file is corrupt; `ConfigError` if the factory is a user's own and cannot be imported.
    """
    if not path.exists():
        raise RunDirectoryError(
            "the run has no such model yet",
            where=str(path),
            hint=f"{quoted_command('resume', path.parent)} finishes it",
        )
    tree, about = checkpoint.read_model(path)
    spec = parsed_fact(about, "model", path)
    shape, prepare = tuple(spec["input_shape"]), Preparation(**spec.get("prepare", {}))
    named = [
        spec["name"] if model is None else None,
        about.get("kind"),
        parsed_fact({"task": "{}", **about}, "task", path),
    ]
    saved = (RunDir(path.parent).read_environment() or {}).get(OWN_FILES)
    notes = refuse_edited_since("the run trained", saved, named, accept_changes)
    if model is None:
        factory = MODELS.find(spec["name"], where=str(path))
        model = ModelSpec(factory, spec["name"], spec["settings"], shape, spec["classes"], 0, prepare)
    else:
        model = replace(model, input_shape=shape, classes=spec["classes"], prepare=prepare)
    module = model.build(initial=False)
    now = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    if now != {name: tuple(value.shape) for name, value in tree.items()}:
        raise RunDirectoryError(
            f"the model '{spec['name']}' now has other weights than when the run was made",
            where=str(path),
            hint="restore its source, or use the version of fedlens that environment.json names",
        )
    load_into(module, tree)
    return module.eval(), about, notes
