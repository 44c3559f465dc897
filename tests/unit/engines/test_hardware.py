"""What the machine is asked about its GPUs, and the sentences for each answer of torch."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fedlens.engines import hardware as module
from fedlens.engines.hardware import Hardware, announcements, driver_version, hardware, multiplies_in_bf16

# As torch 2.14 (c10/cuda/CUDAFunctions.cpp) words them.
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver "
    "from http://www.nvidia.com/Download/index.aspx"
)


def asked(
    monkeypatch: pytest.MonkeyPatch, failure: str | None, built: str | None = "13.0", card: bool = True
) -> Hardware:
    """What is found where torch finds no GPU, fails like this, and an NVIDIA GPU is in the machine or not."""

    def no_gpu() -> bool:
        if failure == TOO_OLD:
            warnings.warn(f"CUDA initialization: {failure}", stacklevel=1)
        return False

    def failing() -> None:
        raise RuntimeError(failure)

    monkeypatch.setattr(torch.cuda, "is_available", no_gpu)
    monkeypatch.setattr(torch.cuda, "init", failing)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(module, "_shows_nvidia", lambda: card)
    return hardware.__wrapped__()


def test_a_machine_without_a_gpu_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for built, failure in (("13.0", NO_DRIVER), (None, None)):
        found = asked(monkeypatch, failure, built, card=False)
        assert found.gpus == ()
        assert announcements(found, {"name": "default", "device": "cpu"}, None) == []


@pytest.mark.parametrize(
    ("failure", "built", "says"),
    [
        (NO_DRIVER, "13.0", "it has no driver; install one, or start the container with its GPUs"),
        (TOO_OLD, "13.0", "its driver is for CUDA 11.4, too old for torch"),
        (None, None, "is built for the processor; install a CUDA build, see pytorch.org"),
        ("CUDA unknown error - this may be due to", "13.0", "is not used: CUDA unknown error"),
    ],
)
def test_a_gpu_that_cannot_be_used_gets_one_sentence(
    failure: str | None, built: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = asked(monkeypatch, failure, built)
    (sentence,) = announcements(found, {"name": "default", "device": "cpu"}, None)
    assert sentence.startswith("the NVIDIA GPU is not used: ")
    assert says in sentence
    assert sentence.endswith("; the run trains on the processor")
    assert announcements(found, {"name": "inline", "device": "cpu"}, None, chosen=False) == []


def test_an_old_driver_is_named_where_no_gpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in WSL, where GPUs are no PCI devices."""
    assert "CUDA 11.4" in str(asked(monkeypatch, TOO_OLD, card=False).obstacle())


def test_gpus_that_the_user_hides_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert asked(monkeypatch, "No CUDA GPUs are available").obstacle() is None


def test_an_apple_gpu_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    found = asked(monkeypatch, None, built=None, card=False)
    assert str(found.obstacle()).startswith("the Apple GPU is not used: mps is not tried")


@pytest.mark.parametrize(("capability", "gpus"), [((9, 0), ("Tesla T",) * 2), ((7, 0), ())])
def test_a_gpu_without_kernels_in_this_torch_is_not_used(
    capability: tuple[int, int], gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda k: "Tesla T")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda k: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90", "sm_90a", "compute_120"])
    found = hardware.__wrapped__()
    assert found.gpus == gpus
    assert (found.obstacle() is None) == bool(gpus)
    if not gpus:
        assert "has no kernels for a Tesla T" in str(found.obstacle())


def test_one_line_says_what_was_chosen_and_how_to_choose_the_processor() -> None:
    end = "; --set engine.device=cpu for the processor"
    two = Hardware(("NVIDIA H100", "NVIDIA H100"))
    said = announcements(
        Hardware(("NVIDIA H100",)),
        {"name": "vectorized", "device": "cuda"},
        "engine: vectorized, groups of 64 clients",
    )
    assert said == [f"1 GPU, NVIDIA H100: vectorized, groups of 64 clients{end}"]
    assert announcements(two, {"name": "inline", "device": "cuda:1"}, None) == [
        f"2 GPUs, NVIDIA H100: inline on cuda:1{end}"
    ]
    assert announcements(two, {"name": "inline", "device": "cuda:1"}, None, chosen=False) == []
    line = "engine: vectorized, groups of 64 clients"
    assert announcements(two, {"name": "vectorized", "device": "cuda:1"}, line, chosen=False) == [line]


def test_a_connected_gpu_is_seen_without_its_driver(tmp_path: Path) -> None:
    for name, vendor, kind in (("0", "0x8086", "0x030000"), ("1", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert not module._shows_nvidia(tmp_path)  # the sound device of a GPU is no GPU
    (tmp_path / "1" / "class").write_text("0x030200\n")
    assert module._shows_nvidia(tmp_path)
    assert not module._shows_nvidia(tmp_path / "missing")


def test_the_version_of_the_driver_is_read(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("580.82.07\n")
    assert driver_version(tmp_path / "version") == "580.82.07"
    assert driver_version(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
        ("flags : fpu avx512f avx512_bf16\n", True),
        ("flags : fpu avx512f avx2\n", False),
        ("Features : asimd\n", False),
        (None, False),
    ],
)
def test_products_of_bf16_are_read_from_the_flags_of_the_processor(
    text: str | None, found: bool, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_in_bf16(tmp_path / "cpuinfo") is found
