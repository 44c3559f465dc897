"""A site that withdraws leaves no byte of its updates at the server, and a run begins again without it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedlens.core.wire.message import Message
from fedlens.files.chained_log import read_chained
from fedlens.files.lock import locked
from fedlens.observers.read_recordings import recorded_rounds
from fedlens.run.rundir import RunDir
from fedlens.server.dossier import write_dossier
from fedlens.server.serve_record import ServeRecord
from tests.unit.cli.commands import ran, refused
from tests.unit.engines.loopback import Site
from tests.unit.server.serve_kit import Wards, _OneRow, write_experiment
from tests.unit.server.test_serve import lines

LEFT = "ward-c"
RECEIPT = f"{LEFT}-withdrawn.json"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts are written there."""
    monkeypatch.chdir(tmp_path)


def having(folder: Path, parts: set[bytes]) -> set[str]:
    """The files below a folder with one of these bytes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    return {path.name for path in files if any(part in path.read_bytes() for part in parts)}


def dossier_of(folder: Path, wards: Wards, run: RunDir) -> str:
    """The dossier of a run, as text."""
    return write_dossier(folder / "dossier", wards.federation.registry, run.path)[0].read_text()


def updates(run: RunDir, site: str) -> set[bytes]:
    """The bytes of all that a site has sent, as far as it was recorded: 64 of each tensor."""
    sent = [
        tensor.numpy().tobytes()[:64]
        for recorded in recorded_rounds(run)
        for reply in recorded.replies
        if reply.client == site
        for tensor in load_file(recorded.folder / reply.file).values()
        if tensor.numel() >= 16 and tensor.any()
    ]
    return set(sent)


def same(one: Path, other: Path) -> None:
    """Two runs have the same numbers and bits."""
    assert lines(one) == lines(other)
    assert (one / "participation.jsonl").read_bytes() == (other / "participation.jsonl").read_bytes()
    for name in ("model.safetensors", "best.safetensors"):
        first, second = load_file(one / name), load_file(other / name)
        assert all(torch.equal(first[leaf], second[leaf]) for leaf in second)


def test_no_byte_of_a_site_stays_and_the_run_begins_without_it(tmp_path: Path) -> None:
    wards = Wards(tmp_path / "one")
    write_experiment(wards.experiment, wards.made, rounds=2, record={"updates": {"every": 1}})
    with wards.at_work():
        run = RunDir(wards.serve(until="2099-01-31").directory)
    sent, others = updates(run, LEFT), updates(run, "ward-a")
    left = wards.sites[LEFT].site
    assert left is not None
    handles = {handle.encode() for handle in left.states}
    shutil.copytree(run.recordings_path / "round-000002", run.journal_path, dirs_exist_ok=True)  # as a note
    assert len(sent) > 4
    assert len(having(run.path, sent)) > 2
    assert "manifest.json" in having(run.path, handles)
    copy = shutil.copytree(run.path, tmp_path / "backup" / "wards" / "1")
    registry = wards.federation.registry

    with locked(run.path / "serve.lock", "the run"):
        failed = refused("federation", "withdraw", registry.folder, LEFT)
        assert "is in use by process" in failed
        assert f"{LEFT} is NOT withdrawn from {run.path}" in failed
        assert "withdrawn from all runs" not in failed
        assert not Path(RECEIPT).exists()
    assert registry.site(LEFT).state == "revoked"
    assert having(run.path, sent)
    said = ran("federation", "withdraw", registry.folder, LEFT, "--runs", tmp_path / "backup")
    assert f"--until 2099-01-31 --without {LEFT}\n" in said
    keys = wards.sites[LEFT].keys.folder
    own = keys.rename(keys.with_name("keys")).parent
    shown = ran("site", "receipt", RECEIPT, "--folder", own)
    assert shown.startswith(f"signed by the server of hospitals for {LEFT}, on 20")
    for line in said.partition("written: ")[0].splitlines():
        assert f"    {line}\n" in shown
    for path in (run.path, copy):
        assert (
            f"{path}: in rounds 0 to 2; models: model.safetensors, best.safetensors\n    deleted: checkpoint ("
            in said
        )
    for folder in (tmp_path / "one", copy):
        assert having(folder, sent | handles | others) == set()
    assert {"model.safetensors", "metrics.jsonl"} <= {path.name for path in run.path.iterdir()}
    line, _, _ = list(read_chained(run.answers_path))[-1]
    assert (line["kind"], line["site"], line["rounds"]) == ("withdrawn", LEFT, [0, 1, 2])
    receipt = re.search(
        rf"{re.escape(str(run.path))}: .+\n    deleted: .+\n    in its .+, line \d+, head \w{{64}}\n", said
    )
    assert receipt is not None
    assert receipt[0] in ran("federation", "withdraw", registry.folder, LEFT)  # again names the first time
    text = dossier_of(tmp_path, wards, run)
    assert re.search(rf"\*\*Withdrawn:\*\* {LEFT}, on \S+ \S+ UTC, line \d+", text)
    assert f"| {LEFT} | {registry.words(registry.site(LEFT))} |" in text
    assert f"{LEFT} was withdrawn from the run on 20" in refused("resume", run.path)

    for site in wards.sites.values():
        site.outcome = site.site = None
    with wards.at_work("ward-a", "ward-b"):
        again = wards.serve(without=[LEFT], out=tmp_path / "again").directory
    assert any(note.startswith("without ward-c, it begins from the start") for note in wards.progress.notes)
    never = Wards(tmp_path / "two", names=("ward-a", "ward-b"))
    write_experiment(never.experiment, never.made, rounds=2, record={"updates": {"every": 1}})
    with never.at_work():
        same(again, never.serve().directory)
    assert LEFT.encode() not in (again / "roster.json").read_bytes()


def late(wards: Wards, first: int) -> None:
    """The site has no part before this round: it fails."""
    ward = wards.sites[LEFT]
    site = Site(LEFT, wards.made.program, _OneRow(2), ward.keys.identity())  # type: ignore[arg-type]
    ward.site, takes = site, site.takes

    def on_ask(ask: Message) -> bool:
        site.takes = takes if ask.fields.round >= first else lambda op: None
        return True

    ward.on_ask = on_ask


def interrupted(wards: Wards, last: int) -> None:
    """Serves until the end of a round."""

    def interrupt(round: int) -> None:
        if round == last:
            raise KeyboardInterrupt

    wards.progress.each_round = interrupt
    with wards.at_work(), pytest.raises(KeyboardInterrupt):
        wards.serve()
    wards.progress.each_round = lambda round: None


def test_a_run_goes_on_from_the_checkpoint_before_the_first_answer_of_a_site(tmp_path: Path) -> None:
    wards, never = Wards(tmp_path / "one"), Wards(tmp_path / "two")
    for each, first, last in ((wards, 3, 3), (never, 9, 2)):
        write_experiment(each.experiment, each.made, rounds=4)
        late(each, first)
        interrupted(each, last)
    base = RunDir(tmp_path / "one" / "run")
    said = ran("federation", "withdraw", wards.federation.registry.folder, LEFT)
    assert f"{base.path}: in rounds 3; in no finished model\n" in said
    assert f"{LEFT} is withdrawn from all runs of " in said
    assert [path.name for path in base.checkpoint_path.iterdir()] == ["round-000002"]

    with wards.at_work("ward-a", "ward-b"):
        again = wards.serve(without=[LEFT], out=tmp_path / "again").directory
    assert f"without ward-c, it goes on after round 2 of {base.path}" in wards.progress.notes
    record, before = ServeRecord.read(RunDir(again)), ServeRecord.read(base)
    assert record is not None
    assert before is not None
    assert (record.run, record.attempt) == (before.run, before.attempt + 1)
    never.federation.registry.revoke(LEFT)
    with never.at_work("ward-a", "ward-b"):
        same(again, never.serve().directory)
