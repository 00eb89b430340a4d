#!/bin/bash
# A Kafka broker on the loopback for the full tests: one node in KRaft mode, state under
# target/services/kafka.
#
#   tests/services/kafka.sh start    downloads the jars once, starts, waits, prints the address;
#                                    does nothing if it already runs
#   tests/services/kafka.sh stop     stops it; keeps the state
#   tests/services/kafka.sh clean    stops it and removes the state
#
# Needs Java 17 and Maven. Uses KAFKA_PORT (default 9092) and the next port.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
home=$(cd "$here/../.." && pwd)/target/services/kafka
port=${KAFKA_PORT:-9092}
controller=$((port + 1))
address="127.0.0.1:$port"

running() {
    [ -f "$home/pid" ] && kill -0 "$(cat "$home/pid")" 2>/dev/null
}

java_class() {
    class=$1
    shift
    java -cp "$home/jars/*" -Xmx512m -Dorg.slf4j.simpleLogger.defaultLogLevel=warn "$class" "$@"
}

answers() {
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || nc -z 127.0.0.1 "$port" 2>/dev/null
}

start() {
    if running; then
        echo "$address"
        return
    fi
    mkdir -p "$home"
    if [ ! -f "$home/jars/.complete" ]; then
        mvn --quiet --batch-mode --file "$here/kafka-pom.xml" \
            org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
            -DoutputDirectory="$home/jars" -DincludeScope=runtime >&2
        touch "$home/jars/.complete"
    fi
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
            --config "$home/server.properties" >"$home/format.log" 2>&1
    fi
    # In its own session, so that a caller's Ctrl-C does not stop it.
    setsid java -cp "$home/jars/*" -Xmx512m -Dorg.slf4j.simpleLogger.defaultLogLevel=warn \
        kafka.Kafka "$home/server.properties" >"$home/server.log" 2>&1 </dev/null &
    echo $! >"$home/pid"
    tries=0
    until answers; do
        tries=$((tries + 1))
        if [ $tries -gt 120 ] || ! running; then
            echo "Kafka did not start:" >&2
            tail -20 "$home/server.log" >&2
            exit 1
        fi
        sleep 0.5
    done
    echo "$address"
}

stop() {
    running || return 0
    pid=$(cat "$home/pid")
    kill "$pid"
    tries=0
    while kill -0 "$pid" 2>/dev/null; do
        tries=$((tries + 1))
        [ $tries -le 60 ] || kill -9 "$pid"
        sleep 0.5
    done
    rm -f "$home/pid"
}

case "${1:-}" in
start) start ;;
stop) stop ;;
clean)
    stop
    rm -rf "$home/data"
    ;;
*)
    echo "usage: $0 start|stop|clean" >&2
    exit 2
    ;;
esac
