"""Routing: the first match wins, and whatever does not fit is named, all of it at once."""

from __future__ import annotations

import pytest
import torch

from optimizers import AdamW, Muon
from vescale import Block, Rules

NAMED = [
    ("layers.0.q_proj.weight", torch.zeros(4, 6)),
    ("norm.weight", torch.zeros(4)),
    ("embed.weight", torch.zeros(9, 4)),
]


def test_the_first_matching_group_takes_a_parameter() -> None:
    rules = Rules(matrices=("*_proj.weight", Muon()), norms=("norm.weight", AdamW()), rest=("*", AdamW()))
    routes = rules.route(NAMED).routes
    assert {group: [route.name for route in found] for group, found in routes.items()} == {
        "matrices": ["layers.0.q_proj.weight"],
        "norms": ["norm.weight"],
        "rest": ["embed.weight"],
    }
    assert rules.block_of("layers.0.q_proj.weight", NAMED[0][1]) == Block((4, 6), 1, "matrices")
    assert rules.block_of("deep.inside.norm.weight", NAMED[1][1]).group == "norms", "the end of a name, behind a dot"
    assert rules.block_of("layernorm.weight", NAMED[1][1]).group == "rest"


def test_the_table_says_who_gets_what() -> None:
    table = str(Rules(matrices=("*_proj.weight", Muon()), rest=("*", AdamW())).route(NAMED))
    rows = [line.split() for line in table.splitlines()]
    assert rows[1] == ["matrices", "Muon", "1", "24", "24", "4"]
    assert rows[2] == ["rest", "AdamW", "2", "40", "1", "8"]


def test_everything_that_does_not_fit_is_in_one_message() -> None:
    rules = Rules(matrices=(["*_proj.weight", "norm.weight"], Muon()), gone=("nothing.*", AdamW()))
    with pytest.raises(ValueError) as caught:
        rules.route(NAMED)
    message = str(caught.value)
    assert "norm.weight in group matrices: Muon" in message
    assert "no pattern matches parameter embed.weight" in message
    assert "pattern 'nothing.*' of group gone matches no parameter" in message


def test_a_group_that_takes_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="group late takes no parameter: groups before it take all"):
        Rules(rest=("*", AdamW()), late=("norm.weight", AdamW())).route(NAMED)
    with pytest.raises(ValueError, match="group none takes no parameter: it has no pattern"):
        Rules(none=([], AdamW()), rest=("*", AdamW())).route(NAMED)


def test_groups_are_pairs_of_patterns_and_rules() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        Rules()
    with pytest.raises(ValueError, match="a: expected .pattern, rule.*b: str is no rule.*c: .*write AdamW"):
        Rules(a="*", b=("*", "muon"), c=("*", AdamW))
    with pytest.raises(
        ValueError, match=r"a: expected a pattern or a list of patterns, got \[5\].*'w' stands there 2 times"
    ):
        Rules(a=([5], AdamW()), b=(["w", "w"], AdamW()))


def test_a_pattern_that_is_never_asked_is_an_error() -> None:
    rules = Rules(norms=("norm.weight", AdamW()), rest=(["norm.weight", "*"], AdamW()))
    with pytest.raises(
        ValueError, match="^pattern 'norm.weight' of group rest takes no parameter: groups before it take"
    ):
        rules.route(NAMED)


def test_wrappers_do_not_change_the_name_that_a_pattern_sees() -> None:
    """ByteDance-Seed/VeOmni #1011: rules by name missed after wrapping."""
    rules = Rules(first=("layers.0.proj.weight", Muon()), rest=("*", AdamW()))
    for name in ("layers.0._checkpoint_wrapped_module.proj.weight", "_orig_mod.layers.0.proj.weight"):
        assert rules.group_of(name) == "first"
