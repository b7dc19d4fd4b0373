"""Settings: what is taken, and that all that is wrong is said at once."""

import pytest

from kit.outbound import NOTHING_ALLOWED
from kit.settings import SettingsError, load
from services.gateway.settings import Settings

GIVEN = {"CONVERSATION_ADDRESSES": "127.0.0.1:1, [::1]:2", "THREADLOOM_SERVICE_CREDENTIAL": "secret"}


def test_defaults() -> None:
    found = load(Settings, GIVEN)
    assert found.listen == ("127.0.0.1", 8080)
    assert found.conversation == ("127.0.0.1:1", "[::1]:2")
    assert found.origins == ("localhost",)
    assert found.log_level == "INFO"
    assert found.allowed_hosts == NOTHING_ALLOWED


def test_an_ipv6_address_is_taken() -> None:
    assert load(Settings, {**GIVEN, "THREADLOOM_HTTP_LISTEN": "[::]:0"}).listen == ("::", 0)


def test_every_problem_is_told() -> None:
    wrong = {
        "THREADLOOM_HTTP_LISTEN": "8080",
        "CONVERSATION_ADDRESSES": " , ",
        "THREADLOOM_ALLOWED_ORIGINS": "app.example.com",
        "THREADLOOM_DRAIN_SECONDS": "0",
        "THREADLOOM_LOG_LEVEL": "LOUD",
        "THREADLOOM_ALLOWED_HOSTS": "https://x",
    }
    with pytest.raises(SettingsError) as found:
        load(Settings, wrong)
    for name in (*wrong, "THREADLOOM_SERVICE_CREDENTIAL"):
        assert name in str(found.value)
