"""What a model costs: parameters, operations, and what each layer makes of an image."""

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

_REST = "(between the layers)"


@dataclass(frozen=True)
class Layer:
    """A layer, in the order of the forward pass: for one image, and FLOPs of the forward pass alone."""

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    flops: int
    activation_bytes: int


@dataclass(frozen=True)
class ModelCost:
    """What a model costs.

    A FLOP is one multiplication or one addition in a matrix product or a convolution, so a multiply-accumulate (MAC)
    is two; nothing else is counted: no biases, no pooling, no normalization.

    Attributes:
        trainable, frozen, buffers: numbers; those in counters are left out.
        nbytes: of all of the model's tensors, as they are sent.
        forward: FLOPs of a forward pass, for one image.
        step: FLOPs of a forward and a backward pass, for one batch of `batch`.
        layers: the layers, those without a layer inside.
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
        """Multiply-accumulates of a forward pass, for one image: what papers often call FLOPs."""
        return self.forward / 2

    @property
    def step_an_image(self) -> float:
        """FLOPs of training on one image once."""
        return self.step / self.batch


def cost_of(build: Callable[[], nn.Module], input_shape: Sequence[int], batch: int) -> ModelCost:
    """What the model that `build` makes costs, with batches of `batch` images.

    Counted on tensors without content where the model can be run on them, so a large one takes no time.

    >>> cost = cost_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 2, 2), batch=4)
    >>> cost.trainable, cost.forward, cost.step  # 12 x 5 MACs; the same for the weights' gradient
    (65, 120, 960)
    """
    with torch.random.fork_rng(devices=[]):
        module = build()
    spec, sizes = spec_of(module), {name: value.numel() for name, value in module.state_dict().items()}

    def numbers(*roles: Any, trainable: bool | None = None) -> int:
        return sum(sizes[name] for name in part(spec, *roles, trainable=trainable))

    forward, layers = _counted(module, partial(_layers, input_shape))
    step, _ = _counted(module, partial(_step, input_shape, batch))
    return ModelCost(
        numbers("weight", "head", "arch", trainable=True),
        numbers("weight", "head", "arch", trainable=False),
        numbers("buffer"),
        nbytes(tree_of(module)),
        forward,
        step,
        batch,
        layers,
    )


def _counted(
    module: nn.Module, work: Callable[[nn.Module, FlopCounterMode], tuple[Layer, ...]]
) -> tuple[int, tuple[Layer, ...]]:
    with torch.random.fork_rng(devices=[]):
        try:
            return _on(copy.deepcopy(module).to("meta"), work)
        except Exception:  # of whatever kind: a model may look at the values that it computes
            return _on(copy.deepcopy(module), work)


def _on(
    module: nn.Module, work: Callable[[nn.Module, FlopCounterMode], tuple[Layer, ...]]
) -> tuple[int, tuple[Layer, ...]]:
    with FlopCounterMode(display=False) as counter:
        layers = work(module, counter)
    return counter.get_total_flops(), layers


def _images(module: nn.Module, n: int, shape: Sequence[int]) -> Tensor:
    like = next(iter(module.parameters()))
    return torch.zeros(n, *shape, dtype=like.dtype, device=like.device)


def _step(shape: Sequence[int], batch: int, module: nn.Module, counter: FlopCounterMode) -> tuple[Layer, ...]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    outputs = module.train()(_images(module, batch, shape))
    torch.autograd.grad(outputs.sum(), parameters, allow_unused=True)
    return ()


def _layers(shape: Sequence[int], module: nn.Module, counter: FlopCounterMode) -> tuple[Layer, ...]:
    """A forward pass of one image, with gradients: without them some layers take a way that is not counted."""
    found: dict[str, Layer] = {}
    begun: list[int] = []
    handles = []

    def begin(*_: Any) -> None:
        begun.append(counter.get_total_flops())

    def end(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        flops = counter.get_total_flops() - begun.pop()
        tensor = output if isinstance(output, Tensor) else None
        before = found.pop(name, None)  # a layer that is called twice has its sums
        found[name] = Layer(
            name,
            type(layer).__name__,
            tuple(tensor.shape[1:]) if tensor is not None else (),
            sum(p.numel() for p in layer.parameters()),
            flops + (before.flops if before else 0),
            (tensor.nbytes if tensor is not None else 0) + (before.activation_bytes if before else 0),
        )

    for name, layer in module.named_modules():
        if not any(layer.children()):
            handles += [
                layer.register_forward_pre_hook(begin),
                layer.register_forward_hook(partial(end, name or type(layer).__name__)),
            ]
    module.eval()(_images(module, 1, shape))
    for handle in handles:
        handle.remove()
    rest = counter.get_total_flops() - sum(layer.flops for layer in found.values())
    own = sum(p.numel() for p in module.parameters()) - sum(layer.parameters for layer in found.values())
    more = [Layer(_REST, "", (), own, rest, 0)] if rest or own else []
    return (*found.values(), *more)
