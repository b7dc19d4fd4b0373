"""The OpenAPI 3.1 document, made from the route table that the router is made from."""

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec

from kit.errors import CLASSES
from services.gateway.problems import Problem
from services.gateway.routes.operations import ADMIN_ERRORS, COMMON_ERRORS, Answer, OpenOperation, Operation, Parameter
from services.gateway.wire.conversations import code_of

REF = "#/components/schemas/{name}"
PROBLEM = {"$ref": REF.format(name="Problem")}

INFO = {
    "title": "Threadloom",
    "version": "1",
    "description": (
        "Durable conversations with AI. An answer streams as server-sent events, survives dropped connections and "
        "crashed processes, and resumes at any frame by `Last-Event-ID`. Before the first byte of a stream an error "
        "is a status with a JSON body; after it, an `error` event. Every response carries `X-Request-Id`."
    ),
}
SECURITY_SCHEMES = {
    "apikey": {"type": "apiKey", "in": "header", "name": "apikey", "description": "The project's key."},
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT",
        "description": "The user's token: HS256 by the project's secret, or RS256 or ES256 by a key of its JWKS.",
    },
    "ticket": {"type": "apiKey", "in": "query", "name": "ticket", "description": "A stream ticket; works once."},
}
# The user's token beside the project's key; or a token that names its project, or a service key, alone.
SECURITY: list[dict[str, list[str]]] = [{"apikey": [], "bearer": []}, {"bearer": []}, {"apikey": []}]


def document(operations: Iterable[Operation | OpenOperation]) -> dict[str, Any]:
    """The whole document as plain JSON data."""
    operations = list(operations)
    refs, components = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, refs)
    return {
        "openapi": "3.1.0",
        "info": INFO,
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": SECURITY_SCHEMES},
    }


Refs = dict[type[msgspec.Struct], dict[str, Any]]


def _schemas(operations: Iterable[Operation | OpenOperation]) -> tuple[Refs, dict[str, Any]]:
    shapes: dict[type[msgspec.Struct], None] = {Problem: None}  # a dict keeps the order
    for operation in operations:
        if isinstance(operation, Operation) and operation.body is not None:
            shapes[operation.body] = None
        shapes.update(dict.fromkeys(answer.shape for answer in operation.answers if answer.shape is not None))
    refs, components = msgspec.json.schema_components(shapes, ref_template=REF)
    return dict(zip(shapes, refs, strict=True)), components


def _operation(operation: Operation | OpenOperation, refs: Refs) -> dict[str, Any]:
    responses = _answers(operation.answers, refs)
    found: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if isinstance(operation, OpenOperation):
        return found | {"security": []}
    found["security"] = [*SECURITY, {"ticket": []}] if operation.takes_ticket else SECURITY
    parameters = _parameters(operation)
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": refs[operation.body]}}
        found["requestBody"] = {"required": not operation.body_is_optional, "content": content}
    responses.update(_errors(operation))
    return found


def _answers(answers: Iterable[Answer], refs: Refs) -> dict[str, Any]:
    """One response a status; two answers of one status differ in their media type."""
    found: dict[str, Any] = {}
    for answer in answers:
        told = _answer(answer, refs)
        known = found.setdefault(str(answer.status), told)
        if known is not told:
            known["description"] += " " + told["description"]
            known["content"].update(told["content"])
    return found


def _answer(answer: Answer, refs: Refs) -> dict[str, Any]:
    found: dict[str, Any] = {"description": answer.about}
    if answer.shape is not None:
        found["content"] = {answer.media_type: {"schema": refs[answer.shape]}}
    elif answer.status != HTTPStatus.NO_CONTENT:
        is_json = answer.media_type == "application/json"
        found["content"] = {answer.media_type: {"schema": {"type": "object" if is_json else "string"}}}
    return found


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    path = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    # A ticket is described once, as a security scheme.
    query = [_parameter(one, "query") for one in operation.query if one.name != "ticket"]
    return path + query + [_parameter(one, "header") for one in operation.headers]


def _parameter(one: Parameter, place: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer", "minimum": 1} if one.is_number else {"type": "string"}
    if one.one_of:
        schema["enum"] = list(one.one_of)
    return {"name": one.name, "in": place, "required": False, "description": one.about, "schema": schema}


def _errors(operation: Operation) -> dict[str, Any]:
    """One response a status, listing the codes that come with it."""
    codes: dict[int, list[str]] = {}
    for reason in (*COMMON_ERRORS, *(ADMIN_ERRORS if operation.is_for_admins else ()), *operation.errors):
        codes.setdefault(CLASSES[reason].http, []).append(code_of(reason))
    return {
        str(status): {"description": ", ".join(sorted(names)), "content": {"application/json": {"schema": PROBLEM}}}
        for status, names in sorted(codes.items())
    }
