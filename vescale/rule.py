"""Rules: which optimizer each parameter gets, and what an optimizer has to say to be one.

A **rule** is a frozen, keyword-only dataclass whose fields are its hyperparameters. It never mentions a rank, a mesh or
a collective; it states its block and up to three functions, and the ``Optimizer`` calls them on whatever this rank
holds. ``Rule`` and ``BlockRule`` say what each is given::

    prepare(param, grad, state, *, skip) -> payloads     element-wise, on the local run
    block(payloads, state) -> direction                  whole blocks, pure
    apply(param, direction, state, *, skip)              element-wise, on the local run

How the rules of this project fit::

    rule      block         finest  wire  payloads        state in the cut                  state where computed
    AdamW     one element   1       -     none            exp_avg, exp_avg_sq  f32          -
    Adam8bit  256 elements  256     -     none            exp_avg, exp_avg_sq_root  u8      -
                                                          a scale per 256 of each  f32
    Muon      the matrix    1       bf16  momentum input  momentum  f32                     -
    NorMuon   the matrix    1       bf16  momentum input  momentum  f32                     mean square of a row (m,)
    Shampoo   b x b         1       f32   gradient        -                                 exp_avg, exp_avg_sq (b, b)
                                                                                            L, R and their roots (b, b)
    SOAP      b x b         1       f32   gradient        -                                 exp_avg, exp_avg_sq, L, R,
                                                                                            Q_L, Q_R (b, b)

Element state lives with the parameter's run, and so does chunk state, one number for each ``finest`` elements; block
state, of any shape, where the block is computed. Shampoo and SOAP keep their moments as block state: one payload goes
out and one direction comes back, where moments kept in the cut would send three. A rule without ``block`` (AdamW,
Adam8bit) does everything in ``prepare`` and never communicates, whatever its block. Payloads and directions are rounded
to ``wire_dtype`` whether an edge cuts the block or not, so that the update does not depend on the number of ranks.

What a rule may also have, each with a meaning to the ``Optimizer`` alone:

    prepare_runs(params, grads, states)         ``prepare`` of several runs by a rule without blocks: lists of what that
                                                takes, fewer launches; passed over in a class that has a ``prepare`` of
                                                its own and none of this
    for_shape(shape) -> rule                    another rule for parameters of some shapes (Adam8bit: small ones)
    blocks_in_place(payloads, places, out)      ``block`` of blocks of any shapes, where they lie in flat payloads, as
                                                ((first element, shape), ...): on a GPU one launch for all of a run;
                                                passed over in a class that has a ``block`` of its own and none of this
    chunk_state() -> {name: dtype}              state with one number for each ``finest`` consecutive elements
    block_state(block) -> {name: first value}   state of a block of that shape; then ``block`` has another signature:
                                                see ``BlockRule.block``
    state_in_place                              names of ``block_state`` that ``block`` writes where it finds them
    refresh                                     every how many steps a block is told ``refresh="again"``, else None;
                                                block i when (t + i) % refresh == 0; every block "first" at t = 0
    parameter_state() -> {name: first value}    0-d float32 numbers of a parameter, the same on every rank
    loaded(state)                               called with a parameter's state after it was read from elsewhere
    param_dtype                                 of the parameters that it steps, float32 where it says none
    places                                      True: its state has ``stream``, an integer of the parameter's name, and
                                                ``first``, the run's first element in it; with a ``finest`` above 1
    cost(block)                                 work of one block, in FLOPs; else its elements
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from vescale.block import Block, Lattice


@runtime_checkable
class Rule(Protocol):
    """What every rule says of itself. One without blocks does all its work in ``prepare``; others are ``BlockRule``."""

    finest: int  # no edge may fall off a multiple of this many elements; a ClassVar, since it is no hyperparameter

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the block of a parameter of ``shape``: as many sizes as it has dims, or ``()`` for single elements.

        A stack (E, m, n) of matrices has the block (1, m, n). A block that does not divide the parameter is shorter at
        its end; in a stack its rows must divide the matrix's.

        Raises:
            ValueError: If the rule cannot step such a parameter.
        """

    def element_state(self) -> dict[str, torch.dtype]:
        """Names and dtypes of the state that has the parameter's shape; it begins as zeros."""

    def prepare(
        self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], *, skip: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Updates element state and returns what ``block`` needs, (n,) each, in ``wire_dtype``; ``()`` without blocks.

        Each element of what is written or returned follows from the same element of what is given. Without blocks this
        steps ``param`` in place too.

        Args:
            param: (n,) float32, this rank's run of one or several neighbouring parameters, padding included: it begins
                and ends at multiples of 32 elements of their buffer, so vector loops have no tail of other bits.
            grad: (n,) float32, never written.
            state: The names of ``element_state``, (n,) each, and ``"step"``: () float32, the steps completed before
                this one.
            skip: () float32, 1.0 to write nothing; None when that cannot be. Select with ``torch.where``: a product
                with NaN is NaN.
        """


@runtime_checkable
class BlockRule(Rule, Protocol):
    """A rule whose update needs whole blocks."""

    wire_dtype: torch.dtype  # of payloads and directions

    def block(self, payloads: tuple[torch.Tensor, ...], state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the directions of blocks: like a payload in shape and dtype, and a function of these blocks alone.

        A rule with ``block_state`` has instead::

            block(payloads, state, *, refresh) -> (direction, {name: what is new of that state, (B, *shape)})

        It writes nothing but the names of ``state_in_place``. ``refresh`` is "first" in a block's first step, "again"
        when it is its turn, else None.

        Args:
            payloads: What ``prepare`` returned, of one or more blocks of equal shape: (B, *block) in ``wire_dtype``
                each, as many dims as the parameter and one; never written. On a CPU B is 1: libraries choose kernels,
                hence bits, by the size of a batch.
            state: Empty; or the names of ``block_state``, (B, *shape) each, and ``"step"`` as in ``prepare``. Whether a
                step will be skipped is not known here: then payloads may be anything, zeros where there is state.
        """

    def apply(
        self,
        param: torch.Tensor,
        direction: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        *,
        skip: torch.Tensor | None,
    ) -> None:
        """Steps ``param`` in place.

        Args:
            param: (n,), the run that ``prepare`` was given.
            direction: (n,) in ``wire_dtype``, zero between parameters.
            state: As in ``prepare``.
            skip: As in ``prepare``.
        """


class Group(NamedTuple):
    """One named entry of ``Rules``."""

    patterns: tuple[str, ...]
    rule: Any


class Rules:
    """Named groups of parameters and the rule of each; the first group with a matching pattern takes a parameter.

    Example::

        rules = Rules(matrices=("*_proj.weight", Muon(lr=0.02)), rest=("*", AdamW(lr=3e-4)))

    Args:
        groups: name=(pattern or list of patterns, rule). A pattern is a glob (``fnmatch``, case counts) of the whole
            name or of its end behind a dot.

    Raises:
        ValueError: If there is no group, or a group is not a pair of patterns, each once, and a rule.
    """

    def __init__(self, **groups: tuple[str | Sequence[str], Any]) -> None:
        problems = [] if groups else ["Rules needs at least one group: name=(pattern, rule)"]
        self.groups: dict[str, Group] = {}
        for name, entry in groups.items():
            if not isinstance(entry, tuple | list) or len(entry) != 2:
                problems.append(f"{name}: expected (pattern, rule), got {entry!r}")
                continue
            patterns, rule = (entry[0],) if isinstance(entry[0], str) else entry[0], entry[1]
            wrong = [*_not_patterns(patterns), *_not_a_rule(rule)]
            problems += [f"{name}: {problem}" for problem in wrong]
            if not wrong:
                self.groups[name] = Group(tuple(patterns), rule)
        if problems:
            raise ValueError("; ".join(problems))

    def group_of(self, name: str) -> str:
        """Returns the name of the group that takes the parameter ``name``.

        Raises:
            ValueError: If no pattern matches.
        """
        for group, entry in self.groups.items():
            if any(_matches(name, pattern) for pattern in entry.patterns):
                return group
        raise ValueError(f"no pattern matches parameter {name}; add a group with the pattern '*' for the rest")

    def block_of(self, name: str, param: torch.Tensor) -> Block:
        """Returns the block of a parameter; what ``fully_shard(block_of=...)`` asks.

        Raises:
            ValueError: If no pattern matches, or the rule cannot step such a parameter.
        """
        group = self.group_of(name)
        try:
            rule = self.rule_of(name, whole_shape(param))
            label = group if type(rule) is type(self.groups[group].rule) else f"{group}: {type(rule).__name__}"
            return Block(rule.block_shape(tuple(param.shape)), rule.finest, label)
        except ValueError as error:
            raise ValueError(f"{name} in group {group}: {error}") from None

    def rule_of(self, name: str, shape: tuple[int, ...]) -> Any:
        """Returns the rule that steps a parameter: its group's, or what that names for such a ``whole_shape``.

        Raises:
            ValueError: If no pattern matches.
        """
        return rule_for(self.groups[self.group_of(name)].rule, shape)

    def route(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> Routing:
        """Returns which parameter goes to which group; print it.

        Raises:
            ValueError: Of everything that does not fit, together: a parameter that no pattern matches, a pattern that
                matches no parameter or none that groups before it leave, a rule that cannot step a parameter.
        """
        named, problems = list(named_parameters), []
        routes: dict[str, list[Route]] = {group: [] for group in self.groups}
        taken: dict[str, list[str]] = {group: [] for group in self.groups}
        for name, param in named:
            try:
                taken[self.group_of(name)].append(name)
                block = self.block_of(name, param)
                rule = self.rule_of(name, whole_shape(param))
                routes[self.group_of(name)].append(Route(name, tuple(param.shape), block, rule))
            except ValueError as error:
                problems.append(str(error))
        for group, entry in self.groups.items():
            if not entry.patterns:
                problems.append(f"group {group} takes no parameter: it has no pattern")
            for pattern in entry.patterns:
                if any(_matches(name, pattern) for name in taken[group]):
                    continue
                if any(_matches(name, pattern) for name, _ in named):
                    why = f"of group {group} takes no parameter: groups before it take all that it matches"
                else:
                    why = f"of group {group} matches no parameter"
                problems.append(f"pattern {pattern!r} {why}")
        if problems:
            raise ValueError("; ".join(problems))
        return Routing(self, routes)


class Route(NamedTuple):
    """One parameter in its group."""

    name: str
    shape: tuple[int, ...]
    block: Block
    rule: Any


class Routing(NamedTuple):
    """Every parameter in its group; ``str`` is the table that a run prints at its start."""

    rules: Rules
    routes: dict[str, list[Route]]

    def __str__(self) -> str:
        rows = [("group", "rule", "parameters", "elements", "largest block", "state B/element")]
        for group, routes in self.routes.items():
            by_rule: dict[str, list[Route]] = {}
            for route in routes:
                by_rule.setdefault(type(route.rule).__name__, []).append(route)
            for rule, some in by_rule.items():
                elements = sum(math.prod(route.shape) for route in some)
                largest = max((math.prod(route.block.shape) for route in some), default=0)
                state = sum(state_bytes(route.rule, route.shape) for route in some)
                each = f"{state / max(elements, 1):.4g}"
                rows.append((group, rule, str(len(some)), f"{elements:,}", f"{largest:,}", each))
        return table(rows)


def state_bytes(rule: Any, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a parameter's state over all ranks, padding and counters left out."""
    numel = math.prod(shape)
    total = numel * sum(dtype.itemsize for dtype in rule.element_state().values())
    if hasattr(rule, "chunk_state"):
        total += -(-numel // rule.finest) * sum(dtype.itemsize for dtype in rule.chunk_state().values())
    if hasattr(rule, "block_state"):
        lattice = Lattice(shape, rule.block_shape(shape))
        total += lattice.num_blocks * sum(first.nbytes for first in rule.block_state(lattice.block).values())
    return total


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as lines of text in columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def rule_for(rule: Any, shape: tuple[int, ...]) -> Any:
    """Returns the rule that ``rule`` names for parameters of this shape, ``rule`` itself unless it says otherwise."""
    return rule.for_shape(shape) if hasattr(rule, "for_shape") else rule


def stands_for(rule: Any, faster: str, plain: str) -> bool:
    """Returns whether a rule's method ``faster`` still does what ``plain`` does.

    A class that has another ``plain`` than the one it derives from, and not another ``faster``, is asked for ``plain``.
    """
    fast, slow = (next((cls for cls in type(rule).__mro__ if name in vars(cls)), None) for name in (faster, plain))
    return fast is not None and slow is not None and issubclass(fast, slow)


def whole_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape by which a rule is chosen: the parameter's own, or with the rows that other ranks hold of it
    (``part_of``; see ``vescale.rows``), so that it does not depend on how experts are dealt."""
    part = getattr(param, "part_of", None)
    return tuple(param.shape) if part is None else (part.total, *param.shape[1:])


# What torch's wrappers put into names: checkpoint_wrapper and torch.compile.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def unwrapped(name: str) -> str:
    """Returns a parameter's name as it was before modules were wrapped."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _not_patterns(patterns: Any) -> list[str]:
    """Why these are no patterns of a group."""
    if not isinstance(patterns, Iterable) or not all(isinstance(pattern, str) for pattern in patterns):
        return [f"expected a pattern or a list of patterns, got {patterns!r}"]
    counts = Counter(patterns)
    return [f"pattern {pattern!r} stands there {count} times" for pattern, count in counts.items() if count > 1]


def _not_a_rule(rule: Any) -> list[str]:
    """Why this is no rule."""
    kind = type(rule).__name__
    if isinstance(rule, type):
        return [f"expected a rule, got the class {rule.__name__}: write {rule.__name__}(...)"]
    if not isinstance(rule, Rule) or not dataclasses.is_dataclass(rule):
        return [f"{kind} is no rule: a dataclass with finest, block_shape, element_state and prepare"]
    taken = [field.name for field in dataclasses.fields(rule) if field.name in ("params", "param_names", "name")]
    if taken:
        return [f"{kind} has a field {taken[0]}, which means something else in a parameter group"]
    if hasattr(rule, "block") and not isinstance(rule, BlockRule):
        return [f"{kind} has block, so it needs apply and wire_dtype too"]
    return []


def _matches(name: str, pattern: str) -> bool:
    name = unwrapped(name)
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
