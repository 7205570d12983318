#!/usr/bin/env bash
# Builds every fuzz target into $OUT, with its seeds and its dictionary beside
# it. ClusterFuzzLite runs this in its container; `cargo xtask fuzz
# --clusterfuzzlite` runs it on a developer's machine.
set -euo pipefail
: "${OUT:?is the directory to build into}"
# In the container this file is a copy outside the repository, and the working
# directory is inside.
cd "$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --show-toplevel 2>/dev/null || pwd)"

triple=x86_64-unknown-linux-gnu
cargo fuzz build --target "$triple" --strip-dead-code

dictionary() {
  case $1 in
    case_toml) echo case ;;
    container) echo container ;;
    encode_cpu) echo f32 ;;
    *) echo blob ;;
  esac
}

for glue in fuzz/fuzz_targets/*.rs; do
  target=$(basename "$glue" .rs)
  cp "fuzz/target/$triple/release/$target" "$OUT/"
  cp "fuzz/dictionaries/$(dictionary "$target").dict" "$OUT/$target.dict"
  seeds=("regressions/seeds/$target")
  if [[ -d regressions/fuzz/$target ]]; then
    seeds+=("regressions/fuzz/$target")
  fi
  # -FS: a zip file that is there already is brought up to date.
  zip --quiet --recurse-paths --junk-paths -FS "$OUT/${target}_seed_corpus.zip" "${seeds[@]}"
done
