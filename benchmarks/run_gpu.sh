#!/usr/bin/env bash
# Runs benchmarks one after another, in order of need: a failure of one does not stop the rest.
#
#   bash benchmarks/run_gpu.sh FOLDER 'SECONDS MODULE ARGUMENTS' ..
#   bash benchmarks/run_gpu.sh /tmp/out '200 benchmarks.vs_peers --contexts 8192 --rows 1' '60 benchmarks.long_context --parts scores'
#
# Each prints to FOLDER/<number>.log and is ended after its seconds; the last lines of each log are shown.
out=$1
shift
mkdir -p "$out"
number=0
for job in "$@"; do
  read -r seconds command <<<"$job"
  log="$out/$((number += 1)).log"
  # shellcheck disable=SC2086  # the arguments are words
  timeout "$seconds" python3 -m $command >"$log" 2>&1
  echo "$command: exit $?, ${SECONDS}s since the start"
  tail -n 5 "$log" | cut -c1-400
done
