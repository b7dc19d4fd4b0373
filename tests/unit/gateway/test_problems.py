"""The table of errors: reason to status, code and headers."""

import json

import pytest

from kit.errors import CLASSES, ServiceError
from services.gateway.problems import HttpError, method_not_allowed, to_response

EXPECTED = {
    "THREAD_NOT_FOUND": 404,
    "NOT_FOUND": 404,
    "IDEMPOTENCY_KEY_REUSED": 422,
    "CURSOR_EXPIRED": 410,
    "INVALID_OPTIONS": 400,
    "NO_USER_MESSAGE": 400,
    "CONTENT_TOO_LARGE": 413,
    "RUN_IN_PROGRESS": 409,
    "AI_PROVIDER_NOT_CONFIGURED": 409,
    "AI_PROVIDER_ERROR": 502,
    "AI_PROVIDER_TIMEOUT": 504,
    "AI_RATE_LIMITED": 429,
    "CONTEXT_TOO_LARGE": 400,
    "TURN_TIMEOUT": 504,
    "UNAUTHENTICATED": 401,
    "FORBIDDEN": 403,
    "UNAVAILABLE": 503,
    "INTERNAL": 500,
    "ALREADY_EXISTS": 409,
    "MODEL_NOT_PRICED": 409,
    "QUOTA_EXCEEDED": 402,
    "AI_BUDGET_EXCEEDED": 402,
}


def test_the_table_is_whole() -> None:
    assert {reason: kind.http for reason, kind in CLASSES.items()} == EXPECTED


@pytest.mark.parametrize(("reason", "status"), EXPECTED.items())
def test_a_reason_has_its_status_and_code(reason: str, status: int) -> None:
    response = to_response(ServiceError(reason, "A sentence.", retry_after=0.2), "request-1")
    code = "rate_limit" if reason == "AI_RATE_LIMITED" else reason
    assert response.status_code == status
    assert response.headers["retry-after"] == "1"
    assert ("www-authenticate" in response.headers) == (status == 401)
    assert json.loads(response.body) == {
        "code": code, "message": "A sentence.", "request_id": "request-1", "retry_after": 0.2,
    }  # fmt: skip


def test_an_unknown_reason_is_a_500() -> None:
    assert to_response(ServiceError("FROM_THE_FUTURE", "A sentence."), "request-1").status_code == 500


def test_http_has_errors_of_its_own() -> None:
    error: HttpError = method_not_allowed("GET, POST")
    response = to_response(error, "request-1")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, POST")


def test_numbers_are_numbers() -> None:
    error = ServiceError("CONTENT_TOO_LARGE", "A sentence.", {"limit": "50", "unit": "parts", "status": "x"})
    body = json.loads(to_response(error, "request-1").body)
    assert (body["limit"], body["unit"]) == (50, "parts")
    assert "status" not in body
