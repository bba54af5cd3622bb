"""The command that trains: `python -m vescale.train recipe=llama_debug_muon`, alone or under torchrun.

Four hops: YAML -> `compose` (plain values) -> `resolve` (objects) -> `Trainer` (the loop). torch is imported only after
composition, so that `--help`, `--cfg job` and mistyped keys answer at once. Whatever is wrong with the input is said in
one line on stderr, with exit code 2, before anything is allocated.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale.keys import SPREADING, WATCHING, among, flat
from vescale.resolve import Refused, choices, resolve

if TYPE_CHECKING:
    from vescale.trainer import Trainer

CHECK = "--check"  # answers whether a command would be refused, and runs nothing
# Characters of a run's name before it is cut and told apart by a hash; most file systems stop at 255.
LONGEST_NAME = 120


class Point(NamedTuple):
    """One composed configuration: plain values, and what a command line needs to compose it again."""

    config: dict[str, Any]
    overrides: list[str]
    options: list[str]
    follows: dict[str, str]  # keys whose values are taken from another key, with that key


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

    ours = [word for word in argv if word.lstrip("+~").partition("=")[0] in ("hydra.run.dir", "hydra.sweep.dir")]
    if ours:
        raise ValueError(f"{ours[0]}: Hydra only composes here and makes no folder; the run's is run_dir=...")
    _check_folders(argv)
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


def _check_folders(argv: Sequence[str]) -> None:
    """Refuses what Hydra would pass over in silence, or blame others for what comes of it, in a user's folder.

    A file of a shipped one's name is hidden by that; a recipe without its header has its keys below `recipe`.
    """
    pairs = [(*word.partition("=")[::2], after) for word, after in zip(argv, [*argv[1:], ""], strict=False)]
    folders = [Path(value or after) for key, value, after in pairs if key in ("--config-dir", "-cd")]
    names = [name for key, value, _ in pairs if key == "recipe" for name in value.split(",")]
    shipped = resources.files("recipes")
    for path in (path for folder in folders for path in sorted(folder.glob("*/*.yaml"))):
        hides = shipped.joinpath(path.parent.name, path.name)
        if hides.is_file() and hides.read_bytes() != path.read_bytes():
            raise ValueError(f"{path}: a shipped file has this name, and hides it: give it another")
    for path in (folder / "recipe" / f"{name}.yaml" for folder in folders for name in names):
        if path.is_file() and not re.match(r"#\s*@package\s+_global_\s*$", path.read_text(), re.MULTILINE):
            raise ValueError(
                f"{path}: expected a first line `# @package _global_`: its keys are the configuration's own"
            )


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
    written = flat(typing.cast(dict[str, Any], OmegaConf.to_container(config)))
    return Point(plain, overrides, _options(settings), _followed(written))


def _followed(written: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys that take their values from another, `${trainer.steps}` or `${part:${trainer.steps},0.04}`."""
    found = {key: re.search(r"\$\{([\w.]+)\}", value) for key, value in written.items() if isinstance(value, str)}
    return {key: source[1] for key, source in found.items() if source}


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
        own = f"your own {group}/{name}.yaml is found with --config-dir FOLDER"
        return f"unknown {group} {name!r}: {choices(name, problem.options)} ({own})"
    cause = problem.__cause__ if isinstance(problem.__cause__, (ConfigAttributeError, ConfigKeyError)) else problem
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(cause.parent_node, DictConfig):
        return f"unknown key {str(cause.full_key)!r}: {_known_keys(cause)}"
    if isinstance(problem, OverrideParseException):
        return f"cannot read {problem.override!r}: expected key=value, and quotes around values with ,[]{{}}()$\"'"
    if isinstance(problem, InterpolationResolutionError):
        line = str(problem).partition("\n")[0]
        return f"{problem.full_key}: {line.partition('resolving interpolation: ')[2] or line}"
    return " ".join(str(problem).split())


def _known_keys(problem: Any) -> str:  # OmegaConf's
    """Returns what may be set where a key is unknown, and where else there is one of that name."""
    from omegaconf import OmegaConf

    mapping, wrong = problem.parent_node, str(problem.key)
    keys = [str(key) for key in mapping if key not in ("hydra", "_target_")]
    known = choices(wrong, keys) if keys else f"nothing is there yet; +{problem.full_key}=... adds it"
    everything = flat(typing.cast(dict[str, Any], OmegaConf.to_container(mapping._get_root())))
    places = [key for key in everything if key.endswith(f".{wrong}") and not key.startswith("hydra.")]
    return known + (f"; there is {', '.join(places[:4])}" if places else "")


# --- the run's folder ---


def _name_run(config: dict[str, Any], recipe: str | None, overrides: Sequence[str]) -> None:
    """Fills in `name` and `run_dir`, from the command alone (never a clock).

    Every rank gets the same, and the same command resumes.
    """
    name = config.get("name") or os.environ.get("VESCALE_RUN_ID") or default_name(recipe, overrides)
    if not config.get("run_dir") and (str(name) in (".", "..") or {"/", "\\", "\0"} & {*str(name)}):
        raise ValueError(f"name: expected the name of a folder in runs/, got {str(name)!r}; run_dir=... takes a path")
    config["name"] = str(name) if isinstance(name, int | float) else name  # YAML takes name=7 for a number
    config["run_dir"] = config.get("run_dir") or f"runs/{name}"
    tracking = config.get("tracking") or {}
    if tracking.get("name", "") is None and "WANDB_NAME" not in os.environ:
        tracking["name"] = config["name"]


def default_name(recipe: str | None, overrides: Sequence[str]) -> str:
    """Returns the recipe and whatever else the command line changed that changes numbers.

    `llama_debug_muon-optimizer_adamw`: letters, digits and `-_.`, which mean nothing to a shell or to Hydra.
    """
    changes = sorted(o.lstrip("+~") for o in overrides)
    kept = [change for change in changes if not among(change.partition("=")[0], ("recipe", *WATCHING))]
    name = re.sub(r"[^\w.-]+", "_", "-".join([recipe or "train", *kept]), flags=re.ASCII)
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


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
    differ = [
        key
        for key in sorted({*old, *new})
        if old.get(key, missing) != new.get(key, missing) and not among(key, WATCHING + SPREADING)
    ]
    if differ:
        told = "; ".join(f"{key} was {old.get(key, missing)}, now {new.get(key, missing)}" for key in differ)
        kept = " ".join(f"{key}={old[key]}" for key in differ if among(key, ["trainer.schedule"]) and key in old)
        or_keep = f", or keep its schedule: {kept}" if kept else ""  # which follows trainer.steps
        raise ValueError(
            f"{folder} holds a run of another configuration: {told}; give this run its own name=...{or_keep}"
        )


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
    codes = []
    for i, point in enumerate(found):
        print(f"[{i + 1}/{len(found)}] {' '.join(point.overrides)}", flush=True)
        command = [sys.executable, "-m", "vescale.train", *point.options, *point.overrides]
        codes.append(abs(subprocess.call(command)))
    print("\n".join(_sweep_table(found, codes)), flush=True)
    return max(codes)


def _sweep_table(found: Sequence[Point], codes: Sequence[int]) -> list[str]:
    """Returns a line for each point, the lowest validation loss first."""
    from vescale.tracking import read_metrics

    rows = []
    for point, code in zip(found, codes, strict=True):
        path, last = Path(point.config["run_dir"]) / "metrics.jsonl", dict[str, Any]()
        for row in read_metrics(path) if path.is_file() else ():
            last |= row
        loss, failed = last.get("validation_loss", math.inf), f"  (exit code {code})" if code else ""
        said = "-" if math.isinf(loss) else f"{loss:.4f}"
        rows.append((bool(code), loss, f"{said:>15}  {last.get('step', 0):>6}  {' '.join(point.overrides)}{failed}"))
    lines = [line for _, _, line in sorted(rows)]
    return ["", "validation loss    step  point", *lines]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    0; 2 for input that was refused with one line; 75 after a signal, to be run again; 1 for a run that failed; 130
    after Ctrl-C.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        _say("stopped; the same command goes on from the newest checkpoint")
        return 130  # 128 + SIGINT, as a shell has it


def _run(argv: Sequence[str]) -> int:
    words = [word for word in argv if word != CHECK]
    try:
        found = points(words)
        if len(found) > 1 or {"-m", "--multirun"} & {*words}:
            return sweep(found)
        trainer = _checked(found[0]) if found else None  # Hydra printed what was asked for
    except (ValueError, OSError, NotImplementedError) as problem:
        return _refuse(problem)
    return 0 if trainer is None or CHECK in argv else _train(trainer)


def _train(trainer: Trainer) -> int:
    """Runs; what stops a run is one line, and a mistake of the program is a traceback."""
    from vescale.capacity import is_shortage
    from vescale.stop import Stopped

    try:
        trainer.run()
    except Stopped as stopped:
        short = is_shortage(stopped.__cause__)  # the other ranks may have had enough
        if short:
            _show_plan(trainer)
        return _fail(str(stopped), stopped.code, anyone=short)
    except (ValueError, OSError, NotImplementedError) as problem:  # of the data, a folder or a disk, on this rank
        return _fail(" ".join(str(problem).split()), 1, anyone=True)
    except RuntimeError as problem:
        if not _is_of_another_rank(problem):
            raise
        time.sleep(1)  # seconds, for the rank whose failure this is to speak first
        return _fail("another rank has ended; the same command goes on from the newest checkpoint", 1, anyone=True)
    return 0


def _show_plan(trainer: Trainer) -> None:
    """Prints where the plan has a rank's memory, unless there is not even enough for that."""
    from vescale.mesh import world_size
    from vescale.shortage import table

    with suppress(Exception):  # the line that follows is worth more
        print(table(prepare(trainer.settings), ranks=world_size()), file=sys.stderr, flush=True)


def _is_of_another_rank(problem: RuntimeError) -> bool:
    """Whether a collective failed because a peer is gone: gloo's and NCCL's words."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    return any(word in str(problem) for word in words)


def _checked(point: Point) -> Trainer | None:
    """Returns a trainer that may run, or None after a dry run has printed its plan."""
    from vescale.mesh import world_size

    world, config = world_size(), point.config
    try:
        trainer = prepare(config)
    except Refused as problem:
        raise problem.at_the_source(point.follows) from None
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
    from vescale.logit_clip import watched_heads

    trainer.check_ranks(world)
    seq_len = trainer.data_config.seq_len
    total, flops = trainer.model_config.num_parameters(), trainer.model_config.flops_per_token(seq_len)
    size = f"{total:,} parameters, {flops:.4g} FLOPs per token at {seq_len} tokens, {world} rank{'s' * (world > 1)}"
    blueprint = Blueprint.of_job(trainer, world)
    clip = trainer.logit_clip
    logits = "" if clip is None else f", {4 * watched_heads(clip, trainer.model):,} of largest logits"
    return f"{trainer.routing}\n{size}\n{blueprint.held()}{logits}\n{blueprint.describe()}"


def _refuse(problem: Exception) -> int:
    """Says what is wrong with the input in one line, and returns 2.

    Rank 0 speaks first; if it found nothing wrong it does not end this process, and the others speak for themselves.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(5)  # seconds; torchrun ends this process within a tenth of one after rank 0's exit
    return _fail(" ".join(str(problem).split()), 2, anyone=True)


def _fail(line: str, code: int, *, anyone: bool = False) -> int:
    """Says why the process ends, also to torchrun's report, and returns its exit code."""
    _say(line, anyone=anyone)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        when = {"timestamp": str(int(time.time()))}
        Path(report).write_text(json.dumps({"message": {"message": line, "extraInfo": {"py_callstack": line, **when}}}))
    return code


def _say(line: str, *, anyone: bool = False) -> None:
    """Prints a line on stderr, once for all ranks unless ``anyone`` may speak."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or anyone:
        print("vescale.train:" if rank == "0" else f"vescale.train: rank {rank}:", line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
