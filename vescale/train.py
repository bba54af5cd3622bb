"""The command that trains: `python -m vescale.train recipe=llama_debug_muon`, alone or under torchrun.

Four hops: YAML -> `compose` (plain values) -> `resolve` (objects) -> `Trainer` (the loop). torch is imported only after
composition, so that `--help`, `--cfg job` and mistyped keys answer at once. Whatever is wrong with the input is said in
one line on stderr, with exit code 2, before anything is allocated.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vescale.trainer import Trainer

# Keys that watch a run without changing a number in it: they name no run, and may differ on resume.
WATCHING: tuple[str, ...] = (
    "name",
    "run_dir",
    "dry_run",
    "world_size",
    "tracking",
    "trainer.log_every",
    "trainer.eval_every",
    "trainer.eval_sequences",
    "trainer.save_every",
    "trainer.keep",
)
# Keys that may differ on resume too: how far to go, and how the same sums are spread over ranks (equal to rounding, not
# bit for bit).
SPREADING: tuple[str, ...] = (
    "trainer.steps",
    "trainer.micro_batch",
    "parallelism.dp_shard",
    "parallelism.zero",
    "parallelism.reshard_after_forward",
    "parallelism.max_padding",
)
BROKEN = object()  # stands for what could not be built and has been complained about
# Characters of a run's name before it is cut and told apart by a hash; most file systems stop at 255.
LONGEST_NAME = 120


class Point(NamedTuple):
    """One composed configuration: plain values, and what a command line needs to compose it again."""

    config: dict[str, Any]
    overrides: list[str]
    options: list[str]


# --- composition: the only use of Hydra ---


def compose(argv: Sequence[str]) -> dict[str, Any]:
    """Returns the configuration that `argv` names, resolved to plain values, with `name` and `run_dir` filled in.

    Args:
        argv: What follows `python -m vescale.train` on the command line.

    Raises:
        ValueError: In one line, for an unknown recipe, an unknown key, a value that does not parse, or a sweep.
    """
    found = points(argv)
    if len(found) != 1:
        raise ValueError(f"expected one configuration, got {len(found)}: a sweep (-m) is for python -m vescale.train")
    return found[0].config


def points(argv: Sequence[str], command: str = "train") -> list[Point]:
    """Returns every configuration that `argv` names: one, or the points of a sweep (-m), or none if Hydra only printed
    what was asked for (--cfg, --info).

    YAML may use two resolvers: `${by_model:{llama8b: 3e-4, ...}}`, a number tuned for the chosen model, and
    `${part:${trainer.steps},0.04}`, a whole number that is a fraction of another.

    Args:
        argv: What follows `python -m vescale.train` on the command line.
        command: `train`, or the name of another file beside `recipes/train.yaml` that composes it and more.

    Raises:
        ValueError: In one line, as `compose`.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    found: list[Point] = []
    refused: list[Exception] = []

    def keep(config: DictConfig) -> None:
        try:
            found.append(_point(config, HydraConfig.get()))
        except (ValueError, OmegaConfBaseException) as problem:  # kept from Hydra, which would print it over many lines
            refused.append(problem)

    OmegaConf.register_new_resolver("by_model", _by_model, replace=True)
    OmegaConf.register_new_resolver("part", _part, replace=True)
    with tempfile.TemporaryDirectory() as scratch, _command_line([f"hydra.sweep.dir={scratch}", *argv], command):
        try:
            hydra.main(version_base="1.3", config_path="pkg://recipes", config_name=command)(keep)()
        except (HydraException, OmegaConfBaseException) as problem:
            refused.append(problem)
    if refused:
        raise ValueError(_explain(refused[0])) from refused[0]
    return found


def _point(config: Any, settings: Any) -> Point:  # OmegaConf's containers
    """Returns one configuration as plain values, its run named."""
    from omegaconf import OmegaConf

    if not settings.launcher._target_.endswith(".BasicLauncher"):
        raise ValueError(
            "hydra/launcher: the points of a sweep are processes of this machine; on a cluster, submit "
            "launch/slurm.sbatch once per point"
        )
    plain = typing.cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    overrides = list(settings.overrides.task)
    _name_run(plain, settings.runtime.choices.get("recipe"), overrides)
    return Point(plain, overrides, _options(settings))


@contextmanager
def _command_line(argv: Sequence[str], command: str) -> Iterator[None]:
    """Lets Hydra read `argv`, and raise what it would otherwise print over many lines."""
    arguments, full_error, said = sys.argv, os.environ.get("HYDRA_FULL_ERROR"), io.StringIO()
    words = sorted(argv, key=_is_override)  # argparse wants them together, people put options anywhere
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [f"python -m vescale.{command}", *words], "1"
    try:
        with redirect_stderr(said):
            yield
    except SystemExit as end:  # of argparse, for an option that it does not know
        if end.code:
            raise ValueError(said.getvalue().rpartition("error: ")[2]) from None
        raise
    finally:
        sys.argv = arguments
        os.environ.pop("HYDRA_FULL_ERROR") if full_error is None else os.environ.update(HYDRA_FULL_ERROR=full_error)


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def _by_model(table: Mapping[str, Any]) -> Any:  # numbers, mostly
    """Returns the entry of `table` for the chosen model.

    Tuned numbers follow the model and the rule, never the recipe.
    """
    from hydra.core.hydra_config import HydraConfig

    model = HydraConfig.get().runtime.choices["model"]
    if model not in table:
        raise ValueError(
            f"no number tuned for model={model} (tuned for: {', '.join(map(str, table))}); set this key yourself"
        )
    return table[model]


def _part(whole: Any, fraction: float) -> Any:  # whatever the user gave for it
    """Returns `int(whole * fraction)`; what is no number comes back as it is, to be refused by the field it is for."""
    return int(whole * fraction) if isinstance(whole, int | float) else whole


def _options(settings: Any) -> list[str]:  # Hydra's own configuration
    """Returns the options (not overrides) that the same composition needs in a new process."""
    folders = [source.path for source in settings.runtime.config_sources if source.provider == "command-line"]
    return [f"--config-name={settings.job.config_name}", *(f"--config-dir={folder}" for folder in folders)]


def _explain(problem: Exception) -> str:
    """Returns Hydra's or OmegaConf's complaint as one line that lists what would have been right."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf import DictConfig
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError

    if isinstance(problem, MissingConfigException) and problem.options:
        group, _, name = str(problem.missing_cfg_file).rpartition("/")
        return f"unknown {group} {name!r}: {_choices(name, problem.options)}"
    cause = problem.__cause__ if isinstance(problem.__cause__, (ConfigAttributeError, ConfigKeyError)) else problem
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(cause.parent_node, DictConfig):
        keys = [str(key) for key in cause.parent_node if key not in ("hydra", "_target_")]
        return f"unknown key {str(cause.full_key)!r}: {_choices(str(cause.key), keys)}"
    if isinstance(problem, OverrideParseException):
        return f"cannot read {problem.override!r}: expected key=value, and quotes around values with ,[]{{}}()$\"'"
    if isinstance(problem, InterpolationResolutionError):
        line = str(problem).partition("\n")[0]
        return f"{problem.full_key}: {line.partition('resolving interpolation: ')[2] or line}"
    return " ".join(str(problem).split())


def _choices(wrong: str, right: Iterable[str]) -> str:
    """Returns the list of right names, and the one that was probably meant."""
    names = sorted(right)
    close = difflib.get_close_matches(wrong, names, n=1)
    return f"choose from {', '.join(names) or 'nothing'}" + (f" -- did you mean {close[0]}?" if close else "")


# --- the run's folder ---


def _name_run(config: dict[str, Any], recipe: str | None, overrides: Sequence[str]) -> None:
    """Fills in `name` and `run_dir`, from the command alone (never a clock).

    Every rank gets the same, and the same command resumes.
    """
    name = config.get("name") or os.environ.get("VESCALE_RUN_ID") or default_name(recipe, overrides)
    config["name"] = str(name) if isinstance(name, int | float) else name  # YAML takes name=7 for a number
    config["run_dir"] = config.get("run_dir") or f"runs/{name}"
    tracking = config.get("tracking") or {}
    if tracking.get("name", "") is None and "WANDB_NAME" not in os.environ:
        tracking["name"] = config["name"]


def default_name(recipe: str | None, overrides: Sequence[str]) -> str:
    """Returns the recipe and whatever else the command line changed that changes numbers.

    `llama_debug_muon,optimizer=adamw`.
    """
    changes = sorted(o.lstrip("+~") for o in overrides)
    kept = [change for change in changes if not _among(change.partition("=")[0], ("recipe", *WATCHING))]
    name = ",".join([recipe or "train", *kept]).translate({ord(c): "_" for c in "/\\ \t'\""})
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def _among(key: str, keys: Iterable[str]) -> bool:
    return any(key == k or key.startswith(k + ".") for k in keys)


def check_same_run(config: Mapping[str, Any]) -> None:
    """Raises if the run's folder holds a checkpoint whose numbers come from another configuration.

    Raises:
        ValueError: Every key that differs, with both values.
    """
    from vescale.checkpoint import newest

    folder = Path(config["run_dir"])
    if newest(folder / "checkpoints") is None:  # a run that left none begins anew
        return
    try:
        old = flat(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, AttributeError) as problem:
        raise ValueError(f"{folder}/config.json is damaged: {problem}; give this run its own name=...") from None
    new, missing = flat(json.loads(json.dumps(config))), "nothing"
    told = [
        f"{key} was {old.get(key, missing)}, now {new.get(key, missing)}"
        for key in sorted({*old, *new})
        if old.get(key, missing) != new.get(key, missing) and not _among(key, WATCHING + SPREADING)
    ]
    if told:
        raise ValueError(
            f"{folder} holds a run of another configuration: {'; '.join(told)}; give this run its own name=..."
        )


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as one dictionary with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


# --- from YAML to objects ---


def resolve(node: Any, where: str = "") -> Any:
    """Returns `node` with every mapping that has a `_target_` replaced by that dataclass, built from the mapping's
    other keys.

    Args:
        node: Plain values of a composed configuration, whole or a part of it.
        where: The dotted key of `node`, for messages.

    Raises:
        ValueError: Unknown classes, unknown, missing or ill-typed fields, several together.
    """
    problems: list[str] = []
    built = _build(node, where, problems)
    if problems:
        raise ValueError("; ".join(problems))
    return built


def _build(node: Any, where: str, problems: list[str]) -> Any:
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
        problems.append(f"{where}: {problem}" if where else str(problem))
        return BROKEN


def _at(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _find(target: str, where: str, problems: list[str]) -> Any:
    """Returns the dataclass called `target` ("optimizers.Muon")."""
    module, _, name = str(target).rpartition(".")
    try:
        room = importlib.import_module(module)
    except (ImportError, ValueError):
        problems.append(f"{where}: no module {module!r} to take {target!r} from")
        return None
    kind = getattr(room, name, None)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind
    public = [
        n for n in (getattr(room, "__all__", None) or vars(room)) if dataclasses.is_dataclass(getattr(room, n, None))
    ]
    problems.append(f"{where}: no dataclass {name!r} in {module}: {_choices(name, public)}")
    return None


def _fit_fields(kind: Any, values: dict[str, Any], where: str, problems: list[str]) -> None:
    """Changes `values` to what the fields of `kind` want."""
    problems += _key_problems(kind, values, where)
    fields, hints = {f.name: f for f in dataclasses.fields(kind)}, _hints(kind)
    for key in [key for key in values if key in hints and key in fields]:
        if values[key] is BROKEN or (values[key] is None and fields[key].default is None):  # None: "find out"
            continue
        try:
            values[key] = fit(values[key], hints[key])
        except TypeError as problem:
            problems.append(f"{_at(where, key)}: {problem}")


def _key_problems(kind: Any, values: Mapping[str, Any], where: str) -> list[str]:
    """Returns which of the values `kind` does not know, and which it lacks."""
    fields, empty = {f.name: f for f in dataclasses.fields(kind) if f.init}, dataclasses.MISSING
    needed = [name for name, f in fields.items() if f.default is empty and f.default_factory is empty]
    of = f"{kind.__name__}: " if where else ""
    return [
        *(f"unknown key '{_at(where, key)}': {of}{_choices(key, fields)}" for key in values if key not in fields),
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
    if hint is torch.dtype and isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype):
        return getattr(torch, value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not (value in arms if origin is typing.Literal else _is(value, origin or hint)):
        raise TypeError(f"expected {_words(hint)}, got {value!r}")
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


# --- the command ---


def prepare(config: Mapping[str, Any]) -> Trainer:
    """Returns a trainer that has checked everything that can be checked without memory, peers or files written.

    Raises:
        ValueError: What is wrong with the input.
    """
    from vescale.trainer import Trainer

    return Trainer(resolve({"_target_": "vescale.trainer.RunConfig", **config}), settings=dict(config))


def sweep(found: Sequence[Point]) -> int:
    """Runs each point as a process of its own, one after another, so that no process group outlives its run; returns
    the worst exit code.

    Raises:
        ValueError: Under torchrun, where every rank would run every point.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        raise ValueError(
            "-m cannot run under torchrun: every rank would start every point; use python -m vescale.train -m ..."
        )
    folders = [point.config["run_dir"] for point in found]
    if len({*folders}) < len(folders):
        raise ValueError(
            f"the points of a sweep would share the folder {folders[0]}: leave out name=, run_dir= and VESCALE_RUN_ID"
        )
    worst = 0
    for i, point in enumerate(found):
        print(f"[{i + 1}/{len(found)}] {' '.join(point.overrides)}", flush=True)
        worst = max(
            worst, abs(subprocess.call([sys.executable, "-m", "vescale.train", *point.options, *point.overrides]))
        )
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 2 for input that was refused with one line, 130 after Ctrl-C."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        _say("stopped; the same command goes on from the newest checkpoint")
        return 130  # 128 + SIGINT, as a shell has it


def _run(argv: Sequence[str]) -> int:
    try:
        found = points(argv)
        if len(found) > 1 or {"-m", "--multirun"} & {*argv}:
            return sweep(found)
        trainer = _checked(found[0].config) if found else None  # Hydra printed what was asked for
    except (ValueError, OSError, NotImplementedError) as problem:
        return _refuse(problem)
    if trainer is not None:
        trainer.run()
    return 0


def _checked(config: dict[str, Any]) -> Trainer | None:
    """Returns a trainer that may run, or None after a dry run has printed its plan."""
    from vescale.mesh import world_size

    world, trainer = world_size(), prepare(config)
    if config["dry_run"]:
        print(describe(trainer, config["world_size"] or world))
        return None
    check_same_run(config)
    trainer.check(world)
    return trainer


def describe(trainer: Trainer, world: int) -> str:
    """Returns the routing, the size and the plan of every unit on ``world`` ranks; no process, no memory for weights.

    Args:
        trainer: Of the run; it is used up.
        world: Number of ranks; plans are the same on all of them.

    Raises:
        ValueError: If such a run would be refused.
    """
    from vescale.blueprint import Blueprint

    trainer.check_ranks(world)
    seq_len = trainer.data_config.seq_len
    total, flops = trainer.model_config.num_parameters(), trainer.model_config.flops_per_token(seq_len)
    size = f"{total:,} parameters, {flops:.4g} FLOPs per token at {seq_len} tokens, {world} ranks"
    return f"{trainer.routing}\n{size}\n{Blueprint(trainer, world).describe()}"


def _refuse(problem: Exception) -> int:
    """Says what is wrong with the input in one line, and returns 2.

    Rank 0 speaks first; if it found nothing wrong it does not end this process, and the others speak for themselves.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(5)  # seconds; torchrun ends this process within a tenth of one after rank 0's exit
    _say(" ".join(str(problem).split()), anyone=True)
    return 2


def _say(line: str, *, anyone: bool = False) -> None:
    """Prints a line on stderr, once for all ranks unless ``anyone`` may speak."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or anyone:
        print("vescale.train:" if rank == "0" else f"vescale.train: rank {rank}:", line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
