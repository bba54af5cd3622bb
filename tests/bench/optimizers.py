"""Optimizer steps against the fastest peers, alternating in one run; bytes and blocks counted.

    python tests/bench/optimizers.py [--ranks 1 2 4] [--pairs 7] [--rows muon,adamw,...] [--json FILE]

Rows of the file that a run does not measure again stay.

Peers: FSDP2 with ``full_tensor`` on every rank and the arithmetic of torch's Muon; the same arithmetic with an owner
per matrix and even all-to-alls of equal matrices, as microsoft/dion schedules them; torch's AdamW on FSDP2's DTensors
and on local tensors; torchao's AdamW8bit, eager and compiled; pytorch_optimizer's SOAP and Shampoo; our own rule one
block at a time.
"""

from __future__ import annotations

# ruff: noqa: E402
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Row, arguments, publish, row
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim._muon import _zeropower_via_newtonschulz

# This file is called as the package that it measures: its folder goes to the end of the path.
FOLDER = str(Path(__file__).resolve().parent)
sys.path = [entry for entry in sys.path if str(Path(entry).resolve()) != FOLDER] + [FOLDER]

from optimizers import SOAP, Adam8bit, AdamW, Muon, Shampoo
from vescale import Optimizer, Rules, distribute, fully_shard

LAYERS, WIDTH = 12, 512
# A decoder layer of that width: attention and a gated feed-forward of 8/3.
MATRICES = ((512, 512),) * 4 + ((1408, 512), (1408, 512), (512, 1408))
Step = Callable[[], None]


class Layer(nn.Module):
    """The matrices of one decoder layer."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) / 30) for shape in shapes)


def grads_of(params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Returns whole gradients, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tuple(param.shape), generator=generator) for param in params]


def ours(rule: Any, shapes: Sequence[tuple[int, ...]], layers: int, mesh: DeviceMesh) -> tuple[Step, Optimizer]:
    """Returns a step of our Optimizer over sharded layers whose gradients stay where they are."""
    rules = Rules(all=("*", rule))
    model = nn.Sequential(*(Layer(shapes) for _ in range(layers)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, block_of=rules.block_of)
    optimizer = Optimizer(model.named_parameters(), rules)
    params = list(model.parameters())
    for param, grad in zip(params, grads_of(params), strict=True):
        param.grad = distribute(grad, param.device_mesh, param.placements)
    return optimizer.step, optimizer


def fsdp2_params(shapes: Sequence[tuple[int, ...]], layers: int, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Returns FSDP2's sharded parameters of the same layers, with gradients."""
    from torch.distributed.tensor import distribute_tensor

    model = nn.Sequential(*(Layer(shapes) for _ in range(layers)))
    for module in (*model, model):
        fsdp2(module, mesh=mesh)
    params = list(model.parameters())
    for param, grad in zip(params, grads_of(params), strict=True):
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
    return params


def orthogonalised(update: torch.Tensor) -> torch.Tensor:
    """Returns the update of ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``."""
    gain = 0.2 * max(update.shape) ** 0.5
    return _zeropower_via_newtonschulz(update, (3.4445, -4.7750, 2.0315), 5, 1e-7).mul_(gain)


class FullTensorMuon:
    """Muon with momentum on the shards, each matrix gathered and orthogonalised on every rank (FSDP2 + full_tensor)."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        self.momenta = [torch.zeros_like(param) for param in self.params]

    @torch.no_grad()
    def step(self) -> None:
        for param, momentum in zip(self.params, self.momenta, strict=True):
            momentum.lerp_(param.grad, 0.05)
            update = param.grad.lerp(momentum, 0.95).to(torch.bfloat16).full_tensor()
            direction = orthogonalised(update)
            local = direction.chunk(dist.get_world_size())[dist.get_rank()]  # Shard(0), rows divide
            param.to_local().mul_(1 - 1e-4).add_(local, alpha=-1e-3)


class OwnerMuon:
    """Muon in groups of one matrix per rank: an even all-to-all in, one matrix each, an even one back (dion)."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = [param.to_local() for param in params]
        self.grads = [param.grad.to_local() for param in params]
        self.momenta = [torch.zeros_like(param) for param in self.params]
        self.shapes = [tuple(param.shape) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        world, by_shape = dist.get_world_size(), {}
        for index, shape in enumerate(self.shapes):
            by_shape.setdefault(shape, []).append(index)
        groups = [some[i : i + world] for some in by_shape.values() for i in range(0, len(some), world)]
        flying = [self._send(groups[0])]
        for number, group in enumerate(groups):  # the next group travels while this one is computed
            if number + 1 < len(groups):
                flying.append(self._send(groups[number + 1]))
            self._finish(group, *flying.pop(0))

    def _send(self, group: list[int]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        world, shape = dist.get_world_size(), self.shapes[group[0]]
        send = torch.zeros((world, shape[0] // world, shape[1]), dtype=torch.bfloat16)  # padded with zeros at the end
        for slot, index in enumerate(group):
            self.momenta[index].lerp_(self.grads[index], 0.05)
            send[slot].copy_(self.grads[index].lerp(self.momenta[index], 0.95))
        out = torch.empty_like(send)
        return out, send, dist.all_to_all_single(out.view(-1), send.view(-1), async_op=True)

    def _finish(self, group: list[int], out: torch.Tensor, send: torch.Tensor, work: Any) -> None:
        work.wait()
        shape = self.shapes[group[0]]
        direction = out
        if dist.get_rank() < len(group):
            direction = orthogonalised(out.view(shape)).reshape(out.shape)
        back = torch.empty_like(send)
        dist.all_to_all_single(back.view(-1), direction.contiguous().view(-1))
        for slot, index in enumerate(group):
            self.params[index].mul_(1 - 1e-4).add_(back[slot], alpha=-1e-3)


def alternate(systems: dict[str, Step], pairs: int) -> dict[str, list[float]]:
    """Returns milliseconds of each step of each system, all ranks together; a first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(pairs + 1):
        for name in systems if turn % 2 else reversed(systems):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            systems[name]()
            if dist.is_initialized():
                dist.barrier()
            if turn >= 1:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def against(name: str, times: dict[str, list[float]]) -> list[Row]:
    """Returns a row for each peer."""
    return [row(f"{name}; {peer}", "ms", times["ours"], times[peer]) for peer in times if peer != "ours"]


def muon(mesh: DeviceMesh, pairs: int) -> list[Row]:
    """Twelve layers of 512: full_tensor on every rank, and an owner per matrix."""
    step, optimizer = ours(Muon(), MATRICES, LAYERS, mesh)
    peers = {
        "FSDP2 + full_tensor": FullTensorMuon(fsdp2_params(MATRICES, LAYERS, mesh)).step,
        "owner per matrix, even all-to-all": OwnerMuon(fsdp2_params(MATRICES, LAYERS, mesh)).step,
    }
    times = alternate({"ours": step, **peers}, pairs)
    buckets = [bucket for program in optimizer._programs.values() for bucket in program]
    sent = optimizer.counters.exchange_bytes / (pairs + 1) / 2**20
    blocks, most = sum(len(b.kept) + sum(map(len, b.arriving.values())) for b in buckets), torch.tensor([sent])
    counted = torch.tensor([float(blocks)])
    dist.all_reduce(counted)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    world, numel = dist.get_world_size(), LAYERS * sum(m * n for m, n in MATRICES)
    gathered = 2 * numel * (world - 1) / world / 2**20
    label = f"Muon, {LAYERS} layers of {WIDTH}, {world} ranks"
    print(*optimizer.loads, sep="\n") if dist.get_rank() == 0 else None
    return [
        *against(label, times),
        row(f"{label}: most sent by a rank; by full_tensor", "MiB", [most.item()], [gathered]),
        row(f"{label}: matrices orthogonalised; by full_tensor", "", [counted.item()], [world * LAYERS * 7.0]),
    ]


def experts(mesh: DeviceMesh, pairs: int) -> list[Row]:
    """Stacks of experts, whole on a rank: nothing moves."""
    shapes = ((8, 256, 128), (8, 128, 256))
    step, optimizer = ours(Muon(), shapes, 4, mesh)
    peer = FullTensorStack(fsdp2_params(shapes, 4, mesh)).step
    times = alternate({"ours": step, "FSDP2 + full_tensor": peer}, pairs)
    sent = optimizer.counters.exchange_bytes / 2**20
    label = f"Muon, 64 stacked experts of 256 x 128, {dist.get_world_size()} ranks"
    return [*against(label, times), row(f"{label}: sent in all steps", "MiB", [sent])]


class FullTensorStack(FullTensorMuon):
    """The same for stacks of matrices."""

    @torch.no_grad()
    def step(self) -> None:
        for param, momentum in zip(self.params, self.momenta, strict=True):
            momentum.lerp_(param.grad, 0.05)
            update = param.grad.lerp(momentum, 0.95).to(torch.bfloat16).full_tensor()
            direction = torch.stack([orthogonalised(matrix) for matrix in update])
            local = direction.chunk(dist.get_world_size())[dist.get_rank()]
            param.to_local().mul_(1 - 1e-4).add_(local, alpha=-1e-3)


def adamw(mesh: DeviceMesh, pairs: int) -> list[Row]:
    """200 parameters of 64k."""
    shapes = ((256, 256),) * 10
    step, _ = ours(AdamW(), shapes, 20, mesh)
    systems: dict[str, Step] = {"ours": step}
    for kind in ("foreach", "fused"):
        systems[f"torch {kind} on FSDP2's DTensors"] = torch.optim.AdamW(
            fsdp2_params(shapes, 20, mesh), **{kind: True}
        ).step
    sharded = fsdp2_params(shapes, 20, mesh)
    locals_ = [nn.Parameter(param.to_local().clone()) for param in sharded]
    for local, param in zip(locals_, sharded, strict=True):
        local.grad = param.grad.to_local().clone()
    systems["torch fused on local tensors"] = torch.optim.AdamW(locals_, fused=True).step
    return against(f"AdamW, 200 parameters of 64k, {dist.get_world_size()} ranks", alternate(systems, 3 * pairs))


def plain(rule: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[Step, Optimizer, list[nn.Parameter]]:
    """Returns a step over plain parameters in one process, and the parameters, with gradients."""
    params = [nn.Parameter(weight.detach().clone()) for weight in Layer(shapes).weights]
    for param, grad in zip(params, grads_of(params), strict=True):
        param.grad = grad
    optimizer = Optimizer([(f"p{i}", param) for i, param in enumerate(params)], Rules(all=("*", rule)))
    return optimizer.step, optimizer, params


def adam8bit(mesh: DeviceMesh, pairs: int) -> list[Row]:
    """Sixteen parameters of 256k."""
    from torchao.optim import AdamW8bit

    shapes = ((512, 512),) * 16
    step, optimizer, params = plain(Adam8bit(), shapes)
    compiled, real = AdamW8bit(plain(Adam8bit(), shapes)[2]), torch.compile
    eager = AdamW8bit(plain(Adam8bit(), shapes)[2])

    def eagerly() -> None:
        torch.compile = lambda function, **options: function
        try:
            eager.step()
        finally:
            torch.compile = real

    systems = {"ours": step, "torchao AdamW8bit, eager": eagerly, "torchao AdamW8bit, compiled": compiled.step}
    times = alternate(systems, pairs)
    held = sum(v.nbytes for p in params for name, v in optimizer.state[p].items() if name != "step")
    each = held / sum(param.numel() for param in params)
    return [*against("Adam8bit, 16 parameters of 256k", times), row("Adam8bit: state per element", "B", [each], [8.0])]


class Gathered:
    """A peer over whole matrices on every rank: their gradients by ``full_tensor``; a rank keeps its rows."""

    def __init__(self, params: Sequence[nn.Parameter], peer: Callable[[list[nn.Parameter]], Any]) -> None:
        self.params = list(params)
        self.whole = [nn.Parameter(param.full_tensor()) for param in self.params]
        self.optimizer = peer(self.whole)

    @torch.no_grad()
    def step(self) -> None:
        for param, whole in zip(self.params, self.whole, strict=True):
            whole.grad = param.grad.full_tensor()
        self.optimizer.step()
        for param, whole in zip(self.params, self.whole, strict=True):
            param.to_local().copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])  # Shard(0), rows divide


def kronecker(mesh: DeviceMesh, pairs: int) -> list[Row]:
    """Eight matrices of 256 x 256, one block each, over ten steps so that every refresh is in.

    Roots and bases are renewed every ten steps on both sides, all in float32. The peer of roots by eigenvalues is
    ``Shampoo``, which has no moments and takes a singular value decomposition; that of roots by Newton is
    ``ScalableShampoo``, with blocks, moments and grafting as ours. On several ranks the peer has whole matrices by
    ``full_tensor``, or makes do with its own rows, whose result depends on the number of ranks.
    """
    import pytorch_optimizer
    from pytorch_optimizer.optimizer.shampoo import LayerWiseGrafting

    # glibc gives blocks of 256 KB back and faults them in again, until one larger than those was freed, as in any
    # process that has trained.
    torch.ones(7 * 2**20)
    shapes, found = ((256, 256),) * 8, []
    graft, every = LayerWiseGrafting.RMSPROP, {"preconditioning_compute_steps": 10}
    blocks = {"block_size": 256, "start_preconditioning_step": 1, "graft_type": graft}
    for name, rule, peer in (
        ("SOAP", SOAP(block_size=256), lambda params: pytorch_optimizer.SOAP(params)),
        (
            "Shampoo, roots by eigenvalues",
            Shampoo(block_size=256, root="eigen"),
            lambda params: pytorch_optimizer.Shampoo(params, **every),
        ),
        (
            "Shampoo, roots by Newton",
            Shampoo(block_size=256),
            lambda params: pytorch_optimizer.ScalableShampoo(params, **blocks, **every),
        ),
    ):
        times = alternate(_rivals(rule, peer, shapes, mesh), max(pairs // 3, 2))
        found += against(f"{name}, 8 matrices of 256 x 256, ten steps, {mesh.size()} ranks", times)
    if mesh.size() > 1:
        return found
    return [*found, *(line for size, count in ((256, 8), (32, 64)) for line in batches(size, count, pairs))]


def _rivals(
    rule: Any, peer: Callable[[list[nn.Parameter]], Any], shapes: Sequence[tuple[int, ...]], mesh: DeviceMesh
) -> dict[str, Step]:
    """Ten steps of ours and of the peer, in the ways that it can be had on these ranks."""
    step = ours(rule, shapes, 1, mesh)[0]
    if mesh.size() == 1:
        return {"ours": _ten(step), "pytorch_optimizer": _ten(peer(plain(AdamW(), shapes)[2]).step)}
    rows = []
    for param in fsdp2_params(shapes, 1, mesh):
        rows.append(nn.Parameter(param.to_local().clone()))
        rows[-1].grad = param.grad.to_local().clone()
    return {
        "ours": _ten(step),
        "pytorch_optimizer + full_tensor": _ten(Gathered(fsdp2_params(shapes, 1, mesh), peer).step),
        "pytorch_optimizer on each rank's rows": _ten(peer(rows).step),
    }


def batches(size: int, count: int, pairs: int) -> list[Row]:
    """Our rules on equal blocks, all in one batch, as on a GPU, and one at a time, as on a CPU."""
    found = []
    for rule in (SOAP(block_size=size), Shampoo(block_size=size, root="eigen")):
        grads = torch.randn(count, size, size)
        state = {
            name: first.expand(count, *first.shape).clone() for name, first in rule.block_state((size,) * 2).items()
        }
        state["step"] = torch.zeros(())
        for refresh in ("first", None):
            state |= rule.block((grads,), state, refresh=refresh)[1]

        def together(refresh: str | None, rule: Any = rule, grads: Any = grads, state: Any = state) -> None:
            rule.block((grads,), state, refresh=refresh)

        def apart(refresh: str | None, rule: Any = rule, grads: Any = grads, state: Any = state) -> None:
            for i in range(len(grads)):
                one = {name: value[i : i + 1] if value.ndim else value for name, value in state.items()}
                rule.block((grads[i : i + 1],), one, refresh=refresh)

        systems = {"ours": _nine_and_a_refresh(together), "one at a time": _nine_and_a_refresh(apart)}
        label = f"{type(rule).__name__}, {count} blocks of {size} in one batch, ten steps"
        found += against(label, alternate(systems, pairs))
    return found


def _nine_and_a_refresh(run: Callable[[str | None], None]) -> Step:
    def ten() -> None:
        for refresh in (*[None] * 9, "again"):
            run(refresh)

    return ten


def _ten(step: Step) -> Step:
    def run() -> None:
        for _ in range(10):
            step()

    return run


ROWS = {"muon": muon, "experts": experts, "adamw": adamw, "adam8bit": adam8bit, "kronecker": kronecker}
ALONE = ("adam8bit",)  # one process is enough


def work(rank: int, ranks: int, pairs: int, names: list[str], port: int, file: Path) -> None:
    """Runs on every rank; rank 0 leaves its rows in ``file``."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,))
    rows = [line for name in names for line in ROWS[name](mesh, pairs)]
    if rank == 0:
        torch.save([tuple(line) for line in rows], file)
    dist.destroy_process_group()


def with_earlier(rows: list[Row], file: Path | None) -> list[Row]:
    """Returns the file's rows that are not measured again, and then ``rows``."""
    if file is None or not file.exists():
        return rows
    new = {line.name for line in rows}
    return [*(Row(**line) for line in json.loads(file.read_text())["rows"] if line["name"] not in new), *rows]


def main() -> None:
    """Reads the arguments and starts the ranks."""
    parser = arguments("Optimizer steps against the fastest peers.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--pairs", type=int, default=7, help="alternating rounds that count")
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, names = [], options.rows.split(",")
    for ranks in options.ranks:
        some = [name for name in names if name not in ALONE or ranks == options.ranks[0] == 1]
        file = Path(f"/tmp/optimizers_{os.getpid()}_{ranks}.pt")
        if some:
            mp.spawn(work, args=(ranks, options.pairs, some, 29600 + ranks, file), nprocs=ranks)
            rows += [Row(*line) for line in torch.load(file, weights_only=True)]
            file.unlink()
            # what there is, should a later number of ranks take too long
            publish("optimizer steps", with_earlier(rows, options.json), options.json)
    peers = [line for line in rows if line.unit == "ms" and line.peer]
    print(
        f"median ratio {statistics.median(line.peer / line.ours for line in peers):.2f} over {len(peers)} rows of time"
    )


if __name__ == "__main__":
    main()
