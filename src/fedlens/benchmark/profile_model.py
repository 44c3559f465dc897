"""The cost of a model: its parameters and FLOPs, and the output of each layer for one image."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedlens.core.schema import nbytes
from fedlens.core.tree import part, spec_of, tree_of

_BETWEEN = "(between the layers)"


@dataclass(frozen=True)
class Layer:
    """A layer: its output, FLOPs and activations in the forward pass for one image."""

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    flops: int
    activation_bytes: int


@dataclass(frozen=True)
class ModelCost:
    """The cost of a model.

    A FLOP is one multiplication or one addition in a matrix product or a convolution, so a multiply-accumulate (MAC)
    is two FLOPs. Nothing else is counted: no biases, no pooling, no normalization.

    Attributes:
        trainable, frozen, buffers: how many numbers the parameters and buffers hold, counters excluded.
        nbytes: bytes of all tensors of the model, as they are sent.
        forward: FLOPs of a forward pass for one image.
        step: FLOPs of a forward and a backward pass for one batch of `batch` images.
        layers: the layers without a layer inside, in the order of the forward pass.
    """

    trainable: int
    frozen: int
    buffers: int
    nbytes: int
    forward: int
    step: int
    batch: int
    layers: tuple[Layer, ...]

    @property
    def macs(self) -> float:
        """Multiply-accumulates of a forward pass for one image; papers often call these FLOPs."""
        return self.forward / 2

    @property
    def step_an_image(self) -> float:
        """FLOPs of one pass of training, per image."""
        return self.step / self.batch


def cost_of(build: Callable[[], nn.Module], input_shape: Sequence[int], batch: int) -> ModelCost:
    """The cost of the model that `build` makes, with batches of `batch` images.

    Counted on tensors without content where the model runs on them, so a large model takes no time.

    >>> cost = cost_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 2, 2), batch=4)
    >>> cost.trainable, cost.forward, cost.step  # 12 x 5 MACs; the same for the weights' gradient
    (65, 120, 960)
    """
    with torch.random.fork_rng(devices=[]):
        module = build()
        spec = spec_of(module)
        sizes = {name: value.numel() for name, value in module.state_dict().items()}

        def numbers(*roles: Any, trainable: bool | None = None) -> int:
            return sum(sizes[name] for name in part(spec, *roles, trainable=trainable))

        trainable, frozen = (numbers("weight", "head", "arch", trainable=choice) for choice in (True, False))
        buffers, size = numbers("buffer", "fixed"), nbytes(tree_of(module))
        try:
            layers, step = _counted(copy.deepcopy(module).to("meta"), input_shape, batch)
        except Exception:  # of any kind: a model may look at the values that it computes
            layers, step = _counted(module, input_shape, batch)
    forward = sum(layer.flops for layer in layers)
    return ModelCost(trainable, frozen, buffers, size, forward, step, batch, layers)


def _counted(module: nn.Module, shape: Sequence[int], batch: int) -> tuple[tuple[Layer, ...], int]:
    """The layers with their FLOPs of a forward pass for one image, and the FLOPs of a step; changes the module."""
    parameters = list(module.parameters())
    images = torch.zeros(batch, *shape, dtype=parameters[0].dtype, device=parameters[0].device)
    with FlopCounterMode(display=False) as counter:
        outputs = module.train()(images)
        trained = [p for p in parameters if p.requires_grad]
        torch.autograd.grad(outputs.sum(), trained, allow_unused=True)
    # With gradients too: without them some layers take a path that the counter does not see.
    with FlopCounterMode(display=False) as in_forward:
        layers = _hooked(module, in_forward)
        module.eval()(images[:1])
    between = in_forward.get_total_flops() - sum(layer.flops for layer in layers.values())
    outside = sum(p.numel() for p in parameters) - sum(layer.parameters for layer in layers.values())
    if between or outside:
        layers[_BETWEEN] = Layer(_BETWEEN, "", (), outside, between, 0)
    return tuple(layers.values()), counter.get_total_flops()


def _hooked(module: nn.Module, counter: FlopCounterMode) -> dict[str, Layer]:
    """The layers by name, which fill up while the module runs; a layer that runs twice has its sums."""
    layers: dict[str, Layer] = {}
    flops_before = 0

    def begin(*_: Any) -> None:
        nonlocal flops_before
        flops_before = counter.get_total_flops()

    def end(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        shape, size = (tuple(output.shape[1:]), output.nbytes) if isinstance(output, Tensor) else ((), 0)
        flops = counter.get_total_flops() - flops_before
        if earlier := layers.pop(name, None):
            flops, size = flops + earlier.flops, size + earlier.activation_bytes
        numbers = sum(p.numel() for p in layer.parameters())
        layers[name] = Layer(name, type(layer).__name__, shape, numbers, flops, size)

    for name, layer in module.named_modules():
        if not any(layer.children()):
            layer.register_forward_pre_hook(begin)
            layer.register_forward_hook(partial(end, name or type(layer).__name__))
    return layers
