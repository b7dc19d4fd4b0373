"""The bounds of billing's settings."""

import pytest

from kit.settings import SettingsError, load
from services.billing.settings import Settings

NEEDED = {
    "BILLING_DATABASE_URL": "postgresql://x",
    "BILLING_ENGINE_DATABASE_URL": "postgresql://x",
    "THREADLOOM_SERVICE_CREDENTIAL": "x",
}
BOUNDS = {"BILLING_RUNS_PER_MINUTE": (1, 10**6), "BILLING_CREDITS_PER_USD": (0, 10**9)}


def test_a_deployment_that_says_nothing_has_these_terms() -> None:
    found = load(Settings, NEEDED)
    assert (found.runs_per_minute, found.credits_per_usd) == (60, 1000)


@pytest.mark.parametrize("name", BOUNDS)
def test_the_terms_of_a_deployment_have_the_bounds_of_a_projects(name: str) -> None:
    for value in BOUNDS[name]:
        load(Settings, NEEDED | {name: str(value)})
    for wrong in (str(BOUNDS[name][0] - 1), str(BOUNDS[name][1] + 1), "many", "1.5"):
        with pytest.raises(SettingsError, match=name):
            load(Settings, NEEDED | {name: wrong})
