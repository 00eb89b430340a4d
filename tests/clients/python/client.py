"""Calls a running platform through generated Python code: client.py GENERATED_DIR URL TOKEN."""

import sys

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

generated, url, token = sys.argv[1:]
sys.path.insert(0, generated)

from connectrpc.code import Code  # noqa: E402
from connectrpc.errors import ConnectError  # noqa: E402
from dfa.cfa.v1 import cfa_pb2  # noqa: E402
from dfa.cfa.v1.cfa_connect import CfaRegistryServiceClientSync  # noqa: E402

credentials = {"authorization": f"Bearer {token}"}
with CfaRegistryServiceClientSync(url) as registry:
    request = cfa_pb2.GetInstrumentRequest(instrument_id="CFA-RUB")
    found = registry.get_instrument(request, headers=credentials)
    assert found.instrument.instrument_id == "CFA-RUB", found

    request = cfa_pb2.GetInstrumentRequest(instrument_id="NO-SUCH-THING")
    try:
        registry.get_instrument(request, headers=credentials)
        raise AssertionError("an unknown instrument is refused")
    except ConnectError as error:
        assert error.code == Code.NOT_FOUND, error
        info = error_details_pb2.ErrorInfo()
        assert error.details[0].Unpack(info), error.details
        assert (info.reason, info.domain) == ("INSTRUMENT_NOT_FOUND", "platform"), info
print("Python, Connect: unary, error details")

with grpc.insecure_channel(url.removeprefix("http://")) as channel:
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert health.status == health_pb2.HealthCheckResponse.SERVING, health
print("Python, gRPC: health")
