"""The OpenAI Chat Completions adapter: any server that speaks that protocol.

The `openai` package makes the request (addresses, keys, typed errors); its stream is
read raw and decoded with msgspec, because its per-chunk models cost more than the
rest of the turn. What the package then no longer does is done here: SSE framing,
`[DONE]`, and errors in mid-stream.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, cast

import aiohttp
import httpx2
import msgspec
import openai
from openai import AsyncAPIResponse, AsyncOpenAI, AsyncStream, DefaultAioHttpClient

from kit.errors import ServiceError
from services.conversation.limits import ERROR_CHARS
from services.conversation.providers.model import (
    Answered,
    Finished,
    ModelEvent,
    ModelRequest,
    ProviderFailure,
    Reasoning,
    Text,
    TokenUsage,
)
from services.conversation.providers.sse import DataLines, LineTooLong
from services.conversation.providers.text import TextRepair, repaired

PROVIDER = "openai"
NO_KEY = "every-request-brings-its-own"  # the package wants one
SECRET_CHARS = 8  # a shorter key is a placeholder, and part of ordinary words
DONE = b"[DONE]"
RAW_RESPONSE = "X-Stainless-Raw-Response"  # the package's own header: it does not read the body then
RETRYABLE_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class _Details(msgspec.Struct):
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    # Gateways in front of providers that bill writes to their cache name them so.
    cache_write_tokens: int | None = None
    cache_creation_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    model: str | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)
_encode = msgspec.json.Encoder().encode


class OpenAIChat:
    """A connection pool to one base URL, shared by all projects; each request brings its project's key."""

    provider = PROVIDER

    def __init__(self, base_url: str, call_seconds: float) -> None:
        self._client = AsyncOpenAI(
            base_url=base_url,
            api_key=NO_KEY,
            # Cookies are refused: what a provider sets for one project would be sent with another's key.
            http_client=DefaultAioHttpClient(cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[]))),
            max_retries=0,  # one retry budget a turn, and it is the runner's
            timeout=call_seconds,
        )
        # The package reads them from the environment; they belong to one key and spoil the others.
        self._client.organization = self._client.project = None

    async def close(self) -> None:
        """Closes the pool."""
        await self._client.close()

    @asynccontextmanager
    async def _ask(self, request: ModelRequest) -> AsyncIterator[AsyncAPIResponse[Any]]:
        """The answer, its body unread. By the package's low door: `create` walks and copies what it is given."""
        answer = cast(
            AsyncAPIResponse[Any],
            await self._client.post(
                "/chat/completions",
                cast_to=object,
                content=_encode(_body(request)),
                options={"headers": _headers(request)},
                stream=True,
                stream_cls=AsyncStream[Any],
            ),
        )
        try:
            yield answer
        finally:
            await answer.close()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[list[ModelEvent], None]:
        """See ModelClient.stream."""
        try:
            async with self._ask(request) as answer:
                yield [Answered(request.model, PROVIDER)]
                reader = _Reader(request.api_key)
                async for chunk in _body_of(answer):
                    yield reader.read(chunk)  # also when empty: a comment is a sign of life
                    if reader.is_over:
                        break
                else:
                    yield reader.end()
                if reader.failure is not None:
                    raise reader.failure
        except openai.APIStatusError as error:
            raise _refused(error, request.api_key) from error
        except (openai.APITimeoutError, httpx2.TimeoutException) as error:
            raise _not_answered(error) from error
        except (openai.APIConnectionError, httpx2.TransportError, aiohttp.ClientError, OSError) as error:
            raise _disconnected(error) from error


class _Reader:
    """One answer: bytes in, model events out."""

    def __init__(self, api_key: str) -> None:
        self._api_key = api_key
        self._lines = DataLines()
        self._text, self._thinking = TextRepair(), TextRepair()
        self._finish = ""
        self._is_done = False
        self.failure: ProviderFailure | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted from this stream."""
        return self._is_done or self.failure is not None

    def read(self, chunk: bytes) -> list[ModelEvent]:
        """The events this chunk completes; what came before an error event or garbage is kept."""
        try:
            return self._payloads(self._lines.feed(chunk))
        except LineTooLong:
            self.failure = _broken("The model provider sent a piece that is longer than any answer may be.")
            return []

    def end(self) -> list[ModelEvent]:
        """The last events of a stream that ended by itself; ending too early is a failure."""
        events = self._payloads(self._lines.rest())
        if not self.is_over:
            if self._finish:
                self._finish_up(events)
            else:
                self.failure = _broken("The model provider closed the connection in mid-answer.")
        return events

    def _payloads(self, payloads: list[bytes]) -> list[ModelEvent]:
        events: list[ModelEvent] = []
        try:
            for payload in payloads:
                self._payload(payload, events)
        except ProviderFailure as failure:
            self.failure = failure
        return events

    def _payload(self, payload: bytes, events: list[ModelEvent]) -> None:
        if self._is_done:
            return
        if payload.strip() == DONE:
            self._finish_up(events)
            return
        chunk = _decode(payload)
        if chunk.error is not None:
            raise _error_event(chunk.error, self._api_key)
        for choice in chunk.choices or ():
            if choice.delta is not None:
                self._delta(choice.delta, events)
            if choice.finish_reason:
                self._finish = choice.finish_reason
        if chunk.usage is not None:
            events += _reported(chunk.usage)

    def _delta(self, delta: _Delta, events: list[ModelEvent]) -> None:
        thought = delta.reasoning_content or delta.reasoning
        if thought:
            thought = self._thinking.feed(thought)
            if thought:
                events.append(Reasoning(thought))
        if delta.content:
            text = self._text.feed(delta.content)
            if text:
                events.append(Text(text))

    def _finish_up(self, events: list[ModelEvent]) -> None:
        self._is_done = True
        for kind, rest in ((Reasoning, self._thinking.rest()), (Text, self._text.rest())):
            if rest:
                events.append(kind(rest))
        if not self._finish:
            raise _broken("The model provider ended the answer without saying why.")
        events.append(Finished(repaired(self._finish)))


def _body_of(answer: AsyncAPIResponse[Any]) -> AsyncIterable[bytes]:
    """The answer's bytes as they come. Each of the package's layers costs a delta some microseconds."""
    response = answer.http_response
    if "content-encoding" in response.headers or not isinstance(response.stream, AsyncIterable):
        return answer.iter_bytes()
    return response.stream


def _headers(request: ModelRequest) -> dict[str, str]:
    return {
        # A header costs 1 µs; the package's with_options copies the client, for 110 µs.
        "Authorization": f"Bearer {request.api_key}",
        "Content-Type": "application/json",
        "X-Client-Request-Id": request.call_id,
        RAW_RESPONSE: "stream",
    }


def _body(request: ModelRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "messages": request.messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning_effort:
        body["reasoning_effort"] = request.reasoning_effort
    return body


def _decode(payload: bytes) -> _Chunk:
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    # msgspec refuses lone surrogates, which providers do send when they cut an emoji in two.
    try:
        return msgspec.convert(json.loads(payload.decode("utf-8", "replace")), _Chunk)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise _broken("The model provider sent something that is not a chat completion.") from error


def _reported(usage: Any) -> list[ModelEvent]:
    """The figures, if they can be read: nonsense among them must not spoil a whole answer."""
    try:
        return [_usage(msgspec.convert(usage, _Usage, strict=False))]
    except msgspec.ValidationError:
        return []


def _usage(usage: _Usage) -> TokenUsage:
    # Reasoning is a part of the output and cached a part of the input in this protocol. Some servers that
    # speak it count reasoning beside the output, as their total tells, or cached tokens beside the input.
    prompt, completion = usage.prompt_tokens_details or _Details(), usage.completion_tokens_details or _Details()
    read, written, thought = usage.prompt_tokens or 0, usage.completion_tokens or 0, completion.reasoning_tokens or 0
    cached, stored = prompt.cached_tokens or 0, prompt.cache_write_tokens or prompt.cache_creation_tokens or 0
    if thought > written or (thought and usage.total_tokens == read + written + thought):
        written += thought
    if cached + stored > read:
        read += cached + stored
    return TokenUsage(
        input_tokens=read,
        output_tokens=written,
        thinking_tokens=thought,
        cached_tokens=cached,
        cache_write_tokens=stored,
    )


def _refused(error: openai.APIStatusError, api_key: str) -> ProviderFailure:
    status = error.status_code
    words = _provider_words(error.body, api_key)
    sentence = words or f"The model provider answered {status}."
    retry_after = _retry_after(error.response.headers.get("retry-after"))
    reason = "AI_RATE_LIMITED" if status == 429 else "AI_PROVIDER_ERROR"
    if status == 429:
        sentence = f"429 Too Many Requests: {sentence}"
    metadata = {"provider": PROVIDER, "status": str(status)}
    return ProviderFailure(
        ServiceError(reason, sentence, metadata, retry_after), status in RETRYABLE_STATUSES, status, retry_after
    )


def _timed_out(*, may_be_billed: bool = True) -> ProviderFailure:
    error = ServiceError("AI_PROVIDER_TIMEOUT", "The model provider did not answer in time.", {"provider": PROVIDER})
    return ProviderFailure(error, is_retryable=True, may_be_billed=may_be_billed)


def _broken(sentence: str, *, may_be_billed: bool = True) -> ProviderFailure:
    error = ServiceError("AI_PROVIDER_ERROR", sentence, {"provider": PROVIDER})
    return ProviderFailure(error, is_retryable=True, may_be_billed=may_be_billed)


def _gone() -> ProviderFailure:
    return _broken("The model provider closed the connection before it answered.")


def _unreachable() -> ProviderFailure:
    return _broken("The model provider cannot be reached.", may_be_billed=False)


def _not_answered(error: BaseException) -> ProviderFailure:
    """A reported timeout, or a refused or closed connection: the package takes the one for the other."""
    causes = list(_chain(error))
    if any(isinstance(cause, aiohttp.ServerDisconnectedError) for cause in causes):
        return _gone()
    # Looked for first: the package reports a refused connection as one that timed out.
    if any(isinstance(cause, aiohttp.ClientConnectorError) for cause in causes):
        return _unreachable()
    is_unconnected = any(isinstance(cause, (aiohttp.ConnectionTimeoutError, httpx2.ConnectTimeout)) for cause in causes)
    return _timed_out(may_be_billed=not is_unconnected)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, to the first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _error_event(body: Any, api_key: str) -> ProviderFailure:
    return _broken(_provider_words(body, api_key) or "The model provider reported an error in mid-answer.")


def _disconnected(error: Exception) -> ProviderFailure:
    if isinstance(error.__cause__, httpx2.ConnectError):
        return _unreachable()
    return _broken("The connection to the model provider broke.")


def _provider_words(body: Any, api_key: str) -> str:
    """The provider's own sentence, shortened; never a key: providers echo those in 401s."""
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        body = body["error"]
    words = body.get("message") if isinstance(body, dict) else body
    if not isinstance(words, str):
        return ""
    flat = " ".join(repaired(words).split())
    if len(api_key) >= SECRET_CHARS:
        flat = flat.replace(api_key, "[key]")  # before it is shortened, which may cut a key in two
    hidden = " ".join("[key]" if word.startswith(("sk-", "Bearer")) else word for word in flat.split(" "))
    return hidden[:ERROR_CHARS]


def _retry_after(value: str | None) -> float | None:
    try:
        seconds = float(value) if value else None
    except ValueError:
        return None  # an HTTP date; our own delay serves as well
    return seconds if seconds is not None and 0 <= seconds < 86_400 else None
