"""What runs on the nodes of a Ray cluster, and how payloads lie in its object store."""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fedlens.core.errors import FedlensError, RunFailed, told
from fedlens.core.registry import USER_MODULE_PREFIX
from fedlens.data.images import DecodedImages
from fedlens.engines.client_groups import Groups
from fedlens.engines.devices import Computing
from fedlens.engines.executor import Executor
from fedlens.engines.memory import keep_freed_memory
from fedlens.engines.shared_memory import Packer, unpack

_ALIGN = 64  # bytes: where torch would lay a tensor itself; some sums depend on it in the last bit

Packed = tuple[bytes, np.ndarray]  # an envelope, and uint8 [n] with what it leaves out
Source = tuple[str, str, str]  # a module's name, its file, and what stands in that
# What came of a call; what was written meanwhile; what broke, if it did: an error as it is to be raised, or any other
# in one line and where it was.
Report = tuple[Any, str, RunFailed | tuple[str, str] | None]


class RayWorker:
    """Answers blocks of requests in a process of Ray's.

    Args:
        how: threads of one computation, and clients that are computed at once.
        sources: the user's own files, which need not be on this machine.
        program: the program, as `pack` made it.
    """

    def __init__(self, how: tuple[int, int], sources: Sequence[Source], program: Packed) -> None:
        threads, group = how
        keep_freed_memory()
        torch.set_num_threads(threads)
        for source in sources:
            load_source(*source)
        found = unpacked(program)
        Computing(found.device, found.arithmetic.precision).begin()
        self._site = Executor(found, groups=Groups(group) if group > 1 else None)
        self._asks: dict[int, tuple[Any, ...]] = {}

    def work(self, ask: int, shared: Packed | None, items: Packed, alone: bool = False) -> Packed:
        """The answers to some requests of an ask; `shared` comes with an ask's first."""
        if shared is not None:
            self._asks[ask] = unpacked(shared)
        op, values, expect, reduce = self._asks[ask]
        answers = self._site.block(op, values, unpacked(items), expect, reduce, alone)
        return pack(answers, f"what the operation '{op}' answered")

    def forget(self, ask: int) -> None:
        """Lets go of what an ask shared, so that the object store may have its memory back."""
        self._asks.pop(ask, None)


class Relay(io.TextIOBase):
    """Takes in what Python code writes to standard output and standard error, until a report takes it along.

    There is one for as long as a worker lives: a log handler holds on to the stream that it was made with.
    """

    def __init__(self) -> None:
        self._written: deque[str] = deque()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._written.append(text)
        return len(text)

    def report(self, call: Callable[..., Any], *arguments: Any) -> Report:
        """Makes the call, and reports on it, also where it raises."""
        value: Any = None
        fault: RunFailed | tuple[str, str] | None = None
        with contextlib.redirect_stdout(self), contextlib.redirect_stderr(self):
            try:
                value = call(*arguments)
            except FedlensError as error:
                fault = RunFailed(error.what, where=error.where, hint=error.hint)
            except Exception as error:
                fault = (told(error), traceback.format_exc())
        return value, "".join(self._written.popleft() for _ in range(len(self._written))), fault


def outpost() -> type:
    """The class of Ray's actors. It is made inside a function, so that it travels by value.

    So it can say what it found where fedlens is not installed, or is another one.
    """

    class Outpost:
        def start(self, expected: dict[str, str], how: Any, sources: Any, program: list[Any]) -> Any:
            import importlib
            import sys

            found = {"python": ".".join(map(str, sys.version_info[:2]))}
            for name in ("torch", "fedlens"):
                try:
                    found[name] = importlib.import_module(name).__version__.partition("+")[0]
                except ImportError:
                    found[name] = "none"
            if found != expected:
                return found, "", None

            import ray

            from fedlens.engines.ray_worker import RayWorker, Relay

            def begin() -> dict[str, str]:
                self.worker = RayWorker(how, sources, ray.get(program[0]))
                return found

            self.relay = Relay()
            return self.relay.report(begin)

        def work(self, *arguments: Any) -> Any:
            return self.relay.report(self.worker.work, *arguments)

        def there(self) -> Any:
            return None, "", None

        def forget(self, ask: int) -> None:
            self.worker.forget(ask)

    return Outpost


def versions() -> dict[str, str]:
    """What has to be the same at the driver and at every worker, as `outpost` finds it.

    A build of torch for GPUs and one without are of the same version.
    """
    import fedlens

    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__.partition("+")[0],
        "fedlens": fedlens.__version__.partition("+")[0],
    }


# -- payloads in the object store -------------------------------------------------------------------------------------


def pack(payload: Any, what: str, code: bool = False, instead: Callable[[Any], Any] | None = None) -> Packed:
    """A payload as an envelope and one array, which Ray lays into its store as it is.

    Raises `RunFailed` about `what` where it cannot be sent.
    """
    try:
        packer = Packer(payload, code, instead)
    except Exception as error:
        raise RunFailed(
            f"{what} cannot be sent to Ray's workers: {type(error).__name__}: {error}",
            hint="take tensors, bytes, plain values, and lists or mappings of these; engine.name=inline sends nothing",
        ) from error
    memory = np.empty(packer.size, np.uint8)
    packer.write(memory.data)
    return packer.envelope, memory


def unpacked(packed: Packed) -> Any:
    """The payload; its tensors look at the store, which keeps the object as long as one of them is there.

    >>> unpacked(pack({"w": torch.arange(3)}, "it"))
    {'w': tensor([0, 1, 2])}
    """
    envelope, memory = packed
    return unpack(envelope, _view(memory))


def _view(memory: np.ndarray) -> memoryview:
    """A view that torch makes tensors of: it knows none that are read-only, and warns of what Ray gives out."""
    if memory.size == 0:
        return memoryview(b"")
    if memory.ctypes.data % _ALIGN:  # a small object, which lies in a message
        roomy = np.empty(memory.size + _ALIGN, np.uint8)
        first = -roomy.ctypes.data % _ALIGN
        roomy[first : first + memory.size] = memory
        memory = roomy[first : first + memory.size]
    seen: Any = (ctypes.c_ubyte * memory.size).from_address(memory.ctypes.data)
    seen.owner = memory  # lives as long as any view of it
    return memoryview(seen).cast("B")


class Emptied:
    """Stands for a store of decoded images, and becomes an empty one where it arrives.

    What is decoded later is no part of the program: each worker keeps what it decodes itself, and so that those of
    one machine keep no more than was allowed, each has room for its share.
    """

    def __init__(self, store: DecodedImages, workers: int) -> None:
        each = (store.memory.size - store.slots) // store.slots if store.slots else 0
        self._made = (store.slots // workers, each)

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodedImages.of, self._made


# -- the user's own files ---------------------------------------------------------------------------------------------


def user_sources() -> list[Source]:
    """The files that `fedlens.core.registry.load_file` has loaded, with their text: no node need have them."""
    modules = [module for name, module in sys.modules.items() if name.startswith(USER_MODULE_PREFIX)]
    return [(m.__name__, str(m.__file__), Path(str(m.__file__)).read_text(encoding="utf-8")) for m in modules]


def load_source(name: str, file: str, text: str) -> None:
    """Makes a module of a text, unless there is one of this name already.

    >>> load_source("fedlens_example", "example.py", "answer = 42")
    >>> sys.modules.pop("fedlens_example").answer
    42
    """
    if name in sys.modules:
        return
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    try:
        exec(compile(text, file, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
