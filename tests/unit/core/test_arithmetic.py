"""Number formats: what is computed in 16 bits and what is not, and gradients that fit into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fedlens.base.errors import ConfigError
from fedlens.core import arithmetic
from fedlens.core.arithmetic import Arithmetic, gradients_of

CPU = torch.device("cpu")


class Watched(nn.Module):
    """A convolution and a linear layer that note what type and layout passes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        self.came = x.is_contiguous(memory_format=torch.channels_last)
        between = self.conv(x)
        self.between = between.dtype
        return {"logits": self.head(between.flatten(1)), "more": [between]}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_layers_compute_in_the_type_and_layout_asked_for_and_results_are_fp32(
    precision: str, channels_last: bool
) -> None:
    torch.manual_seed(0)
    module = Watched()
    plain = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(2, 3, 8, 8)
    expected = module(x)["logits"]
    fitted = Arithmetic(precision, channels_last).fit(module, CPU)
    found = fitted(x)
    assert module.between == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert module.came == channels_last
    assert (found["logits"].dtype, found["more"][0].dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(found["logits"], expected, rtol=0.05, atol=0.05)
    assert all(torch.equal(value, plain[name]) for name, value in fitted.state_dict().items())
    again = functional_call(fitted, plain, (x,))["logits"]
    assert torch.equal(again, found["logits"])


@pytest.mark.parametrize(("capability", "expected"), [("AVX2", True), ("AVX512", True), ("DEFAULT", False)])
def test_the_layout_of_convolutions_follows_the_processor(
    capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    auto, module = Arithmetic(channels_last="auto"), Watched()
    assert auto.lays_out(module, CPU) is expected
    assert not auto.lays_out(module, torch.device("cuda"))
    assert not auto.lays_out(nn.Linear(2, 2), CPU)
    assert not auto.lays_out(Watched().double(), CPU)
    assert not auto.lays_out(nn.Conv2d(4, 8, 1, stride=2), CPU)  # oneDNN would write beyond its memory
    assert auto.lays_out(nn.Conv2d(8, 8, 1, stride=2), CPU) is expected
    assert Arithmetic(channels_last=True).lays_out(nn.Linear(2, 2), CPU)
    auto.fit(module, CPU)(torch.randn(2, 3, 8, 8))
    assert module.came is expected


@pytest.mark.parametrize("processor", ["AVX2", "AVX512"])
def test_a_layout_that_would_end_the_process_is_refused(
    processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
    forced, module = Arithmetic(channels_last=True), nn.Sequential(nn.ReLU(), nn.Conv2d(4, 8, 1, stride=2))
    assert forced.lays_out(nn.Conv2d(8, 8, 1, stride=2), CPU)
    assert forced.lays_out(module, torch.device("cuda"))
    if processor == "AVX512":
        assert forced.lays_out(module, CPU)
        return
    with pytest.raises(
        ConfigError, match=r"the layer '1' is a 1 x 1.*\(engine.channels_last\); set it to 'auto' or false"
    ):
        forced.fit(module, CPU)


def test_gradients_of_a_16_bit_pass_are_those_of_the_weights_type() -> None:
    module = Arithmetic("bf16").fit(nn.Linear(4, 2), CPU)
    found = gradients_of(module(torch.ones(3, 4)).sum(), list(module.parameters()), torch.bfloat16)
    assert [g.dtype for g in found] == [torch.float32] * 2
    assert torch.equal(found[0], torch.full((2, 4), 3.0))


@pytest.mark.parametrize("slope", [1e-9, 1e-4, 1.0, 2.0**11, 60000.0])
def test_small_gradients_are_not_lost_in_fp16_and_large_ones_do_not_overflow(slope: float) -> None:
    w = torch.ones(3, requires_grad=True)

    def loss() -> torch.Tensor:
        return (w.half() * 1).float().sum() * slope

    found = gradients_of(loss(), [w], torch.float16)[0]
    torch.testing.assert_close(found, torch.full((3,), slope), rtol=1e-2, atol=1e-10)
    if slope == 1e-9:  # what it would be without a scale
        assert not gradients_of(loss(), [w])[0].any()


def test_a_gradient_that_no_scale_makes_finite_is_given_as_it_is() -> None:
    w = torch.ones(1, requires_grad=True)
    found = gradients_of((w.half() * 1).float().sum() * 1e6, [w], torch.float16)
    assert found[0].isinf().all()


def test_each_of_stacked_clients_has_the_scale_that_it_would_have_alone() -> None:
    """One that diverges, and one whose gradients are large, leave another its small ones."""
    slopes = [1e-9, 3e-8, 60000.0, torch.inf, 1.0]
    w, b = torch.ones(5, 3, requires_grad=True), torch.ones(5, requires_grad=True)

    def losses(w: torch.Tensor, b: torch.Tensor, slopes: list[float]) -> torch.Tensor:
        there = (w.half() * 1).float().sum(1) + (b.half() * 1).float()
        return (there * torch.tensor(slopes)).sum()

    found = gradients_of(losses(w, b, slopes), [w, b], torch.float16, stacked=True)
    for k, slope in enumerate(slopes):
        own = [v[k : k + 1].detach().requires_grad_() for v in (w, b)]
        alone = gradients_of(losses(*own, [slope]), own, torch.float16)
        assert all(torch.equal(f[k], a[0]) for f, a in zip(found, alone, strict=True))
    torch.testing.assert_close(found[1][:2], torch.tensor(slopes[:2]), rtol=1e-2, atol=1e-12)


def test_the_gradient_is_taken_again_only_where_it_overflowed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    real = arithmetic._differentiated

    def counting(*args: object, keep: bool = False) -> object:
        taken.append(keep)
        return real(*args, keep=keep)

    monkeypatch.setattr(arithmetic, "_differentiated", counting)
    w = torch.ones(1, requires_grad=True)
    for slope, times in ((1.0, 1), (100.0, 2), (60000.0, 4)):
        taken.clear()
        gradients_of((w.half() * 1).float().sum() * slope, [w], torch.float16)
        assert len(taken) == times
    assert taken == [True, True, True, False]  # the last one lets go of the graph


def options() -> dict[str, Any]:
    """PyTorch's options for products in float32, by all of their names; an error is its first words."""
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    named: dict[str, Callable[[], Any]] = {
        "general": lambda: backends.fp32_precision,
        "cudnn": lambda: cudnn.fp32_precision,
        "matmul": lambda: backends.cuda.matmul.fp32_precision,
        "conv": lambda: cudnn.conv.fp32_precision,
        "rnn": lambda: cudnn.rnn.fp32_precision,
        "mkldnn": lambda: mkldnn.matmul.fp32_precision,
        "deterministic": lambda: cudnn.deterministic,
        "benchmark": lambda: cudnn.benchmark,
        "allow_tf32": lambda: cudnn.allow_tf32,
        "matmul.allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
        "precision": torch.get_float32_matmul_precision,
    }
    values = {}
    for name, read in named.items():
        try:
            values[name] = read()
        except RuntimeError as error:
            values[name] = str(error)[:20]
    return values


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The current GPUs one after the other; PyTorch's options are restored."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    backends: Any = torch.backends
    yield current
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True  # the default
    for option in (backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn.matmul):
        option.fp32_precision = "none"
    backends.cudnn.deterministic = backends.cudnn.benchmark = False


BACKENDS: Any = torch.backends
GIVEN: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "older conv": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
    "older matmul": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "conv": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
    "cudnn": lambda: setattr(BACKENDS.cudnn, "fp32_precision", "tf32"),
    "general": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "kernels": lambda: setattr(BACKENDS.cudnn, "benchmark", True),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_all_options_of_a_gpu_are_set_without_contradiction_and_restored(
    given: str, precision: str, gpus: list[int]
) -> None:
    GIVEN[given]()
    before = options()
    with Arithmetic(precision).on(torch.device("cuda")):
        tf32 = precision == "tf32"
        wanted = {"matmul", "conv", "rnn"}, "tf32" if tf32 else "ieee"
        inside = options()
        assert {name: inside[name] for name in wanted[0]} == dict.fromkeys(*wanted)
        assert (inside["allow_tf32"], inside["matmul.allow_tf32"]) == (tf32, tf32)
        assert (inside["precision"], inside["mkldnn"]) == ("high" if tf32 else "highest", "none")
        assert (inside["deterministic"], inside["benchmark"]) == (True, False)
        with torch.backends.cudnn.flags(enabled=False):  # reads the older names
            pass
    assert options() == before


def test_an_option_that_was_inherited_is_inherited_again(gpus: list[int]) -> None:
    backends: Any = torch.backends
    backends.fp32_precision = "tf32"
    with Arithmetic().on(torch.device("cuda")):
        assert backends.cuda.matmul.fp32_precision == "ieee"
    assert backends.cuda.matmul.fp32_precision == "tf32"
    backends.fp32_precision = "ieee"
    assert backends.cuda.matmul.fp32_precision == "ieee"


@pytest.mark.parametrize(("device", "taken"), [("cuda", 0), ("cuda:1", 1)])
def test_the_named_gpu_is_the_one_that_is_seeded(device: str, taken: int, gpus: list[int]) -> None:
    with Arithmetic().on(torch.device(device)):
        assert gpus[-1] == taken
    assert gpus[-1] == 0


def test_on_a_cpu_nothing_is_set(gpus: list[int]) -> None:
    before = options()
    with Arithmetic("bf16").on(CPU):
        assert options() == before
    assert gpus == [0]


def test_a_model_is_refused_on_a_gpu_whose_options_are_not_set(gpus: list[int]) -> None:
    cuda = torch.device("cuda")
    with pytest.raises(RuntimeError, match=r"with arithmetic\.on\(device\)"):
        Arithmetic().fit(nn.Linear(2, 2), cuda)
    with Arithmetic().on(cuda):
        moved = []
        module = nn.Linear(2, 2)
        module.to = lambda *to, **named: moved.append(to) or module  # type: ignore[method-assign,assignment]
        Arithmetic().fit(module, cuda)
    assert moved == [(cuda,)]
