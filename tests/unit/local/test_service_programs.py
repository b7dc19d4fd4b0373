"""What the processes of a stack are told, and what they are not."""

from pathlib import Path

from deploy.local import service_programs
from deploy.local.service_programs import BILLING, CONVERSATION, RolePasswords, Wiring

WIRING = Wiring(
    admin_url="postgresql://postgres:owner@127.0.0.1:5432/threadloom",
    passwords={CONVERSATION: RolePasswords("c-request", "c-engine"), BILLING: RolePasswords("b-request", "b-engine")},
    nats_url="nats://127.0.0.1:4222",
    provider_url="https://provider.example/v1",
    provider_key="sk-provider",
    model="gpt-x",
    credential="credential",
    secret_keys="k1:ring",
    conversations=("127.0.0.1:1001", "127.0.0.1:1002"),
    billings=("127.0.0.1:2001", "127.0.0.1:2002"),
)
LOG = Path("/dev/null")
OUTER = {"DATABASE_URL": "postgresql://outer", "OPENAI_API_KEY": "sk-outer", "THREADLOOM_SECRET_KEYS": "k0:outer"}


def test_billing_gets_its_own_roles_and_address_and_nobody_elses_secrets() -> None:
    environ = service_programs.billing("billing-2", WIRING, OUTER, LOG).environ
    assert environ["THREADLOOM_GRPC_LISTEN"] == "127.0.0.1:2002"
    assert environ["BILLING_DATABASE_URL"] == "postgresql://threadloom_billing:b-request@127.0.0.1:5432/threadloom"
    assert "threadloom_billing_engine:b-engine@" in environ["BILLING_ENGINE_DATABASE_URL"]
    assert environ["THREADLOOM_SERVICE_CREDENTIAL"] == "credential"
    told = " ".join(environ.values())
    assert [word for word in ("c-request", "owner", "sk-", "k0:", "k1:", "nats://") if word in told] == []


def test_conversation_and_gateway_are_told_where_billing_is_and_only_conversation_has_the_key_ring() -> None:
    conversation = service_programs.conversation("conversation-1", WIRING, OUTER, LOG).environ
    gateway = service_programs.gateway("gateway-1", 8080, WIRING, OUTER, LOG).environ
    assert conversation["BILLING_ADDRESSES"] == gateway["BILLING_ADDRESSES"] == "127.0.0.1:2001,127.0.0.1:2002"
    assert gateway["CONVERSATION_ADDRESSES"] == "127.0.0.1:1001,127.0.0.1:1002"
    assert conversation["THREADLOOM_SECRET_KEYS"] == "k1:ring"
    assert "THREADLOOM_SECRET_KEYS" not in gateway
    assert "b-request" not in " ".join(conversation.values())


def test_no_two_processes_share_a_port_for_metrics() -> None:
    environ = {"THREADLOOM_METRICS_PORT": "9100"}
    programs = [service_programs.conversation(f"conversation-{number}", WIRING, environ, LOG) for number in (1, 2)]
    programs += [service_programs.billing(f"billing-{number}", WIRING, environ, LOG) for number in (1, 2)]
    ports = [program.environ["THREADLOOM_METRICS_PORT"] for program in programs]
    assert ports == ["9100", "9101", "9102", "9103"]
    assert "THREADLOOM_METRICS_PORT" not in service_programs.gateway("gateway-1", 1, WIRING, environ, LOG).environ


def test_both_schemas_are_migrated_each_with_a_log_of_its_own() -> None:
    first, second = service_programs.migrations(WIRING, {}, lambda name: Path(f"{name}.log"))
    assert (first.log.name, second.log.name) == ("migrate-conversation.log", "migrate-billing.log")
    assert second.environ["BILLING_MIGRATION_URL"] == WIRING.admin_url
    assert (second.environ["BILLING_ROLE_PASSWORD"], second.environ["BILLING_ENGINE_ROLE_PASSWORD"]) == (
        "b-request",
        "b-engine",
    )


def test_what_receivers_may_be_called_is_taken_over_from_outside() -> None:
    outer = {**OUTER, "THREADLOOM_ALLOWED_HOSTS": "127.0.0.1"}
    assert service_programs.conversation("conversation-1", WIRING, outer, LOG).environ["THREADLOOM_ALLOWED_HOSTS"] == (
        "127.0.0.1"
    )
