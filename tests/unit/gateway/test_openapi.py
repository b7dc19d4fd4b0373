"""The document says what is served, and all of it."""

from typing import Any
from unittest.mock import Mock

import pytest

from services.gateway import openapi
from services.gateway.app import OPERATIONS, routes
from services.gateway.routes.operations import OpenOperation, Operation

DOCUMENT: dict[str, Any] = openapi.document(OPERATIONS)


def test_every_route_is_in_the_document_and_the_other_way_round() -> None:
    served = {(route.path_format, method) for route in routes(Mock()) for method in route.app._methods}  # type: ignore[attr-defined]
    told = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert served == told


def test_every_reference_has_its_schema() -> None:
    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*(references(value) for value in node.values()))
        return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()

    schemas = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert references(DOCUMENT) <= schemas


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
def test_an_operation_tells_its_statuses(operation: Operation | OpenOperation) -> None:
    told = DOCUMENT["paths"][operation.path][operation.method.lower()]
    assert {str(answer.status) for answer in operation.answers} <= set(told["responses"])
    if isinstance(operation, Operation):
        assert {"401", "400", "500", "503"} <= set(told["responses"])
        assert told["security"]
        assert ("requestBody" in told) == (operation.body is not None)
    names = [part for part in operation.path.split("/") if part.startswith("{")]
    assert sum(one["in"] == "path" for one in told.get("parameters", [])) == len(names)


def test_unknown_options_are_refused_by_the_schema_too() -> None:
    talk = ("NewMessage", "NewConversation", "ConversationChange", "Cancel", "TextPart")
    money = ("NewPrice", "NewTier", "NewQuota", "NewCap", "TermsChange", "NewProviderKey", "NewIdentity")
    for name in (*talk, *money):
        assert DOCUMENT["components"]["schemas"][name]["additionalProperties"] is False
