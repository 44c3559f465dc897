"""Number format and memory layout of forward and backward passes; weights, losses and sums keep their dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedlens.base.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16", "tf32"]
Layout = bool | Literal["auto"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SCALES = (2.0**14, 2.0**9, 2.0**4, 1.0)  # of a loss in fp16, the largest first


@dataclass(frozen=True)
class Arithmetic:
    """How forward and backward passes compute.

    Attributes:
        precision: "fp32"; "tf32", matrix products of fp32 with 10 bits of mantissa (NVIDIA); "bf16" and "fp16",
            autocast: convolutions and matrix products in 16 bits, operations that need a larger range in 32.
        channels_last: images and convolutions with the channels innermost in memory; "auto" where `lays_out` says so.
    """

    precision: Precision = "fp32"
    channels_last: Layout = False

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The 16-bit dtype of autocast; None without autocast."""
        return _AUTOCAST.get(self.precision)

    def lays_out(self, module: nn.Module, device: torch.device) -> bool:
        """Whether this module computes with the channels innermost.

        With "auto": if its 2-d convolutions are in fp32 and the CPU has AVX2 or AVX-512, where this was measured to be
        faster. The choice depends on no timing, so runs are reproducible to the bit.

        Raises `ConfigError` if it is set, and such a layer would end the process; see `lays_out_channels_last`.
        """
        if self.channels_last is True and device.type == "cpu":
            _refuse_overrun(module)
        if self.channels_last != "auto":
            return self.channels_last
        return channels_last_pays(device) and lays_out_channels_last(module)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Sets PyTorch's process-wide options for computing on this device, and restores them at the end.

        By default PyTorch uses tf32 in convolutions and recurrent layers, kernels whose results differ from run to run,
        and the first GPU. All computation with a model on a GPU runs in this context, and `fit` requires it. On a CPU
        nothing is set.

        >>> with PLAIN.on(torch.device("cpu")):
        ...     net = PLAIN.fit(nn.Linear(2, 2), torch.device("cpu"))
        """
        if device.type != "cuda":
            yield
            return
        with ExitStack() as restore:
            restore.callback(torch.cuda.set_device, torch.cuda.current_device())
            if device.index is not None:  # the GPU that is seeded, and whose free memory is read
                torch.cuda.set_device(device.index)
            _set_options(self.precision == "tf32", restore)
            yield

    def fit(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Moves a module to this device and wraps its forward pass; outputs have the dtype of its weights.

        Raises `RuntimeError` on a GPU outside of `on`.

        >>> net = Arithmetic("bf16").fit(nn.Linear(2, 2), torch.device("cpu"))
        >>> net(torch.ones(1, 2)).dtype, net.weight.dtype
        (torch.float32, torch.float32)
        """
        if device.type == "cuda" and not _options_are_set():
            raise RuntimeError("a model on a GPU computes in `with arithmetic.on(device)`, see Arithmetic.on")
        module = module.to(device)
        channels_last = self.lays_out(module, device)
        if channels_last:
            module = module.to(memory_format=torch.channels_last)
        if self.autocast_dtype is not None or channels_last:
            # An attribute of the module, so that every way of calling it uses this, `functional_call` too.
            module.__dict__["forward"] = _Forward(self.autocast_dtype, channels_last, module, device.type)
        return module


PLAIN = Arithmetic()


def _gpu_products() -> tuple[Any, ...]:
    """The operations that have an option for products of float32 on a GPU."""
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn


def _set_options(tf32: bool, restore: ExitStack) -> None:
    """Sets the options of `Arithmetic.on`; `restore` receives the callbacks that undo it."""
    backends: Any = torch.backends
    cudnn = backends.cudnn
    # An option that is "none" takes the value of its backend or the general one, so these are set first.
    for option in (backends, cudnn, *_gpu_products(), backends.mkldnn.matmul):
        restore.callback(setattr, option, "fp32_precision", option.fp32_precision)
        option.fp32_precision = "none"
    # The older names set the options above too. PyTorch raises if one is read that contradicts them.
    allowed = True
    with suppress(RuntimeError):  # True contradicts "none"
        allowed = cudnn.allow_tf32
    restore.callback(setattr, cudnn, "allow_tf32", allowed)
    restore.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    backends.cuda.matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    for option in _gpu_products():
        option.fp32_precision = "tf32" if tf32 else "ieee"
    restore.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
    restore.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
    cudnn.deterministic, cudnn.benchmark = True, False


def _options_are_set() -> bool:
    """Whether PyTorch's options are as in `Arithmetic.on`."""
    allowed = {option.fp32_precision == "tf32" for option in _gpu_products()}
    return torch.backends.cudnn.deterministic and len(allowed) == 1


def lays_out_channels_last(module: nn.Module) -> bool:
    """Whether `channels_last = "auto"` applies to a module: it has 2-d convolutions, all of them in fp32.

    Not to one with a 1 x 1 convolution with a stride and a number of channels that is no multiple of 8: its gradient by
    oneDNN 3.12 writes beyond its memory then, on processors with AVX2 alone.
    """
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return bool(convolutions) and all(
        layer.weight.dtype == torch.float32 and not _overruns(layer) for layer in convolutions
    )


def _overruns(layer: nn.Conv2d) -> bool:
    return set(layer.kernel_size) == {1} and set(layer.stride) != {1} and layer.in_channels % 8 > 0


def _refuse_overrun(module: nn.Module) -> None:
    layers = [
        name for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d) and _overruns(layer)
    ]
    if layers and torch.backends.cpu.get_cpu_capability() == "AVX2":
        raise ConfigError(
            f"the layer '{layers[0]}' is a 1 x 1 convolution with a stride and a number of channels that is no "
            "multiple of 8, and on this processor its gradient with the channels innermost ends the process",
            where="engine.channels_last",
            hint="set it to 'auto' or false",
        )


def channels_last_pays(device: torch.device) -> bool:
    """Whether convolutions in fp32 were measured to be faster with the channels innermost on such a processor."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX")


class _Forward:
    """A module's forward pass in another number format or layout."""

    def __init__(
        self, dtype: torch.dtype | None, channels_last: bool, module: nn.Module, device: str
    ) -> None:
        self.dtype, self.channels_last, self.plain, self.device = dtype, channels_last, module.forward, device

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self.channels_last:
            inputs = tuple(_inner_channels(value) for value in inputs)
        if self.dtype is None:
            return self.plain(*inputs, **named)
        with torch.autocast(self.device, self.dtype):
            return _restored(self.plain(*inputs, **named), self.dtype)


def _inner_channels(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _restored(value: Any, dtype: torch.dtype) -> Any:
    """Casts tensors of `dtype` to fp32: losses and metrics are computed in full precision."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype == dtype else value
    if isinstance(value, dict):
        return {name: _restored(item, dtype) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_restored(item, dtype) for item in value)
    return value


def gradients_of(
    loss: Tensor, parameters: Sequence[Tensor], dtype: torch.dtype | None = None, stacked: bool = False
) -> list[Tensor]:
    """The gradient of each parameter; zero for one that the loss does not depend on.

    With `dtype` = float16, whose smallest number is 6e-8, the loss is scaled up before the backward pass, and the
    gradients are scaled down after it. If they exceed the range (65,504), they are computed again at a smaller scale,
    so no step is skipped. For `stacked` parameters, [A, ...] of A clients each, every client has the scale that it
    would have alone, so a client that diverges does not affect the others.

    >>> w = torch.ones(2, requires_grad=True)
    >>> gradients_of((3 * w[0]).sum(), [w])
    [tensor([3., 0.])]
    """
    if dtype is not torch.float16:
        return _differentiated(loss, parameters)
    kept: list[Tensor] = []
    done: Tensor | None = None
    for scale in _SCALES:
        last = scale == _SCALES[-1]
        found = _differentiated(loss * scale, parameters, keep=not last)
        taken = [g / scale for g in found]
        kept = taken if done is None else [_chosen(done, *pair) for pair in zip(kept, taken, strict=True)]
        finite = _finite(found, stacked)
        done = finite if done is None else done | finite
        if bool(done.all()):
            break
    return kept


def _finite(gradients: Sequence[Tensor], stacked: bool) -> Tensor:
    """Whether all gradients are finite: [], or [A] for each client."""
    each = [g.isfinite().reshape(len(g), -1).all(1) if stacked else g.isfinite().all() for g in gradients]
    return torch.stack(each).all(0)


def _chosen(done: Tensor, before: Tensor, now: Tensor) -> Tensor:
    """`before` for the clients (or the model) whose scale was found already, `now` for the others."""
    return torch.where(done.view(*done.shape, *[1] * (now.dim() - done.dim())), before, now)


def _differentiated(loss: Tensor, parameters: Sequence[Tensor], keep: bool = False) -> list[Tensor]:
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
