"""The rules of webhooks: events, payloads, signatures, when a try is made again, how a failing one is spared."""

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime
from uuid import UUID, uuid4

import pytest

from kit.errors import ServiceError
from services.conversation import limits
from services.conversation.domain import endings, events, webhooks
from services.conversation.domain.fold import RunState
from services.conversation.domain.webhook_health import Health, rest_after

NOW = datetime(2026, 12, 1, 3, tzinfo=UTC)
MOST = limits.WEBHOOK_RETRY_AFTER_MAX


@pytest.mark.parametrize("given", [[], ["ping"], ["run.finished", "run.started"], [""]])
def test_events_that_are_none_are_refused(given: list[str]) -> None:
    with pytest.raises(ServiceError, match=r"run\.finished, run\.failed") as caught:
        webhooks.check_events(given)
    assert (caught.value.reason, caught.value.metadata["field"]) == ("INVALID_OPTIONS", "events")


def test_events_are_kept_once_each() -> None:
    assert webhooks.check_events(["run.failed", "run.finished", "run.failed"]) == ["run.finished", "run.failed"]
    assert webhooks.check_events(["run.failed"]) == ["run.failed"]


def test_every_end_is_an_event() -> None:
    ends = {status: webhooks.type_of(status) for status in ("succeeded", "cancelled", "failed")}
    assert ends == {"succeeded": "run.finished", "cancelled": "run.finished", "failed": "run.failed"}


def test_a_payload_says_when_in_utc_and_keeps_every_character() -> None:
    at = NOW.astimezone(timezone(timedelta(hours=5)))
    text = webhooks.envelope("ping", {"user_id": 'ü"\n'}, at)
    assert json.loads(text) == {
        "type": "ping",
        "timestamp": "2026-12-01T03:00:00.000000Z",
        "data": {"user_id": 'ü"\n'},
    }
    assert "\n" not in text


def told(state: RunState, status: str) -> dict[str, object]:
    return webhooks.run_data(run="r", thread="t", message="m", user="u", model="asked", status=status, state=state)


def test_a_run_that_waited_and_was_cancelled_has_no_usage_and_the_model_it_asked_for() -> None:
    state, log = RunState(), [events.run_started("q", "asked"), endings.finish("cancelled", "asked", 0.0)]
    events.number(log, 1)
    for event in log:
        state.apply(event)
    data = told(state, "cancelled")
    assert (data["model"], data["cost_usd"], data["error"]) == ("asked", "0.000000000", None)
    assert (data["finish_reason"], data["message_id"]) == ("cancelled", "msg_m")
    assert (data["run_id"], data["conversation_id"], data["user_id"]) == ("r", "t", "u")


def test_a_secret_is_as_long_as_the_hash_and_a_signature_covers_id_time_and_body() -> None:
    raw = bytes(range(limits.WEBHOOK_SECRET_BYTES))
    secret = webhooks.new_secret(raw)
    assert secret == "whsec_" + base64.b64encode(raw).decode()
    headers = webhooks.sign(secret, "id-1", 1_700_000_000, b'{"a":1}')
    digest = hmac.new(raw, b'id-1.1700000000.{"a":1}', hashlib.sha256).digest()
    assert headers == {
        "webhook-id": "id-1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }
    signatures = {
        webhooks.sign(*changed)["webhook-signature"]  # type: ignore[arg-type]
        for changed in ((secret, "id-1", 1, b""), (secret, "id-2", 1, b""), (secret, "id-1", 2, b""))
    }
    assert len(signatures) == 3


def test_the_signature_is_the_one_of_the_standards_own_example() -> None:
    headers = webhooks.sign(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_schedule_is_followed_to_its_end() -> None:
    pauses = limits.WEBHOOK_PAUSES
    assert [webhooks.pause_after(failures, pauses) for failures in range(1, len(pauses) + 1)] == list(pauses)
    assert webhooks.pause_after(len(pauses) + 1, pauses) is None
    assert webhooks.pause_after(len(pauses) + 1, pauses, asked=5.0) is None
    assert list(pauses) == sorted(pauses)
    assert 72 * 3600 < sum(pauses) < 77 * 3600


@pytest.mark.parametrize(
    ("asked", "pause"), [(None, 60.0), (0.0, 60.0), (59.0, 60.0), (61.0, 61.0), (MOST, MOST), (MOST + 1, MOST)]
)
def test_a_receiver_may_ask_for_a_longer_pause_but_not_for_ever(asked: float | None, pause: float) -> None:
    assert webhooks.pause_after(2, limits.WEBHOOK_PAUSES, asked) == pause


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("0", 0.0),
        ("120", 120.0),
        ("9" * 5000, 999_999_999.0),
        ("-5", None),
        ("1.5", None),
        ("²", None),
        ("soon", None),
        (format_datetime(NOW + timedelta(minutes=2), usegmt=True), 120.0),
        (format_datetime(NOW - timedelta(minutes=2), usegmt=True), 0.0),
        ("Tue, 01 Dec 2026 03:02:00", 120.0),
        ("Tue, 01 Dec 99999 03:02:00 GMT", None),
        ("Tue, 01 Dec 2026 03:02:00 +9999999999", None),
    ],
)
def test_what_a_receiver_asks_for(header: str | None, seconds: float | None) -> None:
    assert webhooks.retry_after(header, NOW) == seconds


def test_a_pause_of_a_receiver_that_fails_doubles_up_to_a_bound() -> None:
    first, most = limits.WEBHOOK_REST_SECONDS, limits.WEBHOOK_REST_MAX_SECONDS
    assert [rest_after(failures) for failures in (1, 2, 3, 4)] == [0.0, first, 2 * first, 4 * first]
    assert rest_after(8) == most
    assert rest_after(10**9) == most


def test_one_that_failed_is_tried_one_at_a_time_and_rests_until_it_is_well() -> None:
    health, hook = Health(), uuid4()
    assert health.rooms(0.0) == {}
    health.note(hook, False, 0.0)
    assert health.rooms(0.0) == {hook: 1}
    health.note(hook, False, 10.0)
    rest = limits.WEBHOOK_REST_SECONDS
    assert health.rooms(10.0 + rest - 0.01) == {hook: 0}
    assert health.rooms(10.0 + rest) == {hook: 1}
    health.note(hook, True, 20.0)
    assert health.rooms(20.0) == {}


def test_only_so_many_are_remembered_the_newest_failures_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WEBHOOKS_REMEMBERED", 2)
    health, hooks = Health(), [UUID(int=number) for number in range(3)]
    for hook in (hooks[0], hooks[1], hooks[0]):
        health.note(hook, False, 0.0)
    assert set(health.rooms(100.0)) == {hooks[0], hooks[1]}
    health.note(hooks[2], False, 0.0)
    assert set(health.rooms(100.0)) == {hooks[0], hooks[2]}
