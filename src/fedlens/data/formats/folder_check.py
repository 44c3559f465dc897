"""Checks a folder of a user's own data and reports every problem at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.base.registry import read_settings
from fedlens.data.diagnostics import Finding, Findings, unique
from fedlens.data.formats.cells import typed
from fedlens.data.formats.column_names import client_column, image_column
from fedlens.data.formats.csv_table import read_csv
from fedlens.data.formats.guess_format import Guess, guess_format
from fedlens.data.formats.reader import examine
from fedlens.data.formats.registry import find_format
from fedlens.data.formats.scan import Scan


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Args:
        facts: counts of images, classes and so on; see `fedlens.data.formats.scan.Scan.facts`.
        findings: the problems that stop a run: first those of the whole set, then those of examples, each sorted by
            file, then line.
        warnings: what is likely a mistake, but stops no run.
        dataset: the table `data.dataset` of an experiment that reads the same data, but for examples with problems; of
            several parties, the table `data.parties`.
        guessed: why the format was chosen; empty if it was given.
    """

    facts: Mapping[str, Any]
    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...] = ()
    dataset: Mapping[str, Any] = field(default_factory=dict)
    guessed: str = ""

    @property
    def hardly_any_left(self) -> bool:
        """Whether so many images have problems that leaving them out is no advice: three quarters, or all but one."""
        left, bad = self.facts["images"], self.facts["left_out"]
        return bool(bad) and (left < 2 or bad >= 3 * left)

    @property
    def ready(self) -> Mapping[str, Any] | None:
        """The table `data.dataset` with which a run starts; None if the problems stop every run.

        These are problems of the whole dataset, or of so many examples that too few images, or no boxes, remain.
        """
        if any(not finding.example or "parties" in self.facts for finding in self.findings):
            return None
        if self.findings and (self.facts["images"] < 2 or self.facts.get("boxes") == 0):
            return None
        return {**self.dataset, "on_error": "skip"} if self.findings else self.dataset


def check_folder(folder: Path, format: str | None = None, settings: Mapping[str, Any] | None = None) -> Check:
    """Reads the whole of `folder`, in a format of `fedlens.data.formats.registry.FORMATS`, and decodes every image.

    Without a format it is guessed (`guess_format`). `settings` are those of the dataset of that name. With the format
    `csv` the table may be left out if the folder has only one.

    Raises `ConfigError` if the format or a setting is wrong, or the format cannot be guessed. Problems of the data
    are in the result.

    >>> import tempfile
    >>> check = check_folder(Path(tempfile.mkdtemp()), "image-folder")
    >>> [finding.what for finding in check.findings]
    ['the folder has no images']
    """
    given, guessed = {"path": str(folder), **(settings or {})}, ""
    if format is None:
        guess = guess_format(folder, given) if folder.is_dir() else Guess("image-folder", "")
        format, guessed = guess.format, guess.why
    entry = find_format(format)
    if format == "csv" and "table" not in given and folder.is_dir():
        given["table"] = _only_table(folder)
    # Paths stay as given, so that findings name files as the user sees them.
    paths = {key: given[key] for key in ("path", "table") if key in given}
    scan = examine(entry.fill(), read_settings(entry.reader(), given, "") | paths, full=True)
    findings = unique(sorted(scan.findings, key=lambda finding: (finding.example, natural(finding.where))))
    if scan.described and "client" not in scan.columns and given.get("client_column") is None:
        scan.findings.warn(
            folder,
            "no client is named, so the partition has to make clients, as iid does",
            _client_hint(scan),
        )
    facts = {**scan.facts(), "format": format}
    return Check(
        facts, tuple(findings), tuple(scan.findings.warnings), {"name": scan.format, **given}, guessed
    )


def own_dataset(folder: Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the settings of the dataset in a folder of a user's own data, in the format that its files have.

    Raises `ConfigError` if no format fits, or several do.
    """
    given = {"path": str(folder), **settings}
    name = guess_format(folder, given).format
    if name != "csv":
        return name, given
    return "image-folder", given if "table" in given else {**given, "table": _only_table(folder)}


def _client_hint(scan: Scan) -> str:
    """How to name the clients, with the column that may do so, of the table or of one that is not used yet."""
    column = client_column(scan.columns)
    setting = "" if column is None else f"client_column={column}"
    if not setting and scan.settings.get("table") is None:
        setting = next(filter(None, map(_clients_of_table, sorted(scan.folder.glob("*.csv")))), "")
    example = f", such as {setting}" if setting else ""
    return f"name a column of the table (client_column{example}), a folder (client_level) or a client_pattern"


def _clients_of_table(path: Path) -> str:
    """The settings with which a table of images names the clients; empty if it does not."""
    table = read_csv(path, Findings(), path.parent)
    images = None if table is None else image_column(table)
    if table is None or images is None:
        return ""
    others = {
        name: typed(table.column(name)) for name in table.columns if name not in (images, "label", "split")
    }
    column = client_column(others)
    if column is None:
        return ""
    given = {"table": path.name, "client_column": column} | (
        {} if images == "path" else {"path_column": images}
    )
    return " ".join(f"{key}={value}" for key, value in given.items())


def natural(text: str) -> tuple[tuple[str, int], ...]:
    """A key by which line 10 comes after line 9.

    >>> sorted(["a, line 10", "a, line 9"], key=natural)
    ['a, line 9', 'a, line 10']
    """
    return tuple((word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", text))


def _only_table(folder: Path) -> str:
    tables = sorted(path.name for path in folder.glob("*.csv"))
    if len(tables) != 1:
        what = f"the folder has {len(tables)} files ending in .csv" if tables else "the folder has no table"
        hint = "name the table with --set table=FILE"
        raise ConfigError(what, where=str(folder), hint=hint)
    return str(folder / tables[0])
