"""Two nodes train as one: two agents that meet by address, in two network namespaces where the machine allows them.

Without root, or without iproute2, both agents are on this host; what is lost then is only that each node has an address
of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import free_port

from vescale.tracking import read_metrics

ROOT = Path(__file__).parents[2]
ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=16"),
    *("trainer.log_every=1", "trainer.eval_every=100", "trainer.eval_sequences=2", "trainer.save_every=2"),
    *("trainer.steps=4", "trainer.device=cpu", "tracking.mode=disabled"),
]


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


@pytest.fixture
def nodes() -> Iterator[list[tuple[list[str], str, str]]]:
    """Two nodes: what a command there begins with, the address of the first, and the interface to it."""
    names = [f"vescale{uuid.uuid4().hex[:6]}" for _ in range(2)]
    links = [f"v{name[-6:]}" for name in names]
    can = os.geteuid() == 0 and shutil.which("ip") is not None
    made = can and all([_ip("netns", "add", name) for name in names])
    made = made and _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
    for at, (name, link) in enumerate(zip(names, links, strict=True)):
        made = made and _ip("link", "set", link, "netns", name)
        made = made and _ip("-n", name, "addr", "add", f"10.213.77.{at + 1}/24", "dev", link)
        made = made and all(_ip("-n", name, "link", "set", device, "up") for device in (link, "lo"))
    if made:
        yield [(["ip", "netns", "exec", name], "10.213.77.1", link) for name, link in zip(names, links, strict=True)]
    else:
        yield [([], "127.0.0.1", "lo")] * 2
    for name in names if can else []:
        _ip("netns", "delete", name)


def test_two_nodes_of_one_rank_each_train_as_one(nodes: list[tuple[list[str], str, str]], tmp_path: Path) -> None:
    started, port = [], free_port()
    for rank, (begin, address, interface) in enumerate(nodes):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        env |= {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(port), "NPROC": "1"}
        words = ["bash", str(ROOT / "launch" / "torchrun.sh"), *ARGV, f"run_dir={tmp_path / 'run'}"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([*begin, *words], env={**env, "PYTHON": sys.executable}, **options))  # type: ignore[call-overload]
    said = [node.communicate(timeout=180)[0] for node in started]
    assert [node.returncode for node in started] == [0, 0], said
    own = ["\n".join(line for line in text.splitlines() if "[c10d]" not in line) for text in said]
    assert "2 ranks" in own[0] and own[1] == ""  # rank 0 alone speaks; torch warns of hosts without a name
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4]
