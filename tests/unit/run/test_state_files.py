"""Client states in files: the same bits come back, damage and full disks are sentences, nothing is left lying about."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlens.base.errors import RunDirectoryError, RunFailed
from fedlens.core import tensorfile
from fedlens.core.payload import encode
from fedlens.core.states import ClientStates
from fedlens.files import model_digest
from fedlens.run import checkpoint, state_files
from fedlens.run.rundir import RunDir
from fedlens.run.state_files import StateFiles, fault_of, path_of

DTYPES = [
    *sorted(tensorfile.DTYPES, key=str),
    torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    made = StateFiles(tmp_path / "states")
    made.sweep(set(), set())
    return made


def of(number: float) -> dict[str, Any]:
    return {"w": torch.full((4,), float(number))}


def names(files: StateFiles) -> set[str]:
    return {path.name for path in files.directory.iterdir()} if files.directory.exists() else set()


def test_any_payload_comes_back_to_the_bit(files: StateFiles) -> None:
    bits = torch.randint(0, 2, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {
        str(dtype): bits.to(torch.bool) if dtype == torch.bool else bits.view(dtype) for dtype in DTYPES
    }
    shared = torch.arange(5)
    payload = {
        "tensors": tensors,
        "odd": {
            "nan": torch.tensor([float("nan"), -0.0]),
            "none": torch.empty(0, 3),
            "point": torch.tensor(7),
        },
        "nested": [{"a/b~c": (shared, [shared, None])}, (), [], {}],
        "plain": [1, -(2**80), True, 0.1, float("inf"), float("-inf"), -0.0, "ä\n", b"\x00\xff", None],
    }
    found = StateFiles(files.directory).get(files.put(payload))
    before, after = encode(payload), encode(found)
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    for name, tensor in before[1].items():
        assert after[1][name].dtype == tensor.dtype
        assert after[1][name].shape == tensor.shape
        assert bytes(model_digest.raw(after[1][name])) == bytes(model_digest.raw(tensor))
    assert found["nested"][0]["a/b~c"][0] is found["nested"][0]["a/b~c"][1][0]
    assert isinstance(found["nested"][0]["a/b~c"], tuple)
    # In memory of its own: a part that is kept does not keep the whole.
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in after[1].values() if t.numel())


def test_the_name_is_the_hash_of_the_content_and_equal_states_are_one_file(files: StateFiles) -> None:
    first, second, other = files.put(of(1)), files.put(of(1)), files.put(of(2))
    assert first == second != other
    assert names(files) == {f"{first}.safetensors", f"{other}.safetensors"}
    for key in (first, other):
        assert hashlib.sha256(path_of(files.directory, key).read_bytes()).hexdigest() == key
        assert fault_of(files.directory, key) is None


def test_a_file_from_a_life_before_is_not_trusted_but_written_anew(files: StateFiles) -> None:
    key = files.put(of(1))
    path_of(files.directory, key).write_bytes(b"cut by a power cut")
    again = StateFiles(files.directory)
    assert again.put(of(1)) == key
    assert fault_of(files.directory, key) is None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "No such file or directory"),
        (
            lambda path: path.write_bytes(b""),
            "not a whole safetensors file: it has 0 bytes, and the length of its header alone takes 8",
        ),
        (
            lambda path: os.truncate(path, path.stat().st_size - 1),
            "not a whole safetensors file: its tensors have 16 bytes, and 15 follow the header",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x01"), "its checksum is another"),
    ],
)
def test_a_file_that_is_gone_or_damaged_is_a_sentence_and_no_checkpoint_takes_it(
    files: StateFiles, damage: Any, said: str
) -> None:
    key, other = files.put(of(1)), files.put(of(2))
    path = path_of(files.directory, key)
    damage(path)
    run = files.directory.parent
    sentence = (
        f"the file of a client's state cannot be read: {said} ({path}); resume from an earlier checkpoint, "
        f"if it does not need this file: 'fedlens resume {run}'."
    )
    for act in (lambda: files.get(key), lambda: files.sync([other, key])):
        with pytest.raises(RunFailed) as told:
            act()
        assert str(told.value) == sentence
    assert fault_of(files.directory, key) in (said, "its checksum is another")
    files.sync([other])


def test_any_flipped_bit_is_noticed(files: StateFiles) -> None:
    key = files.put({"w": torch.ones(2), "n": 3})
    path = path_of(files.directory, key)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(RunFailed, match="cannot be read"):
            files.get(key)
        assert fault_of(files.directory, key) == "its checksum is another"
    path.write_bytes(whole)
    assert files.get(key)["n"] == 3


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    kept = files.put(of(1))

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = (tensorfile, "contiguous") if step == "write" else (state_files.os, "rename")
    with monkeypatch.context() as patched:
        patched.setattr(*target, full)
        with pytest.raises(RunFailed) as told:
            files.put(of(2))
    assert str(told.value) == (
        f"the disk is full, so the state of a client could not be written ({files.directory}); free some space, "
        f"then resume with 'fedlens resume {files.directory.parent}'."
    )
    assert names(files) == {f"{kept}.safetensors"}
    assert torch.equal(files.get(files.put(of(2)))["w"], of(2)["w"])


def test_the_disk_is_waited_for_before_a_checkpoint_and_not_otherwise(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    keys = [files.put(of(number)) for number in range(3)]
    paths = [path_of(files.directory, key).stat().st_ino for key in keys]
    assert synced == []
    files.sync(keys[:2])
    assert sorted(synced[:2]) == sorted(paths[:2])
    assert synced[2:] == [path.stat().st_ino for path in (files.directory, files.directory.parent)]
    synced.clear()
    files.sync(keys[:2])
    assert synced == []
    files.sync(keys)
    assert synced[0] == paths[2]


def test_a_disk_that_refuses_to_sync_is_a_sentence(
    files: StateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = files.put(of(1))

    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(RunFailed, match="the state of a client could not be written: Input/output error"):
            files.sync([key])
    files.sync([key])


def test_a_dropped_file_goes_unless_a_checkpoint_has_it(files: StateFiles) -> None:
    saved, live, neither = (files.put(of(number)) for number in range(3))
    files.saving({saved})
    for key in (saved, neither):
        files.drop(key)
    assert names(files) == {f"{saved}.safetensors", f"{live}.safetensors"}
    (files.directory / ".state.0123456789abcdef.tmp").touch()
    (files.directory / "mine.txt").touch()
    files.sweep(set(), {live})
    assert names(files) == {f"{live}.safetensors", "mine.txt"}
    files.drop(saved)  # it is gone already


def test_before_it_is_known_what_checkpoints_have_nothing_is_removed(tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "states")
    key = files.put(of(1))
    files.drop(key)
    assert names(files) == {f"{key}.safetensors"}


def test_a_run_has_them_where_its_checkpoints_look(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert checkpoint.states_beside(run.checkpoint_path) == run.states_path


def test_a_checkpoint_whose_state_is_damaged_is_passed_over(tmp_path: Path) -> None:
    files, directory = StateFiles(tmp_path / "states"), tmp_path / "checkpoint"
    both, last = files.put(of(1)), files.put(of(2))
    checkpoint.save(directory, 1, {"round": 1}, [both])
    checkpoint.save(directory, 2, {"round": 2}, {both, last})
    assert checkpoint.states_of_all(directory) == {both, last}
    path_of(files.directory, last).unlink()
    loaded = checkpoint.load_latest(directory)
    assert loaded is not None
    assert (loaded.round, loaded.payload) == (1, {"round": 1})
    sentence = f"the state of a client, {last[:16]}...: No such file or directory"
    assert loaded.skipped == [f"the checkpoint of round 2 is corrupt ({sentence}) and was skipped"]
    assert checkpoint.load(checkpoint.path_of(directory, 2)).payload == {"round": 2}  # for its model
    path_of(files.directory, both).write_bytes(b"not it")
    with pytest.raises(RunDirectoryError, match=r"no checkpoint can be read: .* its checksum is another"):
        checkpoint.load_latest(directory)


def test_what_damaged_and_unfinished_checkpoints_refer_to_is_not_asked(tmp_path: Path) -> None:
    assert checkpoint.states_of_all(tmp_path / "none") == set()
    for round, key in enumerate(("aa", "bb", "cc", "dd")):
        checkpoint.save(tmp_path, round, {}, [key])
    (tmp_path / "round-000000").rename(tmp_path / "round-000000.saving")
    (tmp_path / "round-000001").rename(tmp_path / "round-000001.replaced")
    manifest = tmp_path / "round-000002/manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"cc", b"xx"))
    assert checkpoint.states_of_all(tmp_path) == {"bb", "dd"}


def test_only_what_changed_is_written_for_the_next_checkpoint(files: StateFiles) -> None:
    states = ClientStates(files, memory=64)
    for client in range(10):
        states.commit(client, of(client))
    assert len(names(files)) == 6  # sixteen bytes each: four may stay
    first = states.mark().saved()
    assert len(names(files)) == 10
    written = {path: path.stat().st_mtime_ns for path in files.directory.iterdir()}
    files.saving(set(first.keys.values()))
    states.commit(3, of(33))
    second = states.mark().saved()
    assert {client for client in second.keys if second.keys[client] != first.keys[client]} == {3}
    assert {path for path in files.directory.iterdir() if path.stat().st_mtime_ns != written.get(path)} == {
        path_of(files.directory, second.keys[3])
    }
    states.keep()
    files.sweep(set(second.keys.values()), states.keys)
    assert names(files) == {f"{key}.safetensors" for key in second.keys.values()}
