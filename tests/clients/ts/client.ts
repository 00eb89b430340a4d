// Calls a running platform through generated TypeScript code: client.ts URL TOKEN.
import { Code, ConnectError, createClient, type Interceptor } from "@connectrpc/connect";
import { createConnectTransport, createGrpcTransport, createGrpcWebTransport } from "@connectrpc/connect-node";
import assert from "node:assert/strict";
import { CfaRegistryService } from "./gen/dfa/cfa/v1/cfa_pb.js";
import { Health, HealthCheckResponse_ServingStatus } from "./gen/health/v1/health_pb.js";

const [baseUrl, token] = process.argv.slice(2);
const bearer: Interceptor = (next) => (request) => {
  request.header.set("authorization", `Bearer ${token}`);
  return next(request);
};
const options = { baseUrl, interceptors: [bearer] };
const transports = {
  Connect: createConnectTransport({ ...options, httpVersion: "1.1", useBinaryFormat: false }),
  gRPC: createGrpcTransport(options),
  "gRPC-Web": createGrpcWebTransport({ ...options, httpVersion: "1.1" }),
};
for (const [protocol, transport] of Object.entries(transports)) {
  const registry = createClient(CfaRegistryService, transport);
  const found = await registry.getInstrument({ instrumentId: "CFA-RUB" });
  assert.equal(found.instrument?.instrumentId, "CFA-RUB");

  const missing = await registry.getInstrument({ instrumentId: "NO-SUCH-THING" }).catch(ConnectError.from);
  assert(missing instanceof ConnectError && missing.code === Code.NotFound);
  const [detail] = missing.details;
  assert("type" in detail && detail.type === "google.rpc.ErrorInfo");
  assert(Buffer.from(detail.value).includes("INSTRUMENT_NOT_FOUND"));

  const health = await createClient(Health, transport).check({});
  assert.equal(health.status, HealthCheckResponse_ServingStatus.SERVING);
  console.log(`TypeScript, ${protocol}: unary, error details, health`);
}
process.exit(0);
