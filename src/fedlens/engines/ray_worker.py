"""The code that runs on the nodes of a Ray cluster, and the format of payloads in its object store."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fedlens.base import interrupts
from fedlens.base.errors import FedlensError, HookError, RunFailed, told
from fedlens.base.memory import keep_freed_memory
from fedlens.base.registry import USER_MODULE_PREFIX
from fedlens.base.threads import share_cores
from fedlens.data.feature_cache import FeatureStore
from fedlens.data.images import DecodedImages
from fedlens.engines.client_groups import Groups
from fedlens.engines.executor import Executor
from fedlens.engines.shared_memory import Packer, unpack

_ALIGN = 64  # bytes, as torch aligns tensors; the last bits of some sums depend on it

Packed = tuple[bytes, np.ndarray]  # an envelope, and uint8 [n] with the contents of its tensors
Source = tuple[str, str, str]  # a module's name, its file, and the text of the file
# The return value of a call, the output during it, and the error that ends the run.
Report = tuple[Any, str, RunFailed | None]


class RayWorker:
    """Answers blocks of requests in a process of Ray.

    Args:
        size: threads of one computation, and the number of clients computed at once.
        sources: the user's own files, which need not be on this machine.
        program: the program in the object store, as `pack` made it.
    """

    def __init__(self, size: tuple[int, int], sources: Sequence[Source], program: Any) -> None:
        threads, group = size
        interrupts.no_user()
        keep_freed_memory()
        torch.set_num_threads(threads)
        share_cores(threads)  # which Ray has reserved
        for source in sources:
            load_source(*source)
        loaded = _fetched(program)
        options = contextlib.ExitStack()
        options.enter_context(loaded.computing())
        atexit.register(options.close)
        self._executor = Executor(loaded, groups=Groups(group) if group > 1 else None)
        self._asks: dict[int, tuple[Any, ...]] = {}

    def work(self, ask: int, shared: list[Any], items: Packed, alone: bool = False) -> Packed:
        """The answers to some requests of an ask. `shared` holds the reference to the shared part of the ask."""
        if ask not in self._asks:
            self._asks[ask] = _fetched(shared[0])
        op, values, expect, reduce = self._asks[ask]
        answers = self._executor.block(op, values, unpacked(items), expect, reduce, alone)
        return pack(answers, f"the result of the operation '{op}'")

    def forget(self, ask: int) -> None:
        """Releases the shared part of an ask, so that the object store can free its memory."""
        self._asks.pop(ask, None)


def _fetched(reference: Any) -> Any:
    import ray

    return unpacked(ray.get(reference))


class Relay(io.StringIO):
    """Collects what Python code writes to standard output and standard error, for the next report.

    A worker has one for its whole life, because a log handler keeps its first stream.
    """

    def report(self, call: Callable[..., Any], *arguments: Any) -> Report:
        """Makes the call and reports on it, even if it raises.

        Raises:
            SystemExit, KeyboardInterrupt: as the call does, if something ends the worker. The driver replaces it.
        """
        value: Any = None
        failure: RunFailed | None = None
        with contextlib.redirect_stdout(self), contextlib.redirect_stderr(self):
            try:
                value = call(*arguments)
            except FedlensError as error:
                failure = RunFailed(error.what, where=error.where, hint=error.hint)
                if isinstance(error, HookError):
                    failure = error
            except BaseException as error:  # Ray would end the worker for some of them
                # Ray ends a worker of a drained node by SystemExit; one of an operation is a failure of its client.
                if isinstance(error, SystemExit) or not interrupts.from_code(error):
                    raise
                traceback.print_exc()
                hint = "its traceback is above; engine.name=inline runs without workers"
                failure = RunFailed(f"a worker of Ray failed: {told(error)}", hint=hint)
        written = self.getvalue()
        self.seek(0)
        self.truncate()
        return value, written, failure


def actor_class() -> Any:
    """The class of Ray's actors. A class made in a function is sent by value.

    So it can report its versions even if fedlens is missing there, or has another version.
    """

    class Actor:
        worker: Any = None

        @staticmethod
        def versions() -> dict[str, str]:
            """The versions that must be equal to the driver's. Builds of torch with and without GPUs count as equal."""
            import importlib
            import sys

            versions = {"python": ".".join(map(str, sys.version_info[:2]))}
            for name in ("torch", "fedlens"):
                try:
                    versions[name] = importlib.import_module(name).__version__.partition("+")[0]
                except ImportError:
                    versions[name] = ""
            return versions

        def hello(self, expected: dict[str, str], size: Any, sources: Any, program: list[Any]) -> Any:
            """The versions here. The first call loads the program if they are the driver's."""
            if self.worker is not None or self.versions() != expected:
                return self.versions(), "", None

            from fedlens.engines.ray_worker import RayWorker, Relay

            def begin() -> dict[str, str]:
                self.worker = RayWorker(size, sources, program[0])
                return expected

            self.relay = Relay()
            return self.relay.report(begin)

        def work(self, *arguments: Any) -> Any:
            """A report; None if Ray restarted the actor since the last `hello`."""
            return None if self.worker is None else self.relay.report(self.worker.work, *arguments)

        def forget(self, ask: int) -> None:
            if self.worker is not None:
                self.worker.forget(ask)

    return Actor


# -- payloads in the object store -------------------------------------------------------------------------------------


def pack(payload: Any, what: str, code: bool = False, instead: Callable[[Any], Any] | None = None) -> Packed:
    """A payload as an envelope and one array, which Ray puts into its store without another copy.

    Raises `RunFailed` about `what` if it cannot be sent.
    """
    try:
        packer = Packer(payload, code, instead)
    except Exception as error:
        raise RunFailed(
            f"{what} cannot be sent to Ray's workers: {type(error).__name__}: {error}",
            hint="use tensors, bytes, plain values, and lists or mappings of these; engine.name=inline sends nothing",
        ) from error
    memory = np.empty(packer.size, np.uint8)
    packer.write(memory.data)
    return packer.envelope, memory


def unpacked(packed: Packed) -> Any:
    """The payload. Its tensors are views of the store, which keeps the object as long as one of them exists.

    >>> unpacked(pack({"w": torch.arange(3)}, "it"))
    {'w': tensor([0, 1, 2])}
    """
    envelope, memory = packed
    return unpack(envelope, _view(memory))


def _view(memory: np.ndarray) -> memoryview:
    """A writable view, because torch warns about the read-only arrays that Ray returns."""
    if memory.size == 0:
        return memoryview(b"")
    if memory.ctypes.data % _ALIGN:  # a small object, which is part of a message
        roomy = np.empty(memory.size + _ALIGN, np.uint8)
        first = -roomy.ctypes.data % _ALIGN
        roomy[first : first + memory.size] = memory
        memory = roomy[first : first + memory.size]
    writable: Any = (ctypes.c_ubyte * memory.size).from_address(memory.ctypes.data)
    writable.owner = memory  # lives as long as any view of it
    return memoryview(writable).cast("B")


class Emptied:
    """Replaces a cache of decoded images or of features; arrives at a worker as an empty cache.

    Each worker keeps what it decodes or computes, up to its share of the limit of the machine.
    """

    def __init__(self, store: DecodedImages | FeatureStore, workers: int) -> None:
        if isinstance(store, FeatureStore):
            slots, each = store.rows.shape
        else:
            slots = store.slots
            each = (store.memory.size - slots) // slots if slots else 0
        self._made = type(store).of, (slots // workers, each)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._made


# -- the user's own files ---------------------------------------------------------------------------------------------


def user_sources() -> list[Source]:
    """The files that `fedlens.base.registry.load_file` has loaded, with their text, for nodes without them."""
    modules = [module for name, module in sys.modules.items() if name.startswith(USER_MODULE_PREFIX)]
    return [(m.__name__, str(m.__file__), Path(str(m.__file__)).read_text(encoding="utf-8")) for m in modules]


def load_source(name: str, file: str, text: str) -> None:
    """Makes a module from its text, unless one of this name exists; it can import modules beside it that are here.

    >>> load_source("fedlens_example", "example.py", "answer = 42")
    >>> sys.modules.pop("fedlens_example").answer
    42
    """
    if name in sys.modules:
        return
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    if (folder := str(Path(file).parent)) not in sys.path:
        sys.path.append(folder)
    try:
        exec(compile(text, file, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
