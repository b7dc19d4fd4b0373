"""The tests' own tools, where a mistake would make tests lie."""

import json
import socket
import threading
import time
from typing import Any

from tests.support.http import Answer
from tests.support.slow_proxy import SlowProxy
from tests.support.sse import Frame, FrameReader

STREAM = (
    ": hello\n\n"
    'id: r:1.1\nevent: delta\ndata: {"text": "é"}\n\n'
    'id: r:2.1\r\nevent: withdraw\r\ndata: {"keep": 0}\r\n\r\n'
    'id: r:3.1\nevent: done\ndata: {"text":\ndata:  "ü"}\n\n'
).encode()


def test_frames_are_the_same_whatever_pieces_the_bytes_come_in() -> None:
    for size in range(1, len(STREAM) + 1):
        reader = FrameReader()
        frames = [frame for at in range(0, len(STREAM), size) for frame in reader.feed(STREAM[at : at + size])]
        assert [(frame.id, frame.event) for frame in frames] == [
            ("r:1.1", "delta"),
            ("r:2.1", "withdraw"),
            ("r:3.1", "done"),
        ]
        assert frames[2].data == {"text": "ü"}
        assert reader.comments == 1


def test_a_withdrawal_cuts_the_text_and_the_order_is_read_from_the_ids() -> None:
    answer = Answer()
    script: list[tuple[str, dict[str, Any]]] = [
        ("delta", {"text": "ab😀"}),
        ("withdraw", {"keep": 2}),
        ("delta", {"text": "c"}),
        ("done", {}),
    ]
    for number, (event, data) in enumerate(script, 1):
        answer.add(Frame(f"run:{number}.1", event, data))
    assert answer.text == "abc"
    assert answer.order() == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert answer.last_id == "run:4.1"
    assert answer.end is not None


def test_the_proxy_delays_cuts_and_mends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, SlowProxy(server.getsockname()[1]) as proxy:
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        proxy.delay(0.05)
        with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
            begun = time.monotonic()
            connection.sendall(json.dumps({"a": 1}).encode())
            assert connection.recv(100) == b'{"a": 1}'
            assert time.monotonic() - begun >= 0.1
            proxy.cut()
            assert _is_broken(connection)
        proxy.mend()
        with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
            connection.sendall(b"again")
            assert connection.recv(100) == b"again"


def _echo(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            while received := connection.recv(100):
                connection.sendall(received)


def _is_broken(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True
