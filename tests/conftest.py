"""What all tests share."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Nothing that imports torch: the process that hands the tests to workers would take seconds for it, in which they wait.
if TYPE_CHECKING:
    from tests.forked import Lasting

# A runner that was started in the background may ignore Ctrl-C, and so would every process that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What is remembered of image files from run to run has no place in the home of whoever runs the tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fedlens-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a FEDLENS_DATA that names no folder, with which all tests of real data would be skipped."""
    folder = os.environ.get("FEDLENS_DATA")
    if folder and not Path(folder).is_dir():
        raise pytest.UsageError(f"FEDLENS_DATA is not a folder: {folder}. Correct it, or unset it.")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Prepares a process that runs tests; that which hands them to workers does not."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return
    import typer.testing
    from hypothesis import settings

    from fedlens.run import environment

    # The same examples in every run, and none of them fails for being slow on a busy machine.
    settings.register_profile("fedlens", deadline=None, derandomize=True, max_examples=50, database=None)
    settings.load_profile("fedlens")
    patch = pytest.MonkeyPatch()
    # Each call of a command would build all commands again.
    patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))  # type: ignore[attr-defined]
    # What a test writes need not survive a power cut; tests that count or break these calls replace them again.
    patch.setattr(os, "fsync", lambda descriptor: None)
    # Each run asks git for the revision, which takes a fifth of a small run's time: once.
    patch.setattr(environment, "_git_revision", functools.cache(environment._git_revision))
    patch.setattr(asyncio, "run", _run_to_the_last_connection)
    gc.disable()  # looking for garbage among all that collecting makes would double its time


def _run_to_the_last_connection(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run`, after which no socket is left to be collected while another test runs, which would fail for it.

    aiohttp lets a TLS connection that it gave up say goodbye for 30 s, and forgets it at once.
    """

    async def close() -> None:
        for transport in list(asyncio.get_running_loop()._transports.values()):  # type: ignore[attr-defined]
            transport.abort()
        for _ in range(5):  # transports close their sockets in later steps of the loop
            await asyncio.sleep(0)

    with asyncio.Runner() as runner:
        try:
            return runner.run(main)
        finally:
            runner.run(close())


def pytest_collection_finish() -> None:
    """Collects garbage again: without looking at modules and tests, which stay, and a tenth as often as Python does."""
    gc.freeze()
    gc.set_threshold(7_000, 10, 10)  # with 700, half of the time in which a test parses the source
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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sets what holds for all tests: attributes, because a fixture costs ten times as much, and tests are 12,000.

    Torch has one thread; the last bits of a sum depend on their number. Runs do not draw report.html, a third of a
    small run's time, unless the test is marked `report_page`, nor studies and analyses pictures for papers, most of a
    small study's time, unless it is marked `pictures`.
    """
    import torch

    from fedlens import carry_out

    torch.set_num_threads(1)
    draw = _draw()  # before it is replaced for the first time
    carry_out._report = draw if item.get_closest_marker("report_page") else lambda directory, progress: None
    looks = item.get_closest_marker("pictures")
    for module, draw_chart in _pictures().items():
        sys.modules[module].draw_chart = draw_chart if looks else _no_picture  # type: ignore[attr-defined]


@functools.cache
def _draw() -> Any:
    from fedlens import carry_out

    return carry_out._report


@functools.cache
def _pictures() -> dict[str, Any]:
    names = ("fedlens.analyses.analyze", "fedlens.results.figures.study_figures")
    return {name: importlib.import_module(name).draw_chart for name in names}


def _no_picture(chart: Any, path: Path, hint: str | None = None) -> Path:
    """Refuses what drawing refuses, and writes an empty line, for which a full disk has no room."""
    from fedlens.results.figures.picture import check_suffix, style, write_picture

    with style():
        check_suffix(path)
        return write_picture(b"\n", path, hint)


@pytest.fixture(autouse=True, scope="module")
def own_files() -> Iterator[None]:
    """A user's files that other tests have loaded are forgotten: each worker that an engine starts would load them."""
    from tests.new_process import new_process

    path = list(sys.path)
    new_process()
    yield
    sys.path[:] = path


@pytest.fixture(autouse=True, scope="module")
def on_the_processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs that name no device train on the processor, whose bits the tests know; only tests/gpu finds GPUs."""
    import torch

    from fedlens.engines.hardware import Hardware

    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.device_count() and not request.path.is_relative_to(Path(__file__).parent / "gpu"):
            patch.setenv("CUDA_VISIBLE_DEVICES", "")  # of child processes
            for module in ("fedlens.engines.devices", "fedlens.run.build"):
                patch.setattr(f"{module}.hardware", Hardware)
        yield


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


@pytest.fixture(scope="session")
def lasting() -> Iterator[Callable[[int], Lasting]]:
    """The process that workers of so many threads are forked from: one for all engines."""
    from tests.forked import Lasting

    made: dict[int, Lasting] = {}
    yield lambda threads: made.setdefault(threads, Lasting(threads))
    for one in made.values():
        one.end()


@pytest.fixture
def forked(lasting: Callable[[int], Lasting]) -> Callable[..., str]:
    """`tests.forked.run`: a program in a new process, without the seconds that importing torch takes."""
    from tests.forked import run

    return functools.partial(run, lasting(1))


@pytest.fixture
def quick_workers(lasting: Callable[[int], Lasting], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start in milliseconds. For tests of numbers; those of starting, dying and ending go without."""
    monkeypatch.setattr("fedlens.engines.processes.WorkerPool", lasting)


@pytest.fixture
def quick_jobs(lasting: Callable[[int], Lasting], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the workers that carry out the runs of a study."""
    monkeypatch.setattr("fedlens.studies.jobs.WorkerPool", lasting)


@pytest.fixture
def few_orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each epsilon in a moment, by Rényi divergences of few orders. For tests of what is counted, not of how well."""
    from fedlens.privacy import accounting

    def forget() -> None:
        for cached in (accounting._epsilons, accounting._rdp_of):
            cached.cache_clear()

    by_rdp = accounting._by_rdp
    monkeypatch.setattr(accounting, "_by_pld", lambda kinds, delta: None)
    monkeypatch.setattr(
        accounting, "_by_rdp", lambda kinds, delta, _=None: by_rdp(kinds, delta, range(2, 32))
    )
    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def resnet20_file(real_data: Path) -> Path:
    """The published weights of ResNet-20 on CIFAR-10; the test is skipped without them."""
    name = "weights/cifar10-resnet20.safetensors"
    beside = Path(__file__).parents[2] / "shared" / "data"
    for folder in (real_data, beside):
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"no {name} in FEDLENS_DATA or in {beside}")
