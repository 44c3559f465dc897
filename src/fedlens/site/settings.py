"""The settings of a site, `site.toml`: its data, what may be computed with them, and what others may name."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedlens.algorithms.registry import ALGORITHMS
from fedlens.base.errors import ConfigError, IdentityError, nearest, one_line
from fedlens.base.registry import settings_model
from fedlens.base.setting_errors import validated
from fedlens.data.datasets.registry import DATASETS
from fedlens.data.formats.folder_check import own_dataset
from fedlens.engines.devices import Device
from fedlens.engines.inline import Threads
from fedlens.files.regular_file import open_regular
from fedlens.identity.authority import check_name
from fedlens.identity.keys import public_key
from fedlens.models.registry import MODELS
from fedlens.settings.config import Named
from fedlens.settings.config_source import Source, read_toml
from fedlens.settings.toml_lines import key_lines

SITE_FILE = "site.toml"


@dataclass(frozen=True)
class SiteLimits:
    """What `site.toml` says: the fewest examples behind a number, bytes of the largest body, what is kept of runs.

    `rules` is the SHA-256 of the file, and what it says, for the log.
    """

    min_examples: int = 1
    most: int = 2**32
    keep_days: int = 365
    keep_sent: bool = False
    rules: Mapping[str, Any] = field(default_factory=dict)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SiteData(_Table):
    """The table `[data]`."""

    dataset: Named
    clients: str | None = Field(
        None, min_length=1, description="a column: each value is a client, SITE/VALUE, which the server sees"
    )
    persons: str | None = Field(
        None,
        min_length=1,
        description="a column: each value is a person, for 'site check', `min_persons` and `max_epsilon`",
    )
    labels: dict[str, str] = Field(
        {},
        description="local label to class of the experiment; equal names need no line, '' leaves images out",
    )
    exclude: str | None = Field(
        None,
        min_length=1,
        description="a file with one name of an image or one value of a column a line, which are left out",
    )
    cache: float = Field(2.0, ge=0, le=4096, description="GiB of decoded images that are kept in memory")


class SiteAllow(_Table):
    """The table `[allow]`: what this site computes. A line without a default sets no limit if it is left out.

    `fedlens.site.policy` refuses what it does not allow before an operation runs.
    """

    operations: list[str] | None = Field(
        None, description="the operations that a server may ask for, such as `train` and `evaluate-own`"
    )
    algorithms: list[str] | None = Field(
        None, description="the algorithms that an experiment may name; one of `[files]` by FILE.py:NAME"
    )
    models: list[str] | None = Field(
        None, description="the models that an experiment may name, also within others"
    )
    max_rounds: int | None = Field(None, ge=1, description="the most rounds of an experiment")
    max_epochs: int | None = Field(
        None,
        ge=1,
        description="the most epochs that one operation trains, such as a round or the tuning of a measured model",
    )
    max_seconds: float | None = Field(
        None, gt=0, description="the longest time of one operation, which is given up then"
    )
    min_examples: int = Field(
        8,
        ge=1,
        description="the fewest examples of a client behind an update or a result; one class may have fewer",
    )
    min_persons: int | None = Field(
        None,
        ge=1,
        description="the fewest persons among the images that a client trains on or holds out; needs [data] persons",
    )
    min_steps: int | None = Field(
        None, ge=1, description="the fewest local steps behind an update; a gradient over all images is one"
    )
    min_batch: int | None = Field(
        None, ge=1, description="the fewest images in a batch, and at a client that trains"
    )
    min_cohort: int = Field(3, ge=2, description="the fewest sites in a secure sum")
    secure_sum: Literal["any", "only"] = Field(
        "any", description="'only' refuses each operation that reads examples outside a secure sum"
    )
    report_metrics: bool | Literal["totals"] = Field(
        True,
        description="'totals': evaluations send sums over all held-out images alone; false: nothing is evaluated, "
        "and updates have no losses and counts beside them",
    )
    pixel_sums: bool = Field(
        True, description="false: refuses experiments without mean and std, for which sites sum pixels"
    )
    max_epsilon: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="the largest epsilon of one image of a client, over all runs on its data; refuses all that adds no "
        "noise for each image (privacy.unit = 'example'). With `persons` of [data]: of one person, by privacy.column",
    )
    delta: float = Field(
        1e-5, gt=0, lt=1, description="the delta of max_epsilon; far below 1 / images of a client"
    )
    reviewers: int = Field(1, ge=1, le=9, description="how many people must approve an experiment")


class SiteCompute(_Table):
    """The table `[compute]`."""

    device: Device = "auto"
    threads: Threads = 1
    max_message: int = Field(4096, ge=1, description="MiB of the largest message that is taken")


class SiteKeep(_Table):
    """The table `[keep]`."""

    days: int = Field(
        365,
        ge=1,
        le=36_500,
        description="days after its last ask until the states and stored answers of a run are removed",
    )
    sent: bool = Field(
        False,
        description="keep the bodies of answers in sent/; parts of images can be computed back from them",
    )


class _Settings(_Table):
    data: SiteData
    allow: SiteAllow = SiteAllow()
    compute: SiteCompute = SiteCompute()
    keep: SiteKeep = SiteKeep()
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = {}
    reviewers: dict[str, str] = {}


@dataclass(frozen=True)
class SiteSettings:
    """What `site.toml` says.

    Attributes:
        path: the file; paths in it are relative to its folder.
        data, compute: its tables, with defaults.
        files: what an experiment may name besides fedlens's own tables: a path to its SHA-256 in hexadecimal.
        allow, keep: the tables `[allow]` and `[keep]`.
        reviewers: the public keys (DER) of people who decide on other machines, by name.
        digest: SHA-256 of the file in hexadecimal, which the log has at each start after a change.
    """

    path: Path
    data: SiteData
    compute: SiteCompute
    files: Mapping[str, str]
    allow: SiteAllow = field(default_factory=SiteAllow)
    keep: SiteKeep = field(default_factory=SiteKeep)
    reviewers: Mapping[str, bytes] = field(default_factory=dict)
    digest: str = field(default="", compare=False)
    _source: Source = field(default_factory=lambda: Source({}), repr=False, compare=False)

    @classmethod
    def read(cls, path: Path) -> SiteSettings:
        """Reads the file, and no data. Raises `ConfigError` with key and line for what is wrong in it."""
        text, values = read_toml(path, "join the federation, or name the folder of the site")
        return cls.of(values, path, key_lines(text), hashlib.sha256(text.encode()).hexdigest())

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        path: Path,
        lines: Mapping[str, int] = MappingProxyType({}),
        digest: str = "",
    ) -> SiteSettings:
        """The same of the values of a file. Raises `ConfigError`."""
        source = Source(dict(values), path, lines)
        if isinstance(data := values.get("data"), Mapping) and "min_examples" in data:
            where = source.locate("data.min_examples")
            raise ConfigError(
                "'min_examples' is now a line of [allow]", where=where, hint="move it from [data] to [allow]"
            )
        checked = validated(_Settings, values, "", source.locate)
        if checked.allow.min_persons is not None and checked.data.persons is None:
            raise ConfigError(
                "[allow] min_persons needs [data] persons, which names the column with the person of each image",
                where=source.locate("allow.min_persons"),
                hint='write persons = "COLUMN" below [data]',
            )
        reviewers = {}
        for name, text in checked.reviewers.items():
            try:
                check_name(name)
                reviewers[name] = base64.b64decode(text, validate=True)
                public_key(reviewers[name])
            except (IdentityError, ValueError):
                raise ConfigError(
                    f"'{one_line(name)}' is no reviewer with a public key",
                    where=source.locate(f"reviewers.{name}"),
                    hint="write the line that 'fedlens site decide --new-key' prints",
                ) from None
        tables = checked.data, checked.compute, checked.files, checked.allow, checked.keep
        return cls(path, *tables, reviewers, digest, source)

    def rules(self) -> dict[str, Any]:
        """Its data, `[allow]` and `[keep]` with defaults, and `[reviewers]`: what `of` reads again."""
        tables = {"data": self.data, "allow": self.allow, "keep": self.keep}
        people = {name: base64.b64encode(key).decode() for name, key in self.reviewers.items()}
        return {
            **{name: table.model_dump(exclude_none=True) for name, table in tables.items()},
            "reviewers": people,
        }

    def bound(self) -> dict[str, str]:
        """SHA-256 of each line of `rules` that an approval binds, by its key: any other value ends the approval.

        Not `[keep]`, `[compute]` and the cache, which change neither what is computed and leaves nor who decides. A
        path counts as it is written, so that a reviewer on another machine binds the same.
        """
        values = {
            f"{table}.{line}": value for table, lines in self.rules().items() for line, value in lines.items()
        }
        return {
            key: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
            for key, value in values.items()
            if key != "data.cache" and not key.startswith("keep.")
        }

    def changed(self) -> str | None:
        """That the file is another now, as a sentence; None if not.

        A person who tightens a limit, or removes a reviewer, expects it to hold, and the log has the file's digest.
        """
        with suppress(ConfigError):
            if SiteSettings.read(self.path).digest == self.digest:
                return None
        return f"{self.path.name} has changed: start the site again"

    def check_names(self) -> None:
        """Raises `ConfigError` for a name in `[allow]` that fedlens does not have, and for too few reviewers.

        A site that runs has found them when the experiment fits no line; a person who writes the file should at once.
        """
        for line, table in (("algorithms", ALGORITHMS), ("models", MODELS)):
            for name in self.allow.model_dump()[line] or ():
                if name not in table and ":" not in name:
                    what = f"[allow] {line} names '{name}', which fedlens does not have"
                    raise ConfigError(
                        what, where=self._source.locate(f"allow.{line}"), hint=nearest(name, table)
                    )
        if (error := self.too_few_reviewers()) is not None:
            raise error

    def too_few_reviewers(self) -> ConfigError | None:
        """Says that `[reviewers]` has fewer keys than approvals are needed; None if it has enough."""
        if self.allow.reviewers <= 1 + len(self.reviewers):
            return None
        return ConfigError(
            f"[allow] reviewers = {self.allow.reviewers}, and [reviewers] names {len(self.reviewers)} besides this "
            "site, so that nothing can be approved",
            where=self._source.locate("allow.reviewers"),
            hint="write the line that 'fedlens site decide --new-key' prints under [reviewers]",
        )

    def not_allowed(self, what: str, line: str) -> str:
        """A sentence that a line of `[allow]` does not allow something, with its value and place."""
        value, number = self.allow.model_dump()[line], self._source.lines.get(f"allow.{line}")
        place = f"in {self.path}" + ("" if number is None else f", line {number}")
        return f"{what} is not allowed: [allow] {line} = {json.dumps(value)}, {place}"

    def file(self, name: str) -> str | None:
        """The line of `[files]` for a name in an experiment: the same name, or a path that ends in it; or None.

        A server sends names without folders.
        """
        if name in self.files:
            return name
        same = [path for path in self.files if path.rpartition("/")[2] == name]
        return same[0] if len(same) == 1 else None

    def place(self, name: str) -> Path:
        """The path of a name in `site.toml`."""
        return Path(os.path.abspath(self.path.parent / Path(name).expanduser()))

    def dataset(self) -> tuple[str, dict[str, Any]]:
        """The name of the dataset, and its settings with absolute paths. "folder" is data of a format that is guessed.

        A reader of a user's own data draws no test images, which a site does not use. Raises `ConfigError` if no
        format fits a folder, or several do.
        """
        settings = dict(self.data.dataset)
        name = settings.pop("name")
        inside = self.place(settings["path"]) if isinstance(settings.get("path"), str) else None
        if inside is not None:
            settings["path"] = str(inside)
        if isinstance(table := settings.get("table"), str):
            within = None if inside is None else inside / table
            settings["table"] = str(within if within is not None and within.exists() else self.place(table))
        file, _, attribute = name.rpartition(":")
        if file.endswith(".py"):  # a reader of the site's own
            return f"{self.place(file)}:{attribute}", settings
        if name == "folder" and inside is not None:
            name, settings = own_dataset(inside, settings)
        fields = settings_model(DATASETS.find(name)).model_fields if name in DATASETS else {}
        if "on_error" in fields:
            settings.setdefault("test", 0.0)
        return name, settings

    def content(self, name: str) -> bytes:
        """The content of the file of this line in `[files]`.

        Raises `ConfigError` if it cannot be read, or its SHA-256 is another one.
        """
        path, where = self.place(name), f"{self.path}: files.{name}"
        try:
            with open_regular(path) as file:
                content = file.read()
        except OSError as error:
            what = f"{path} cannot be read: {error.strerror}"
            raise ConfigError(what, where=where, hint="put the file there") from None
        found = hashlib.sha256(content).hexdigest()
        if found != self.files[name]:
            raise ConfigError(
                f"{path} has the SHA-256 {found}, and another one is approved",
                where=where,
                hint="use the file that was approved, or approve this one",
            )
        return content
