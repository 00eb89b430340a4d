#!/bin/bash
# A PostgreSQL server on the loopback for the full tests: state under target/services/postgres,
# fsync on.
#
#   tests/services/postgres.sh start    installs the server if missing, starts it, waits, prints
#                                       the URL; does nothing if it already runs
#   tests/services/postgres.sh stop     stops it; keeps the state
#   tests/services/postgres.sh clean    stops it and removes the state
#
# Uses the newest server of Debian's packages (installed through apt-get if missing and run as root)
# or the one in PATH, and POSTGRES_PORT (default 5439). PostgreSQL refuses to run as root, so root
# runs it as the user `postgres`.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
home=$(cd "$here/../.." && pwd)/target/services/postgres
port=${POSTGRES_PORT:-5439}
url="postgres://platform@127.0.0.1:$port/platform"

tools() {
    newest=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -1)
    if [ -n "$newest" ] && [ -x "$newest/initdb" ]; then
        echo "$newest"
    elif command -v initdb >/dev/null; then
        dirname "$(readlink -f "$(command -v initdb)")"
    fi
}

# Runs a command as the server's user, in a folder that this user may enter.
as_server() {
    if [ "$(id -u)" = 0 ]; then
        (cd / && setpriv --reuid=postgres --regid=postgres --init-groups "$@")
    else
        "$@"
    fi
}

running() {
    [ -f "$data/postmaster.pid" ] && as_server "$bin/pg_ctl" --pgdata="$data" status >/dev/null 2>&1
}

# The user `postgres` needs access to every parent folder of the state. Without it the state is in
# /tmp.
choose_data() {
    data=$home/data
    [ "$(id -u)" = 0 ] || return 0
    mkdir -p "$home"
    if ! as_server test -x "$home" 2>/dev/null; then
        data=/tmp/platform-postgres-$(printf %s "$home" | cksum | cut -d' ' -f1)/data
    fi
}

start() {
    if [ -z "$(tools)" ]; then
        if [ "$(id -u)" != 0 ]; then
            echo "PostgreSQL is missing: install the package postgresql, or run this as root" >&2
            exit 1
        fi
        apt-get update >&2
        DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends postgresql >&2
    fi
    bin=$(tools)
    choose_data
    if running; then
        echo "$url"
        return
    fi
    if [ ! -f "$data/PG_VERSION" ]; then
        mkdir -p "$data"
        chmod 700 "$data"
        [ "$(id -u)" != 0 ] || chown -R postgres:postgres "$data"
        as_server "$bin/initdb" --pgdata="$data" --username=platform --auth=trust --encoding=UTF8 --locale=C.UTF-8 >&2
    fi
    # In its own session, so that a caller's Ctrl-C does not stop it.
    as_server setsid "$bin/pg_ctl" --pgdata="$data" --log="$data/server.log" --wait --timeout=60 --options="\
        -c listen_addresses=127.0.0.1 -c port=$port -c unix_socket_directories= -c fsync=on -c synchronous_commit=on \
        -c max_connections=400 -c shared_buffers=256MB -c max_wal_size=2GB -c checkpoint_timeout=15min" start >&2 || {
        echo "PostgreSQL did not start:" >&2
        tail -20 "$data/server.log" >&2
        exit 1
    }
    exists=$("$bin/psql" -qAt "${url%/*}/postgres" -c "SELECT 1 FROM pg_database WHERE datname = 'platform'")
    [ -n "$exists" ] || "$bin/createdb" --maintenance-db="${url%/*}/postgres" platform
    echo "$url"
}

stop() {
    bin=$(tools)
    [ -n "$bin" ] || return 0
    choose_data
    running || return 0
    as_server "$bin/pg_ctl" --pgdata="$data" --mode=fast --wait stop >&2
}

case "${1:-}" in
start) start ;;
stop) stop ;;
clean)
    stop
    [ -z "${data:-}" ] || rm -rf "$data"
    ;;
*)
    echo "usage: $0 start|stop|clean" >&2
    exit 2
    ;;
esac
