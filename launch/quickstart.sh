#!/usr/bin/env bash
# Command 1: trains a small Llama with Muon on real text, on every GPU of this machine, or on two CPU ranks.
#   bash launch/quickstart.sh [key=value ...]      e.g. trainer.steps=100
# TORCH_INDEX_URL: an extra pip index, e.g. the one with torch's CPU builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

make_venv
ranks=2
if [[ -e /dev/nvidiactl || -e /dev/kfd ]]; then
    # The global batch is 8 sequences: the largest number of GPUs that divides it.
    ranks=$(.venv/bin/python -c 'import torch; n = torch.cuda.device_count(); print(max((k for k in (1, 2, 4, 8) if k <= n), default=2))')
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # one thread a rank: two ranks on two cores lose a factor of ten with two each
WORLD_SIZE=$ranks .venv/bin/python -m vescale.train --check recipe=llama_debug_muon "$@" # one line, before any rank starts
.venv/bin/python -m vescale.torchrun --standalone --nproc-per-node "$ranks" -m vescale.train recipe=llama_debug_muon "$@"
echo next:
[[ " $* " == *" optimizer=adamw "* ]] || echo "  .venv/bin/python -m vescale.train recipe=llama_debug_muon optimizer=adamw"
cat <<'END'
  .venv/bin/python -m vescale.train recipe=llama70b_muon dry_run=true world_size=256
  .venv/bin/python -m vescale.train -m optimizer=muon,adamw trainer.steps=50
END
