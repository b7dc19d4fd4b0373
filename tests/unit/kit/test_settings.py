"""Settings are read once, and every problem is told at once."""

from dataclasses import dataclass, fields

import pytest

from kit.settings import SettingsError, comma_list, load, port, positive, setting
from services.conversation.settings import Settings

REQUIRED = {
    "CONVERSATION_DATABASE_URL": "postgresql://a",
    "CONVERSATION_ENGINE_DATABASE_URL": "postgresql://b",
    "THREADLOOM_SERVICE_CREDENTIAL": "secret",
}


@dataclass(frozen=True)
class Some:
    name: str = setting("NAME", "The name.")
    limit: float = setting("LIMIT", "The limit.", "1.5", positive)
    key: int = setting("KEY", "The key.", "1", int, secret=True)


def test_the_environment_wins_over_the_default() -> None:
    assert load(Some, {"NAME": "x", "LIMIT": "2"}) == Some("x", 2.0, 1)


def test_an_empty_variable_counts_as_unset() -> None:
    assert load(Some, {"NAME": "x", "LIMIT": ""}).limit == 1.5
    with pytest.raises(SettingsError, match="NAME is not set: The name"):
        load(Some, {"NAME": ""})


def test_all_problems_are_listed_and_no_secret_is_shown() -> None:
    with pytest.raises(SettingsError) as caught:
        load(Some, {"LIMIT": "-1", "KEY": "hunter2"})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "hunter2" not in lines[2].partition("not usable")[0]


@pytest.mark.parametrize("raw", ["0", "-1", "nan", "inf", "-inf", "x", "1,5"])
def test_a_number_that_is_not_above_zero_is_refused(raw: str) -> None:
    with pytest.raises(ValueError):
        positive(raw)


@pytest.mark.parametrize("raw", ["-1", "65536", "x", "80.0"])
def test_a_number_that_is_no_port_is_refused(raw: str) -> None:
    with pytest.raises(ValueError):
        port(raw)
    assert (port("0"), port("65535")) == (0, 65535)


def test_a_list_ignores_blanks_and_empty_values() -> None:
    assert comma_list(" a, ,b,") == ("a", "b")


def test_the_service_starts_with_its_three_secrets_alone() -> None:
    settings = load(Settings, REQUIRED)
    assert (settings.turn_seconds, settings.openai_api_key) == (120.0, "-")


@pytest.mark.parametrize("missing", sorted(REQUIRED))
def test_a_missing_secret_stops_the_start_and_is_named(missing: str) -> None:
    with pytest.raises(SettingsError, match=missing):
        load(Settings, {name: value for name, value in REQUIRED.items() if name != missing})


def test_every_variable_is_described_and_every_address_is_a_secret() -> None:
    for field in fields(Settings):
        assert field.metadata["doc"]
        assert field.metadata["secret"] == (
            "DATABASE_URL" in field.metadata["env"]
            or field.metadata["env"]
            in ("NATS_URL", "OPENAI_API_KEY", "THREADLOOM_SECRET_KEYS", "THREADLOOM_SERVICE_CREDENTIAL")
        )


def test_settings_shown_as_text_hide_every_secret() -> None:
    shown = repr(load(Settings, REQUIRED | {"OPENAI_API_KEY": "hunter2", "THREADLOOM_TURN_SECONDS": "77"}))
    assert "77" in shown
    assert [value for value in (*REQUIRED.values(), "hunter2") if value in shown] == []


@pytest.mark.parametrize("variable", ["THREADLOOM_POOL_SIZE", "THREADLOOM_LOG_LEVEL"])
def test_a_value_the_service_cannot_run_with_stops_the_start(variable: str) -> None:
    bad = {"THREADLOOM_POOL_SIZE": "0.5", "THREADLOOM_LOG_LEVEL": "LOUD"}
    with pytest.raises(SettingsError, match=variable):
        load(Settings, REQUIRED | {variable: bad[variable]})
