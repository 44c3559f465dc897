"""The schema of an experiment: what TOML can say, and Python likewise. No import of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fedlens.algorithms.registry import default_table
from fedlens.base.errors import nearest
from fedlens.base.registry import import_name
from fedlens.base.setting_errors import fields_at, refuse_loose, validated
from fedlens.core.random import derive
from fedlens.data.catalogue import keeps_images
from fedlens.local.settings import LocalSettings
from fedlens.privacy.settings import PrivacySettings
from fedlens.settings.party_settings import PartySettings


def _named(value: Any) -> Any:
    """A table with a name; the name alone, or a Python function, is short for a table."""
    if isinstance(value, str) or (callable(value) and not isinstance(value, Mapping)):
        return {"name": value}
    if type(value).__name__ == "Dataset" and not isinstance(value, Mapping):
        raise ValueError("'resume' cannot find a Dataset object again; pass a function that returns it")
    if isinstance(value, Mapping) and "name" not in value:
        near = [key for key in value if nearest(str(key), ["name"]).startswith("did you mean")]
        raise ValueError("the table has no 'name'" + (f", but '{near[0]}'" if near else ""))
    return dict(value) if isinstance(value, Mapping) else value


Named = Annotated[dict[str, Any], BeforeValidator(_named)]


def _rules(value: Any) -> Any:
    """One client rule, or a list of them."""
    return [_named(item) for item in value] if isinstance(value, list | tuple) else _named(value)


def _listed(value: Any) -> Any:
    """A list of tables; one alone is short for a list of one, and "none" for none."""
    if isinstance(value, str) and value == "none":
        return []
    return [_named(item) for item in (value if isinstance(value, list | tuple) else [value])]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_Settings = TypeVar("_Settings", bound=_Table)


PARTY_FILES = "party-files"  # the dataset of data.parties.files
NETWORK = "network"  # the engine that asks sites
AT_SITES = "sites"  # the dataset whose examples are at the sites of a federation

# What is done to the images of clients that hold whole images, and would be ignored of parties.
_OF_WHOLE_IMAGES = ("augment", "validation_from", "prefetch", "reassign")


def sums_moments(dataset: Mapping[str, Any], normalize: str) -> bool:
    """Whether sites sum their images: the experiment normalizes with their mean, and does not give it.

    >>> sums_moments({"name": "sites"}, "standard"), sums_moments({"name": "sites"}, "half")
    (True, False)
    """
    return normalize == "standard" and dataset.get("mean") is None


class DataSettings(_Table):
    """The `[data]` table."""

    dataset: Named
    partition: Named | None
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of the training data that is held out for validation"
    )
    validation_from: Literal["global", "client"] = Field(
        "global",
        description="where the validation examples come from. global: all clients' examples together; client: each "
        "client's own, which `evaluation.clients` then measures each client on",
    )
    cache: float = Field(
        2.0,
        ge=0,
        le=4096,
        description="GiB of decoded images that are kept in memory; others are read from their files each time",
    )
    augment: Annotated[list[dict[str, Any]], BeforeValidator(_listed)] = Field(
        [],
        description="augmentation of training images: a name (pad-crop-flip), a table, or a list of them in order",
    )
    normalize: Literal["standard", "unit", "half", "imagenet"] = Field(
        "standard",
        description="standard: mean 0 and standard deviation 1 per channel; unit: only scaled to 0 to 1; half: scaled "
        "to -1 to 1; imagenet: with the mean and deviation of ImageNet's images, which published weights expect",
    )
    prefetch: int = Field(
        1,
        ge=0,
        le=64,
        description="batches that are decoded and augmented ahead, in threads, while a step runs; 0 for none. The "
        "results are the same. Only for images in files, and for augmented batches above 256 KiB",
    )
    reassign: bool = Field(
        False,
        description="reassign the images to the clients at random, each keeping its number of images: the IID twin of "
        "the partition",
    )
    parties: PartySettings | None = Field(
        None,
        description="vertical learning, in place of `data.partition`: a table; each party holds a part of every image",
    )

    @model_validator(mode="before")
    @classmethod
    def _either(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        dataset = values.get("dataset", {})
        if isinstance(dataset, Mapping) and dataset.get("name") == AT_SITES:
            return {"partition": None, **values}
        if (parties := values.get("parties")) is not None:
            values = {"partition": None, **values}
            if not (isinstance(parties, Mapping) and parties.get("files") is not None):
                return values
            if isinstance(dataset, Mapping) and dataset.get("name", PARTY_FILES) == PARTY_FILES:
                values["dataset"] = {"name": PARTY_FILES, **dataset, "files": parties["files"]}
            return values
        return {key: value for key, value in values.items() if key != "partition" or value is not None}

    @field_validator("parties")
    @classmethod
    def _alone(cls, parties: PartySettings | None, known: ValidationInfo) -> PartySettings | None:
        if parties is None:
            return None
        if known.data.get("partition") is not None:
            raise ValueError("the table takes the place of data.partition: leave one of them out")
        if parties.files is not None and known.data.get("dataset", {}).get("name") != PARTY_FILES:
            raise ValueError(
                "the table has files, which take the place of data.dataset: leave one of them out"
            )
        for name in _OF_WHOLE_IMAGES:
            if name in known.data and known.data[name] != cls.model_fields[name].default:
                raise ValueError(
                    f"the table has no use for data.{name}, which is for clients with whole images"
                )
        return parties


class Seeds(_Table):
    """The `[seeds]` table. Each is derived from `seed` unless it is set."""

    data: int = Field(ge=0, lt=2**63, description="synthetic data, and the choice of held-out examples")
    partition: int = Field(ge=0, lt=2**63, description="the partition")
    initialization: int = Field(ge=0, lt=2**63, description="the model's initial weights")
    selection: int = Field(ge=0, lt=2**63, description="the choice of clients in each round")
    training: int = Field(ge=0, lt=2**63, description="the order of batches, augmentation, dropout")


Pixels = Annotated[int, Field(ge=1)]


class WindowSettings(_Table):
    """The table `evaluation.size`: windows that slide over each image."""

    window: Pixels | tuple[Pixels, Pixels]
    stride: Pixels | tuple[Pixels, Pixels]


def _size(value: Any) -> Any:
    """`evaluation.size`, checked here: of a union, pydantic reports what each of its forms is missing."""
    if isinstance(value, Mapping):
        if set(value) == {"window", "stride"} and all(
            (type(s) is int and s >= 1) or _pair(s) for s in value.values()
        ):
            return value
        raise ValueError("the table must have window and stride alone, each in pixels: a number, or [h, w]")
    if value == "full" or _pair(value):
        return value
    raise ValueError("must be 'full', [h, w] in pixels, or a table with window and stride")


def _pair(value: Any) -> bool:
    """Whether this is [h, w], both at least 1."""
    return (
        isinstance(value, list | tuple) and len(value) == 2 and all(type(s) is int and s >= 1 for s in value)
    )


class Neighbours(_Table):
    """The table `evaluation.neighbours`: labelled images that measure the features of a self-supervised run."""

    dataset: Named
    k: int = Field(20, ge=1, description="nearest training images that vote on a test image")
    temperature: float = Field(
        0.07, gt=0, allow_inf_nan=False, description="of the votes: exp(similarity / temperature)"
    )
    train: int = Field(5000, ge=1, description="training images at most, drawn once")
    test: int = Field(1000, ge=1, description="test images at most, drawn once")


def _neighbours(value: Any) -> Any:
    """The table `evaluation.neighbours`; the name of a dataset alone is short for a table."""
    return {"dataset": value} if isinstance(value, str) else value


class Evaluation(_Table):
    """The `[evaluation]` table."""

    every: int = Field(1, ge=1, description="evaluate every N rounds, and after the last round")
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="images per batch of an evaluation; auto: 500, halved until inputs and outputs take at most "
        "256 MiB",
    )
    size: Annotated[Literal["full"] | tuple[Pixels, Pixels] | WindowSettings, BeforeValidator(_size)] = Field(
        "full",
        description="size of images in evaluations and predictions, for tasks with masks or boxes. full: as stored; "
        "[h, w]: images are resized to h x w pixels, and the outputs resized back; {window = [h, w], stride = [h, w]} "
        "(or one number each): windows slide over the image, and logits are averaged where they overlap",
    )
    clients: Literal["all", "none"] | Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="which clients are measured, each on its own held-out examples: all, none, or a number drawn anew "
        "each time; by default none, or all if the algorithm makes personal models. Needs data.validation = 0.2 (or "
        "another share) and data.validation_from = 'client'. Writes the values to clients.jsonl",
    )
    test_peers: Literal["all"] | Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="of peer-to-peer learning: how many peers' models are measured on the test data, the same ones in "
        "the whole run, drawn by seeds.selection; or all. The metrics are peers_*_mean, peers_*_std and peers_*_worst",
    )
    overlap: bool = Field(
        False,
        description="evaluate while the next round trains, on idle workers. The metrics are the same, "
        "one round later. Only for engines with workers; others evaluate at once",
    )
    train: bool = Field(
        False, description="also evaluate the global model on the training data of all clients"
    )
    neighbours: Annotated[Neighbours | None, BeforeValidator(_neighbours)] = Field(
        None,
        description="of self-supervised tasks: a labelled dataset, on which the k-NN accuracy of the features is "
        "measured; a name or a table",
    )


class CheckpointSettings(_Table):
    """The `[checkpoint]` table."""

    seconds: float = Field(
        30.0, ge=0, description="minimum seconds between two checkpoints; 0 saves every round"
    )


class DivergenceSettings(_Table):
    """The `[divergence]` table."""

    patience: int = Field(
        3,
        ge=0,
        description="end the run after so many rounds in a row in which at least half of the clients sent values that "
        "are not finite; 0 never ends it for that",
    )


def _task(value: Any) -> Any:
    """The table of a task, which needs no name; a name or a Python class alone is short for a table."""
    return dict(value) if isinstance(value, Mapping) else _named(value)


class RecordedRounds(_Table):
    """The tables `record.local_models` and `record.updates`: which rounds are recorded."""

    every: int | None = Field(None, ge=1, description="record every N rounds")
    rounds: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, description="record these rounds")

    def includes(self, round: int) -> bool:
        """Whether this round is recorded."""
        return (self.every is not None and round % self.every == 0) or round in (self.rounds or ())


class Record(_Table):
    """The `[record]` table."""

    clients: bool = Field(
        False,
        description="also write each client's training metrics to clients.jsonl, one object per client "
        "and round; the values that `evaluation.clients` measures are always written",
    )
    unsafe: bool = Field(
        False,
        description="with [privacy]: record the local loss and, if they are asked for, lines and models by client all "
        "the same. The run is then not private, and its summary says so",
    )
    images: bool | Literal["auto"] = Field(
        "auto",
        description="keep test images in the run directory and in report.html: the most confident mistakes, and "
        "examples of masks and boxes. auto: those of published datasets, and none of your own data",
    )
    local_models: RecordedRounds | None = Field(
        None,
        description="rounds of which `recordings` keeps each client's model after local training, and the global model "
        "before and after: {every = 5, rounds = [1, 12]}, or one of the two keys. `fedlens analyze` reads them",
    )
    updates: RecordedRounds | None = Field(
        None,
        description="rounds of which `recordings` keeps all that each client sent, such as its update and control "
        "variate, given as for local_models",
    )


class Config(_Table):
    """All settings of an experiment.

    >>> config = Config.model_validate({
    ...     "rounds": 3, "model": "linear", "local": {"lr": 0.1},
    ...     "data": {"dataset": "digits", "partition": {"name": "iid", "clients": 4}}})
    >>> config.algorithm["name"], config.engine["name"], config.evaluation.every
    ('fedavg', 'default', 1)
    """

    name: str = Field("run", min_length=1, description="the name of the run")
    seed: int = Field(0, ge=0, lt=2**63, description="all random numbers are derived from it")
    rounds: int = Field(ge=1, description="communication rounds")
    max_skipped: int = Field(
        0,
        ge=0,
        description="how many rounds in a row may be skipped: rounds in which no reply is accepted, or the aggregate "
        "refuses to make an update. They leave the model and all states as they are. More of them end the run",
    )
    data: DataSettings
    model: Named
    algorithm: Named = Field(default_factory=lambda: {"name": "fedavg"})
    task: Annotated[dict[str, Any], BeforeValidator(_task)] = Field(
        default_factory=dict,
        description="what the model is trained for, and how it is measured; by default the dataset's kind names it",
    )
    local: LocalSettings
    select: Named | None = Field(None, description="client selection: which clients take part in a round")
    client: Annotated[dict[str, Any] | list[dict[str, Any]] | None, BeforeValidator(_rules)] = Field(
        None,
        description="client rule: how the local objective or gradient is modified, in addition to the "
        "algorithm's rule; "
        "a table, or a list of tables",
    )
    aggregate: Named | None = Field(None, description="how client updates are aggregated")
    server: Named | None = Field(
        None, description="server step: how the aggregated update changes the global model"
    )
    privacy: PrivacySettings | None = Field(
        None, description="differential privacy: how much the published model may say about any one client"
    )
    evaluation: Evaluation = Field(default_factory=Evaluation)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    divergence: DivergenceSettings = Field(default_factory=DivergenceSettings)
    record: Record = Field(default_factory=Record)
    engine: Named = Field(default_factory=lambda: {"name": "default"})
    observe: Annotated[list[dict[str, Any]], BeforeValidator(_listed)] = Field(
        [],
        description='observers of your own that follow the run, such as "curves.py:TensorBoard": a name, a table, or '
        "a list of them. They change no result",
    )
    seeds: Seeds

    @property
    def keeps_images(self) -> bool:
        """Whether the run keeps images of its test data."""
        return keeps_images(self.record.images, self.data.dataset["name"])

    @property
    def at_sites(self) -> bool:
        """Whether the training data are at the sites of a federation."""
        return bool(self.data.dataset["name"] == AT_SITES)

    @property
    def sums_moments(self) -> bool:
        """Whether the sites sum their images, see `sums_moments`."""
        return self.at_sites and sums_moments(self.data.dataset, self.data.normalize)

    @property
    def slots(self) -> dict[str, dict[str, Any] | None]:
        """The tables of single components, by name; None for those that the algorithm decides."""
        return {"select": self.select, "aggregate": self.aggregate, "server": self.server}

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        seed, given = values.get("seed", 0), values.get("seeds", {})
        filled = dict(values)
        if isinstance(given, Mapping) and isinstance(seed, int):
            filled["seeds"] = {name: derive(seed, "seeds", name) for name in Seeds.model_fields} | dict(given)
        engine = values.get("engine")
        if isinstance(engine, Mapping) and "name" not in engine:
            filled["engine"] = {"name": "default", **engine}
        # A slot needs no name as long as it is what the algorithm fills it with.
        for slot in ("select", "aggregate", "server"):
            table = values.get(slot)
            if isinstance(table, Mapping) and "name" not in table:
                filled[slot] = default_table(slot, values.get("algorithm")) | dict(table)
        return filled


def read_config(values: Mapping[str, Any], locate: Callable[[str], str] = str) -> Config:
    """The checked settings. `locate` turns a key such as `local.lr` into where a person finds it.

    Raises `ConfigError` with the key, and the nearest right name where a name is wrong. The settings of a named
    thing (a partition, an algorithm) are checked when it is built, before any work starts.
    """
    config = validated(Config, values, "", locate, elsewhere=settings_named)
    refuse_loose(values, config, "", locate, finite=True)
    return config


def settings_named(name: str) -> list[str]:
    """The full keys of the settings called `name`, in any table.

    >>> settings_named("lr"), settings_named("alpha"), settings_named("nothing")
    (['local.lr'], ['data.partition.alpha'], [])
    """
    tables = {"": list(Config.model_fields)}
    tables |= {f"{key}.": fields_at(Config, key) for key in Config.model_fields}
    found = [f"{table}{name}" for table, names in tables.items() if name in names]
    return found + [f"{table}.{name}" for table, names in _OF_NAMED.items() if name in names]


# Settings that many things of a kind have: those of a named thing are only known with its name.
_OF_NAMED = {
    "data.dataset": (
        *("path", "table", "path_column", "label_column", "client_column", "client_pattern", "client_level"),
        *("classes", "channels", "size", "fit", "test", "on_error"),
    ),
    "data.partition": ("alpha", "classes_per_client"),
    "select": ("clients_per_round", "fraction"),
    "algorithm": ("mu",),
    "model": ("width",),
    "engine": ("device", "workers", "threads", "precision", "group"),
}


def filled(config: _Settings, tables: Mapping[str, Any]) -> _Settings:
    """The settings with these tables in place of those at their keys.

    >>> given = Config.model_validate({
    ...     "rounds": 3, "model": "linear", "local": {"lr": 0.1}, "data": {"dataset": "digits", "partition": "iid"}})
    >>> filled(given, {"data.partition": {"name": "iid", "clients": 4}}).data.partition
    {'name': 'iid', 'clients': 4}
    """
    values = dict(config)
    for key, table in tables.items():
        name, _, below = key.partition(".")
        values[name] = filled(values[name], {below: table}) if below else table
    return config.model_copy(update=values)


def plain(config: Config) -> dict[str, Any]:
    """The settings as TOML can hold them: tables and plain values, what is not set left out."""
    cleaned = _clean(config.model_dump())
    assert isinstance(cleaned, dict)
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if callable(value):
        return import_name(value)
    return value
