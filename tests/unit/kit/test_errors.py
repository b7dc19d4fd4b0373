"""One error type, the same on every wire."""

import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.errors import (
    CLASSES,
    ServiceError,
    from_event_error,
    from_status,
    internal,
    not_found,
    seconds,
    to_event_error,
    to_status,
)
from threadloom.common.v1.error_reason_pb2 import ErrorReason

PREFIX = "ERROR_REASON_"
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ERRORS = st.builds(
    ServiceError,
    st.sampled_from(sorted(CLASSES)),
    WORDS,
    st.dictionaries(WORDS, WORDS, max_size=3),
    st.none() | st.integers(0, 10**12).map(lambda nanos: nanos / 1e9),
)


def test_every_reason_has_a_class_and_every_class_a_reason() -> None:
    named = {name.removeprefix(PREFIX) for name in ErrorReason.keys()}  # noqa: SIM118 - an enum wrapper, no dict
    assert named - {"UNSPECIFIED"} == set(CLASSES)


def test_every_reason_carries_its_prefix() -> None:
    assert all(name.startswith(PREFIX) for name in ErrorReason.keys())  # noqa: SIM118


@pytest.mark.parametrize("reason", sorted(CLASSES))
def test_a_class_fits_both_protocols(reason: str) -> None:
    kind = CLASSES[reason]
    assert 1 <= kind.grpc <= 16
    assert 400 <= kind.http <= 599
    # A server's fault in one protocol is a server's fault in the other.
    assert (kind.http >= 500) == (kind.grpc in (4, 13, 14))


@given(ERRORS)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_an_error_survives_the_way_over_grpc(error: ServiceError) -> None:
    status = to_status(error)
    assert status.code == error.kind.grpc
    back = from_status(status_pb2.Status.FromString(status.SerializeToString()))
    assert back is not None
    assert (back.reason, back.message, back.metadata) == (error.reason, error.message, error.metadata)
    assert back.retry_after == pytest.approx(error.retry_after) if error.retry_after else not back.retry_after


def test_a_wait_of_zero_is_not_no_wait() -> None:
    back = from_status(to_status(ServiceError("UNAVAILABLE", "x", retry_after=0.0)))
    assert back is not None
    assert back.retry_after == 0.0


def test_an_error_survives_the_way_through_an_event() -> None:
    error = ServiceError("AI_RATE_LIMITED", "Slow down.", {"provider": "openai", "status": "429"}, 2.5)
    assert from_event_error(to_event_error(error)) == error
    bare = ServiceError("INTERNAL", "Broken.")
    assert from_event_error(to_event_error(bare)) == bare


def test_a_status_of_somebody_else_is_not_ours() -> None:
    assert from_status(status_pb2.Status(code=5, message="no")) is None
    foreign = status_pb2.Status(code=5)
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="NOT_FOUND", domain="else.where"))
    assert from_status(foreign) is None


def test_an_unknown_reason_counts_as_internal() -> None:
    assert ServiceError("NO_SUCH_REASON", "x").kind == CLASSES["INTERNAL"]


def test_an_error_says_its_reason_and_keeps_secrets_out_of_internal() -> None:
    assert str(not_found("run")) == "NOT_FOUND: This run does not exist."
    assert internal().metadata == {}


@pytest.mark.parametrize("value", [0.0, 0.001, 1.5, 86_400.0])
def test_seconds_become_a_duration(value: float) -> None:
    assert seconds(value).ToNanoseconds() == round(value * 1e9)
