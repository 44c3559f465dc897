"""Where the settings of a study stand: the file and the line of each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """Where the settings of a study stand: the file, the scale, and the lines by key."""

    path: Path | None = None
    scale: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)

    def locate(self, *keys: str | int) -> str:
        """Returns the place of a key for error messages: the file, the line, the table and the key.

        >>> places = Places(Path("study.toml"), lines={"grid": 4, "grid.local.lr": 5})
        >>> places.locate("grid", "local.lr"), places.locate("grid", "rounds")
        ('study.toml, line 5: [grid] local.lr', 'study.toml, line 4: [grid] rounds')
        """
        parts = [str(key) for key in keys]
        shown = parts[-1] if len(parts) == 1 else f"[{'.'.join(parts[:-1])}] {parts[-1]}"
        if self.path is None:
            return shown
        in_scale = self.lines.get(".".join(["scales", self.scale, *parts])) if self.scale else None
        lines = (self.lines.get(".".join(parts[:length])) for length in range(len(parts), 0, -1))
        line = in_scale or next((line for line in lines if line is not None), None)
        return f"{self.path}, line {line}: {shown}" if line else f"{self.path}: {shown}"

    def locate_listed(self, kind: str, number: int | None, key: str = "") -> str:
        """The same for a key of a list of tables, counted from 0; None for no table of it.

        >>> Places(Path("study.toml"), lines={"tables.0.document": 9}).locate_listed("tables", 0, "document")
        'study.toml, line 9: [[tables]] 1 document'
        """
        parts = [kind, *([] if number is None else [str(number)]), *filter(None, key.split("."))]
        place = self.locate(*parts)
        shown = f"[[{kind}]]" + ("" if number is None else f" {number + 1}") + (f" {key}" if key else "")
        return f"{place.rpartition(': ')[0]}: {shown}" if ": " in place else shown

    def locate_key(self, key: str) -> str:
        """The same for a key such as `methods.fedavg.set`."""
        table = next((name for name in ("grid.", "random.", "set.") if f".{name}" in f".{key}"), None)
        if table:  # what follows is a dotted setting
            before, _, setting = f".{key}".partition(f".{table}")
            return self.locate(*filter(None, before.split(".")), table[:-1], setting)
        return self.locate(*key.rsplit(".", 1)) if "." in key else self.locate(key)
