"""What an Optimizer cannot step is one line, and nothing has changed: parameters, groups, flags, rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from optimizers import Adam8bit, AdamW, Muon, Shampoo
from vescale import Optimizer, Rules

ALL = Rules(all=("*", AdamW()))
ONE = nn.Parameter(torch.zeros(8, 4))


@pytest.mark.parametrize(
    ("named", "rules", "said"),
    [
        (nn.Linear(2, 2).parameters(), ALL, "expected model.named_parameters.., pairs .* got Parameter"),
        (nn.Linear(2, 2), ALL, "pairs of name and parameter, got Linear"),
        ([{"params": [ONE]}], ALL, "pairs of name and parameter, got dict"),
        ([("a", ONE), ("b", ONE)], ALL, "a and b are one parameter, which would be stepped twice"),
        ([("a", ONE), ("a", nn.Parameter(torch.zeros(3)))], ALL, "two parameters are named a"),
        ([("a", ONE)], AdamW(), "expected Rules.*, got AdamW"),
    ],
)
def test_what_are_no_named_parameters_or_no_rules_is_refused(named: Any, rules: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^Optimizer: .*{said}"):
        Optimizer(named, rules)


def _cut_by_others() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    param = nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="w: expected a parameter of a module that fully_shard .* got a DTensor of"):
        Optimizer([("w", param)], ALL)


def test_a_parameter_that_others_have_cut_is_refused(pool: Any) -> None:
    """Its rule would see rows of a matrix: pytorch's own FSDP2 and tensor parallelism without fully_shard around."""
    pool(1).run(_cut_by_others)


def _stepped(rule: Any) -> Optimizer:
    torch.manual_seed(0)
    params = {"w": nn.Parameter(torch.randn(8, 4)), "b": nn.Parameter(torch.randn(4))}
    optimizer = Optimizer(params.items(), Rules(matrices=("w", rule), rest=("b", AdamW())))
    for param in params.values():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


def _set(**changes: Any) -> Callable[[Optimizer], Any]:
    return lambda optimizer: optimizer.param_groups[0].update(changes)


@pytest.mark.parametrize(
    ("rule", "change", "said"),
    [
        (Muon(), _set(lr=-1.0), "Muon: lr: expected"),
        (Muon(), _set(momentum=torch.tensor(2.0)), "Muon: momentum: expected"),
        (Muon(), _set(rows=4), r"group matrices: the block of w cannot change from \(8, 4\) to \(4, 4\)"),
        (Muon(), _set(rows=3), "Muon: rows=3 does not divide the 8 rows"),
        (Adam8bit(min_numel=4), _set(min_numel=64), "the rule of w cannot change from Adam8bit to AdamW"),
        (Shampoo(block_size=4), _set(block_size=2), "the block of w cannot change from"),
        (Shampoo(block_size=4), _set(graft="none"), "state of w cannot change from"),
        (Muon(), lambda optimizer: optimizer.param_groups[0].pop("lr"), "group matrices has lost lr"),
        (Muon(), lambda optimizer: optimizer.param_groups.pop(), "expected the groups .*matrices.*rest.*, got"),
        (Muon(), lambda optimizer: optimizer.param_groups.append({"name": "more"}), "expected the groups"),
    ],
)
def test_groups_that_do_not_fit_any_more_are_refused(rule: Any, change: Any, said: str) -> None:
    optimizer = _stepped(rule)
    params = [run.params[0] for run in optimizer.runs]
    before = {name: value.clone() for name, value in (*enumerate(params), *optimizer.named_state().items())}
    change(optimizer)
    with pytest.raises(ValueError, match=said):
        optimizer.step()
    after = dict((*enumerate(params), *optimizer.named_state().items()))
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


def test_what_is_no_matter_of_memory_may_change_between_steps() -> None:
    optimizer = _stepped(Muon())
    optimizer.param_groups[0].update(nesterov=False, coefficients="simple", cautious=True)
    optimizer.step()
    optimizer.param_groups[0].update(rows=4)
    with pytest.raises(ValueError, match="the block of w cannot change"):
        optimizer.step()


@pytest.mark.parametrize("skip", [True, 1.0, torch.ones(1), torch.tensor(True), torch.ones((), dtype=torch.float64)])
def test_a_flag_is_a_number_of_float32(skip: Any) -> None:
    with pytest.raises(ValueError, match=r"step: skip: expected None or a \(\) torch.float32 tensor on cpu, got"):
        _stepped(AdamW()).step(skip=skip)
