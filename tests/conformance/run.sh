#!/bin/sh
# Runs the official Connect conformance suite against the platform's protocol layer: Connect, gRPC
# and gRPC-Web over HTTP/1.1 and h2c. Needs the Go toolchain. Passes its arguments to the runner
# (`-v`, `--trace`, `--run 'pattern'`).
set -eu

# Newest release whose dependencies the Go module proxy serves.
version=v1.0.6

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
bin="$root/target/conformance/$version"

if [ ! -x "$bin/connectconformance" ]; then
    GOBIN="$bin" go install "connectrpc.com/conformance/cmd/connectconformance@$version"
fi
cd "$root"
cargo build --quiet --workspace --bin conformance

exec "$bin/connectconformance" \
    --mode server \
    --conf "$here/config.yaml" \
    --known-failing "@$here/known-failing.txt" \
    "$@" \
    -- "${CARGO_TARGET_DIR:-$root/target}/debug/conformance"
