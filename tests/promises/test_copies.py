"""Per step one cast of each segment's shard per gather, and nothing else: seen from outside, and counted inside."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from bench.copies import SMALLEST, Copies
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from models.layers import linear_cross_entropy
from models.linear import Linear

WIDTH, DEPTH = 64, 3


class Layer(nn.Module):
    """Two projections whose gradients are written in place, or nn.Linear's, which a hook copies."""

    def __init__(self, cls: type[nn.Linear]) -> None:
        super().__init__()
        self.up, self.down = cls(WIDTH, 2 * WIDTH, bias=False), cls(2 * WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(0)
        for module in (self.up, self.down):
            nn.init.normal_(module.weight, std=0.1, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Layers of which the last two are one, so that a weight is used twice."""

    def __init__(self, cls: type[nn.Linear], recompute: bool = False) -> None:
        super().__init__()
        self.layers, self.recompute = nn.ModuleList(Layer(cls) for _ in range(DEPTH)), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[-1]):
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def _net(cls: type[nn.Linear], policy: MixedPrecisionPolicy, recompute: bool = False) -> nn.Module:
    from vescale import fully_shard

    model, mesh = Net(cls, recompute), init_device_mesh("cpu", (2,))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


def _step(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)).square().sum().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _counted(cls: type[nn.Linear], policy: MixedPrecisionPolicy) -> tuple[Counter, dict[str, int]]:
    from vescale import counters

    model = _net(cls, policy)
    _step(model)
    before = vars(counters(model)).copy()
    model.zero_grad()
    x = torch.ones(8, WIDTH, dtype=policy.param_dtype or torch.float32)
    with Copies() as copies:
        model(x).square().sum().backward()
    return Counter(copies.seen), {name: value - before[name] for name, value in vars(counters(model)).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [Linear, nn.Linear])
def test_copies_seen_from_outside_are_those_counted_inside(pool, dtype: torch.dtype, cls: type[nn.Linear]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    weights, size = 2 * 2 * WIDTH * WIDTH, dtype.itemsize
    for seen, inside in pool(2).run(_counted, cls, policy):
        # The layer that is used twice is gathered twice in each direction.
        gathers, uses = 2 * (DEPTH + 1), 2 * (DEPTH + 1)
        casts = {("aten::copy_", weights // 2 * size): gathers}
        copied = 0 if cls is Linear else 2 * DEPTH
        hooks = {("aten::copy_", weights // 2 * size): copied}  # a weight and half a layer have the same bytes
        widened = {("aten::copy_", weights // 2 * 4): DEPTH} if dtype is torch.bfloat16 else {}
        gloos = {
            ("aten::copy_", weights // 2 * size): DEPTH
        }  # its reduce-scatter copies the result out, when waited for
        assert seen == Counter(casts) + Counter(hooks) + Counter(widened) + Counter(gloos)
        assert all(copy.nbytes >= SMALLEST for copy in seen)
        assert (inside["gathers"], inside["reduces"]) == (gathers, DEPTH)
        assert inside["cast_bytes"] == gathers * weights // 2 * size
        assert inside["gather_bytes"] == 2 * inside["cast_bytes"]
        assert (inside["grad_copies"], inside["grad_copy_bytes"]) == (copied, copied * weights // 2 * size)
        assert inside["grads_in_place"] == (uses if cls is Linear else 0)


def _bits(dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    expected = _step(_net(nn.Linear, policy))
    for recompute in (False, True):
        for name, grad in _step(_net(Linear, policy, recompute)).items():
            assert torch.equal(grad, expected[name]), name
    compiled = _net(Linear, policy)
    for layer in compiled.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        autocast = _net(Linear, MixedPrecisionPolicy())
        plain = _net(nn.Linear, MixedPrecisionPolicy())
        for name, grad in _step(autocast).items():
            assert torch.equal(grad, _step(plain)[name]), name
    for name, grad in _step(compiled).items():
        torch.testing.assert_close(grad, expected[name])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_written_in_place_have_the_bits_of_nn_linears(pool, dtype: torch.dtype | None) -> None:
    pool(2).run(_bits, dtype)


class Head(nn.Module):
    """The model's end, whose loss computes the head's gradient chunk by chunk; tied, its weight is used twice."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.body, self.head = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(0)
        for module in (self.body, self.head):
            nn.init.normal_(module.weight, std=0.1, generator=generator)
        if tied:
            self.head.weight = self.body.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.arange(x.shape[0]) % 7
        return linear_cross_entropy(torch.relu(self.body(x)), self.head.weight, labels, chunk_size=3) / x.shape[0]


def _heads(dtype: torch.dtype, tied: bool) -> None:
    """Ours against one process; what a hook copies is counted, and there is nothing."""
    from vescale import counters, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    whole, model = Head(tied).to(dtype), fully_shard(Head(tied), mp_policy=policy)
    x = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).to(dtype)
    for step in range(2):  # the second backward adds
        for net in (whole, model):
            (net(x) * (step + 1)).backward()
    for name, p in model.named_parameters():
        expected = dict(whole.named_parameters())[name].grad.float()
        bound = 1e-6 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=bound, atol=bound * expected.abs().max().item())
    assert counters(model).grad_copies == 0 and counters(model).grads_in_place == 4
    (grad,) = torch.autograd.grad(whole(x), whole.head.weight)  # only asked for: nothing is written
    assert grad.shape == whole.head.weight.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_gradient_is_written_in_place_too(pool, dtype: torch.dtype) -> None:
    for tied in (False, True):
        pool(2).run(_heads, dtype, tied)


def test_counters_refuse_what_counts_nothing() -> None:
    from vescale import counters

    with pytest.raises(ValueError, match="sharded modules and Optimizers, got Linear"):
        counters(nn.Linear(2, 2))
