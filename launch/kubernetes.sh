#!/usr/bin/env bash
# Prints the manifest of a run on a Kubernetes cluster; nothing is sent anywhere. Its output is the dry run.
#   IMAGE=registry/vescale:1 RUN="recipe=llama8b_muon name=mine" bash launch/kubernetes.sh | kubectl apply -f -
# NAME: of the job (default vescale). NNODES: pods (default 2). NPROC: GPUs a pod (default 8). The image has this checkout
# in /vescale.
set -euo pipefail
: "${IMAGE:?set IMAGE to an image with this checkout in /vescale}" "${RUN:?set RUN to what follows python -m vescale.train}"
NAME=${NAME:-vescale} NNODES=${NNODES:-2} NPROC=${NPROC:-8}
# In the manifest it stands between YAML's double quotes.
RUN=${RUN//\\/\\\\} RUN=${RUN//\"/\\\"} RUN=${RUN//$'\n'/ }
manifest=$(<"$(dirname "${BASH_SOURCE[0]}")/kubernetes.yaml")
for word in IMAGE NAME NNODES NPROC RUN; do # RUN last: its own words stay as they are
    manifest=${manifest//"\$$word"/"${!word}"} # quoted: an & would stand for the word
done
printf '%s\n' "$manifest"
