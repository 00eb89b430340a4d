#!/usr/bin/env bash
# Prints the path of strace; installs it with apt-get if it is missing.
set -euo pipefail
if ! command -v strace >/dev/null; then
    apt-get update -qq >&2
    apt-get install -y -qq strace >&2
fi
command -v strace
