"""What the simulated GPUs allow, refuse and count; they run in the process that test_rows.py starts."""

from __future__ import annotations

import concurrent.futures
import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simgpu
import torch
from torch import Tensor, nn

SAME = "same device"


@pytest.fixture
def x() -> Tensor:
    return torch.arange(6.0).view(2, 3)


@pytest.fixture
def g(x: Tensor) -> Tensor:
    return x.cuda()


@pytest.fixture
def h(x: Tensor) -> Tensor:
    return x.to("cuda:1")


def put(value: Any, target: Tensor, at: Any) -> Tensor:
    target = target.clone()
    target[at] = value
    return target


def counted(function: Callable[[], Any]) -> dict[str, int]:
    with simgpu.counted() as counts:
        function()
    return dict(counts)


def test_operands_on_several_devices_are_refused(x: Tensor, g: Tensor, h: Tensor) -> None:
    one, first = torch.tensor(2.0), torch.tensor([0])
    for mix in (
        lambda: x + g,
        lambda: g + h,
        lambda: x * g.sum(),
        lambda: torch.stack([g.sum(), one]),
        lambda: torch.add(g, g, out=torch.empty(2, 3)),
        lambda: g.index_select(0, first),
        lambda: one.clone().add_(g.sum()),
        lambda: put(torch.ones(1, 3), g, first),
        lambda: g @ x.t(),
    ):
        with pytest.raises(RuntimeError, match=SAME):
            mix()
    for index in (lambda: x[g[0].long()], lambda: g[first.to("cuda:1")]):
        with pytest.raises(RuntimeError, match="indices should be"):
            index()


def test_other_misuse_is_refused_as_by_cuda(x: Tensor, g: Tensor) -> None:
    for convert in (g.numpy, lambda: np.asarray(g)):
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            convert()
    with pytest.raises(RuntimeError, match="generator but found 'cpu'"):
        torch.rand(2, device="cuda", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        g.clone().data = x
    with pytest.raises((RuntimeError, torch.AcceleratorError), match="invalid device"):
        torch.zeros(1, device="cuda:2")
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.ones(2, 2, dtype=torch.int64, device="cuda") @ torch.ones(
            2, 2, dtype=torch.int64, device="cuda"
        )


def test_what_cuda_allows_is_allowed(x: Tensor, g: Tensor) -> None:
    one, last = torch.tensor(2.0), torch.tensor([1])
    assert torch.equal((g * one).cpu(), x * 2)
    assert (one * g.sum()).item() == 30
    assert torch.equal(g[last].cpu(), x[1:])
    assert put(torch.tensor(5.0), g, last)[1].tolist() == [5, 5, 5]
    assert put(3.0, g, last)[1].tolist() == [3, 3, 3]
    assert put(torch.ones(3), g, 0).tolist() == [[1, 1, 1], [3, 4, 5]]
    assert torch.rand(2, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)).is_cuda


def test_results_are_on_the_device_that_was_asked_for(x: Tensor, g: Tensor, h: Tensor) -> None:
    assert torch.zeros(1, device="cuda").device == torch.device("cuda:0")
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device == torch.device("cuda:1")
    assert torch.tensor([1.0], device="cuda").is_cuda
    assert torch.as_tensor(np.ones(2), device="cuda").is_cuda
    assert (x.new_zeros(2).device.type, g.new_zeros(2).device.type) == ("cpu", "cuda")
    assert torch.zeros_like(h).device.index == 1
    assert (type(g.cpu()), type(g.to("cpu").numpy())) == (Tensor, np.ndarray)
    with torch.inference_mode():
        assert torch.tensor(1).to(g).is_cuda
        assert torch.ones(2).to("cuda:1").device.index == 1
        assert torch.ones(2).to(torch.device("cuda"), torch.float64).is_cuda


def test_views_data_and_resizing_keep_their_memory(x: Tensor, g: Tensor) -> None:
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    weight.data = torch.zeros(4, device="cuda")
    assert (weight.shape, weight.sum().item()) == ((4,), 0)
    weight.data.add_(1)
    assert weight.sum().item() == 4
    view = g.clone()
    view[1].add_(1)
    assert view[1, 0].item() == 4
    assert (view.t_().shape, view.sum().item()) == ((3, 2), 18)
    resized = torch.empty(0, device="cuda")
    torch.add(g, g, out=resized)
    assert (resized.shape, resized.sum().item()) == ((2, 3), 30)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(144, 10),
    ]
    return nn.Sequential(*layers)


IMAGES, LABELS = torch.linspace(-1, 1, 320).view(5, 1, 8, 8), torch.arange(5)


def gradients(device: str) -> list[Tensor]:
    model = network().to(device)
    torch.manual_seed(5)
    nn.functional.cross_entropy(model(IMAGES.to(device)), LABELS.to(device)).backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_gradients_have_the_bits_of_the_processor(device: str) -> None:
    assert all(map(torch.equal, gradients("cpu"), gradients(device)))


def test_networks_are_copied_and_evaluated() -> None:
    copied = copy.deepcopy(network().cuda())
    assert isinstance(copied[0].weight, nn.Parameter)
    assert (copied[0].weight.is_cuda, copied[0].weight.requires_grad) == (True, True)
    model, images = network().cuda().eval(), IMAGES.cuda()
    with torch.inference_mode():
        outputs = model(images)
        order = outputs.argsort(descending=True, stable=True)[:, :3]
        assert (outputs.is_inference(), images[1:].is_inference()) == (True, False)
        assert outputs.gather(1, order).shape == (5, 3)
    assert not model(images).is_inference()
    with torch.autocast("cuda", torch.bfloat16):
        assert nn.Linear(3, 3).cuda()(images[0, 0, :3, :3]).dtype == torch.bfloat16
    optimizer = torch.optim.Adam(model.train().parameters())
    nn.functional.cross_entropy(model(images), LABELS.cuda()).backward()
    optimizer.step()
    for inference in (False, True):
        with torch.inference_mode(inference):
            rows = images[0]
            assert nn.functional.scaled_dot_product_attention(rows, rows, rows).is_cuda


def test_a_recurrent_network_has_nearly_the_bits_of_the_processor() -> None:
    model, inputs = nn.LSTM(3, 4, 2, batch_first=True), torch.linspace(-1, 1, 30).view(2, 5, 3)

    def computed(device: str) -> list[Tensor]:
        copied = copy.deepcopy(model).to(device)
        outputs = copied(inputs.to(device))[0]
        outputs.square().sum().backward()
        return [outputs.detach().cpu(), *[parameter.grad.cpu() for parameter in copied.parameters()]]

    torch.testing.assert_close(computed("cuda"), computed("cpu"), atol=1e-6, rtol=1e-5)


def test_each_gpu_has_a_generator_of_its_own() -> None:
    torch.cuda.manual_seed(3)
    drawn, other = torch.rand(2, device="cuda").tolist(), torch.rand(2, device="cuda:1").tolist()
    torch.cuda.manual_seed(3)
    assert torch.rand(2, device="cuda").tolist() == drawn != other
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert torch.rand(2, device="cuda").tolist() == drawn
    assert torch.equal(before, torch.get_rng_state())


def test_a_process_sees_the_gpus_that_cuda_visible_devices_named_at_its_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simgpu, "_visible", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name(0) == "Simulated GPU 1"
    with pytest.raises(RuntimeError, match="invalid device"):
        torch.zeros(1, device="cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert torch.cuda.device_count() == 1


def test_threads_have_the_gpus_and_forks_are_refused() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: torch.tensor([1.0], device="cuda").is_cuda).result()
    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_launches_and_copies_are_counted(x: Tensor, g: Tensor) -> None:
    assert counted(lambda: g + g) == {"kernels": 1}
    assert counted(lambda: g.view(-1).t()) == {}
    assert counted(lambda: x.cuda()) == {"uploads": 1, "uploads_bytes": 24, "waits": 1}
    assert counted(lambda: x.to("cuda", non_blocking=True)) == {"uploads": 1, "uploads_bytes": 24}
    assert counted(g.cpu) == {"downloads": 1, "downloads_bytes": 24, "waits": 1}
    assert counted(lambda: torch.tensor([1.0], device="cuda"))["uploads"] == 1
    assert counted(lambda: g[torch.tensor([0])])["uploads"] == 1


def test_waits_are_counted_and_their_lines_named(g: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(lambda: g.sum().item()) == {"kernels": 1, "waits": 1}
    for wait in (lambda: g[g > 2], lambda: bool((g > 2).any()), g.nonzero, g.tolist, torch.cuda.synchronize):
        assert counted(wait)["waits"] == 1
    assert "waits" not in counted(lambda: put(0.0, g, g > 2))
    monkeypatch.setattr(simgpu, "WATCHED", "/tests/simulated_gpu/test_")
    with simgpu.counted() as counts:
        g.tolist()
    assert "waits in simulator.py:" in counts.at("waits")


def test_products_in_tf32_and_unordered_sums_are_counted(g: Tensor) -> None:
    product = torch.backends.cuda.matmul
    before = product.fp32_precision
    try:
        product.fp32_precision = "ieee"
        assert "tf32" not in counted(lambda: g @ g.t())
        product.fp32_precision = "tf32"
        assert counted(lambda: g @ g.t())["tf32"] == 1
    finally:
        product.fp32_precision = before
    at = torch.zeros(2, dtype=torch.int64, device="cuda")
    assert counted(lambda: g.clone().index_add_(0, at, g))["unordered"] == 1


def test_memory_runs_out(g: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simgpu, "LARGEST", 100)
    monkeypatch.setattr(simgpu, "FREE", [10, 20])
    assert (torch.cuda.mem_get_info(0)[0], torch.cuda.mem_get_info(1)[0]) == (10, 20)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(26, device="cuda")
