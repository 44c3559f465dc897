"""Makes the objects of an experiment from its settings, and refuses what does not fit before any work starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain as chain_of
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fedlens.algorithms.averaging import Parts
from fedlens.base.errors import ConfigError
from fedlens.base.frozen import FrozenSplit
from fedlens.base.registry import OwnSettings
from fedlens.core.algorithm_base import AlgorithmBase, BareAlgorithm
from fedlens.core.dataset_info import DatasetInfo
from fedlens.core.engine_base import EngineBase, EngineWork
from fedlens.core.protocol import Algorithm, ClientDataSource, FederationInfo, ModelSpec, Program, State
from fedlens.core.tree import count, fixed_leaves
from fedlens.data.boxes import Boxes
from fedlens.data.catalogue import data_directory
from fedlens.data.client_datasets import ClientDatasets
from fedlens.data.feature_cache import with_features
from fedlens.data.partition.roster import Roster
from fedlens.data.sites import ExamplesHere
from fedlens.data.vertical.feature_partition import AnyPartition, FeaturePartition
from fedlens.data.vertical.vertical_datasets import party_facts, vertical_datasets
from fedlens.engines.hardware import announcements, hardware
from fedlens.local.chain import chain
from fedlens.local.class_counts import absent_classes
from fedlens.local.rules import ClientRule
from fedlens.local.settings import LocalSettings
from fedlens.local.vectorized.batched_train import BatchedTrain
from fedlens.models.user_models import downloads, try_model
from fedlens.models.weights import InitialWeights
from fedlens.run.client_data import client_data_of
from fedlens.run.initial_weights import initial_weights, settings_read, with_trained_widths
from fedlens.run.neighbours import LabelledImages, labelled_images
from fedlens.run.session import Session, SharedDataset
from fedlens.settings import algorithm_check
from fedlens.settings.config import Config, filled
from fedlens.settings.memory_check import check_letters, check_memory
from fedlens.settings.model_kind import (
    prepared_for,
    with_vocabulary,
)
from fedlens.settings.plan import SLOT_REGISTRIES, Plan
from fedlens.settings.recording_check import check_recording
from fedlens.settings.resolve import Resolved, located
from fedlens.settings.single_images import refuse_single_images
from fedlens.tasks.central_evaluation import evaluation_batch
from fedlens.tasks.evaluation_size import EvaluationSize, evaluation_size
from fedlens.tasks.task import Task
from fedlens.vision.detector import Detector


@dataclass(frozen=True)
class Built:
    """An experiment that is ready to run."""

    config: Config
    client_data: ClientDatasets
    partition: AnyPartition
    algorithm: AlgorithmBase
    engine: EngineBase
    model: ModelSpec
    unwrapped: ModelSpec  # without the layers that the task puts around it: what model files hold
    parameters: int
    trainable: int  # of them, those that are trained
    federation: FederationInfo
    task: Task
    clients_per_round: int | None
    source: ClientDataSource  # the same data, or the features of them
    evaluation_size: EvaluationSize  # at which images are evaluated
    notes: tuple[str, ...] = ()  # which weights were loaded; what was left out of the data, or corrected
    labelled: LabelledImages | None = None  # whose nearest neighbours measure the encoder
    shared: SharedDataset | None = None  # the data in a session, with their digest once it is known

    @property
    def program(self) -> Program:
        """What an engine is opened with."""
        return Program(self.algorithm.ops, self.source, self.config.seeds.training)

    def on_device(self, state: State) -> State:
        """The server's state where the engine computes, if the server's code may compute there too."""
        return self.engine.on_device(state) if self.algorithm.follows_device else state

    @property
    def layout(self) -> str:
        """How the model's images lie in memory: 'channels last' or 'contiguous'."""
        program = self.engine.applied(Program({}, self.client_data, 0))
        last = program.arithmetic.lays_out(self.model.build(initial=False), torch.device(program.device))
        return "channels last" if last else "contiguous"


def build(
    planned: Plan,
    data_dir: Path,
    download: bool,
    engine: EngineBase | None = None,
    say: Callable[[str], None] = lambda sentence: None,
    initial: Path | None = None,
    session: Session | None = None,
    roster: Roster | None = None,
    here: ExamplesHere | None = None,
) -> Built:
    """Loads the data, partitions it, and makes the algorithm and the engine.

    `initial` is the file of the initial model in the directory of a run that is resumed; `model.weights` is not read
    again then. `session` has data and partitions of earlier runs. `roster` are the clients whose data are at sites, and
    `here` the examples of those of this site, if this is one.

    Raises `ConfigError` if the settings do not fit the data or each other, and `DataError` if the data is missing or
    damaged.
    """
    try:
        return _build(planned, data_dir, download, engine, say, initial, session, roster, here)
    except ConfigError as error:
        if error.where is None or error.where.partition(".")[0] not in Config.model_fields:
            raise
        raise located(error, "", planned.locate) from error


def _build(
    planned: Plan,
    data_dir: Path,
    download: bool,
    engine: EngineBase | None,
    say: Callable[[str], None],
    initial: Path | None,
    session: Session | None,
    roster: Roster | None,
    here: ExamplesHere | None,
) -> Built:
    config, chosen = planned.config, planned.chosen
    algorithm_check.check_combinations(config)
    if not (initial and initial.exists()):
        _read_weights(chosen["model"], data_dir, download)
    client_data, partition, task, tables, shared = client_data_of(
        planned, data_dir, download, say, session, roster, here
    )
    data = client_data.dataset
    choice, widened = with_trained_widths(with_vocabulary(chosen["model"], data.info))
    federation = _federation(config, client_data, partition, task)
    model, unwrapped, module, weights = _model(config, choice, client_data, task, initial, download)
    config = filled(config, {**tables, "model": choice.table() | settings_read(weights)})
    parts = _parts(planned, config, model, task, federation, data.info)
    bare: Algorithm = chosen["algorithm"](parts)
    algorithm: AlgorithmBase = chosen["algorithm"].made(lambda: BareAlgorithm.wrap(bare))
    at_clients = task.local_leaves(parts.spec) | algorithm.personal
    if weights is not None:  # clients begin with their own leaves of the initial model
        weights.travels = bool(at_clients)
    algorithm_check.refuse_frozen(algorithm, config)
    algorithm_check.check_privacy(config, algorithm, parts.spec, data.moments_of)
    algorithm_check.refuse_replaced(chosen["algorithm"], algorithm, parts, planned.overridden)
    if data.at_sites:
        algorithm_check.check_at_sites(config, algorithm, parts.measure)
    size = algorithm.clients_per_round(federation)
    recorded = check_recording(config, algorithm, task, parts.spec, size, at_clients)
    _refuse_single_images(config.local, model, task, client_data, partition, algorithm, federation)
    source = _source(planned, client_data, partition, model, module)
    engine = planned.engine() if engine is None else engine
    config = _fitting(engine, config, algorithm, parts, source, size, say)
    check_letters(algorithm.letter_bytes(federation), config.engine)
    largest = federation.largest if size is not None else int(partition.sizes().sum())
    seen = config.rounds * config.local.steps_at(largest) * config.local.batch(largest)
    about = [*_about_boxes(module, data.train.targets), *task.notes(seen)]  # before the module moves to meta
    absent = absent_classes(task, client_data.data_of("@test"), data) if "@test" in federation.held else ()
    trained = replace(model, input_shape=client_data.training_shape)
    check_memory(module, trained, task, config.local, largest, config.engine, say)
    return Built(
        config,
        client_data,
        partition,
        algorithm,
        engine,
        model,
        unwrapped,
        count((algorithm.composed or model).leaves),
        count((algorithm.composed or model).leaves, trainable=True),
        federation,
        task,
        size,
        source,
        parts.evaluation_size,
        _notes(
            weights, widened, (*data.notes, *planned.notes, *recorded), absent, (*about, *algorithm.notes)
        ),
        labelled_images(planned, algorithm, unwrapped, task, data_dir, download),
        shared,
    )


def _read_weights(model: Resolved, data_dir: Path, download: bool) -> None:
    """Reads the file of the initial weights, if the model has one."""
    if model.shared is not None and (weights := model.shared.initial_weights) is not None:
        weights.look_in(data_dir / "weights")
        with downloads(download):
            weights.read_before_data()


def _notes(weights: InitialWeights | None, widened: Sequence[str], *others: Sequence[str]) -> tuple[str, ...]:
    """What the user is told: the weights that were loaded, then mistakes in the data, then what was chosen."""
    loaded = (weights.note,) if weights is not None and weights.note else ()
    return tuple(chain_of.from_iterable((loaded, widened, *others)))


class _BuiltModel(NamedTuple):
    """A model as it is trained, as the user named it, once built, and its initial weights."""

    wrapped: ModelSpec
    unwrapped: ModelSpec
    module: nn.Module
    weights: InitialWeights | None


def _model(
    config: Config,
    choice: Resolved,
    client_data: ClientDatasets,
    task: Task,
    initial: Path | None,
    download: bool,
) -> _BuiltModel:
    """Builds the model once. Raises `ConfigError` if it refuses the dataset's images or the task its outputs."""
    data = client_data.dataset
    unwrapped = ModelSpec(
        choice.factory,
        choice.name,
        choice.settings,
        data.input_shape,
        max(1, len(data.classes)),  # images without labels have no class
        config.seeds.initialization,
        prepared_for(task, choice.shared),
    )
    model = task.wrap(unwrapped)
    weights = initial_weights(model, initial)
    with downloads(download):
        module = choice.made(model.build)
    if isinstance(model.factory, OwnSettings) or data.kind == "language":
        for shape in dict.fromkeys((model.input_shape, client_data.training_shape)):
            blank = task.blank(2, shape)
            choice.made(partial(try_model, module, blank, model.classes, task.misfit))
    return _BuiltModel(replace(model, fixed=fixed_leaves(module)), unwrapped, module, weights)


def _federation(
    config: Config, client_data: ClientDatasets, partition: AnyPartition, task: Task
) -> FederationInfo:
    data, parties = client_data.dataset, config.data.parties
    return FederationInfo(
        partition.sizes(),
        len(data.classes),
        data.input_shape,
        client_data.held(),
        client_data.held_out_sizes(),
        data.kind,
        task.most_counts(data.input_shape),
        None if parties is None else party_facts(partition, parties.align),
        isinstance(partition, Roster),  # also at a site, which has its own examples
        partition.contract if isinstance(partition, Roster) else "",
    )


def _parts(
    planned: Plan, config: Config, model: ModelSpec, task: Task, federation: FederationInfo, info: DatasetInfo
) -> Parts:
    """The components that the algorithm is made of."""
    chosen = planned.chosen
    prepare, setting = chosen["model"].shared, config.evaluation.size
    kept = prepare is not None and prepare.cache_features
    table = setting if isinstance(setting, str | tuple) else setting.model_dump()
    size = evaluation_size(table, task, info.input_shape, kept)
    batch = evaluation_batch(config.evaluation.batch_size, task, info, size)
    return Parts(
        model,
        task,
        config.local,
        federation,
        measure(config, federation),
        batch,
        config.evaluation.clients,
        **{slot: chosen[slot]() for slot in SLOT_REGISTRIES if slot in chosen},
        client=chain(*(rule() for rule in planned.rules)) if planned.rules else None,
        evaluation_size=size,
        test_peers=config.evaluation.test_peers,
        selection_seed=config.seeds.selection,
        privacy=config.privacy,
        rounds=config.rounds,
    )


def _refuse_single_images(
    local: LocalSettings,
    model: ModelSpec,
    task: Task,
    client_data: ClientDatasets,
    partition: AnyPartition,
    algorithm: AlgorithmBase,
    federation: FederationInfo,
) -> None:
    """Raises `ConfigError` if a client trains on a batch of one image, and the model cannot."""
    sizes, shape = partition.sizes(), client_data.training_shape
    if algorithm.clients_per_round(federation) is None:  # one client that has all data
        refuse_single_images(model, task, local, sizes.sum(keepdims=True), ["the pooled data"], shape=shape)
        return
    trained = list(algorithm.candidates(federation))
    sizes, names = partition.trained_sizes(trained), [partition.ids[client] for client in trained]
    refuse_single_images(model, task, local, sizes, names, algorithm.full_gradients, shape)


def _about_boxes(module: torch.nn.Module, targets: object) -> list[str]:
    """What a detector says about the boxes of the training images, such as how many its anchors do not fit."""
    if not (isinstance(module, Detector) and isinstance(targets, Boxes)):
        return []
    return module.notes(torch.tensor(targets.boxes))


def _source(
    planned: Plan,
    client_data: ClientDatasets,
    partition: AnyPartition,
    model: ModelSpec,
    module: torch.nn.Module,
) -> ClientDataSource:
    """What workers read: the data, the parts of the parties, or the features of a frozen part that are kept.

    Raises `ConfigError` where the training images change from epoch to epoch.
    """
    if isinstance(partition, FeaturePartition):
        return vertical_datasets(client_data.dataset, partition, client_data.held_out)
    if (split := FrozenSplit.of(module)) is None:
        return client_data
    if planned.augments:
        raise ConfigError(
            f"the augmentation '{planned.augments[0].name}' changes the images at random, so the features of an image "
            "cannot be kept",
            where="model.cache_features",
            hint="remove data.augment, or set model.cache_features = false",
        )
    if client_data.dataset.train.changing:
        raise ConfigError(
            f"the images of '{client_data.dataset.name}' are drawn anew in every step, so their features cannot be "
            "kept",
            where="model.cache_features",
            hint="set model.cache_features = false",
        )
    shape = split.features(torch.zeros(1, *model.input_shape)).shape[1:]
    return with_features(client_data, model, tuple(shape), int(planned.config.data.cache * 2**30))


def _fitting(
    engine: EngineBase,
    config: Config,
    algorithm: AlgorithmBase,
    parts: Parts,
    source: ClientDataSource,
    size: int | None,
    say: Callable[[str], None],
) -> Config:
    """The settings with the engine's own choices filled in. Raises `ConfigError` for what the engine cannot do."""
    engine.check(algorithm.ops)
    clients, images = parts.federation.eligible.tolist(), images_of_the_run(config, parts.federation, size)
    plain = BatchedTrain(parts.model, parts.task, parts.local, ClientRule())
    work = EngineWork(algorithm.ops, source, clients, size, config.rounds, images, plain.trial)
    if algorithm.asks_each_step:
        # One client after the other, and nothing left for workers.
        work = replace(work, cohort=None, images=0.0)
    line = engine.choose(work)
    table = config.engine if engine.table is None else engine.table
    bare = Program(algorithm.ops, work.data, config.seeds.training)
    placed = engine.applied(bare)
    # An engine of the user's own that does not say where it computes keeps its setting.
    chosen = config.engine.get("device") == "auto" and placed is not bare
    table = {**table, "device": placed.device} if chosen else table
    for sentence in announcements(hardware(), table, line, chosen):
        say(sentence)
    config = filled(config, {"engine": table})
    algorithm_check.check_evaluation(config.evaluation, algorithm, engine.ahead)
    return config


def images_of_the_run(config: Config, federation: FederationInfo, cohort: int | None) -> float:
    """About how many images a run trains on, counting each use of an image.

    Without a cohort, one client has the pooled data.
    """
    every = federation.sizes
    sizes = every[federation.eligible] if cohort is not None else every.sum(keepdims=True)
    mean = float(sizes.mean()) if len(sizes) else 0.0
    local = config.local
    per_client = local.work * (local.examples or mean)
    if local.steps:
        per_client = local.steps * local.batch(max(1, round(mean)))
    return config.rounds * (cohort or len(sizes)) * per_client


def measure(config: Config, federation: FederationInfo) -> Sequence[str]:
    """The names of the data that the server evaluates the model on: `@test`, `@validation`, `@train`."""
    asked = {
        "@test": "@test" in federation.held,
        "@validation": "@validation" in federation.held,
        "@train": config.evaluation.train,
    }
    return tuple(name for name, measured in asked.items() if measured)


__all__ = ["Built", "build", "data_directory", "measure"]
