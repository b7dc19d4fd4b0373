"""The tables of the conversation service, in the Postgres schema `conversation`.

Who may see which row is in the migrations (row-level security); who may write
which column too. Every table carries project_id, every user-owned one user_id.
"""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, MetaData, SmallInteger, Text, UniqueConstraint
from sqlalchemy import text as sql
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, JSONB, TIMESTAMP
from sqlalchemy.dialects.postgresql import UUID as PG_UUID
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA = "conversation"
NOW = sql("clock_timestamp()")


class Base(DeclarativeBase):
    """Every table; types are given once here."""

    metadata = MetaData(
        schema=SCHEMA,
        naming_convention={
            "ix": "%(table_name)s_%(column_0_N_name)s",
            "uq": "%(table_name)s_%(column_0_N_name)s",
            "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
            "pk": "%(table_name)s_pkey",
        },
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as it is
        str: Text,
        bytes: BYTEA,
        datetime: TIMESTAMP(timezone=True),
        UUID: PG_UUID(as_uuid=True),
        dict[str, Any]: JSONB,
        int: BigInteger,
    }


def _project() -> Mapped[UUID]:
    return mapped_column(ForeignKey("conversation.projects.id", ondelete="CASCADE"))


def _thread() -> Mapped[UUID]:
    return mapped_column(ForeignKey("conversation.ai_threads.id", ondelete="CASCADE"))


class Project(Base):
    """A tenant."""

    __tablename__ = "projects"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    slug: Mapped[str] = mapped_column(unique=True)
    jwt_secret: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class ProjectKey(Base):
    """A key of a project; only its SHA-256 is kept. kind: anon or service."""

    __tablename__ = "project_keys"
    key_sha256: Mapped[bytes] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = _project()
    kind: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    revoked_at: Mapped[datetime | None]


class ProviderKey(Base):
    """A project's key of a model provider, sealed (kit/sealing.py) under the ring's key `key_id`."""

    __tablename__ = "provider_keys"
    project_id: Mapped[UUID] = mapped_column(
        ForeignKey("conversation.projects.id", ondelete="CASCADE"), primary_key=True
    )
    provider: Mapped[str] = mapped_column(primary_key=True)
    sealed: Mapped[bytes]
    key_id: Mapped[str]
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Webhook(Base):
    """An address of a project that is told of its events; its signing secret is sealed (kit/sealing.py)."""

    __tablename__ = "webhooks"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("conversation.projects.id", ondelete="CASCADE"), index=True)
    url: Mapped[str]
    events: Mapped[list[str]] = mapped_column(ARRAY(Text))
    enabled: Mapped[bool] = mapped_column(server_default=sql("true"))
    disabled_reason: Mapped[str] = mapped_column(server_default="")
    sealed: Mapped[bytes]
    key_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class WebhookDelivery(Base):
    """One event for one webhook. `due_at` of a pending one: when it is tried, or its lease ends."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("webhook_id", "run_id", "type", name="webhook_deliveries_once"),
        Index("webhook_deliveries_due", "webhook_id", "due_at", postgresql_where=sql("state = 'pending'")),
        Index("webhook_deliveries_newest", "webhook_id", "created_at", "id"),
        Index(None, "created_at"),
    )
    id: Mapped[UUID] = mapped_column(primary_key=True)
    webhook_id: Mapped[UUID]
    project_id: Mapped[UUID]
    run_id: Mapped[UUID | None]
    type: Mapped[str]
    payload: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="pending")
    attempts: Mapped[int] = mapped_column(server_default="0")
    due_at: Mapped[datetime] = mapped_column(server_default=NOW)
    last_status: Mapped[int] = mapped_column(server_default="0")
    last_error: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Identity(Base):
    """How tokens of a project's identity provider are verified. One of jwks_url and jwks is set."""

    __tablename__ = "identities"
    __table_args__ = (CheckConstraint("(jwks_url IS NULL) <> (jwks IS NULL)", name="identities_one_source"),)
    project_id: Mapped[UUID] = mapped_column(
        ForeignKey("conversation.projects.id", ondelete="CASCADE"), primary_key=True
    )
    jwks_url: Mapped[str | None]
    jwks: Mapped[str | None]
    issuer: Mapped[str] = mapped_column(server_default="")
    audience: Mapped[str] = mapped_column(server_default="")
    refuses_hs256: Mapped[bool] = mapped_column(server_default=sql("false"))
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class StreamTicket(Base):
    """A single-use stand-in for a caller's credential in a URL; only its SHA-256 is kept."""

    __tablename__ = "stream_tickets"
    ticket_sha256: Mapped[bytes] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = _project()
    user_id: Mapped[str]
    role: Mapped[str]
    expires_at: Mapped[datetime]


class Worker(Base):
    """One process start. Its runs are its own until lease_until."""

    __tablename__ = "workers"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    lease_until: Mapped[datetime]
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Thread(Base):
    """A conversation. next_position and last_message_at hand out the order of its messages.

    Tokens and cost are those of its calls that ended, in nano-USD.
    """

    __tablename__ = "ai_threads"
    __table_args__ = (Index(None, "project_id", "user_id", "updated_at", "id"),)
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = _project()
    user_id: Mapped[str]
    title: Mapped[str] = mapped_column(server_default="")
    system_prompt: Mapped[str] = mapped_column(server_default="")
    default_model_slug: Mapped[str] = mapped_column(server_default="")
    next_position: Mapped[int] = mapped_column(server_default="1")
    last_message_at: Mapped[datetime] = mapped_column(server_default=sql("'-infinity'"))
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)
    tokens_in: Mapped[int] = mapped_column(server_default="0")
    tokens_out: Mapped[int] = mapped_column(server_default="0")
    thinking_tokens: Mapped[int] = mapped_column(server_default="0")
    cached_tokens: Mapped[int] = mapped_column(server_default="0")
    cache_write_tokens: Mapped[int] = mapped_column(server_default="0")
    cost_nano: Mapped[int] = mapped_column(server_default="0")
    usage_estimated: Mapped[bool] = mapped_column(server_default=sql("false"))


class Message(Base):
    """An entry of a thread. Of a streaming one, `text` is a snapshot as of event `text_seq`."""

    __tablename__ = "ai_messages"
    __table_args__ = (UniqueConstraint("thread_id", "position"),)
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID]
    user_id: Mapped[str]
    thread_id: Mapped[UUID] = _thread()
    run_id: Mapped[UUID]
    position: Mapped[int]
    role: Mapped[str]
    status: Mapped[str]
    parts: Mapped[bytes] = mapped_column(server_default=sql("''::bytea"))
    text: Mapped[str] = mapped_column(server_default="")
    text_seq: Mapped[int] = mapped_column(server_default="0")
    model: Mapped[str] = mapped_column(server_default="")
    provider: Mapped[str] = mapped_column(server_default="")
    tokens_in: Mapped[int] = mapped_column(server_default="0")
    tokens_out: Mapped[int] = mapped_column(server_default="0")
    thinking_tokens: Mapped[int] = mapped_column(server_default="0")
    cached_tokens: Mapped[int] = mapped_column(server_default="0")
    usage_estimated: Mapped[bool] = mapped_column(server_default=sql("false"))
    latency_ms: Mapped[int] = mapped_column(server_default="0")
    finish_reason: Mapped[str] = mapped_column(server_default="")
    error: Mapped[bytes | None]
    metadata_: Mapped[dict[str, Any]] = mapped_column("metadata", server_default=sql("'{}'::jsonb"))
    created_at: Mapped[datetime]
    cache_write_tokens: Mapped[int] = mapped_column(server_default="0")
    cost_nano: Mapped[int] = mapped_column(server_default="0")
    cost_credits: Mapped[int] = mapped_column(server_default="0")


class TraceEvent(Base):
    """A finished trace of a finished run. `ordinal` is its place in the run, `payload` a Trace message."""

    __tablename__ = "trace_events"
    __table_args__ = (Index(None, "thread_id", "position", "ordinal"),)
    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    ordinal: Mapped[int] = mapped_column(primary_key=True)
    project_id: Mapped[UUID]
    user_id: Mapped[str]
    thread_id: Mapped[UUID] = _thread()
    message_id: Mapped[UUID]
    position: Mapped[int]
    type: Mapped[str]
    payload: Mapped[bytes]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime]


class Run(Base):
    """One answer in the making. (worker_id, epoch) is its owner; without a worker it may be claimed."""

    __tablename__ = "ai_runs"
    __table_args__ = (
        Index(None, "thread_id"),
        # One active run a thread (durability.md 22).
        Index("ai_runs_one_active", "thread_id", unique=True, postgresql_where=sql("status = 'running'")),
        Index("ai_runs_owned", "worker_id", postgresql_where=sql("status = 'running'")),
        Index(
            "ai_runs_untrimmed",
            "finished_at",
            postgresql_where=sql("finished_at IS NOT NULL AND NOT log_trimmed"),
        ),
    )
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID]
    user_id: Mapped[str]
    thread_id: Mapped[UUID] = _thread()
    user_message_id: Mapped[UUID]
    reply_message_id: Mapped[UUID]
    status: Mapped[str]
    model: Mapped[str]
    options: Mapped[bytes]
    worker_id: Mapped[UUID | None]
    epoch: Mapped[int] = mapped_column(server_default="1")
    takeovers: Mapped[int] = mapped_column(server_default="0")
    cancel_requested_at: Mapped[datetime | None]
    last_seq: Mapped[int] = mapped_column(server_default="0")
    log_bytes: Mapped[int] = mapped_column(server_default="0")
    log_trimmed: Mapped[bool] = mapped_column(server_default=sql("false"))
    error: Mapped[bytes | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    finished_at: Mapped[datetime | None]
    begun_at: Mapped[datetime | None]


class QueuedRun(Base):
    """What the start of a run that waits will write. The lowest ordinal of a thread is next."""

    __tablename__ = "queued_runs"
    __table_args__ = (UniqueConstraint("thread_id", "ordinal"),)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("conversation.ai_runs.id", ondelete="CASCADE"), primary_key=True)
    project_id: Mapped[UUID]
    user_id: Mapped[str]
    thread_id: Mapped[UUID]
    ordinal: Mapped[int]
    parts: Mapped[bytes]
    text: Mapped[str]
    title: Mapped[str]
    is_kept: Mapped[bool]


class RunWatch(Base):
    """A run that is cancelled once no client has watched it for cancel_after_ms; watched, `until` moves on."""

    __tablename__ = "run_watch"
    run_id: Mapped[UUID] = mapped_column(ForeignKey("conversation.ai_runs.id", ondelete="CASCADE"), primary_key=True)
    project_id: Mapped[UUID]
    cancel_after_ms: Mapped[int]
    until: Mapped[datetime]


class RunEvent(Base):
    """The log. `payload` is a RunEvent message; `kind` is its oneof's field number."""

    __tablename__ = "run_events"
    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    project_id: Mapped[UUID]
    kind: Mapped[int] = mapped_column(SmallInteger)
    payload: Mapped[bytes]


class IdempotencyKey(Base):
    """A request seen before. `resource` is what it made; NULL once that failed before it answered."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (Index(None, "created_at"), Index(None, "resource"))
    project_id: Mapped[UUID] = mapped_column(
        ForeignKey("conversation.projects.id", ondelete="CASCADE"), primary_key=True
    )
    caller: Mapped[str] = mapped_column(primary_key=True)
    method: Mapped[str] = mapped_column(primary_key=True)
    route: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_sha256: Mapped[bytes]
    resource: Mapped[UUID | None]
    kept_message_id: Mapped[UUID | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class ApiCall(Base):
    """One attempt at a provider, written before the request. Holds no text; outlives its thread.

    status: started; sent, once it has its hold, whose `rates` price it; then how it ended.
    """

    __tablename__ = "api_calls"
    __table_args__ = (Index(None, "run_id"),)
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID]
    user_id: Mapped[str]
    thread_id: Mapped[UUID]
    run_id: Mapped[UUID]
    message_id: Mapped[UUID]
    step: Mapped[int]
    attempt: Mapped[int]
    model: Mapped[str]
    provider: Mapped[str] = mapped_column(server_default="")
    status: Mapped[str] = mapped_column(server_default="started")
    http_status: Mapped[int] = mapped_column(server_default="0")
    error_code: Mapped[str] = mapped_column(server_default="")
    tokens_in: Mapped[int] = mapped_column(server_default="0")
    tokens_out: Mapped[int] = mapped_column(server_default="0")
    thinking_tokens: Mapped[int] = mapped_column(server_default="0")
    cached_tokens: Mapped[int] = mapped_column(server_default="0")
    usage_source: Mapped[str] = mapped_column(server_default="unknown")
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ended_at: Mapped[datetime | None]
    cache_write_tokens: Mapped[int] = mapped_column(server_default="0")
    cost_nano: Mapped[int] = mapped_column(server_default="0")
    rates: Mapped[bytes | None]
    credits_per_usd: Mapped[int] = mapped_column(server_default="0")


class OutboxRow(Base):
    """What another service must be told, as long as it has not received it."""

    __tablename__ = "outbox"
    __table_args__ = (Index(None, "due_at"),)
    id: Mapped[UUID] = mapped_column(primary_key=True)
    topic: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[UUID]
    payload: Mapped[bytes]
    attempts: Mapped[int] = mapped_column(server_default="0")
    due_at: Mapped[datetime] = mapped_column(server_default=NOW)
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
