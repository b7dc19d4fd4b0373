"""The tables of the billing service, in the Postgres schema `billing`. Money is nano-USD.

Who may see and write which row is in the migrations (row-level security).
"""

from datetime import date, datetime
from uuid import UUID

from sqlalchemy import BigInteger, Date, Index, MetaData, Text
from sqlalchemy import text as sql
from sqlalchemy.dialects.postgresql import BYTEA, TIMESTAMP
from sqlalchemy.dialects.postgresql import UUID as PG_UUID
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA = "billing"
NOW = sql("clock_timestamp()")
NO = sql("false")


class Base(DeclarativeBase):
    """Every table; types are given once here."""

    metadata = MetaData(
        schema=SCHEMA,
        naming_convention={"ix": "%(table_name)s_%(column_0_N_name)s", "pk": "%(table_name)s_pkey"},
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as it is
        str: Text,
        bytes: BYTEA,
        date: Date,
        datetime: TIMESTAMP(timezone=True),
        UUID: PG_UUID(as_uuid=True),
        int: BigInteger,
    }


class ModelPrice(Base):
    """A price somebody set. The nil project's hold for all projects. `rates` is a billing.v1.Rates."""

    __tablename__ = "model_prices"
    project_id: Mapped[UUID] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    rates: Mapped[bytes]
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Quota(Base):
    """What a user may spend in a period: day, month or total. Of user_id '': every user who has no row."""

    __tablename__ = "quotas"
    project_id: Mapped[UUID] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(primary_key=True)
    period: Mapped[str]
    limit_nano: Mapped[int]


class SpendCap(Base):
    """What a project may spend in a period."""

    __tablename__ = "spend_caps"
    project_id: Mapped[UUID] = mapped_column(primary_key=True)
    period: Mapped[str] = mapped_column(primary_key=True)
    limit_nano: Mapped[int]


class ProjectTerms(Base):
    """What a project agreed to besides prices; NULL: the deployment's."""

    __tablename__ = "project_terms"
    project_id: Mapped[UUID] = mapped_column(primary_key=True)
    credits_per_usd: Mapped[int | None]
    runs_per_minute: Mapped[int | None]


class Account(Base):
    """The running sums of a user, or of a project (user_id ''), in one period.

    Every hold is in six of them, with limits or without, so that a limit set later knows
    what was spent before it. They are the fixed rows that holds and settles queue at.
    """

    __tablename__ = "accounts"
    project_id: Mapped[UUID] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(primary_key=True)
    period: Mapped[str] = mapped_column(primary_key=True)
    start: Mapped[date] = mapped_column(primary_key=True)
    held_nano: Mapped[int] = mapped_column(server_default="0")
    spent_nano: Mapped[int] = mapped_column(server_default="0")


class Hold(Base):
    """Money set aside. `status`: open, settled, released, expired. `day` names its periods' accounts.

    A row without rates never was a hold: the call was released before it was asked for, and is barred.
    """

    __tablename__ = "holds"
    __table_args__ = (
        Index(None, "project_id", "run_id"),
        Index("holds_open", "expires_at", postgresql_where=sql("status = 'open'")),
        Index("holds_closed", "status", "closed_at", postgresql_where=sql("closed_at IS NOT NULL")),
    )
    api_call_id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID]
    user_id: Mapped[str]
    run_id: Mapped[UUID]
    thread_id: Mapped[UUID]
    message_id: Mapped[UUID]
    model: Mapped[str]
    input_max: Mapped[int]
    output_max: Mapped[int]
    output_min: Mapped[int]
    output_granted: Mapped[int]
    amount_nano: Mapped[int]
    rates: Mapped[bytes | None]
    credits_per_usd: Mapped[int]
    status: Mapped[str] = mapped_column(server_default="open")
    day: Mapped[date]
    placed_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expires_at: Mapped[datetime]
    closed_at: Mapped[datetime | None]


class LedgerRow(Base):
    """One call, once. Outlives its thread and its user."""

    __tablename__ = "cost_ledger"
    __table_args__ = (
        Index(None, "project_id", "booked_at", "api_call_id"),
        Index(None, "project_id", "user_id", "booked_at", "api_call_id"),
    )
    api_call_id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID]
    user_id: Mapped[str]
    run_id: Mapped[UUID]
    thread_id: Mapped[UUID]
    message_id: Mapped[UUID]
    model: Mapped[str]
    tokens_in: Mapped[int]
    cached_tokens: Mapped[int]
    cache_write_tokens: Mapped[int]
    tokens_out: Mapped[int]
    thinking_tokens: Mapped[int]
    cost_nano: Mapped[int]
    reported_nano: Mapped[int]
    estimated: Mapped[bool] = mapped_column(server_default=NO)
    above_hold: Mapped[bool] = mapped_column(server_default=NO)
    late: Mapped[bool] = mapped_column(server_default=NO)
    day: Mapped[date]
    booked_at: Mapped[datetime] = mapped_column(server_default=NOW)


class RateWindow(Base):
    """How many runs a user began in the minute that began at `started_at`."""

    __tablename__ = "rate_windows"
    project_id: Mapped[UUID] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(primary_key=True)
    started_at: Mapped[datetime] = mapped_column(server_default=NOW)
    used: Mapped[int] = mapped_column(server_default="0")
