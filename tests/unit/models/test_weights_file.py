"""Files of weights: both formats, wrappers, and every way in which a file is no such file."""

from __future__ import annotations

import os
import pickle
import socket
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

from fedlens.base.errors import ConfigError, DataError, FedlensError
from fedlens.models import weights_file
from fedlens.models.weights_file import file_of_run, read_weights
from fedlens.models.weights_setting import names_a_file
from fedlens.run.checkpoint import write_model

TREE = {"conv.weight": torch.arange(6.0).reshape(2, 3), "conv.bias": torch.ones(2)}


def refused(path: Path, kind: type[FedlensError] = DataError) -> str:
    with pytest.raises(kind) as error:
        read_weights(path)
    text = str(error.value)
    assert str(path) in text
    return text


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize(
    "prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_a_state_dictionary_is_read_wrapped_or_not(tmp_path: Path, wrapper: str | None, prefix: str) -> None:
    tree = OrderedDict((prefix + name, value) for name, value in TREE.items())
    torch.save(tree if wrapper is None else {wrapper: tree, "epoch": 3}, tmp_path / "a.pth")
    found = read_weights(tmp_path / "a.pth").tensors
    assert {n: v.tolist() for n, v in found.items()} == {n: v.tolist() for n, v in TREE.items()}


def test_a_model_within_a_state_dictionary_is_found(tmp_path: Path) -> None:
    torch.save({"model": {"state_dict": TREE, "args": {"lr": 0.1}}}, tmp_path / "a.pt")
    assert set(read_weights(tmp_path / "a.pt").tensors) == set(TREE)


def test_a_prefix_that_one_name_lacks_is_part_of_the_names(tmp_path: Path) -> None:
    save_file({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.safetensors")
    assert set(read_weights(tmp_path / "a.safetensors").tensors) == {"module.a", "b"}


def test_both_formats_give_the_same_bits(tmp_path: Path) -> None:
    tree = {"half": torch.randn(3).half(), "brain": torch.randn(3).bfloat16(), "n": torch.tensor(7)}
    save_file(tree, tmp_path / "a.safetensors")
    torch.save(tree, tmp_path / "a.bin")
    one, other = (read_weights(tmp_path / f"a.{kind}") for kind in ("safetensors", "bin"))
    assert one.sha256 != other.sha256
    for name, value in tree.items():
        assert one.tensors[name].dtype == value.dtype
        assert torch.equal(one.tensors[name], value)
        assert torch.equal(other.tensors[name], value)


def test_the_format_is_told_by_the_content_not_by_the_name(tmp_path: Path) -> None:
    save_file(TREE, tmp_path / "a.pth")
    assert (tmp_path / "a.pth").read_bytes()[0] == 0x80, "a pickle begins so too"
    torch.save(TREE, tmp_path / "b.safetensors")
    torch.save(TREE, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("a.pth", "b.safetensors", "old.pth"):
        assert set(read_weights(tmp_path / name).tensors) == set(TREE)


class Planted:
    """Unpickled by a reader that runs code, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_and_nothing_of_it_runs(tmp_path: Path, zipped: bool) -> None:
    trace = tmp_path / "it-ran"
    content = {"state_dict": TREE, "extra": Planted(trace)}
    torch.save(content, tmp_path / "evil.pth", _use_new_zipfile_serialization=zipped)
    text = refused(tmp_path / "evil.pth")
    assert f"the Python object '{os.mkdir.__module__}.mkdir'" in text
    assert "ran nothing of it" in text
    assert not trace.exists()
    torch.load(tmp_path / "evil.pth", weights_only=False)  # the plant works
    assert trace.exists()


def test_a_plain_pickle_with_code_is_refused_and_nothing_of_it_runs(tmp_path: Path) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        trace = tmp_path / f"it-ran-{protocol}"
        (tmp_path / "evil.pth").write_bytes(pickle.dumps(Planted(trace), protocol))
        refused(tmp_path / "evil.pth")
        assert not trace.exists()


def test_a_whole_module_is_refused_with_the_way_to_save_it(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "net.pt")
    text = refused(tmp_path / "net.pt")
    assert "torch.nn.modules.linear.Linear" in text
    assert "torch.save(model.state_dict(), FILE)" in text


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "pt":
        torch.save(TREE, path)
    else:
        save_file(TREE, path)
    whole = path.read_bytes()
    for length in sorted({*range(0, len(whole), 37), 1, 2, 8, 9, len(whole) - 1}):
        path.write_bytes(whole[:length])
        text = refused(path)
        assert "truncated" in text or "empty" in text or "neither" in text


def test_a_flipped_bit_of_a_file_that_fedlens_wrote_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, TREE, {"classes": "[]"})
    assert read_weights(path).metadata == {"classes": "[]"}
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "SHA-256 mismatch" in refused(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS"),
        (b"<!DOCTYPE html><html>404</html>", "neither a safetensors file nor a state dictionary"),
        (b"\x80\x04N.", "truncated or corrupt"),
        (b"PK\x03\x04" + bytes(100), "truncated or corrupt"),
        (b"\xff" * 200, "truncated or corrupt"),
    ],
)
def test_bytes_that_are_no_weights_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.safetensors" if content[:1] == b"\xff" else tmp_path / "a.bin"
    path.write_bytes(content)
    assert says in refused(path)


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    whole = save(TREE)
    length = int.from_bytes(whole[:8], "little")
    for header in (whole[8 : 8 + length].replace(b"[2,3]", b"[9,9]"), b"{" + b" " * (length - 2) + b"}"):
        (tmp_path / "a.safetensors").write_bytes(whole[:8] + header + whole[8 + length :])
        refused(tmp_path / "a.safetensors")


def test_archives_of_other_kinds_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    refused(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("notes.txt", "hello")
    refused(tmp_path / "b.zip")


def test_a_file_without_tensors_names_what_it_holds(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "best": 0.5}, tmp_path / "a.pt")
    assert "contains no tensors (its entries: 'epoch', 'best')" in refused(tmp_path / "a.pt")
    torch.save([torch.ones(2)], tmp_path / "b.pt")
    assert "contains a list, not a state dictionary" in refused(tmp_path / "b.pt")


def test_entries_that_are_no_tensors_are_left_out(tmp_path: Path) -> None:
    torch.save({**TREE, "epoch": 3, "name": "net"}, tmp_path / "a.pt")
    assert set(read_weights(tmp_path / "a.pt").tensors) == set(TREE)


def test_a_missing_file_is_named_with_the_nearest_ones(tmp_path: Path) -> None:
    save_file(TREE, tmp_path / "resnet20.safetensors")
    assert "did you mean 'resnet20.safetensors'" in refused(tmp_path / "resnet-20.safetensors", ConfigError)
    assert "the folder" in refused(tmp_path / "none" / "a.pt", ConfigError)


def test_a_directory_a_pipe_and_a_socket_are_refused_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "it is a directory" in refused(tmp_path / "folder", ConfigError)
    (tmp_path / "folder" / "config.toml").write_text("")
    assert f"model.weights = 'run:{tmp_path / 'folder'}'" in refused(tmp_path / "folder", ConfigError)
    os.mkfifo(tmp_path / "pipe")
    assert "it is a named pipe" in refused(tmp_path / "pipe", ConfigError)
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(tmp_path / "s"))
        assert "it is a socket" in refused(tmp_path / "s", ConfigError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    save_file(TREE, tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").chmod(0)
    assert "Permission denied" in refused(tmp_path / "a.safetensors", ConfigError)


def test_a_file_over_the_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "large.safetensors", "wb") as file:
        file.truncate(2**42)  # without blocks on the disk, and more than any memory
    monkeypatch.setattr(weights_file, "free_memory", lambda: 2**30)
    text = refused(tmp_path / "large.safetensors", ConfigError)
    assert (
        "has 4,194,304 MiB, and reading it takes 8,388,608 MiB of memory, but only 1,024 MiB is free" in text
    )


def test_the_file_of_a_run_is_its_final_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run directory not found"):
        file_of_run(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config\.toml"):
        file_of_run(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="is not finished"):
        file_of_run(tmp_path)
    write_model(tmp_path / "model.safetensors", TREE, {})
    assert file_of_run(tmp_path) == tmp_path / "model.safetensors"


def test_words_of_torchvision_name_no_file() -> None:
    assert not any(map(names_a_file, ("DEFAULT", "IMAGENET1K_V1", "imagenet", None, 3)))
    assert all(map(names_a_file, ("a.pt", "runs/a", "run:a", "A.SAFETENSORS")))
