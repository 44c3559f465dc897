"""What all tests share."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing
from hypothesis import settings

from fedlens.engines.hardware import Hardware
from fedlens.engines.worker_pool import WorkerPool
from fedlens.run import environment
from tests.forked import run

GPUS = torch.cuda.device_count()

# A runner that was started in the background may ignore Ctrl-C, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and none of them fails for being slow on a busy machine.
settings.register_profile("fedlens", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("fedlens")


# What is remembered of image files from run to run has no place in the home of whoever runs the tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fedlens-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


# Each call of a command would build all commands again.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a FEDLENS_DATA that names no folder, with which all tests of real data would be skipped."""
    folder = os.environ.get("FEDLENS_DATA")
    if folder and not Path(folder).is_dir():
        raise pytest.UsageError(f"FEDLENS_DATA is not a folder: {folder}. Correct it, or unset it.")
    # What a test writes need not survive a power cut; tests that count or break these calls replace them again.
    pytest.MonkeyPatch().setattr(os, "fsync", lambda descriptor: None)
    # Each run asks git for the revision, which takes a fifth of a small run's time: once.
    pytest.MonkeyPatch().setattr(environment, "_git_revision", functools.cache(environment._git_revision))
    gc.disable()  # looking for garbage among all that collecting makes would double its time


def pytest_collection_finish() -> None:
    """Collects garbage again, without looking at modules and tests, which stay."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps a file's tests in one worker, so that they share fixtures, and all timing tests, which are in one file.

    pytest-xdist 3.8 does not see groups that markers make under pytest 9.2. Files are begun in their order, in which
    slow ones come first and the doctests last, so that both workers end at about the same time.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def no_report_page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs do not draw report.html, a third of a small run's time, unless the test is marked `report_page`."""
    if not request.node.get_closest_marker("report_page"):
        monkeypatch.setattr("fedlens.api._report", lambda directory, progress: None)


@pytest.fixture(autouse=True)
def on_the_processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that name no device train on the processor, whose bits the tests know; only tests/gpu finds GPUs."""
    if GPUS and not request.path.is_relative_to(Path(__file__).parent / "gpu"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of child processes
        for module in ("fedlens.engines.devices", "fedlens.run.build"):
            monkeypatch.setattr(f"{module}.hardware", Hardware)


@pytest.fixture(scope="session")
def real_folder() -> Path | None:
    """The folder of real data, or None where there is none."""
    folder = os.environ.get("FEDLENS_DATA")
    return Path(folder) if folder else None


@pytest.fixture(scope="session")
def real_data(real_folder: Path | None) -> Path:
    """The folder of real data; the test is skipped where there is none."""
    if real_folder is None:
        pytest.skip(
            "no real data: point FEDLENS_DATA at a folder with FashionMNIST/, cifar-10-batches-bin/, ..."
        )
    return real_folder


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Torch's threads, on which the last bits of a sum depend: one, or as many as a test asks for, at most two.

    It asks with `@pytest.mark.parametrize("threads", [2], indirect=True)`.
    """
    asked = min(2, getattr(request, "param", 1))
    torch.set_num_threads(asked)
    yield asked
    torch.set_num_threads(1)


class _Lasting(WorkerPool):
    """Makes the workers of one engine after the other: that it imports torch is paid once, not at each start."""

    def close(self) -> None:
        """Stays; the workers end when their engine closes its connections to them."""

    def end(self) -> None:
        """Ends what has stayed."""
        super().close()


@pytest.fixture(scope="session")
def lasting() -> Iterator[dict[int, _Lasting]]:
    """The processes that workers are forked from, by the threads of a worker."""
    made: dict[int, _Lasting] = {}
    yield made
    for one in made.values():
        one.end()


@pytest.fixture
def forked(lasting: dict[int, _Lasting]) -> Callable[..., str]:
    """`tests.forked.run`: a program in a new process, without the seconds that importing torch takes."""
    return functools.partial(run, lasting.setdefault(1, _Lasting(1)))


@pytest.fixture
def quick_workers(lasting: dict[int, _Lasting], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start in milliseconds. For tests of numbers; those of starting, dying and ending go without."""

    def nursery(threads: int) -> _Lasting:
        return lasting.setdefault(threads, _Lasting(threads))

    monkeypatch.setattr("fedlens.engines.processes.WorkerPool", nursery)


@pytest.fixture
def quick_jobs(lasting: dict[int, _Lasting], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the workers that carry out the runs of a study."""

    def nursery(threads: int) -> _Lasting:
        return lasting.setdefault(threads, _Lasting(threads))

    monkeypatch.setattr("fedlens.studies.jobs.WorkerPool", nursery)


@pytest.fixture(scope="session")
def resnet20_file(real_data: Path) -> Path:
    """The published weights of ResNet-20 on CIFAR-10; the test is skipped without them."""
    name = "weights/cifar10-resnet20.safetensors"
    beside = Path(__file__).parents[2] / "shared" / "data"
    for folder in (real_data, beside):
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"no {name} in FEDLENS_DATA or in {beside}")
