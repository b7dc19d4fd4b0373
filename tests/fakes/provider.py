"""The fake model provider: an OpenAI-compatible HTTP server that plays scripts and remembers its calls.

In a test: `with FakeProvider() as provider:` and `provider.base_url`. As a process:
`python -m tests.fakes.provider --port 0`, which prints the base URL. The keys are in README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import uvloop

from tests.fakes.answers import Gates, play, refuse
from tests.fakes.calls import Call, CallLog
from tests.fakes.connection import Connection, Request
from tests.fakes.replies import compose, error_body, read_turn
from tests.fakes.script import BadScript, Script, default_script, parse_script, script_of_request
from tests.fakes.strictness import RefusedRequest, read_request

# From 32768 up the kernel hands ports to outgoing connections, so a port there could be taken at a restart.
PORTS = range(20_000, 32_768)
BIND_ATTEMPTS = 100
BACKLOG = 4096
START_SECONDS = 10.0
STOP_SECONDS = 5.0
MODEL = "fake-model"


class FakeProvider:
    """A provider in a thread of its own. Every public member may be used from any thread."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = port  # 0 until it is started, then the port it keeps for its life
        self._log = CallLog()
        self._gates = Gates()
        self._default = Script()
        self._failures: Counter[str] = Counter()  # by the script's `key`
        self._connections: set[Connection] = set()
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        """What OPENAI_BASE_URL is set to; ends in /v1."""
        return f"http://{self.host}:{self.port}/v1"

    @property
    def calls(self) -> list[Call]:
        """The completions asked for since the last reset, oldest first; they change while they run."""
        return self._log.all()

    def script(self, **keys: Any) -> None:
        """What requests get that bring no script; without keys, the plain answer again."""
        self._default = default_script(**keys)

    def wait_for(self, predicate: Callable[[list[Call]], object], timeout: float = 5.0) -> list[Call]:
        """Block until `predicate` holds of the calls and return them; TimeoutError after `timeout` seconds."""
        return self._log.wait_for(predicate, timeout)

    async def until(self, predicate: Callable[[list[Call]], object], timeout: float = 5.0) -> list[Call]:
        """`wait_for` for a test whose own event loop must go on."""
        return await asyncio.to_thread(self._log.wait_for, predicate, timeout)

    def open_gate(self, name: str) -> None:
        """Let calls with `gate=name` go on, those that are held and those to come."""
        self._loop.call_soon_threadsafe(self._gates.open, name)

    def reset(self) -> None:
        """Forget calls, default script, opened gates and counted failures. Open answers go on, unrecorded."""
        self._log.clear()
        self._default = Script()
        self._gates.close_all()
        self._failures.clear()

    def start(self) -> None:
        listener = _listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        started = threading.Event()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listener, started), name="fake-provider", daemon=True)
        self._thread.start()
        if not started.wait(START_SECONDS):
            raise RuntimeError("the fake provider did not start")

    def stop(self) -> None:
        """Refuse new connections and drop the open ones."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, listener: socket.socket, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.create_server(lambda: Connection(self._handle, self._connections), sock=listener)
        server = self._loop.run_until_complete(serving)
        started.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._drop_connections())
        self._loop.close()

    async def _drop_connections(self) -> None:
        for connection in list(self._connections):
            connection.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()  # one that ignores its client's leaving has no connection to abort
        await asyncio.gather(*others, return_exceptions=True)

    async def _handle(self, request: Request, connection: Connection) -> None:
        match request.method, request.path:
            case "POST", "/v1/chat/completions":
                await self._complete(request, connection)
            case "GET", "/v1/models":
                model = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "fake"}
                connection.write_json(200, {"object": "list", "data": [model]})
            case "GET", "/fake/calls":
                connection.write_json(200, [call.as_json() for call in self.calls])
            case "POST", "/fake/reset":
                self.reset()
                connection.write_json(200, {})
            case "POST", path if path.startswith("/fake/gate/"):
                self._gates.open(path.removeprefix("/fake/gate/"))
                connection.write_json(200, {})
            case method, path:
                connection.write_json(404, error_body(f"there is no {method} {path}", "not_found"))

    async def _complete(self, request: Request, connection: Connection) -> None:
        call = self._log.open(request.headers)
        if request.headers.get("authorization") == "Bearer bad":
            refuse(connection, call, 401, error_body("the API key is wrong", "invalid_api_key"))
            return
        try:
            call.body = read_request(bytes(request.body))
            turn = read_turn(call.body["messages"])
            script = self._script_for(call.body["model"], turn.user_text)
        except (BadScript, RefusedRequest) as error:
            param = getattr(error, "param", None)
            refuse(connection, call, 400, error_body(str(error), "invalid_request_error", param))
            return
        reply = compose(script, call.body, turn, call.id, int(time.time()))
        call.prompt_tokens, call.whole = turn.prompt_tokens, reply.usage
        await play(script, reply, bool(call.body.get("stream")), connection, call, self._gates)

    def _script_for(self, model: str, user_text: str) -> Script:
        script = script_of_request(self._default, model, user_text)
        if script.times and script.fails:
            self._failures[script.key] += 1
            if self._failures[script.key] > script.times:
                return script.healthy()
        return script


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on `port`, or on a free one of PORTS for 0."""
    for candidate in [port] if port else random.sample(PORTS, BIND_ATTEMPTS):
        listener = socket.socket()
        # Not while another process listens there: on Linux this only forgives connections that are closing.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
        else:
            return listener
    raise OSError(f"no free port on {host} for the fake provider (asked for {port or 'any'})")


def main() -> None:
    parser = argparse.ArgumentParser(description="A fake OpenAI-compatible provider that plays scripts.")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--script", default="", help='for requests that bring none, as "chunks=20 delay=10"')
    arguments = parser.parse_args()
    # Blocked before the thread starts, as it inherits the mask; sigwait then takes them here.
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    provider = FakeProvider(arguments.port, arguments.host)
    provider.script(**parse_script(arguments.script))
    with provider:
        print(provider.base_url, flush=True)
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
