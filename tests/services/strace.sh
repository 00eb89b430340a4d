#!/usr/bin/env bash
# Prints the path of strace; installs it if it is missing and the system is Debian.
set -euo pipefail
if ! command -v strace >/dev/null; then
    apt-get update -qq >&2
    apt-get install -y -qq strace >&2
fi
command -v strace
