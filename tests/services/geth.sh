#!/bin/bash
# A geth node with a development chain on the loopback for the full tests.
#
#   tests/services/geth.sh install  builds geth if it is missing
#   tests/services/geth.sh start    builds geth if it is missing, starts the node, waits until it is
#                                   ready, prints the URL; only prints if it already runs
#   tests/services/geth.sh stop     stops the node; keeps the state
#   tests/services/geth.sh kill     kills the node with SIGKILL; loses the last blocks
#   tests/services/geth.sh clean    kills the node and removes the state
#
# Needs Go, and flock and setsid of util-linux. The program is in target/services/geth, the state in
# SERVICE_HOME (default target/services/geth). The node uses GETH_PORT; the start fails if another
# program has it. Without GETH_PORT the node uses the first free port: from 8645 on, or, with
# SERVICE_HOME, from a port computed from it. The script never uses a node that it did not start.
#
# Each transaction gets a block at once. With GETH_PERIOD there is a block per that number of
# seconds instead. The chain id is 1337. A block has about 16,000,000 gas, which one transaction may
# use, or GETH_GAS. Each SERVICE_HOME has its own genesis block.
set -eu

version=v1.16.7

here=$(cd "$(dirname "$0")" && pwd)
services=$(cd "$here/../.." && pwd)/target/services
geth=$services/geth/bin/geth
home=${SERVICE_HOME:-$services/geth}
# Minutes that the build may take, and half seconds that a start or a stop may take.
install_max=30
tries_max=120

fail() {
    echo "geth.sh: $*" >&2
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
    [ -r "/proc/$pid/cmdline" ] && tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF "$home/data"
}

taken() {
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

choose_port() {
    if [ -n "${GETH_PORT:-}" ]; then
        port=$GETH_PORT
        ! taken "$port" || fail "another program listens on port $port: stop it or set GETH_PORT"
        return
    fi
    port=8645
    # A test's own node gets a port of its own, which no other node takes while it is stopped.
    [ -z "${SERVICE_HOME:-}" ] || port=$((6600 + $(printf %s "$home" | cksum | cut -d' ' -f1) % 400))
    # A restart uses the port of the last start, so that clients find the node again.
    [ ! -f "$home/port" ] || port=$(cat "$home/port")
    last=$((port + 100))
    while taken "$port"; do
        port=$((port + 1))
        [ "$port" -lt "$last" ] || fail "no free port below $last"
    done
}

install_program() {
    if [ -x "$geth" ] && [ "$(cat "$geth.version" 2>/dev/null)" = "$version" ]; then
        return
    fi
    need go golang-go
    # One package at a time, with the lowest priority: other programs of the machine go on.
    GOBIN=$(dirname "$geth") GOFLAGS=-p=1 timeout "${install_max}m" nice -n 19 \
        go install "github.com/ethereum/go-ethereum/cmd/geth@$version" >&2 || fail "go did not build geth $version"
    [ -x "$geth" ] || fail "go built no $geth"
    echo "$version" >"$geth.version"
}

# The lock serialises builds and choices of a port. The node does not inherit it (9>&-).
lock() {
    need flock util-linux
    mkdir -p "$home" "$services"
    exec 9>"$services/geth.lock"
    flock -w 2000 9 || fail "another start holds $services/geth.lock"
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
    # The gas limit is part of the genesis block.
    gas=${GETH_GAS:-$((15900000 + $(printf %s "$home" | cksum | cut -d' ' -f1) % 100000))}
    # The node has its own session, so that a caller's Ctrl-C does not stop it.
    setsid "$geth" --dev --dev.period "${GETH_PERIOD:-0}" --dev.gaslimit $gas --miner.gaslimit $gas \
        --datadir "$home/data" --gcmode archive --http --http.addr 127.0.0.1 --http.port "$port" \
        --http.api eth,net,web3,debug,dev,txpool --authrpc.port 0 --port 0 --nodiscover --maxpeers 0 --ipcdisable \
        >"$home/node.log" 2>&1 </dev/null 9>&- &
    echo $! >"$home/pid"
    tries=0
    # The log line is the node's own: an open port could be that of another program.
    until grep -qs "HTTP server started .*127.0.0.1:$port" "$home/node.log" && answers; do
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
    rm -rf "$home/data" "$home/port" "$home/node.log"
    ;;
*)
    echo "usage: $0 install|start|stop|kill|clean" >&2
    exit 2
    ;;
esac
