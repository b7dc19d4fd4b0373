"""`make run`, as a newcomer meets it: real Postgres and NATS, real services, the demo model."""

import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from deploy.local.placement import temporary_folder
from deploy.local.ports import free_port
from deploy.local.processes import wait_until
from deploy.local.settings import DEMO_MODEL
from kit.money import NANO_PER_USD
from tests.support.billing import Billing
from tests.support.http import Client
from tests.support.local_stack import LocalStack, run_command, stack_environ, still_there

STOP_SECONDS = 10.0
RESTART_SECONDS = 20.0
ANSWER_SECONDS = 60.0
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """One running stack with as many replicas as it has by default. Tests leave it running."""
    with temporary_folder() as folder, LocalStack(folder) as running:
        yield running.wait_ready()


def client_of(stack: LocalStack, user: str = "alice") -> Client:
    file = stack.file()
    return Client(file["http"], {"apikey": file["anon_key"], "Authorization": f"Bearer {file['tokens'][user]}"})


def test_the_ready_line_names_address_and_model(stack: LocalStack) -> None:
    line = f"Threadloom is ready on http://127.0.0.1:{stack.port} (model threadloom-demo)"
    assert stack.output().splitlines().count(line) == 1


@needs_curl
def test_the_printed_command_streams_an_answer_as_it_is(stack: LocalStack) -> None:
    command = stack.wait_for(r"(?m)^curl .*$").group()
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True)
    events = [line for line in done.stdout.splitlines() if line.startswith("event: ")]
    assert "event: delta" in events
    assert events[-1] == "event: done"


def test_the_stack_file_is_private_and_complete(stack: LocalStack) -> None:
    path, file = stack.data_dir / "stack.json", stack.file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert file["http"][0] == f"http://127.0.0.1:{stack.port}"
    assert len(file["http"]) == len(file["grpc"]["conversation"]) == 2
    assert len(file["grpc"]["billing"]) == 1
    assert file["project"] == "default"
    assert set(file["tokens"]) == {"alice", "bob"}
    assert {"postgres", "nats", "provider", "anon_key", "service_key", "jwt_secret"} <= set(file)
    services = {name: len(pids) for name, pids in file["pids"].items()}
    servers = {"stack": 1, "postgres": 1, "nats": 1, "provider": 1}
    assert services == {**servers, "billing": 1, "conversation": 2, "gateway": 2}
    with psycopg.connect(file["postgres"]) as connection:
        assert connection.execute("SELECT current_setting('fsync')").fetchone() == ("on",)


@pytest.mark.parametrize("service", ["billing", "conversation", "gateway", "nats", "postgres", "provider"])
async def test_a_killed_process_is_started_again_and_the_stack_goes_on(stack: LocalStack, service: str) -> None:
    pid = stack.file()["pids"][service][0]
    os.kill(pid, signal.SIGKILL)
    stack.wait_for(rf"{service}-1 \(pid {pid}\) was ended by SIGKILL, starting it again", RESTART_SECONDS)
    assert wait_until(lambda: stack.file()["pids"][service][0] != pid, RESTART_SECONDS)
    async with client_of(stack) as client:
        conversation = await client.insist(client.create_conversation, RESTART_SECONDS)
        answer = await client.read_to_end(conversation, "Hello again!", seconds=ANSWER_SECONDS)
    assert answer.end is not None
    assert answer.end.event == "done"


def test_a_second_stack_on_the_same_folder_says_who_runs(stack: LocalStack) -> None:
    second = run_command({**stack.environ, "THREADLOOM_PORT": str(free_port())}, "up")
    assert second.returncode == 1
    assert f"http://127.0.0.1:{stack.port}" in second.stderr
    assert f"pid {stack.process.pid}" in second.stderr


def test_projects_and_tokens_are_made_on_the_running_stack(stack: LocalStack) -> None:
    made = run_command(stack.environ, "project", "acme")
    assert made.returncode == 0, made.stderr
    assert all(word in made.stdout for word in ("acme", "anon key", "service key", "JWT secret"))
    again = run_command(stack.environ, "project", "acme")
    assert (again.returncode, "exists" in again.stderr) == (1, True)
    token = run_command(stack.environ, "token", "carol", "acme")
    assert token.stdout.count(".") == 2
    assert len(token.stdout.split()) == 1
    unknown = run_command(stack.environ, "token", "carol", "nowhere")
    assert (unknown.returncode, "make project NAME=nowhere" in unknown.stderr) == (1, True)


def set_prices(stack: LocalStack, project: str = "") -> dict[tuple[str, str], tuple[int, int]]:
    """(input, output) in nano-USD per million tokens of each price that was set, by model and project."""
    file = stack.file()
    with Billing(file["grpc"]["billing"][0], file["service_credential"]) as billing:
        prices = billing.prices(project)
    return {
        (price.model, price.project_id): (price.rates.base.input.nano_usd, price.rates.base.output.nano_usd)
        for price in prices
    }


def test_the_demo_model_has_a_price_and_further_ones_are_set_for_all_or_for_one_project(stack: LocalStack) -> None:
    project = stack.file()["project_id"]
    assert set_prices(stack)[DEMO_MODEL, ""] == (150_000_000, 600_000_000)
    words = ("gpt-x", "--in=0.25", "--out=1.000000001", "--cached=0.1", "--cache-write=", "--fee=0.01", "--project=")
    made = run_command(stack.environ, "price", *words)
    assert made.returncode == 0, made.stderr
    assert all(word in made.stdout for word in ("gpt-x", "every", "0.25 USD", "0.1", "1.000000001", "0.01 USD"))
    assert run_command(stack.environ, "price", "gpt-x", "--in=2", "--out=3", "--project=default").returncode == 0
    prices = set_prices(stack, project)
    assert prices["gpt-x", ""] == (250_000_000, 1_000_000_001)
    assert prices["gpt-x", project] == (2 * NANO_PER_USD, 3 * NANO_PER_USD)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "make price MODEL=gpt-x IN=0.15 OUT=0.60"),
        (("gpt-x", "--in=1"), "OUT must be given"),
        (("gpt-x", "--in=1e5", "--out=1"), "IN=1e5: must be USD"),
        (("gpt-x", "--in=1", "--out=1", "--cached=0.0000000001"), "CACHED=0.0000000001: must be USD"),
        (("gpt-x", "--in=1", "--out=100001"), "OUT=100001: must be 0 to 100,000 USD"),
        (("gpt-x", "--in=1", "--out=1", "--project=nowhere"), "make project NAME=nowhere"),
        (("g" * 201, "--in=1", "--out=1"), "model must be 1 to 200"),
    ],
)
def test_a_price_that_cannot_be_set_is_refused_with_a_reason(
    stack: LocalStack, words: tuple[str, ...], said: str
) -> None:
    refused = run_command(stack.environ, "price", *words)
    assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr


def test_prices_and_keys_need_a_stack_that_runs(tmp_path: Path) -> None:
    environ = stack_environ(tmp_path, free_port())
    for words in (("price", "gpt-x", "--in=1", "--out=1"), ("provider-key", "openai")):
        refused = run_command(environ, *words)
        assert (refused.returncode, "make run" in refused.stderr) == (1, True)


def test_a_provider_key_comes_through_stdin_and_is_kept_sealed_until_it_is_removed(stack: LocalStack) -> None:
    key = "sk-of-the-project-acme"
    kept = run_command(stack.environ, "provider-key", "openai", sent=f"{key}\n")
    assert kept.returncode == 0, kept.stderr
    assert key not in kept.stdout + kept.stderr
    with psycopg.connect(stack.file()["postgres"], autocommit=True) as connection:
        query = "SELECT * FROM conversation.provider_keys"
        ((*columns,),) = connection.execute(query).fetchall()
        assert not any(key.encode() in (bytes(one) if isinstance(one, bytes) else str(one).encode()) for one in columns)
        assert run_command(stack.environ, "provider-key", "openai", "--remove").returncode == 0
        assert connection.execute(query).fetchall() == []


@pytest.mark.parametrize(
    ("words", "sent", "said"),
    [
        ((), "sk-some-key", "PROVIDER=openai"),
        (("openai",), "", "No key came"),
        (("openai",), "short", "api_key"),
        (("acme-models",), "sk-some-key", "provider"),
        (("openai", "nowhere"), "sk-some-key", "make project NAME=nowhere"),
    ],
)
def test_a_provider_key_that_cannot_be_kept_is_refused_with_a_reason(
    stack: LocalStack, words: tuple[str, ...], sent: str, said: str
) -> None:
    refused = run_command(stack.environ, "provider-key", *words, sent=sent)
    assert (refused.returncode, said in refused.stderr) == (1, True), refused.stderr


def test_a_model_without_a_price_is_named_at_the_start() -> None:
    settings = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "THREADLOOM_MODEL": "my-own"}
    with temporary_folder() as folder, LocalStack(folder, **settings, THREADLOOM_REPLICAS="billing=2") as stack:
        stack.wait_ready()
        assert "make price MODEL=my-own IN=" in stack.output()
        assert len(set(stack.file()["grpc"]["billing"])) == len(stack.file()["pids"]["billing"]) == 2


def test_reset_refuses_while_the_stack_runs(stack: LocalStack) -> None:
    refused = run_command(stack.environ, "reset")
    assert (refused.returncode, "make stop" in refused.stderr) == (1, True)
    assert stack.file()


def test_a_taken_port_names_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused = run_command(stack_environ(tmp_path / "data", port), "up")
    assert refused.returncode == 1
    assert f"Port {port} is taken by" in refused.stderr
    assert f"(pid {os.getpid()})" in refused.stderr
    assert "THREADLOOM_PORT=" in refused.stderr


async def test_sigterm_stops_all_and_a_second_run_finds_its_data() -> None:
    with temporary_folder() as folder:
        with LocalStack(folder) as first:
            first.wait_ready()
            async with client_of(first) as client:
                conversation = await client.create_conversation(title="Kept")
                answer = await client.ask(conversation, "Hello!")
            # The price a person set is not taken back by the next start.
            assert run_command(first.environ, "price", DEMO_MODEL, "--in=7", "--out=8").returncode == 0
            keys, processes = first.file()["anon_key"], first.processes()
            assert len(processes) > 6  # Postgres has children
            assert first.stop(STOP_SECONDS) == 0
            assert wait_until(lambda: not still_there(processes), STOP_SECONDS), still_there(processes)
            assert not (first.data_dir / "stack.json").exists()
        with LocalStack(folder) as second:
            second.wait_ready()
            assert second.file()["anon_key"] == keys
            assert set_prices(second) == {(DEMO_MODEL, ""): (7 * NANO_PER_USD, 8 * NANO_PER_USD)}
            async with client_of(second) as client:
                texts = [message["content"] for message in await client.messages(conversation)]
            assert answer.text in texts
            assert run_command(second.environ, "stop").returncode == 0
            assert second.process.wait(STOP_SECONDS) == 0
        reset = run_command(second.environ, "reset")
        assert "Deleted" in reset.stdout
        assert not second.data_dir.exists()


async def test_a_stack_killed_with_its_children_leaves_nothing_running_and_starts_again() -> None:
    with temporary_folder() as folder:
        with LocalStack(folder) as first:
            first.wait_ready()
            processes = first.processes()
            first.process.kill()
            first.process.wait()
            assert wait_until(lambda: not still_there(processes), STOP_SECONDS), still_there(processes)
        with LocalStack(folder) as second:
            second.wait_ready()
            assert second.stop(STOP_SECONDS) == 0
