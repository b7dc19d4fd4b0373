"""The pydantic-ai peer: an agent behind its Vercel adapter, as its documentation shows it.

Run by uvicorn with uvloop and httptools, from its own environment.
"""

import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.ui.vercel_ai import VercelAIAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

provider = OpenAIProvider(base_url=os.environ["BENCH_PROVIDER_URL"], api_key="key-of-the-bench")
agent = Agent(OpenAIChatModel(os.environ["BENCH_MODEL"], provider=provider))


async def chat(request: Request) -> Response:
    return await VercelAIAdapter.dispatch_request(request, agent=agent)


app = Starlette(routes=[Route("/api/chat", chat, methods=["POST"])])
