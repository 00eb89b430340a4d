#!/bin/bash
# An anvil node (Foundry's development chain) on the loopback for the full tests.
#
#   tests/services/anvil.sh install  installs anvil if it is missing
#   tests/services/anvil.sh start    installs anvil if it is missing, starts the node, waits until
#                                    it is ready, prints the URL; only prints if it already runs
#   tests/services/anvil.sh stop     stops the node; keeps the state
#   tests/services/anvil.sh kill     kills the node with SIGKILL; loses the state since its start
#   tests/services/anvil.sh clean    kills the node and removes the state
#
# Needs Node with npm, and flock and setsid of util-linux. The program is in target/services/anvil,
# the state in SERVICE_HOME (default target/services/anvil). The node uses ANVIL_PORT; the start
# fails if another program has it. Without ANVIL_PORT the node uses the first free port: from 8745
# on, or, with SERVICE_HOME, from a port computed from it. The script never uses a node that it did
# not start.
#
# Each transaction gets a block at once. The chain id is 31337. Each SERVICE_HOME has its own
# genesis block. ANVIL_OPTIONS are further arguments of the program.
set -eu

version=1.7.1

here=$(cd "$(dirname "$0")" && pwd)
services=$(cd "$here/../.." && pwd)/target/services
program=$services/anvil/npm
home=${SERVICE_HOME:-$services/anvil}
# Minutes that the installation may take, and half seconds that a start or a stop may take.
install_max=10
tries_max=120

fail() {
    echo "anvil.sh: $*" >&2
    exit 1
}

need() {
    command -v "$1" >/dev/null || fail "the program $1 is missing: install Debian's package $2"
}

# True if the node of this state runs. Compares the command line too, since the system may have
# given the process id to another program.
running() {
    [ -f "$home/pid" ] || return 1
    pid=$(cat "$home/pid")
    [ -r "/proc/$pid/cmdline" ] && tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF "$home/state.json"
}

taken() {
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

choose_port() {
    if [ -n "${ANVIL_PORT:-}" ]; then
        port=$ANVIL_PORT
        ! taken "$port" || fail "another program listens on port $port: stop it or set ANVIL_PORT"
        return
    fi
    port=8745
    # A test's own node gets a port of its own, which no other node takes while it is stopped.
    [ -z "${SERVICE_HOME:-}" ] || port=$((6100 + $(printf %s "$home" | cksum | cut -d' ' -f1) % 400))
    # A restart uses the port of the last start, so that clients find the node again.
    [ ! -f "$home/port" ] || port=$(cat "$home/port")
    last=$((port + 100))
    while taken "$port"; do
        port=$((port + 1))
        [ "$port" -lt "$last" ] || fail "no free port below $last"
    done
}

# Sets `anvil`, the program. The package of the system contains it, not the one that is installed by
# name.
find_program() {
    anvil=$(ls "$program"/node_modules/@foundry-rs/anvil-*/bin/anvil 2>/dev/null | head -1)
}

install_program() {
    find_program
    if [ -n "$anvil" ] && [ "$(cat "$program/.version" 2>/dev/null)" = "$version" ]; then
        return
    fi
    need npm npm
    rm -rf "$program"
    mkdir -p "$program"
    timeout "${install_max}m" npm install --silent --no-audit --no-fund --prefix "$program" \
        "@foundry-rs/anvil@$version" >&2 || fail "npm did not install @foundry-rs/anvil@$version"
    find_program
    [ -n "$anvil" ] || fail "@foundry-rs/anvil@$version has no program for this system"
    echo "$version" >"$program/.version"
}

# The lock serialises installations and choices of a port. The node does not inherit it (9>&-).
lock() {
    need flock util-linux
    mkdir -p "$home" "$services"
    exec 9>"$services/anvil.lock"
    flock -w 900 9 || fail "another start holds $services/anvil.lock"
}

answers() {
    (
        exec 3<>"/dev/tcp/127.0.0.1/$port"
        body='{"jsonrpc":"2.0","id":1,"method":"eth_chainId","params":[]}'
        printf 'POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n' >&3
        printf 'Content-Length: %s\r\nConnection: close\r\n\r\n%s' "${#body}" "$body" >&3
        timeout 5 cat <&3 | grep -q '"result"'
    ) 2>/dev/null
}

start() {
    need setsid util-linux
    lock
    install_program
    if running; then
        echo "http://127.0.0.1:$(cat "$home/port")"
        return
    fi
    choose_port
    echo "$port" >"$home/port"
    # The time of the genesis block is part of its hash. Two nodes of the same second differ too.
    [ -f "$home/genesis" ] ||
        echo $(($(date +%s) - 1 - $(printf %s "$home" | cksum | cut -d' ' -f1) % 1000000)) >"$home/genesis"
    # The node has its own session, so that a caller's Ctrl-C does not stop it.
    setsid "$anvil" --host 127.0.0.1 --port "$port" --chain-id 31337 --timestamp "$(cat "$home/genesis")" \
        --state "$home/state.json" ${ANVIL_OPTIONS:-} >"$home/node.log" 2>&1 </dev/null 9>&- &
    echo $! >"$home/pid"
    tries=0
    # The log line is the node's own: an open port could be that of another program.
    until grep -qs "Listening on 127.0.0.1:$port" "$home/node.log" && answers; do
        sleep 0.1
        tries=$((tries + 1))
        if [ $tries -gt $((5 * tries_max)) ] || ! running; then
            tail -20 "$home/node.log" >&2
            fail "the node did not start"
        fi
    done
    echo "http://127.0.0.1:$port"
}

# Sends a signal to the node and waits until it has ended.
end_by() {
    running || return 0
    kill "-$1" "$pid"
    tries=0
    while running; do
        tries=$((tries + 1))
        [ $tries -le $((5 * tries_max)) ] || fail "process $pid does not end"
        sleep 0.1
    done
    rm -f "$home/pid"
    # The system closes the sockets of a killed process a moment later.
    port=$(cat "$home/port")
    tries=0
    while taken "$port" && [ $tries -lt $tries_max ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
}

case "${1:-}" in
install)
    lock
    install_program
    ;;
start) start ;;
stop) end_by TERM ;;
kill) end_by KILL ;;
clean)
    end_by KILL
    rm -f "$home/state.json" "$home/port" "$home/genesis" "$home/node.log"
    ;;
*)
    echo "usage: $0 install|start|stop|kill|clean" >&2
    exit 2
    ;;
esac
