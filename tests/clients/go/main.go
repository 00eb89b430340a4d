// Calls a running platform through generated Go code: go-client URL TOKEN.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	cfav1 "dfa/cfa/v1"
	"dfa/cfa/v1/cfav1connect"
)

const missing = "NO-SUCH-THING"

func main() {
	url, token := os.Args[1], os.Args[2]
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	http2 := &http.Protocols{}
	http2.SetUnencryptedHTTP2(true)
	h2c := &http.Client{Transport: &http.Transport{Protocols: http2}}
	overConnect(ctx, "Connect", cfav1connect.NewCfaRegistryServiceClient(http.DefaultClient, url), token)
	web := cfav1connect.NewCfaRegistryServiceClient(http.DefaultClient, url, connect.WithGRPCWeb())
	overConnect(ctx, "gRPC-Web", web, token)
	overConnect(ctx, "gRPC by Connect", cfav1connect.NewCfaRegistryServiceClient(h2c, url, connect.WithGRPC()), token)
	overGrpc(ctx, strings.TrimPrefix(url, "http://"), token)
}

func overConnect(ctx context.Context, protocol string, registry cfav1connect.CfaRegistryServiceClient, token string) {
	get := func(id string) (*connect.Response[cfav1.GetInstrumentResponse], error) {
		request := connect.NewRequest(&cfav1.GetInstrumentRequest{InstrumentId: id})
		request.Header().Set("authorization", "Bearer "+token)
		return registry.GetInstrument(ctx, request)
	}
	found, err := get("CFA-RUB")
	check(err == nil && found.Msg.GetInstrument().GetInstrumentId() == "CFA-RUB", protocol, err)

	_, err = get(missing)
	var refused *connect.Error
	check(errors.As(err, &refused) && refused.Code() == connect.CodeNotFound && len(refused.Details()) > 0, protocol, err)
	detail, err := refused.Details()[0].Value()
	check(err == nil, protocol, err)
	checkInfo(detail, protocol)
	fmt.Printf("Go, %s: unary, error details\n", protocol)
}

func overGrpc(ctx context.Context, address, token string) {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(err == nil, "gRPC", err)
	defer connection.Close()
	health, err := healthv1.NewHealthClient(connection).Check(ctx, &healthv1.HealthCheckRequest{})
	check(err == nil && health.GetStatus() == healthv1.HealthCheckResponse_SERVING, "gRPC", err)

	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	registry := cfav1.NewCfaRegistryServiceClient(connection)
	found, err := registry.GetInstrument(ctx, &cfav1.GetInstrumentRequest{InstrumentId: "CFA-RUB"})
	check(err == nil && found.GetInstrument().GetInstrumentId() == "CFA-RUB", "gRPC", err)
	_, err = registry.GetInstrument(ctx, &cfav1.GetInstrumentRequest{InstrumentId: missing})
	refused := status.Convert(err)
	check(refused.Code() == codes.NotFound && len(refused.Details()) > 0, "gRPC", err)
	checkInfo(refused.Details()[0], "gRPC")
	fmt.Println("Go, gRPC: unary, error details, health")
}

func checkInfo(detail any, protocol string) {
	info, isInfo := detail.(*errdetails.ErrorInfo)
	check(isInfo && info.GetReason() == "INSTRUMENT_NOT_FOUND" && info.GetDomain() == "platform", protocol, detail)
}

func check(holds bool, protocol string, found any) {
	if !holds {
		log.Fatalf("%s: unexpected: %v", protocol, found)
	}
}
