"""What a command shows comes back from the shell, and from `--set`, as it was given."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from fedlens.base.shell_command import quoted_command, setting, shell_command
from fedlens.settings.config_source import Source, override
from tests.unit.cli.printed import parsed

VALUES: dict[str, Any] = {
    "word": "linear",
    "word that is a number": "7",
    "word that is a date": "2026-11-24",
    "word that is true": "true",
    "quotes": 'it\'s "here" and \\there',
    "table": "{not a table",
    "list": "[not a list",
    "blank": "",
    "spaces": "  two  words ",
    "lines": "a\nb",
    "hash": "a # b",
    "dollar": "$HOME `ls` !x *",
    "letters": "Zürich, 東京 \x7f",
    "digits": "9" * 5000,
    "numbers": [1, 2.5, 1e-05, float("inf")],
    "names": ["St. Anna", "a,b", "true"],
    "truth": True,
    "component": {"name": "dirichlet", "alpha": 0.1, "odd key": {"x": [False, "y z"]}},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_setting_is_read_as_it_was(value: Any) -> None:
    command = shell_command("run", "my own.toml", changes=[setting("data.dataset.x", value)])
    _, given = parsed(command)
    assert given["recipe"] == "my own.toml"
    assert override(Source({}), given["changes"]).values == {"data": {"dataset": {"x": value}}}


def test_paths_and_options_are_read_as_they_were() -> None:
    out, data = Path("-my runs") / "it's", Path('a "b"')
    verbs, given = parsed(
        shell_command("sweep", Path("-my study.toml"), seeds=range(3), out=out, data_dir=data, quiet=True)
    )
    assert (verbs, given["file"], given["seeds"]) == ("sweep", Path("-my study.toml"), "0,1,2")
    assert (given["out"], given["data_dir"], given["quiet"], given["scale"]) == (out, data, True, None)


def test_in_a_sentence_the_marks_around_a_command_are_none_of_its_own() -> None:
    for folder in ("runs/a", "my runs/a"):
        phrase = quoted_command("resume", Path(folder))
        assert phrase[0] == phrase[-1] not in phrase[1:-1]
        assert shlex.split(phrase[1:-1]) == ["fedlens", "resume", folder]
