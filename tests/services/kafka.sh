#!/bin/bash
# A Kafka broker on the loopback for the full tests: one node in KRaft mode.
#
#   tests/services/kafka.sh start    downloads the jars if missing, starts the broker, waits until
#                                    it is ready, prints the address; only prints if it already
#                                    runs
#   tests/services/kafka.sh stop     stops the broker; keeps the state
#   tests/services/kafka.sh kill     kills the broker with SIGKILL; keeps the state
#   tests/services/kafka.sh clean    kills the broker and removes the state
#
# Needs Java 17, Maven, and flock and setsid of util-linux. The state is in SERVICE_HOME (default
# target/services/kafka). The broker uses KAFKA_PORT and the next port; the start fails if another
# program has one of them. Without KAFKA_PORT the broker uses the first free pair of ports: from
# 9092 on, or, with SERVICE_HOME, from a port computed from it. The script never uses a broker that
# it did not start.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
services=$(cd "$here/../.." && pwd)/target/services
jars=$services/kafka/jars
home=${SERVICE_HOME:-$services/kafka}
# Minutes that the download may take, and half seconds that a start or a stop may take.
download_max=10
tries_max=120

fail() {
    echo "kafka.sh: $*" >&2
    exit 1
}

need() {
    command -v "$1" >/dev/null || fail "the program $1 is missing: install Debian's package $2"
}

# True if the broker runs. Compares the command line too, since the system may have given the
# process id to another program.
running() {
    [ -f "$home/pid" ] || return 1
    pid=$(cat "$home/pid")
    [ -r "/proc/$pid/cmdline" ] && tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF "$home/server.properties"
}

taken() {
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

choose_ports() {
    if [ -n "${KAFKA_PORT:-}" ]; then
        port=$KAFKA_PORT
        for one in "$port" $((port + 1)); do
            ! taken "$one" || fail "another program listens on port $one: stop it or set KAFKA_PORT"
        done
        return
    fi
    port=9092
    # A test's own broker gets a port of its own, which no other broker takes while it is stopped.
    [ -z "${SERVICE_HOME:-}" ] || port=$((9200 + 2 * ($(printf %s "$home" | cksum | cut -d' ' -f1) % 400)))
    # A restart uses the port of the last start, so that clients find the broker again.
    [ ! -f "$home/port" ] || port=$(cat "$home/port")
    last=$((port + 200))
    while taken "$port" || taken $((port + 1)); do
        port=$((port + 2))
        [ "$port" -lt "$last" ] || fail "no free pair of ports below $last"
    done
}

java_class() {
    class=$1
    shift
    java -cp "$jars/*" -Xmx512m -Dorg.slf4j.simpleLogger.defaultLogLevel=warn "$class" "$@"
}

download() {
    # Downloads again when the list of dependencies has changed.
    ! cmp -s "$here/kafka-pom.xml" "$jars/.list" || return 0
    need mvn maven
    rm -rf "$jars"
    timeout "${download_max}m" mvn --quiet --batch-mode --file "$here/kafka-pom.xml" \
        org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
        -DoutputDirectory="$jars" -DincludeScope=runtime >&2 || fail "Maven did not download the jars"
    cp "$here/kafka-pom.xml" "$jars/.list"
}

configure() {
    controller=$((port + 1))
    cat >"$home/server.properties" <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$controller
listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller
advertised.listeners=PLAINTEXT://127.0.0.1:$port
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs=$home/data
num.partitions=12
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
log.retention.ms=-1
PROPERTIES
    if [ ! -f "$home/data/meta.properties" ]; then
        java_class kafka.tools.StorageTool format \
            --cluster-id "$(java_class kafka.tools.StorageTool random-uuid)" \
            --config "$home/server.properties" >"$home/format.log" 2>&1 ||
            { tail -20 "$home/format.log" >&2; fail "cannot format the storage"; }
    fi
}

start() {
    need java openjdk-17-jre-headless
    need setsid util-linux
    need flock util-linux
    version=$(java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -1)
    [ "${version:-0}" -ge 17 ] || fail "java is version ${version:-unknown}, Kafka needs 17"
    mkdir -p "$home" "$services"
    # The lock serialises downloads and choices of ports. The broker does not inherit it (9>&-).
    exec 9>"$services/kafka.lock"
    flock -w 900 9 || fail "another start holds $services/kafka.lock"
    if running; then
        echo "127.0.0.1:$(cat "$home/port")"
        return
    fi
    download
    choose_ports
    echo "$port" >"$home/port"
    configure
    # The broker has its own session, so that a caller's Ctrl-C does not stop it.
    setsid java -cp "$jars/*" -Xmx512m -Dorg.slf4j.simpleLogger.defaultLogLevel=warn \
        -Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info \
        kafka.Kafka "$home/server.properties" >"$home/server.log" 2>&1 </dev/null 9>&- &
    echo $! >"$home/pid"
    tries=0
    # Waits for the broker's own log line, since an open port could be that of another broker.
    until grep -q 'Kafka Server started' "$home/server.log"; do
        sleep 0.5
        tries=$((tries + 1))
        if [ $tries -gt $tries_max ] || ! running; then
            tail -20 "$home/server.log" >&2
            fail "the broker did not start"
        fi
    done
    echo "127.0.0.1:$port"
}

# Sends a signal to the broker and waits until it has ended.
end_by() {
    running || return 0
    kill "-$1" "$pid"
    tries=0
    while running; do
        tries=$((tries + 1))
        [ $tries -le $tries_max ] || fail "process $pid does not end"
        # After half of the time it kills the broker.
        [ $tries -ne $((tries_max / 2)) ] || kill -KILL "$pid"
        sleep 0.5
    done
    rm -f "$home/pid"
    # The system closes the sockets of a killed process a moment later.
    port=$(cat "$home/port")
    tries=0
    while { taken "$port" || taken $((port + 1)); } && [ $tries -lt $tries_max ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
}

case "${1:-}" in
start) start ;;
stop) end_by TERM ;;
kill) end_by KILL ;;
clean)
    end_by KILL
    rm -rf "$home/data" "$home/port"
    ;;
*)
    echo "usage: $0 start|stop|kill|clean" >&2
    exit 2
    ;;
esac
