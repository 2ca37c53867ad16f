#!/usr/bin/env bash
# Runs the GPU benchmarks one after another; a failure of one does not stop the rest. Logs go to the folder $1.
out=${1:-benchmarks/records}
shift
for name in "$@"; do
  timeout 280 python3 benchmarks/$name >"$out/${name%%.*}.log" 2>&1
  echo "$name exit $?"
  tail -c 5000 "$out/${name%%.*}.log"
done
