"""The units and the compose file of docs/services.md: they parse, and fedlens accepts the commands in them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from fedlens.cli.main import app

DOCS = Path(__file__).parents[3] / "docs"
DEPLOY = DOCS / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
PAGE = (DOCS / "services.md").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def scripts() -> dict[str, str]:
    """The shell script of each service of the compose file, with the values of its environment."""
    found = {}
    for name, service in COMPOSE["services"].items():
        script = service["command"][-1]
        for variable, value in service["environment"].items():
            script = script.replace(f"$${variable}", value)
        found[name] = script.replace("$$", "$")
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The words of each fedlens command in a text, without those of the shell."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        if match := re.search(r"(?:^|[\s`/])fedlens ((?:federation|site|serve|replay|purge) [^#|`]*)", line):
            yield shlex.split(re.split(r"\s(?:>|\|\||;)\s?", match[1])[0])


def written() -> list[tuple[str, list[str]]]:
    texts = {path.name: path.read_text(encoding="utf-8") for path in UNITS} | scripts() | {"page": PAGE}
    return [(name, words) for name, text in texts.items() for words in commands(text)]


def test_there_are_commands_in_all_of_them() -> None:
    found = [name for name, _ in written()]
    assert {*COMPOSE["services"], *(path.name for path in UNITS), "page"} <= set(found)
    assert found.count("page") >= 8


@pytest.mark.parametrize(
    ("name", "words"), written(), ids=lambda value: value if isinstance(value, str) else None
)
def test_fedlens_accepts_the_command(name: str, words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while isinstance(command, TyperGroup):
        assert rest[0] in command.commands, f"{name}: fedlens {shlex.join(words)}"
        command = command.commands[rest.pop(0)]
    command.make_context("fedlens", rest)  # raises for an unknown option, or a missing argument


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_service_has_no_rights_that_it_does_not_need(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    needed = {
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "CapabilityBoundingSet=",
        "LimitCORE=0",
    }
    assert needed <= set(lines)
    for key in ("MemoryMax", "CPUQuota", "User"):
        assert sum(line.startswith(f"{key}=") for line in lines) == 1, key
    if path.name == "fedlens-purge.service":  # it needs neither keys nor a network
        assert "PrivateNetwork=yes" in lines
        return
    assert "NotifyAccess=main" in lines  # else NOTIFY_SOCKET is not set
    assert (
        next(line for line in lines if line.startswith("LoadCredential"))
        .split("=")[1]
        .startswith("fedlens-passphrase:")
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for path in DEPLOY.glob("fedlens-*"):
        text = path.read_text(encoding="utf-8").replace("/opt/fedlens/bin/fedlens", "/bin/true")
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    units = sorted(map(str, tmp_path.iterdir()))
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_containers_have_no_rights_and_sites_share_nothing_but_invitations() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert "ports" not in service
    owned = [{volume.split(":")[0] for volume in service["volumes"]} for service in services.values()]
    assert set.intersection(*owned) == {"invitations", "."}
    assert sum(map(len, owned)) == len(services) * 3
    named = {volume for volumes in owned for volume in volumes} - {"."}
    assert named == set(COMPOSE["volumes"])


def test_the_page_links_every_file() -> None:
    linked = set(re.findall(r"\]\(deploy/([\w.-]+)\)", PAGE))
    assert linked == {path.name for path in DEPLOY.iterdir()} - {"Dockerfile", "Dockerfile.dockerignore"}
