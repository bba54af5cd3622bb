#!/usr/bin/env bash
# Runs the training command on every GPU of one node, or of several: the same line on each node.
#   bash launch/torchrun.sh recipe=llama8b_muon
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 bash launch/torchrun.sh recipe=llama70b_muon
# NPROC: ranks on this node (default: its GPUs). MASTER_PORT: default 29500. DRY_RUN=1 prints the command instead.
# Exit code 75 asks to be run again: the run was told to stop (SIGTERM, SIGUSR1), and has saved.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$([[ -x $root/.venv/bin/python ]] && echo "$root/.venv/bin/python" || echo python3)}

nodes=${NNODES:-1} rendezvous=(--standalone)
[[ $nodes =~ ^[1-9][0-9]*$ ]] || { echo "NNODES: expected a number of nodes, got $nodes" >&2; exit 2; }
if ((nodes > 1)); then
    : "${MASTER_ADDR:?NNODES is $nodes: set MASTER_ADDR to the name of node 0}" "${NODE_RANK:?set NODE_RANK to the index of this node, from 0}"
    [[ $NODE_RANK =~ ^[0-9]+$ && 10#$NODE_RANK -lt nodes ]] || { echo "NODE_RANK: expected a number in [0, $nodes), got $NODE_RANK" >&2; exit 2; }
    rendezvous=(--nnodes "$nodes" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
command=("$python" -m vescale.torchrun "${rendezvous[@]}" --nproc-per-node "${NPROC:-gpu}" -m vescale.train "$@")
if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
exec "${command[@]}"
