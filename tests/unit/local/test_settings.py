"""The settings of the local stack."""

import pytest

from deploy.local.settings import DEMO_MODEL, StackSettings, parse_replicas
from kit.settings import SettingsError, load


def test_a_service_that_is_not_named_keeps_its_number_of_replicas() -> None:
    assert parse_replicas("") == {"billing": 1, "conversation": 2, "gateway": 2}
    assert parse_replicas(" conversation = 3 ,") == {"billing": 1, "conversation": 3, "gateway": 2}
    assert parse_replicas("billing=2,conversation=4") == {"billing": 2, "conversation": 4, "gateway": 2}


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ("media=2", "media"),
        ("conversation", "count"),
        ("conversation=0", "1 to 16"),
        ("conversation=17", "1 to 16"),
        ("conversation=-1", "1 to 16"),
        ("conversation=two", "1 to 16"),
        ("conversation=²", "1 to 16"),
        ("gateway=1,gateway=2", "twice"),
        ("=2", "no service"),
    ],
)
def test_wrong_replicas_are_named(raw: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_replicas(raw)


def test_all_wrong_settings_are_reported_together_and_no_secret_is_shown() -> None:
    environ = {
        "THREADLOOM_PORT": "http",
        "THREADLOOM_REPLICAS": "gateway=none",
        "DATABASE_URL": "mysql://root:hunter2@db/x",
        "NATS_URL": "localhost",
        "OPENAI_BASE_URL": "api.example.com",
    }
    with pytest.raises(SettingsError) as caught:
        load(StackSettings, environ)
    assert all(name in str(caught.value) for name in environ)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "80.5", "８０８０"])
def test_a_port_outside_the_range_is_refused(port: str) -> None:
    with pytest.raises(SettingsError, match="1 to 65535"):
        load(StackSettings, {"THREADLOOM_PORT": port})


def test_the_demo_model_answers_only_without_key_and_address() -> None:
    assert load(StackSettings, {}).model == DEMO_MODEL
    assert load(StackSettings, {"OPENAI_API_KEY": "k"}).model == "gpt-4o-mini"
    with_address = load(StackSettings, {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1/", "THREADLOOM_MODEL": "mine"})
    assert (with_address.is_demo, with_address.model, with_address.base_url) == (False, "mine", "http://127.0.0.1:9/v1")
