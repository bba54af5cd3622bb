"""Two nodes train as one: two agents that meet by address, each in a network namespace of its own.

The machine must allow namespaces: root, and iproute2. Where it does not, both agents are on this host; what is lost
then is only that each node has an address of its own, and the test's name says which of the two was run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from waiting import free_port

from vescale.tracking import read_metrics

ROOT = Path(__file__).parents[2]
ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=16"),
    *("trainer.log_every=1", "trainer.eval_every=100", "trainer.eval_sequences=2", "trainer.save_every=2"),
    *("trainer.steps=4", "trainer.device=cpu", "tracking.mode=disabled"),
]
GRADIENTS = 60_000  # bytes of a step's gradients that a rank sends the other: half of 30,000 float32, and more


class Node(NamedTuple):
    """Where an agent runs."""

    name: str  # of its namespace; "": this host
    address: str  # of node 0
    interface: str  # to the other node


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def _allowed() -> bool:
    """Whether this machine lets us make a network namespace."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"vescale{uuid.uuid4().hex[:6]}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except subprocess.CalledProcessError:
        return False
    return True


PLACE = "network-namespaces" if _allowed() else "one-host-as-this-machine-allows-no-namespaces"


@pytest.fixture(params=[PLACE])
def nodes(request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    """Two nodes; what cannot be made of the namespaces of a machine that allows them is an error."""
    if request.param != "network-namespaces":
        yield [Node("", "127.0.0.1", "lo")] * 2
        return
    names = [f"vescale{uuid.uuid4().hex[:6]}" for _ in range(2)]
    links = [f"v{name[-6:]}" for name in names]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for at, (name, link) in enumerate(zip(names, links, strict=True)):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"10.213.77.{at + 1}/24", "dev", link)
            for device in (link, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield [Node(name, "10.213.77.1", link) for name, link in zip(names, links, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _start(node: Node, *, rank: int, port: int, run_dir: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": node.interface}
    env |= {"NNODES": "2", "NODE_RANK": str(rank), "NPROC": "1", "PYTHON": sys.executable}
    env |= {"MASTER_ADDR": node.address, "MASTER_PORT": str(port)}
    inside = ["ip", "netns", "exec", node.name] if node.name else []
    words = ["bash", str(ROOT / "launch" / "torchrun.sh"), *ARGV, f"run_dir={run_dir}"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*inside, *words], env=env, **options)


def test_two_nodes_of_one_rank_each_train_as_one(nodes: list[Node], tmp_path: Path) -> None:
    port = free_port()
    started = [_start(node, rank=rank, port=port, run_dir=tmp_path / "run") for rank, node in enumerate(nodes)]
    said = [agent.communicate(timeout=180)[0] for agent in started]
    assert [agent.returncode for agent in started] == [0, 0], said
    own = ["\n".join(line for line in text.splitlines() if "[c10d]" not in line) for text in said]
    assert "2 ranks" in own[0] and own[1] == ""  # rank 0 alone speaks; torch warns of hosts without a name
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4]
    for node in nodes:
        if node.name:  # both directions of the wire between them have carried four steps' gradients
            (link,) = json.loads(_ip("-n", node.name, "-s", "-j", "link", "show", "dev", node.interface))
            sent = link["stats64"]["tx"]["bytes"]
            assert sent > 4 * GRADIENTS, (node, sent)
