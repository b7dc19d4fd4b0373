"""Whether a server is ready, asked the way its clients will."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.local.calls import OPTIONS
from deploy.local.processes import StackError

PROBE_SECONDS = 2.0
REQUEST_SECONDS = 30.0
# No proxy: an environment's proxy cannot reach this machine.
_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_listening(host: str, port: int) -> bool:
    """Whether a TCP connection is taken."""
    try:
        with socket.create_connection((host, port), PROBE_SECONDS):
            return True
    except OSError:
        return False


def is_serving(address: str) -> bool:
    """Whether the gRPC server at host:port calls itself healthy."""
    host, _, port = address.rpartition(":")
    if not is_listening(host, int(port)):
        return False  # cheaper than a channel, and quiet
    with grpc.insecure_channel(address, OPTIONS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=""), timeout=PROBE_SECONDS
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def answers_ok(url: str) -> bool:
    """Whether GET answers 200."""
    try:
        with _http.open(url, timeout=PROBE_SECONDS) as response:
            return bool(response.status == 200)
    except OSError:  # URLError and HTTPError among them
        return False


def post_json(url: str, body: Mapping[str, object], headers: Mapping[str, str]) -> dict[str, object]:
    """Posts JSON and returns the JSON of a 2xx answer. Raises StackError with the service's own words."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}, method="POST"
    )
    try:
        with _http.open(request, timeout=REQUEST_SECONDS) as response:
            found: dict[str, object] = json.load(response)
    except urllib.error.HTTPError as error:
        raise StackError(f"POST {url} was answered {error.code}: {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise StackError(f"POST {url} failed: {error}") from None
    return found


def exists(url: str, headers: Mapping[str, str]) -> bool:
    """Whether GET with these headers answers 200."""
    try:
        with _http.open(urllib.request.Request(url, headers=dict(headers)), timeout=REQUEST_SECONDS) as response:
            return bool(response.status == 200)
    except OSError:
        return False
