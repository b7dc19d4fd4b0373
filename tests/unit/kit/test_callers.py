"""Who is calling survives metadata, and a part that is missing never widens the view."""

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.callers import PROJECT_KEY, ROLE_KEY, SYSTEM, USER_KEY, Caller, Role, from_metadata, is_user_id, to_metadata
from kit.errors import ServiceError

PROJECT = UUID("0190000a-0000-7000-8000-00000000000b")
GOOD = {ROLE_KEY: "user", PROJECT_KEY: str(PROJECT), USER_KEY: "alice"}
USERS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=255)


@given(USERS)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_a_user_of_any_script_comes_back_and_travels_as_ascii(user: str) -> None:
    caller = Caller(Role.USER, PROJECT, user)
    if is_user_id(user):
        metadata = to_metadata(caller)
        assert all(value.isascii() and value.isprintable() for _, value in metadata)
        assert from_metadata(dict(metadata)) == caller


def test_the_other_roles_come_back() -> None:
    for caller in (SYSTEM, Caller(Role.SERVICE, PROJECT)):
        assert from_metadata(dict(to_metadata(caller))) == caller


BAD = [
    {},
    {ROLE_KEY: ""},
    {ROLE_KEY: "admin"},
    {ROLE_KEY: "SYSTEM"},
    {ROLE_KEY: "user"},
    {ROLE_KEY: "service"},
    {**GOOD, PROJECT_KEY: ""},
    {**GOOD, PROJECT_KEY: "acme"},
    {**GOOD, PROJECT_KEY: str(PROJECT).upper()},
    {**GOOD, PROJECT_KEY: str(PROJECT).replace("-", "")},
    {**GOOD, PROJECT_KEY: f"{{{PROJECT}}}"},
    {ROLE_KEY: "user", PROJECT_KEY: str(PROJECT)},
    {**GOOD, USER_KEY: ""},
    {**GOOD, USER_KEY: "%20"},
    {**GOOD, USER_KEY: "%00"},
    {**GOOD, USER_KEY: "a%0Ab"},
    {**GOOD, USER_KEY: "x" * 256},
    {**GOOD, USER_KEY: "a%E2%80%A8b"},
]


@pytest.mark.parametrize("metadata", BAD)
def test_a_caller_that_is_not_wholly_named_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(ServiceError) as caught:
        from_metadata(metadata)
    assert caught.value.reason == "INVALID_OPTIONS"


def test_a_service_role_never_carries_a_user() -> None:
    assert from_metadata({**GOOD, ROLE_KEY: "service"}) == Caller(Role.SERVICE, PROJECT)


def test_the_system_role_never_carries_a_project() -> None:
    assert from_metadata({**GOOD, ROLE_KEY: "system"}) == SYSTEM


def test_a_user_cannot_spell_another_callers_key() -> None:
    service = Caller(Role.SERVICE, PROJECT).key
    assert all(Caller(Role.USER, PROJECT, user).key != service for user in ("service:", ":", "x"))


@pytest.mark.parametrize("length", [1, 255])
def test_user_ids_of_1_to_255_characters_are_taken(length: int) -> None:
    assert is_user_id("\u00e9" * length)


@pytest.mark.parametrize("user", ["", " ", "x" * 256, "a\x00", "a\nb", "\ud800", "a\u200bb"])
def test_any_other_user_id_is_not(user: str) -> None:
    assert not is_user_id(user)
