"""GPUs simulated on the CPU: tensors that say they are on `cuda:k`, compute on the CPU, and refuse to be mixed.

Every operation on a `Sim` tensor reaches `run`, below autograd. It checks CUDA's rules about devices, computes on the
CPU tensors inside, and counts what a GPU would have done. `install` gives its process the GPUs. See README.md.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import functools
import itertools
import json
import os
import pathlib
import sys
import threading
import types
import weakref
from unittest.mock import MagicMock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten, Tensor, CPU = torch.ops.aten, torch.Tensor, torch.device("cpu")
DEVICES = int(os.environ.get("SIMGPU_DEVICES", "1"))
FREE = [int(float(size)) for size in os.environ.get("SIMGPU_FREE", "70e9").split(",")]  # bytes, of each GPU
TOTAL = int(80e9)  # bytes, of each GPU
LARGEST = float(os.environ.get("SIMGPU_LARGEST", "inf"))  # bytes; a larger tensor raises OutOfMemoryError
WATCHED = os.environ.get("SIMGPU_WATCH", "/fedlens/")  # in the path of the code whose lines `SITES` names
COUNT: collections.Counter = collections.Counter()  # by kind, see README.md
OPS: collections.Counter = collections.Counter()  # kernels by operation
SITES: collections.Counter = collections.Counter()  # (kind, file:line, function), of all kinds but kernels
_guard = _first_process = _visible = None
_random: dict = {}  # the generator of each GPU
_explicit = weakref.WeakValueDictionary()  # generators that a program made for a GPU, by their address

# fmt: off
# The CPU waits for these: they ask how large the result is, or what its value is.
WAITING = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "repeat_interleave", "is_nonzero", "nms", "histc",
}
# On a GPU these add floating-point numbers in no fixed order: a repeated run may differ in its last bits.
UNORDERED = {
    "upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "grid_sampler_2d_backward", "cumsum",
    "_upsample_bilinear2d_aa_backward", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward",
    "scatter_add", "scatter_add_", "index_add", "index_add_", "nll_loss2d_forward", "_roi_align_backward",
    "reflection_pad2d_backward", "replication_pad2d_backward", "embedding_dense_backward", "scatter_reduce",
}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "dot"}
# CUDA has kernels of these for floating-point numbers only.
FLOATS = PRODUCTS | {"upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "replication_pad2d"}
# fmt: on


def is_cuda(device):
    return isinstance(device, torch.device) and device.type == "cuda"


def index_of(device=None):
    """The number of a GPU; the current GPU's where `device` names none."""
    index = device if isinstance(device, int) else torch.device(device or "cuda").index
    index = _guard.simgpu_current() if index is None else index
    if index >= len(visible()):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return index


def visible():
    """The GPUs that this process sees: those of CUDA_VISIBLE_DEVICES, which CUDA reads at its first use."""
    if _visible is not None:
        return _visible
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    asked = range(DEVICES) if named is None else [int(k) for k in named.split(",") if k]
    return list(itertools.takewhile(range(DEVICES).__contains__, asked))


def touch():
    """Records the first use of CUDA in this process: from then on its forks cannot use CUDA."""
    global _first_process, _visible
    _first_process, _visible = _first_process or os.getpid(), visible()
    if _first_process != os.getpid():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. Use the 'spawn' start method")


def tally(kind, size=0, waits=False):
    """Counts one event, and notes the innermost line of watched code that it is in."""
    frame, site = sys._getframe(1), ("?", "?")  # such as autograd's own thread
    while frame is not None and WATCHED not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is not None:
        site = f"{frame.f_code.co_filename.split(WATCHED)[-1]}:{frame.f_lineno}", frame.f_code.co_name
    for each in {kind, "waits"} if waits else {kind}:
        COUNT[each] += 1
        SITES[each, *site] += 1
    if size:
        COUNT[f"{kind}_bytes"] += size


class Counted(collections.Counter):
    """What a block of code did, by kind as in `COUNT`; `sites` says where, as `SITES`."""

    def __init__(self, *counts):
        super().__init__(*counts)
        self.sites = collections.Counter()

    def at(self, kind):
        """The lines of code with this kind of event, one each, the most frequent first: for a test's message."""
        lines = [(n, site) for (each, *site), n in self.sites.most_common() if each == kind]
        return "\n".join(f"{n:6d} {kind} in {where} ({function})" for n, (where, function) in lines)


@contextlib.contextmanager
def counted():
    """Counts the events of a block in a `Counted`, which is complete when the block has ended.

    with simgpu.counted() as counts:
        train()
    assert counts["waits"] == 0, counts.at("waits")
    """
    counts, before, sites = Counted(), COUNT.copy(), SITES.copy()
    yield counts
    counts.update(COUNT - before)
    counts.sites.update(SITES - sites)


class Sim(Tensor):
    """A tensor on a simulated GPU: `inner`, on the CPU, and `gpu`, the number of its device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, gpu):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        device = torch.device("cuda", gpu)
        return Tensor._make_wrapper_subclass(cls, inner.size(), device=device, **layout)

    def __init__(self, inner, gpu):
        self.inner, self.gpu = inner, gpu

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def _take(self, value):
        if type(value) is not Sim:
            raise RuntimeError(
                "Attempted to call `variable.set_data(tensor)`, but they have incompatible tensor type."
            )
        Tensor.data.__set__(self, value)
        self.inner, self.gpu = value.inner, value.gpu

    data = property(Tensor.data.__get__, _take)

    def numpy(self, *args, **named):
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy it first."
        )

    def tolist(self):
        tally("downloads", self.inner.nbytes, waits=True)
        return self.inner.tolist()

    def __deepcopy__(self, memo):
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        copy._is_param = isinstance(self, torch.nn.Parameter)
        return memo.setdefault(id(self), copy)

    def __reduce_ex__(self, protocol):
        return Sim, (self.inner, self.gpu)

    def __repr__(self, **named):
        return f"Sim({self.inner!r}, {self.gpu})"

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def __tensor_flatten__(self):
        return ["inner"], self.gpu

    @staticmethod
    def __tensor_unflatten__(inner, gpu, size, stride):
        return Sim(inner["inner"], gpu)


class Generator(torch.Generator):
    """In place of `torch.Generator`: one for a GPU draws on the CPU, but says where it is."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls, "cpu")
        self.gpu = index_of(device) if is_cuda(torch.device(device)) else None
        if self.gpu is not None:
            _explicit[self._cdata] = self
        return self

    @property
    def device(self):
        return CPU if self.gpu is None else torch.device("cuda", self.gpu)


class Rule:
    """What CUDA allows for an operation, and what it costs."""

    def __init__(self, func):
        name, tags, given = func._schema.name.split("::")[1], func.tags, func._schema.arguments
        has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
        self.composite = has("CompositeImplicitAutograd") and not has("CUDA")  # made of others on a GPU too
        self.copies = name in ("copy_", "_to_copy", "_foreach_copy_", "copy")
        self.indexes = name in ("index", "index_put_", "index_put", "_index_put_impl_")
        # Operands without dimensions may be on the CPU in elementwise operations.
        elementwise = ("_foreach_", "masked_fill", "fill", "index_put")
        self.scalars = torch.Tag.pointwise in tags or name.startswith(elementwise)
        self.seeded, self.view = torch.Tag.nondeterministic_seeded in tags, func.is_view
        self.names, self.waits = [each.name for each in given], name in WAITING
        self.written = {each.name for each in given if each.alias_info and each.alias_info.is_write}
        idle = name.startswith(
            ("empty", "new_empty", "detach", "set_", "resize_", "_local_scalar", "lift_fresh", "_unsafe_view")
        )
        free = idle or self.view or self.copies or torch.Tag.inplace_view in tags
        self.kernel = "" if free else name


rule_of = functools.cache(Rule)


def tensors(values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def mapped(function, value):
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(function, v) for v in value])
    return function(value)


def run(func, args, kwargs):
    """One operation of which an operand or the result is on a GPU."""
    touch()
    rule, given = rule_of(func), list(tensors((*args, *kwargs.values())))
    if rule.composite:  # reaches us whole in inference mode
        with Mode():
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    sims = [value for value in given if type(value) is Sim]
    named = dict(zip(rule.names, args, strict=False)) | kwargs
    refuse(func, rule, given, sims, named)
    device, gpu = kwargs.get("device"), sims[0].gpu if sims else None
    if device is not None:
        gpu = index_of(device) if is_cuda(device) else None

    def inner(value):
        return value.inner if type(value) is Sim else CPU if is_cuda(value) else value

    plain = {name: mapped(inner, value) for name, value in kwargs.items() if name != "pin_memory"}
    with drawing(gpu, plain) if rule.seeded and gpu is not None else contextlib.nullcontext():
        result = INSTEAD.get(func, func)(*mapped(inner, args), **plain)
    account(rule, sims, named, gpu)
    if func is aten.copy_.default:
        return args[0]
    written = {id(value.inner): value for value in sims if rule.written}
    for value in written.values():
        if (value.shape, value.stride()) != (value.inner.shape, value.inner.stride()):  # resized, transposed
            Tensor.data.__set__(value, Sim(value.inner, value.gpu))

    def outer(value):
        if not isinstance(value, Tensor) or type(value) is Sim or id(value) in written or gpu is None:
            return written.get(id(value), value)
        if value.numel() * value.element_size() > LARGEST and not rule.view:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than SIMGPU_LARGEST.")
        # A view of an ordinary tensor is ordinary in inference mode too.
        inference = torch.is_inference_mode_enabled() and any(s.is_inference() for s in sims)
        ordinary = rule.view and torch.is_inference_mode_enabled() and not inference
        with torch.inference_mode(False) if ordinary else contextlib.nullcontext():
            return Sim(value, gpu)

    return mapped(outer, result)


def refuse(func, rule, given, sims, named):
    """Raises CUDA's errors for operands on several devices, or of a type that only the CPU has kernels for."""
    if rule.copies or not sims:
        return
    if rule.kernel in FLOATS and not (sims[0].is_floating_point() or sims[0].is_complex()):
        raise RuntimeError(f'"{rule.kernel}_cuda" not implemented for {sims[0].dtype}')
    if len(sims) == len(given) and not rule.indexes and len({value.gpu for value in sims}) == 1:
        return  # the usual case
    first, indices = given[0].device, list(tensors(named["indices"])) if rule.indexes else []
    if any(at.device not in (first, CPU) for at in indices):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({first})"
        )
    fixed = {id(value) for value in tensors([named[name] for name in rule.written if name in named])}
    scalars = [value for value in given if rule.scalars and value.dim() == 0 and not value.is_cuda]
    anywhere = {id(value) for value in scalars if id(value) not in fixed} | {id(at) for at in indices}
    places = {str(value.device) for value in given if id(value) not in anywhere}
    if len(places) > 1:
        several = " and ".join(sorted(places, reverse=True))
        what = "Expected all tensors to be on the same device, but found at least two devices"
        raise RuntimeError(f"{what}, {several}! ({func})")


def account(rule, sims, named, gpu):
    """Counts what the operation would cost on a GPU."""
    if rule.copies:
        account_copies(rule, named, gpu)
        return
    for at in tensors(named["indices"]) if rule.indexes and sims else ():
        if not at.is_cuda:
            tally("uploads", at.nbytes, waits=True)
        value = named.get("values")  # with one number of the CPU, a mask is filled and not looked up
        if at.dtype in (torch.bool, torch.uint8) and (value is None or value.is_cuda or value.numel() > 1):
            tally("waits")
    name = rule.kernel
    if name:
        launches = sum(named["output_mask"]) if name == "convolution_backward" else 1
        COUNT["kernels"] += launches
        OPS[name] += launches
    if rule.waits or (name.startswith("masked_fill") and type(named.get("value")) is Sim):
        tally("waits")
    if name in UNORDERED and any(value.is_floating_point() for value in sims) and named.get("reduction") != 0:
        tally("unordered")
        COUNT[f"unordered {name}"] += 1
    options = torch.backends.cuda.matmul if name in PRODUCTS else None
    if name.startswith(("convolution", "_thnn_fused_lstm")):
        options = torch.backends.cudnn.conv if name[0] == "c" else torch.backends.cudnn.rnn
    if options is not None and options.fp32_precision == "tf32" and sims[0].dtype == torch.float32:
        tally("tf32")


def account_copies(rule, named, gpu):
    """Counts a copy, or the copies of a list: within a GPU, between GPUs, or between a GPU and the CPU."""
    target, source = named["self"], named.get("src", named["self"])
    many = isinstance(target, (list, tuple))
    for end, start in zip(target, source, strict=True) if many else [(target, source)]:
        before, after = getattr(start, "gpu", None), getattr(end, "gpu", None) if rule.written else gpu
        if before == after or None not in (before, after):
            COUNT["kernels"] += before is not None
            OPS["copy" if before == after else "copy between GPUs"] += before is not None
        else:
            kind = "uploads" if before is None else "downloads"
            tally(kind, start.nbytes, waits=not named.get("non_blocking"))


@contextlib.contextmanager
def drawing(gpu, named):
    """Random numbers of a GPU come from its own generator, not from the CPU's."""
    given = named.get("generator")
    if given is not None and given._cdata not in _explicit:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if given is not None:
        named["generator"] = None
    generator, before = given or _random[gpu], torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def lstm(inputs, hidden, before, bias=None, more=None):
    """A cell's step, which torch has as one kernel for GPUs alone; so is its derivative."""
    i, f, g, o = (inputs + hidden + (0 if bias is None else bias + more)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * before + i * g
    return o * cell.tanh(), cell, torch.cat([i, f, g, o], 1)


def lstm_backward(hidden, cell, before, after, gates, has_bias):
    """The derivative of a cell's step; `hidden` and `cell` are those of the loss."""
    (i, f, g, o), t = gates.chunk(4, 1), after.tanh()
    hidden = torch.zeros_like(t) if hidden is None else hidden
    slope = hidden * o * (1 - t * t) + (0 if cell is None else cell)
    of_gates = [
        slope * g * i * (1 - i),
        slope * before * f * (1 - f),
        slope * i * (1 - g * g),
        hidden * t * o * (1 - o),
    ]
    result = torch.cat(of_gates, 1)
    return result, slope * f, result.sum(0) if has_bias else None


INSTEAD = {
    aten._thnn_fused_lstm_cell.default: lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_backward,
}


class Mode(TorchDispatchMode):
    """Catches operations whose result is on a GPU and whose operands are not."""

    @classmethod
    def _should_skip_dynamo(cls):
        """A wrapper that keeps dynamo out would double the time of an operation; nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours = all(kind in (Sim, Tensor) or issubclass(kind, torch.nn.Parameter) for kind in types)
        to_gpu = any(map(is_cuda, (kwargs.get("device"), *args)))  # `to` has the device among its operands
        if ours and (to_gpu or Sim in types):
            return run(func, args, kwargs)
        if func in (aten._pin_memory.default, aten.is_pinned.default):
            return args[0].clone() if func is aten._pin_memory.default else False
        if kwargs.get("pin_memory"):  # ordinary memory here: no driver could pin it
            kwargs = kwargs | {"pin_memory": False}
        return func(*args, **kwargs)


def install():
    """From here on torch has GPUs in this process, in all of its threads."""
    global _guard
    libraries = pathlib.Path(os.environ["SIMGPU_LIBRARIES"])
    ctypes.CDLL(str(libraries / "interpose.so")).simgpu_count(DEVICES)
    _guard = ctypes.CDLL(str(libraries / "guard.so"))
    _guard.simgpu_guard(DEVICES)
    torch.Generator = Generator
    for k in range(DEVICES):
        _random[k] = Generator()
        _random[k].manual_seed(67280421310721)  # CUDA's default
    torch.backends.cudnn.enabled = False  # the plain forms of convolution, normalization, LSTM and attention
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    for name, function in functions_of_cuda().items():
        setattr(torch.cuda, name, function)
    begin, leave = threading.Thread._bootstrap_inner, os._exit

    def enter():
        torch._C._set_only_lift_cpu_tensors(True)  # so that `torch.tensor(..., device="cuda")` reaches `Mode`
        Mode().__enter__()

    threading.Thread._bootstrap_inner = lambda thread: enter() or begin(thread)
    enter()
    os._exit = lambda code: log() or leave(code)  # as forked workers end
    atexit.register(log)


def log():
    """Appends the counts of this process to the file SIMGPU_LOG, one JSON object."""
    if COUNT and "SIMGPU_LOG" in os.environ:
        sites = {" ".join(site): n for site, n in SITES.most_common()}
        record = {"pid": os.getpid(), "argv": sys.argv, "count": COUNT, "ops": dict(OPS.most_common())}
        with open(os.environ["SIMGPU_LOG"], "a") as file:
            file.write(json.dumps(record | {"sites": sites}) + "\n")


def functions_of_cuda():
    """In place of what `torch.cuda` asks the driver, by name."""

    def properties(device=None):
        touch()
        name, multiprocessors = f"Simulated GPU {visible()[index_of(device)]}", {"multi_processor_count": 132}
        version = {"major": 9, "minor": 0, "warp_size": 32}
        return types.SimpleNamespace(name=name, total_memory=TOTAL, **multiprocessors, **version)

    def exchange(device):
        return _guard.simgpu_exchange(int(device))

    def generator(device=None):
        return _random[index_of(device)]

    functions = {
        "is_available": lambda: touch() is None and bool(visible()),
        "device_count": lambda: len(visible()),
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "current_device": lambda: _guard.simgpu_current(),
        "set_device": lambda device: exchange(index_of(device)),
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "mem_get_info": lambda device=None: (touch() or FREE[visible()[index_of(device)] % len(FREE)], TOTAL),
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *args: True,
        "synchronize": lambda device=None: tally("waits"),
        "manual_seed": lambda seed: generator().manual_seed(int(seed)),
        "manual_seed_all": lambda seed: [each.manual_seed(int(seed)) for each in _random.values()],
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    memory = "memory_allocated memory_reserved max_memory_allocated max_memory_reserved"
    functions |= {name: lambda device=None: 1 for name in memory.split()}
    # One stream, on which everything is done at once.
    streams = ("Stream", "Event", "stream", "current_stream", "default_stream")
    return functions | dict.fromkeys(streams, MagicMock)
