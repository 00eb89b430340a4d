#!/bin/bash
# A PostgreSQL server on the loopback for the full tests, fsync on.
#
#   tests/services/postgres.sh start    installs PostgreSQL if missing, starts the server, waits
#                                       until it is ready, prints the URL; only prints if it
#                                       already runs
#   tests/services/postgres.sh stop     stops the server; keeps the state
#   tests/services/postgres.sh kill     kills the server with SIGKILL; keeps the state
#   tests/services/postgres.sh clean    kills the server and removes the state
#
# Uses the newest of Debian's packages, or the server in PATH. If both are missing and the script
# runs as root, it installs the package with apt-get. Needs flock and setsid of util-linux.
# PostgreSQL refuses to run as root: root starts it as the user `postgres`, with setpriv. The state
# is in SERVICE_HOME (default target/services/postgres). The server uses POSTGRES_PORT; the start
# fails if another program has it. Without POSTGRES_PORT the server uses the first free port: from
# 5439 on, or, with SERVICE_HOME, from a port computed from it. The script never uses a server that
# it did not start.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
services=$(cd "$here/../.." && pwd)/target/services
home=${SERVICE_HOME:-$services/postgres}
# Half seconds that the end of a killed server may take.
tries_max=120

fail() {
    echo "postgres.sh: $*" >&2
    exit 1
}

need() {
    command -v "$1" >/dev/null || fail "the program $1 is missing: install Debian's package $2"
}

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

# True if the server of this state runs. Compares the command line too, since the system may have
# given the process id to another program.
running() {
    [ -f "$data/postmaster.pid" ] || return 1
    pid=$(head -1 "$data/postmaster.pid")
    [ -r "/proc/$pid/cmdline" ] && tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF "$data"
}

# Sets `data`, the folder of the database. If the user `postgres` cannot enter SERVICE_HOME, the
# folder is in /tmp.
choose_data() {
    data=$home/data
    [ "$(id -u)" = 0 ] || return 0
    need setpriv util-linux
    mkdir -p "$home"
    if ! as_server test -x "$home" 2>/dev/null; then
        data=/tmp/platform-postgres-$(printf %s "$home" | cksum | cut -d' ' -f1)/data
    fi
}

taken() {
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

choose_port() {
    if [ -n "${POSTGRES_PORT:-}" ]; then
        port=$POSTGRES_PORT
        ! taken "$port" || fail "another program listens on port $port: stop it or set POSTGRES_PORT"
        return
    fi
    port=5439
    # A test's own server gets a port of its own, which no other server takes while it is stopped.
    [ -z "${SERVICE_HOME:-}" ] || port=$((5600 + $(printf %s "$home" | cksum | cut -d' ' -f1) % 400))
    # A restart uses the port of the last start, so that clients find the server again.
    [ ! -f "$home/port" ] || port=$(cat "$home/port")
    last=$((port + 100))
    while taken "$port"; do
        port=$((port + 1))
        [ "$port" -lt "$last" ] || fail "no free port below $last"
    done
}

url() {
    echo "postgres://platform@127.0.0.1:$1/$2"
}

install_server() {
    [ -z "$(tools)" ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        fail "the PostgreSQL server is missing: install Debian's package postgresql, or run this as root"
    fi
    apt-get update >&2
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends postgresql >&2
    [ -n "$(tools)" ] || fail "the package postgresql has no initdb"
}

launch() {
    # The server has its own session, so that a caller's Ctrl-C does not stop it.
    as_server setsid "$bin/pg_ctl" --pgdata="$data" --log="$data/server.log" --wait --timeout=60 --options="\
        -c listen_addresses=127.0.0.1 -c port=$port -c unix_socket_directories= -c fsync=on -c synchronous_commit=on \
        -c max_connections=400 -c shared_buffers=256MB -c max_wal_size=2GB -c checkpoint_timeout=15min" \
        start >&2 9>&-
}

start() {
    need setsid util-linux
    need flock util-linux
    mkdir -p "$home" "$services"
    # The lock serialises installations and choices of a port. The server does not inherit it
    # (9>&-).
    exec 9>"$services/postgres.lock"
    flock -w 900 9 || fail "another start holds $services/postgres.lock"
    install_server
    bin=$(tools)
    choose_data
    if running; then
        url "$(cat "$home/port")" platform
        return
    fi
    choose_port
    echo "$port" >"$home/port"
    if [ ! -f "$data/PG_VERSION" ]; then
        mkdir -p "$data"
        chmod 700 "$data"
        [ "$(id -u)" != 0 ] || chown -R postgres:postgres "$data"
        as_server "$bin/initdb" --pgdata="$data" --username=platform --auth=trust --encoding=UTF8 --locale=C.UTF-8 >&2
    fi
    tries=0
    # Retries while processes of a killed server still hold its lock and shared memory.
    until launch; do
        tries=$((tries + 1))
        if [ $tries -gt 20 ] || ! tail -5 "$data/server.log" | grep -q 'still in use\|already exists'; then
            tail -20 "$data/server.log" >&2
            fail "the server did not start"
        fi
        sleep 0.5
    done
    exists=$("$bin/psql" -qAt "$(url "$port" postgres)" -c "SELECT 1 FROM pg_database WHERE datname = 'platform'")
    [ -n "$exists" ] || "$bin/createdb" --maintenance-db="$(url "$port" postgres)" platform
    url "$port" platform
}

stop() {
    bin=$(tools)
    [ -n "$bin" ] || return 0
    choose_data
    running || return 0
    as_server "$bin/pg_ctl" --pgdata="$data" --mode=fast --wait --timeout=60 stop >&2
}

kill_server() {
    choose_data
    running || return 0
    kill -KILL "$pid"
    tries=0
    while running; do
        tries=$((tries + 1))
        [ $tries -le $tries_max ] || fail "process $pid does not end"
        sleep 0.5
    done
    # The system closes the sockets of a killed process a moment later.
    port=$(cat "$home/port")
    tries=0
    while taken "$port" && [ $tries -lt $tries_max ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
}

case "${1:-}" in
start) start ;;
stop) stop ;;
kill) kill_server ;;
clean)
    kill_server
    rm -rf "$data" "$home/port"
    case "$data" in /tmp/platform-postgres-*) rmdir "$(dirname "$data")" 2>/dev/null || true ;; esac
    ;;
*)
    echo "usage: $0 start|stop|kill|clean" >&2
    exit 2
    ;;
esac
