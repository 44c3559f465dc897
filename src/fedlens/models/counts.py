"""What a model costs, counted without memory for its weights: parameters, multiply-adds, normalization layers.

PyTorch's own counter (`torch.utils.flop_counter`) gives the same numbers, but its imports take longer than a small run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedlens.vision.detector import Detector, NoRaw

_NORMS = {"batch": _BatchNorm, "group": nn.GroupNorm, "layer": nn.LayerNorm}


@dataclass(frozen=True)
class ModelCounts:
    """What was counted of a model.

    Attributes:
        parameters: numbers in all parameters.
        multiply_adds: of a forward pass for one example, see `fedlens.models.counts`.
        norm_layers: how many normalization layers it has, by kind: `batch`, `group`, `layer`.
    """

    parameters: int
    multiply_adds: int | None
    norm_layers: Mapping[str, int]


def counted(
    build: Callable[[], nn.Module], input_shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> ModelCounts:
    """The counts of the model that `build` makes, for examples of this shape; computes no value.

    >>> counted(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)), (3, 8, 8))
    ModelCounts(parameters=1669, multiply_adds=9216, norm_layers={})
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        module = build().eval()
        products = multiply_adds(module, torch.zeros(1, *input_shape, dtype=dtype))
    kinds = (
        next((kind for kind, base in _NORMS.items() if isinstance(layer, base)), None)
        for layer in module.modules()
    )
    return ModelCounts(
        sum(parameter.numel() for parameter in module.parameters()),
        products,
        dict(Counter(kind for kind in kinds if kind is not None)),
    )


def multiply_adds(module: nn.Module, example: Tensor) -> int | None:
    """The multiply-adds for one example, [1, ...], in convolutions, linear and recurrent layers and matrix products.

    Those of an LSTM layer are 4 units (inputs + units) a token. None if the module uses a function whose multiply-adds
    are not known here, and for a detector whose later layers depend on what it has detected. The module is left in
    evaluation mode. Raises what its forward pass raises.

    >>> multiply_adds(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)), torch.zeros(1, 3, 8, 8))
    9216
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _Counter() as counter:
        module.eval()
        try:
            # Which boxes a detector decodes depends on values, which a count need not have.
            module.raw(example) if isinstance(module, Detector) else module(example)
        except NoRaw:
            return None
    total: int | None = counter.total
    return total


class _Counter(TorchFunctionMode):
    """Adds up the multiply-adds of the functions that are called; `total` is None after one that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.total: int | None = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm and args[0].is_meta:
            return torch.empty_like(args[0])  # PyTorch would take a hundred small steps, 6 ms of each layer
        out = func(*args, **(kwargs or {}))
        if func in _UNKNOWN:
            self.total = None
        elif func in _COUNTED and self.total is not None:
            self.total += _COUNTED[func](out, *args, **(kwargs or {}))
        return out


def _convolution(out: Tensor, input: Tensor, weight: Tensor, *_: Any, **more: Any) -> int:
    return out.numel() * weight[0].numel()


def _transposed(out: Tensor, input: Tensor, weight: Tensor, *_: Any, **more: Any) -> int:
    return input.numel() * weight[0].numel()


def _product(out: Tensor, first: Tensor, second: Tensor, *_: Any, **more: Any) -> int:
    return out.numel() * first.shape[-1]


def _product_from_right(out: Tensor, first: Tensor, second: Tensor) -> int:
    return out.numel() * second.shape[-1]


def _added_product(out: Tensor, input: Tensor, first: Tensor, *_: Any, **more: Any) -> int:
    return out.numel() * first.shape[-1]


def _attention(out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **more: Any) -> int:
    """Of query [..., L, E], key [..., S, E] and value [..., S, V]: L S (E + V), for each head."""
    return query[..., 0, 0].numel() * query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _recurrent(out: Any, input: Tensor, *given: Any, **more: Any) -> int:
    """Each weight once for each token of input [..., features]; the list among the arguments has the weights."""
    weights = next(value for value in given if isinstance(value, list))
    tokens: int = input.shape[:-1].numel()
    products: int = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return tokens * products


_COUNTED: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed),
    **dict.fromkeys((F.linear, torch.matmul, torch.mm, torch.bmm), _product),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__), _product),
    Tensor.__rmatmul__: _product_from_right,
    **dict.fromkeys((torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm), _added_product),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
}
_UNKNOWN = {
    torch.einsum, torch.tensordot, torch.bilinear, F.bilinear, torch.cdist, torch.mv, torch.dot, Tensor.mv, Tensor.dot,
    torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell, F.multi_head_attention_forward,
}  # fmt: skip
