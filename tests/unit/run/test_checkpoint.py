"""Checkpoints: what comes back, what damage does, what a kill and a full disk leave."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor

from fedlens.base.errors import DataError, RunDirectoryError, RunFailed
from fedlens.core import tensorfile
from fedlens.files import model_digest
from fedlens.run import checkpoint

DTYPES = [*sorted(tensorfile.DTYPES, key=str), torch.complex128, torch.float8_e8m0fnu]


def same(left: Any, right: Any) -> bool:
    """Equal in type and to the bit, nan and -0.0 included."""
    if isinstance(left, Tensor):
        like = isinstance(right, Tensor) and (left.dtype, left.shape) == (right.dtype, right.shape)
        return like and bytes(model_digest.raw(left)) == bytes(model_digest.raw(right))
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and list(left) == list(right)
            and all(same(left[k], right[k]) for k in left)
        )
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and repr(left) == repr(right)


def of_bytes(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of any dtype, each element with another byte pattern (0 and 1 for booleans)."""
    count = math.prod(shape) * dtype.itemsize
    pattern = torch.arange(count, dtype=torch.int64).remainder(2 if dtype is torch.bool else 251)
    return pattern.to(torch.uint8).view(dtype).reshape(shape)


def sections(number: int) -> dict[str, Any]:
    return {
        "state": {"w": torch.full((3, 2), float(number)), "steps": torch.tensor(number)},
        "clients": {str(client): {"c": torch.arange(client) + number} for client in range(3)},
        "run": {"round": number, "best": None, "rng": [number, 2**200], "loss": math.nan},
    }


def two(directory: Path) -> Path:
    checkpoint.save(directory, 1, sections(1))
    return checkpoint.save(directory, 2, sections(2))


def latest(directory: Path) -> checkpoint.Loaded:
    loaded = checkpoint.load_latest(directory)
    assert loaded is not None
    return loaded


def assert_falls_back(directory: Path) -> None:
    loaded = latest(directory)
    assert loaded.round == 1
    assert same(loaded.payload, sections(1))
    assert len(loaded.skipped) == 1
    assert "round 2" in loaded.skipped[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,), (2, 3)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    payload = {"state": {"a": of_bytes(dtype, *shape), "b": of_bytes(torch.bfloat16, 3)}}
    checkpoint.save(tmp_path, 0, payload)
    assert same(latest(tmp_path).payload, payload)


def test_awkward_tensors_are_saved_as_the_values_they_show(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    payload = {
        "whole": base,
        "transposed": base.t(),
        "column": base[:, 1],
        "tail": base[1:],
        "expanded": torch.tensor([7.0]).expand(4, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "conjugate of a wide one": torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    want = {key: value.detach().clone().contiguous() for key, value in payload.items()}
    checkpoint.save(tmp_path, 0, payload)
    got = latest(tmp_path).payload
    assert same(got, want)
    assert all(type(value) is Tensor and value.is_contiguous() for value in got.values())
    got["whole"].zero_()
    assert got["tail"].sum() > 0


def test_a_tensor_in_two_places_is_stored_once_and_comes_back_as_one(tmp_path: Path) -> None:
    shared = torch.zeros(1000)
    path = checkpoint.save(tmp_path, 0, {"clients": {str(k): {"control": shared} for k in range(50)}})
    assert (path / "tensors.safetensors").stat().st_size < 2 * 4000
    clients = latest(tmp_path).payload["clients"]
    assert clients["0"]["control"] is clients["49"]["control"]


def test_views_of_one_start_and_other_shape_are_told_apart(tmp_path: Path) -> None:
    base = torch.arange(16, dtype=torch.int32).reshape(4, 4)
    payload = {
        "all": base,
        "flat": base.reshape(-1),
        "t": base.t(),
        "half": base[:2],
        "i16": base.view(torch.int16),
    }
    checkpoint.save(tmp_path, 0, payload)
    assert same(latest(tmp_path).payload, payload)


def test_markers_and_separators_in_a_payload_are_only_data(tmp_path: Path) -> None:
    payload = {
        "a/b": {"c": torch.tensor(1)},
        "a": {"b/c": torch.tensor(2), "b": {"c": torch.tensor(3)}, "b~1c": torch.tensor(4)},
        "__metadata__": torch.tensor(5),
        "map": {"tensor": "/a", "float": "nan", "tuple": [1], "bytes": "x"},
        "": {"": torch.tensor(6), "\ud800é": torch.tensor(7)},
        "0": {"10": 1, "2": 2},
        "round-000001": None,
    }
    checkpoint.save(tmp_path, 0, payload)
    assert same(latest(tmp_path).payload, payload)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=5)
    | st.sampled_from(DTYPES).flatmap(
        lambda d: st.sampled_from([(), (0,), (2,)]).map(lambda s: of_bytes(d, *s))
    )
)
payloads = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=4) | st.integers().map(str), inner, max_size=3)
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@settings(max_examples=80, deadline=None)
@given(payload=payloads)
def test_every_payload_comes_back(tmp_path_factory: pytest.TempPathFactory, payload: dict[str, Any]) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    checkpoint.save(directory, 7, payload)
    loaded = latest(directory)
    assert (loaded.round, loaded.skipped) == (7, [])
    assert same(loaded.payload, payload)
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(2), "ndarray"),
        ({1: 2}, "keys that are not strings"),
        ({1, 2}, "set"),
        (lambda: 0, "function"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_with_its_place(
    tmp_path: Path, value: Any, words: str
) -> None:
    with pytest.raises(RunFailed) as caught:
        checkpoint.save(tmp_path, 0, {"state": {"deep": [0, value]}})
    assert words in str(caught.value)
    assert caught.value.where == "/state/deep/1"
    assert list(tmp_path.iterdir()) == []


def test_any_mapping_is_taken(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 0, MappingProxyType({"state": MappingProxyType({"w": 1})}))
    assert latest(tmp_path).payload == {"state": {"w": 1}}


def test_the_safetensors_library_reads_the_tensors(tmp_path: Path) -> None:
    tree = {str(dtype): of_bytes(dtype, 3, 2) for dtype in sorted(tensorfile.DTYPES, key=str)}
    tree |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(3)}
    tensorfile.write(tmp_path / "a", tree, {"classes": '["é"]'})
    assert same(dict(sorted(safetensors.torch.load_file(tmp_path / "a").items())), dict(sorted(tree.items())))
    with safetensors.safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == {"classes": '["é"]'}


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    tree = {str(dtype): of_bytes(dtype, 3, 2) for dtype in sorted(tensorfile.DTYPES, key=str)}
    safetensors.torch.save_file(tree, tmp_path / "a", {"key": "value"})
    contents = tensorfile.read(tmp_path / "a")
    assert same(dict(sorted(contents.tensors.items())), dict(sorted(tree.items())))
    assert contents.metadata == {"key": "value"}


def test_the_manifest_is_json_and_says_what_the_design_asks(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 12, sections(12))
    assert path.name == "round-000012"
    manifest = json.loads((path / "manifest.json").read_text())
    content = manifest["content"]
    assert content["round"] == 12
    assert content["tensors"]["bytes"] == (path / "tensors.safetensors").stat().st_size
    assert set(manifest) == {"sha256", "content"}
    assert {"fedlens", "format", "payload"} < set(content)


FILES = pytest.mark.parametrize("name", ["tensors.safetensors", "manifest.json"])
# In ci each seventh byte, with each bit in turn; nightly every byte.
EACH = pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.nightly)])


@FILES
@EACH
def test_a_flipped_bit_in_any_byte_is_noticed(tmp_path: Path, name: str, stride: int) -> None:
    file = two(tmp_path) / name
    good = file.read_bytes()
    for position in range(0, len(good), stride):
        bad = bytearray(good)
        bad[position] ^= 1 << (position * 5 % 8)
        file.write_bytes(bad)
        assert_falls_back(tmp_path)
    file.write_bytes(good)
    assert latest(tmp_path).round == 2


@settings(max_examples=40, deadline=None)  # beside each seventh byte and length above and below
@given(data=st.data())
def test_any_damage_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    file = two(directory) / data.draw(st.sampled_from(["tensors.safetensors", "manifest.json"]))
    good = file.read_bytes()
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, min(start + 40, len(good))))
    bad = good[:start] + data.draw(st.binary(max_size=40)) + good[stop:]
    file.write_bytes(bad)
    if bad == good:
        assert latest(directory).round == 2
    else:
        assert_falls_back(directory)
    shutil.rmtree(directory)


@FILES
@EACH
def test_a_file_cut_at_any_length_is_noticed(tmp_path: Path, name: str, stride: int) -> None:
    file = two(tmp_path) / name
    good = file.read_bytes()
    for length in range(0, len(good), stride):
        file.write_bytes(good[:length])
        assert_falls_back(tmp_path)


def _empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def _swap_with_older(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("round-000001"), path)


def _be_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def _mix_with_older(path: Path) -> None:
    shutil.copy(path.with_name("round-000001") / "tensors.safetensors", path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "tensors.safetensors").unlink(),
        lambda path: (path / "manifest.json").unlink(),
        _empty,
        _swap_with_older,
        _mix_with_older,
        _be_a_file,
    ],
)
def test_missing_or_mixed_up_parts_are_noticed(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(two(tmp_path))
    assert_falls_back(tmp_path)


def test_an_unfinished_save_is_passed_over_with_a_sentence(tmp_path: Path) -> None:
    two(tmp_path).rename(tmp_path / "round-000002.saving")
    assert_falls_back(tmp_path)


def test_nothing_saved_is_none_and_all_damaged_is_an_error(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path / "absent") is None
    (tmp_path / "round-000001.saving").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.load_latest(tmp_path) is None
    for path in (two(tmp_path), tmp_path / "round-000001"):
        (path / "manifest.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"round 2 is corrupt.*round 1 is corrupt"):
        checkpoint.load_latest(tmp_path)


def test_another_format_is_an_error_and_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, sections(1))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 2)
        patch.setattr(checkpoint, "__version__", "9.9.9")
        checkpoint.save(tmp_path, 2, sections(2))
    with pytest.raises(
        RunDirectoryError, match=r"fedlens 9\.9\.9 in format 2.*resume the run with fedlens 9\.9\.9"
    ):
        checkpoint.load_latest(tmp_path)


def test_load_reads_one_checkpoint_and_refuses_a_damaged_one(tmp_path: Path) -> None:
    path = two(tmp_path)
    loaded = checkpoint.load(checkpoint.path_of(tmp_path, 1))
    assert (loaded.round, loaded.payload["run"]["round"]) == (1, 1)
    (path / "manifest.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"corrupt|not a readable"):
        checkpoint.load(path)
    with pytest.raises(RunDirectoryError, match="no checkpoint found"):
        checkpoint.load(tmp_path / "round-000009")


def test_saving_removes_later_rounds_so_that_the_run_stays_where_it_is(tmp_path: Path) -> None:
    for number in (1, 5, 6):
        checkpoint.save(tmp_path, number, sections(number))
    checkpoint.save(tmp_path, 2, sections(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-000001", "round-000002"]


def test_a_round_saved_twice_is_the_second(tmp_path: Path) -> None:
    two(tmp_path)
    checkpoint.save(tmp_path, 2, {"run": "again"})
    assert latest(tmp_path).payload == {"run": "again"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-000001", "round-000002"]


@pytest.mark.parametrize("stop_at", [1, 2])
@pytest.mark.parametrize("killed", [True, False])
def test_a_stop_while_a_round_is_saved_again_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, killed: bool
) -> None:
    checkpoint.save(tmp_path, 2, sections(2))
    calls, rename = 0, os.rename

    def stopping(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == stop_at or (killed and calls > stop_at):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", stopping)
        if killed:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 2, sections(3))
    assert same(latest(tmp_path).payload, sections(2))
    checkpoint.save(tmp_path, 2, sections(4))
    checkpoint.prune(tmp_path)
    assert same(latest(tmp_path).payload, sections(4))
    assert [path.name for path in tmp_path.iterdir()] == ["round-000002"]


def test_prune_keeps_the_last_and_the_best_and_sweeps_what_kills_left(tmp_path: Path) -> None:
    for number in range(6):
        checkpoint.save(tmp_path, number, sections(number))
    for name in (
        "round-000004.saving",
        "round-000005.removing",
        "round-000005.replaced",
        "round-000009.saving",
    ):
        shutil.copytree(tmp_path / "round-000004", tmp_path / name)
    (tmp_path / "notes.txt").write_text("mine")
    checkpoint.prune(tmp_path, keep=2, best=1)
    left = ["notes.txt", "round-000001", "round-000004", "round-000005"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    checkpoint.prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "round-000005"]
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoint.prune(tmp_path, keep=0)


def test_prune_cut_off_in_the_middle_leaves_nothing_that_looks_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        checkpoint.save(tmp_path, number, sections(number))
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "rmtree", lambda path, **_: (Path(path) / "manifest.json").unlink(missing_ok=True)
        )
        checkpoint.prune(tmp_path, keep=2)
    for number in (1, 2):
        shutil.rmtree(tmp_path / f"round-{number:06d}")
    assert checkpoint.load_latest(tmp_path) is None
    checkpoint.prune(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_device_keeps_the_old_checkpoint_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    checkpoint.save(tmp_path, 1, sections(1))
    full = lambda path, mode, **options: open("/dev/full", mode, **options)  # noqa: E731, SIM115

    def refuse(specs: object, path: Path, metadata: object) -> None:
        # As the library says it; on a real disk in the test below.
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    places = (("core.tensorfile.serialize_file", refuse), ("files.atomic_files.open", full))
    for place, refusing in places:
        with monkeypatch.context() as patch:
            patch.setattr(f"fedlens.{place}", refusing, raising=False)
            with pytest.raises(
                RunFailed, match=r"disk is full.*round 2.*free some space.*fedlens resume"
            ) as caught:
                checkpoint.save(tmp_path, 2, sections(2))
        assert caught.value.exit_code == 1
        assert [path.name for path in tmp_path.iterdir()] == ["round-000001"]
        assert same(latest(tmp_path).payload, sections(1))


FILL = """
import sys
from pathlib import Path
import torch
from fedlens.base.errors import RunFailed
from fedlens.run import checkpoint
from fedlens.files import jsonl as lines
directory = Path(sys.argv[1]) / "checkpoint"
{limit}
failed = None
for number in range(200):
    try:
        checkpoint.save(directory, number, {{"w": torch.full((20_000 * (1 + number),), float(number))}})
    except RunFailed as error:
        failed = str(error)
        break
loaded = checkpoint.load_latest(directory)
assert failed is not None and "{words}" in failed, failed
assert loaded.round == number - 1 and not loaded.skipped, loaded
assert loaded.payload["w"].unique().tolist() == [number - 1.0]
model = Path(sys.argv[1]) / "model.safetensors"
checkpoint.write_model(model, {{"w": torch.ones(3)}}, {{}})
try:
    checkpoint.write_model(model, {{"w": torch.ones(9_000_000)}}, {{}})
except RunFailed as error:
    assert "{words}" in str(error), error
else:
    raise AssertionError("the large model was written")
assert checkpoint.read_model(model)[0]["w"].tolist() == [1, 1, 1]
names = [path.name for path in Path(sys.argv[1]).rglob("*")]
assert not any("saving" in name or "tmp" in name for name in names), names
"""


@pytest.mark.nightly  # a full device above and a limit on the size of a file below
def test_a_small_file_system_that_fills_up_keeps_what_was_there(tmp_path: Path) -> None:
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    script = 'mount -t tmpfs -o size=4m tmpfs "$0" || exit 77; "$@"'
    if shutil.which("unshare") is None or subprocess.run([*mount, f"{script}", tmp_path, "true"]).returncode:
        pytest.skip("no small file system can be mounted here")
    program = FILL.format(limit="", words="disk is full")
    done = subprocess.run(
        [*mount, script, tmp_path, sys.executable, "-c", program, tmp_path], capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_limit_on_the_size_of_a_file_keeps_what_was_there(
    tmp_path: Path, forked: Callable[..., str]
) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    program = FILL.format(limit=limit, words="larger than the largest allowed file")
    assert forked(program, tmp_path) == "passed"


KILL = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from fedlens.run import checkpoint
directory, rounds, kills = Path(sys.argv[1]), 0, random.Random(3)
torch.set_num_threads(1)

def work(start, pipe):
    for number in range(start + 1, start + 10_000):
        tensors = {str(k): torch.full((2_000,), float(number)) for k in range(20)}
        checkpoint.save(directory, number, {"state": tensors, "run": {"round": number}})
        os.write(pipe, b"%9d" % number)
        checkpoint.prune(directory)
        if number % 3 == 0:  # as a run does that is interrupted at once after a save
            checkpoint.save(directory, number, {"state": tensors, "run": {"round": number}})

cut = 0
for _ in range(25):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        work(rounds, writing)
    os.close(writing)
    time.sleep(kills.uniform(0.0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = os.fdopen(reading, "rb").read()
    saved = max([rounds] + [int(told[i : i + 9]) for i in range(0, len(told), 9)])
    loaded = checkpoint.load_latest(directory)
    cut += any(path.suffix for path in directory.iterdir()) if directory.exists() else 0
    if loaded is None:
        assert saved == 0
        continue
    assert saved <= loaded.round <= saved + 1, (saved, loaded.round)
    assert loaded.payload["run"]["round"] == loaded.round
    assert all(t.unique().tolist() == [loaded.round] for t in loaded.payload["state"].values())
    assert not any("corrupt" in sentence for sentence in loaded.skipped), loaded.skipped
    rounds = loaded.round
assert rounds > 0 and cut > 0, (rounds, cut)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_of_a_save_leaves_the_last_whole_one(
    tmp_path: Path, forked: Callable[..., str]
) -> None:
    assert forked(KILL, tmp_path / "checkpoint") == "passed"


def test_the_digest_sees_names_dtypes_shapes_and_bits_and_nothing_else() -> None:
    base = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(0.0)}
    digest = model_digest.weights_digest(base)
    others: list[dict[str, Tensor]] = [
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"]},
        {"a": base["a"].reshape(3, 2), "b": base["b"]},
        {"a": base["a"].double(), "b": base["b"]},
        {"a": base["a"].view(torch.int32), "b": base["b"]},
        {"a": base["a"], "b": torch.tensor(-0.0)},
        {"a": base["b"], "b": base["a"]},
    ]
    digests = [model_digest.weights_digest(other) for other in others]
    assert len({digest, *digests}) == len(others) + 1
    column_major = base["a"].t().contiguous().t()
    assert model_digest.weights_digest({"b": base["b"], "a": column_major}) == digest
    assert model_digest.weights_digest({"a": torch.nn.Parameter(base["a"]), "b": base["b"]}) == digest


def model(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    tree = {"w": torch.arange(6.0).reshape(2, 3).t(), "b": torch.tensor(3), "buffer": torch.empty(0)}
    metadata = {"spec": '{"name": "linear"}', "classes": '["cat", "dog"]'}
    checkpoint.write_model(path, tree, metadata)
    return tree, metadata


def test_a_model_comes_back_and_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tree, metadata = model(path)
    got, said = checkpoint.read_model(path)
    assert model_digest.weights_digest(got) == model_digest.weights_digest(tree)
    assert said == metadata
    assert model_digest.weights_digest(safetensors.torch.load_file(path)) == model_digest.weights_digest(tree)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@EACH
def test_a_model_with_a_flipped_bit_in_any_byte_or_cut_anywhere_is_refused(
    tmp_path: Path, stride: int
) -> None:
    path = tmp_path / "model.safetensors"
    model(path)
    good = path.read_bytes()
    for position in range(0, len(good), stride):
        bad = bytearray(good)
        bad[position] ^= 1 << (position * 5 % 8)
        for content in (bytes(bad), good[:position]):
            path.write_bytes(content)
            with pytest.raises(DataError):
                checkpoint.read_model(path)


def test_what_is_no_model_of_ours_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    with pytest.raises(DataError, match="No such file"):
        checkpoint.read_model(path)
    safetensors.torch.save_file({"w": torch.ones(2)}, path)
    with pytest.raises(DataError, match="no digest"):
        checkpoint.read_model(path)
    with pytest.raises(RunFailed, match=r"cannot hold 'w' \(strided complex128\)"):
        checkpoint.write_model(path, {"w": torch.ones(2, dtype=torch.complex128)}, {})
    assert [file.name for file in tmp_path.iterdir()] == ["other.safetensors"]
    header = b'{"w":{"dtype":"U8","shape":[0,%d],"data_offsets":[0,0]}}'
    header %= 2**70
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DataError, match=r"corrupt|not a readable"):
        checkpoint.read_model(path)


def test_a_single_element_with_a_stride_is_saved(tmp_path: Path) -> None:
    odd = torch.stack([torch.full((1,), 3.0), torch.zeros(1)], -1)[..., 0]
    assert odd.stride() == (2,)
    checkpoint.save(tmp_path, 1, {"state": {"x": odd}})
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded.payload["state"]["x"], odd)


def test_what_a_killed_writer_left_beside_a_model_goes_with_the_next_one(tmp_path: Path) -> None:
    """The library writes to a name of its own first."""
    (tmp_path / ".tmpa1B2c3").write_bytes(b"half")
    (tmp_path / ".tmp").mkdir()  # somebody else's
    checkpoint.write_model(tmp_path / "model.safetensors", {"w": torch.ones(1)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp", "model.safetensors"]


def test_two_files_of_one_model_have_the_same_bytes(tmp_path: Path) -> None:
    metadata = {str(k): "ü" * k for k in range(12)}
    for name in ("a", "b"):
        checkpoint.write_model(tmp_path / name, {"w": torch.ones(1)}, metadata)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert checkpoint.read_model(tmp_path / "a")[1] == metadata


def test_others_may_read_a_file_where_the_umask_allows_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        checkpoint.write_model(tmp_path / "model.safetensors", {"w": torch.ones(1)}, {})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644
