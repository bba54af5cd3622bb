"""The import law, and the list of private torch names: what holds the rooms apart, and what a new torch may break."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("vescale", "optimizers", "models", "recipes")

# Inside vescale a module imports only from rows above its own, or from its own row without a cycle.
LEVELS = (
    {"block", "shards"},
    {"planner"},
    {"partitions"},
    {"segments"},
    {"collectives", "placement", "checksum", "counting", "scratch", "whole_file", "host_read"},
    {"streams", "reductions", "comms", "elementwise"},
    {"ragged_tensor"},
    {"kernels"},
    {"dbuffer"},
    {"anatomy"},
    {"member"},
    {"aliases"},
    {"reduction"},
    {"unit"},
    {
        "shard_state",
        "state_hooks",
        "twin",
        "commit",
        "fsdp_module",
        "fsdp",
        "full_state",
        "meta_init",
        "rule",
        "run",
        "owners",
        "exchange",
        "sharing",
        "bucket",
        "steppable",
        "optimizer",
        "grad_norm",
    },
    {"backward_step", "logit_clip"},
    {
        "rows",
        "mesh",
        "checkpoint",
        "data",
        "resolve",
        "keys",
        "tracking",
        "feed",
        "watchdog",
        "stop",
        "profile",
        "garbage",
        "capacity",
        "peaks",
    },
    {"saver", "record", "deterministic", "health", "journal", "job", "feed", "run_lock", "preflight"},
    {"evaluation", "position"},
    {"trainer", "machine", "pipeline", "live"},
    {"blueprint", "uneven"},
    {"memory", "traffic", "simulate", "advice"},
    {"optimizer_step", "forecast", "comparison", "tables", "shortage"},
    {"train", "report", "export", "torchrun"},
    {"plan"},
)

# Private names that vescale, optimizers and models use; each is imported below.
PRIVATE = {
    "torch._C._distributed_c10d._dump_fr_trace_json": "which collectives each rank has called, when a run hangs",
    "torch._C._current_graph_task_id": "whether a backward is running: tells recomputation from a failed iteration",
    "torch._C._will_engine_execute_node": "models.Linear: whether a backward adds to the gradient or only asks for it",
    "torch._amp_foreach_non_finite_check_and_unscale_": "GradScaler.unscale_ on the runs of gradients",
    "torch._fused_adamw_": "the operator under torch.optim.AdamW(fused=True)",
    "torch._C.DisableTorchFunctionSubclass": "attributes of parameters that are DTensors, read at every step",
    "torch._foreach_add": "the counters of all runs in one launch",
    "torch._foreach_copy_": "what arrived is put in its places in one launch",
    "torch._foreach_mul_": "clip_grad_norm_: one launch for all gradients",
    "torch.Tensor._dtensor__new__": "the only way to make a DTensor subclass",
    "torch.autograd.profiler._is_profiler_enabled": "labels cost nothing while nobody records",
    "torch.autograd.Variable._execution_engine": "queue_callback at the end of backward, as FSDP2",
    "torch.distributed._symmetric_memory": "buffers that NCCL need not stage, as FSDP2",
    "torch.distributed.tensor._utils": "compute_local_shape_and_global_offset: what Shard leaves to a rank",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec and TensorMeta, which a DTensor is made of",
    "torch._subclasses.fake_tensor": "shapes without memory, for a simulated rank",
    "torch.cuda.memory._dump_snapshot": "who holds the device's memory; torch documents it by this name",
    "torch.cuda.memory._record_memory_history": "the same",
    "torch.nn.Parameter._post_accumulate_grad_hooks": "users' hooks fire on the sharded parameter",
    "torch.testing._internal.distributed.fake_pg": "a process group whose other ranks are made up",
    "torch.utils._python_dispatch": "live bytes and collectives, seen from outside; traceable subclasses, as FSDP2",
    "torch.utils._pytree": "inputs and outputs of modules, arguments of operators",
}


def test_no_file_has_both_sides_of_a_merge() -> None:
    suffixes = {".md", ".py", ".yaml", ".toml", ".sh", ".sbatch"}
    folders = (*PACKAGES, "tests", "launch")
    files = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    for path in files:
        if path.suffix in suffixes and path.is_file():
            assert not re.search(r"^(<{7}|>{7}) ", path.read_text(), flags=re.M), path.relative_to(ROOT)


def _sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def _level(module: str) -> int:
    return next(i for i, row in enumerate(LEVELS) if module in row)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_meet_only_in_yaml(package: str) -> None:
    others = {"vescale", "optimizers", "models", "recipes"} - {package}
    for path in _sources(package):
        for name in _imports(path):
            assert name.split(".")[0] not in others, f"{path.relative_to(ROOT)} imports {name}"


def test_vescale_imports_upward_only() -> None:
    edges: dict[str, set[str]] = {}
    for path in _sources("vescale"):
        module = path.relative_to(ROOT / "vescale").parts[0].removesuffix(".py")
        if module == "__init__":
            continue
        edges[module] = {
            name.split(".")[1] if name.count(".") else name for name in _imports(path) if name.startswith("vescale.")
        } - {module}
        for other in edges[module]:
            assert _level(other) <= _level(module), f"vescale.{module} imports vescale.{other} from a room above it"

    def reach(module: str, seen: tuple[str, ...]) -> None:
        assert module not in seen, f"a cycle: {' -> '.join((*seen, module))}"
        for other in edges.get(module, ()):
            reach(other, (*seen, module))

    for module in edges:
        reach(module, ())


@pytest.mark.parametrize("name", PRIVATE)
def test_every_private_torch_name_exists(name: str) -> None:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return
    pytest.fail(f"{name} is gone")


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_private_torch_names_are_listed() -> None:
    for package in PACKAGES:
        for path in _sources(package):
            tree = ast.parse(path.read_text())
            used = {_dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | set(_imports(path))
            for name in used:
                private = name.startswith("torch.") and any(
                    part.startswith("_") and not part.startswith("__") for part in name.split(".")
                )
                listed = any(name.startswith(known) or known.startswith(f"{name}.") for known in PRIVATE)
                assert not private or listed, f"{path.relative_to(ROOT)} uses {name}"
