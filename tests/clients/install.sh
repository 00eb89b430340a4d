#!/bin/sh
# Usage: install.sh PLATFORM_BINARY. Installs the pinned code generators and command line clients,
# unpacks the contracts of the binary, generates clients from them and builds the Go client. Prints
# the folder. Needs Go, Node, Python 3, and network access the first time.
set -eu

platform=$1
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work="$root/target/clients"
mkdir -p "$work"

tool() { # binary, module@version
    [ -x "$work/bin/$1" ] || GOBIN="$work/bin" go install "$2"
}
{
    tool protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.10
    tool protoc-gen-connect-go connectrpc.com/connect/cmd/protoc-gen-connect-go@v1.19.1
    tool protoc-gen-go-grpc google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.0
    tool grpcurl github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3

    if ! cmp -s "$here/python/requirements.txt" "$work/venv/installed.txt"; then
        rm -rf "$work/venv"
        python3 -m venv "$work/venv"
        "$work/venv/bin/pip" install --quiet --requirement "$here/python/requirements.txt"
        cp "$here/python/requirements.txt" "$work/venv/installed.txt"
    fi
    mkdir -p "$work/ts"
    cp "$here/ts/package.json" "$here/ts/client.ts" "$work/ts/"
    if [ ! -x "$work/ts/node_modules/.bin/tsx" ] || ! cmp -s "$here/ts/package.json" "$work/ts/installed.json"; then
        npm install --silent --prefix "$work/ts"
        cp "$here/ts/package.json" "$work/ts/installed.json"
    fi
    buf="$root/proto/node_modules/.bin/buf"
    [ -x "$buf" ] || npm install --silent --prefix "$root/proto"

    rm -rf "$work/contracts"
    "$platform" proto sources "$work/contracts"
    cd "$work/contracts"
    PATH="$work/venv/bin:$work/bin:$work/ts/node_modules/.bin:$PATH"
    "$buf" generate
    # The contract of the health service comes from gRPC's package.
    "$buf" generate "$work/ts/node_modules/grpc-health-check/proto" --template \
        '{"version": "v2", "plugins": [{"local": "protoc-gen-es", "out": "gen/ts", "opt": "target=ts"}]}'

    rm -rf "$work/ts/gen" "$work/go"
    cp -r gen/ts "$work/ts/gen"
    mkdir "$work/go"
    cp -r gen/go/. "$work/go/"
    cp "$here/go/main.go" "$here/go/go.mod" "$here/go/go.sum" "$work/go/"
    cd "$work/go"
    go build -o "$work/bin/go-client" .
} >&2
echo "$work"
