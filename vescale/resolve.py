"""From YAML to objects: a mapping with a `_target_` becomes that dataclass, and every wrong value is named at once."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BROKEN = object()  # stands for what could not be built and has been complained about


class Problem(NamedTuple):
    """One complaint, and the dotted key that it is about: of a value, or of an object that refuses its own."""

    key: str
    text: str


class Refused(ValueError):
    """What is wrong with a configuration, in one line: a complaint for each wrong value.

    Args:
        problems: The complaints.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.text for problem in problems))
        self.problems = problems

    def at_the_source(self, follows: Mapping[str, str]) -> Refused:
        """Returns the same with one complaint for each mistake, which names the key that the value was given to.

        Args:
            follows: Keys that take their values from another, with that key.
        """
        named = {problem.key for problem in self.problems}
        kept = [problem for problem in self.problems if follows.get(problem.key) not in named]
        return Refused([problem._replace(text=problem.text + _sources(problem, follows)) for problem in kept])


def _sources(problem: Problem, follows: Mapping[str, str]) -> str:
    """Says where the values come from that are complained about."""
    said = []
    for key, source in follows.items():
        of, _, field = key.rpartition(".")
        if key == problem.key or (of == problem.key and re.search(rf"\b{field}\b", problem.text)):
            said.append(f"{key} follows {source}")
    return f" ({', '.join(said)})" if said else ""


def resolve(node: Any, where: str = "") -> Any:
    """Returns `node` with every mapping that has a `_target_` replaced by that dataclass, built from the mapping's
    other keys.

    Args:
        node: Plain values of a composed configuration, whole or a part of it.
        where: The dotted key of `node`, for messages.

    Raises:
        Refused: Unknown classes, unknown, missing or ill-typed fields, several together.
    """
    problems: list[Problem] = []
    built = _build(node, where, problems)
    if problems:
        raise Refused(problems)
    return built


def _build(node: Any, where: str, problems: list[Problem]) -> Any:
    if isinstance(node, list):
        return [_build(item, _at(where, i), problems) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    before = len(problems)
    values = {key: _build(value, _at(where, key), problems) for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return values
    kind = _find(node["_target_"], _at(where, "_target_"), problems)
    if kind is not None:
        _fit_fields(kind, values, where, problems)
    if len(problems) > before:
        return BROKEN
    try:
        return kind(**values)
    except ValueError as problem:
        problems.append(Problem(where, f"{where}: {problem}" if where else str(problem)))
        return BROKEN


def _at(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _find(target: str, where: str, problems: list[Problem]) -> Any:
    """Returns the dataclass called `target` ("optimizers.Muon")."""
    module, _, name = str(target).rpartition(".")
    try:
        room = importlib.import_module(module)
    except ImportError as problem:
        broken = isinstance(problem, ModuleNotFoundError) and not str(target).startswith(str(problem.name))
        why = f": {problem}" if broken or not isinstance(problem, ModuleNotFoundError) else "; is it on PYTHONPATH?"
        problems.append(Problem(where, f"{where}: no module {module!r} to take {target!r} from{why}"))
        return None
    except ValueError:
        problems.append(Problem(where, f"{where}: no module {module!r} to take {target!r} from"))
        return None
    kind = getattr(room, name, None)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind
    public = [
        n for n in (getattr(room, "__all__", None) or vars(room)) if dataclasses.is_dataclass(getattr(room, n, None))
    ]
    problems.append(Problem(where, f"{where}: no dataclass {name!r} in {module}: {choices(name, public)}"))
    return None


def _fit_fields(kind: Any, values: dict[str, Any], where: str, problems: list[Problem]) -> None:
    """Changes `values` to what the fields of `kind` want."""
    problems += [Problem(where, text) for text in _key_problems(kind, values, where)]
    fields, hints = {f.name: f for f in dataclasses.fields(kind)}, _hints(kind)
    for key in [key for key in values if key in hints and key in fields]:
        if values[key] is BROKEN or (values[key] is None and fields[key].default is None):  # None: "find out"
            continue
        try:
            values[key] = fit(values[key], hints[key])
        except TypeError as problem:
            problems.append(Problem(_at(where, key), f"{_at(where, key)}: {problem}"))


def _key_problems(kind: Any, values: Mapping[str, Any], where: str) -> list[str]:
    """Returns which of the values `kind` does not know, and which it lacks."""
    fields, empty = {f.name: f for f in dataclasses.fields(kind) if f.init}, dataclasses.MISSING
    needed = [name for name, f in fields.items() if f.default is empty and f.default_factory is empty]
    of = f"{kind.__name__}: " if where else ""
    return [
        *(f"unknown key '{_at(where, key)}': {of}{choices(key, fields)}" for key in values if key not in fields),
        *(f"missing key '{_at(where, name)}': {of}it has no default" for name in needed if name not in values),
    ]


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except NameError:  # a name that exists for the type checker only: the class checks for itself
        return {}


def fit(value: Any, hint: Any) -> Any:
    """Returns a YAML value as its field's annotation wants it: "float32" as a torch.dtype, a list as a tuple, 3 as 3.0.

    Raises:
        TypeError: Says what was expected and what was got.
    """
    import torch

    origin, arms = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _fit_any(value, hint, arms)
    if origin in (tuple, Sequence) and isinstance(value, list):
        kinds = [arms[0]] * len(value) if origin is Sequence or arms[1:] == (Ellipsis,) else arms
        if len(kinds) != len(value):
            raise TypeError(f"expected {len(kinds)} values, got {value!r}")
        return tuple(fit(item, kind) for item, kind in zip(value, kinds, strict=True))
    if origin is Mapping and isinstance(value, dict):
        return {fit(key, arms[0]): fit(item, arms[1]) for key, item in value.items()}
    if hint is torch.dtype and isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype):
        return getattr(torch, value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not (value in arms if origin is typing.Literal else _is(value, origin or hint)):
        target = (
            f", by _target_: {hint.__module__}.{hint.__name__}"
            if isinstance(hint, type) and dataclasses.is_dataclass(hint)
            else ""
        )
        raise TypeError(f"expected {_words(hint)}{target}, got {value!r}")
    return value


def _is(value: Any, kind: Any) -> bool:
    """Returns whether `value` is a `kind`; True is no int, and what cannot be asked is left to the class itself."""
    if isinstance(value, bool) or kind is typing.Any:
        return kind in (bool, typing.Any)
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that is not `runtime_checkable`
        return True


def _fit_any(value: Any, hint: Any, arms: tuple[Any, ...]) -> Any:
    """Returns `value` as the first of the annotation's alternatives that takes it as it is.

    Else the first that converts it.
    """
    if type(value) in arms:
        return value
    for arm in arms:
        try:
            return fit(value, arm)
        except TypeError:
            continue
    raise TypeError(f"expected {_words(hint)}, got {value!r}")


def _words(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "").replace("collections.abc.", "")


def choices(wrong: str, right: Iterable[str]) -> str:
    """Returns the list of right names, and the one that was probably meant."""
    names = sorted(right)
    close = difflib.get_close_matches(wrong, names, n=1)
    return f"choose from {', '.join(names) or 'nothing'}" + (f" -- did you mean {close[0]}?" if close else "")
