"""What anybody may ask: is it alive, is it ready, what does it measure, what does it offer."""

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response
from starlette.types import ASGIApp

from services.gateway.context import Context
from services.gateway.routes import shapes
from services.gateway.routes.operations import Answer, OpenOperation, json_response

LINKS = shapes.Links("threadloom", "/v1/conversations", "/openapi.json", "/healthz", "/readyz")


async def root(_: Context) -> ASGIApp:
    """Links, for somebody who opens the address in a browser."""
    return json_response(LINKS)


async def healthz(_: Context) -> ASGIApp:
    """The process answers."""
    return json_response(shapes.Health("ok"))


async def readyz(context: Context) -> ASGIApp:
    """Whether requests should be sent here."""
    if context.is_draining:
        return json_response(shapes.Health("draining"), 503)
    if not await context.is_ready():
        return json_response(shapes.Health("unavailable"), 503)
    return json_response(shapes.Health("ok"))


async def metrics(_: Context) -> ASGIApp:
    """Prometheus text."""
    return Response(generate_latest(), headers={"content-type": CONTENT_TYPE_LATEST})


async def openapi(context: Context) -> ASGIApp:
    """The document made from the route table."""
    return Response(msgspec.json.encode(context.document), media_type="application/json")


OPERATIONS = (
    OpenOperation("/", root, "Where to go from here", (Answer(200, "Links.", shapes.Links),)),
    OpenOperation("/healthz", healthz, "Whether the process lives", (Answer(200, "It does.", shapes.Health),)),
    OpenOperation(
        "/readyz",
        readyz,
        "Whether it can serve",
        (Answer(200, "It can.", shapes.Health), Answer(503, "It cannot.", shapes.Health)),
    ),
    OpenOperation(
        "/metrics", metrics, "Prometheus metrics", (Answer(200, "Metrics.", media_type=CONTENT_TYPE_LATEST),)
    ),
    OpenOperation("/openapi.json", openapi, "This document", (Answer(200, "OpenAPI 3.1."),)),
)
