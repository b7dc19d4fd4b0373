"""The one HTTP client for addresses that a tenant names: webhooks, JWKS documents, tools.

Whoever may name an address must not reach through us what only we can reach. So an
address is checked when it is set and at each connection, and the connection goes to the
very address that was checked: a name that is looked up twice may have two answers. No
redirect is followed and no proxy is used. No error tells what a name resolved to.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from kit.errors import ServiceError, invalid, unavailable
from kit.public_addresses import Address, is_public, network
from kit.settings import comma_list

URL_CHARS = 2048  # what servers and proxies in front of them commonly take
RESOLVE_SECONDS = 5.0  # a name server answers in milliseconds, or is asked again after 5 s
CONNECTIONS = 100  # at a time, of one process
ANSWER_BYTES = 64 * 1024  # read of an answer unless its caller says otherwise
NAME = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
)
# What the old parsers of addresses take for one: 127.1, 0x7f000001, 0177.0.0.1, 2130706433.
NUMERIC = re.compile(r"(?:.*\.)?(?:0x[0-9a-f]*|[0-9]+)")
# Addresses of a name; raises OSError.
Lookup = Callable[[str, int], Awaitable[Sequence[str]]]


class CannotReachError(Exception):
    """Nothing came back; the message may be shown to the tenant."""


@dataclass(frozen=True)
class AllowedHosts:
    """What may be reached although it is not public, or without TLS: names, and networks of addresses."""

    names: frozenset[str] = frozenset()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def has_name(self, host: str) -> bool:
        """Whether a host is allowed by its name."""
        return _plain(host) in self.names

    def has_address(self, address: Address) -> bool:
        """Whether an address is allowed by itself."""
        return any(address in network for network in self.networks)


NOTHING_ALLOWED = AllowedHosts()


def allowed_hosts(raw: str) -> AllowedHosts:
    """Parses a comma list of host names, addresses and networks; `-` is none. Raises ValueError."""
    names: set[str] = set()
    networks: list[IPv4Network | IPv6Network] = []
    for entry in () if raw.strip() == "-" else comma_list(raw):
        try:
            networks.append(network(entry.strip("[]")))
            continue
        except ValueError:
            name = _plain(entry)
        if not NAME.fullmatch(name) or NUMERIC.fullmatch(name):
            raise ValueError(f"{entry} is no host name, IP address or network")
        names.add(name)
    return AllowedHosts(frozenset(names), tuple(networks))


def check_url(url: str, allowed: AllowedHosts = NOTHING_ALLOWED, field: str = "url") -> URL:
    """The URL to connect to, if its form allows it; a name in it is not looked up. Raises INVALID_OPTIONS."""
    if len(url) > URL_CHARS:
        raise invalid(field, f"A URL may have at most {URL_CHARS} characters.")
    if not url.isprintable() or any(char.isspace() or char in '\\<>"^`{|}' for char in url):
        raise invalid(field, "The URL holds characters that a URL cannot hold.")
    try:
        parsed = URL(url)
        host, port = parsed.raw_host, parsed.port
    except ValueError:
        raise invalid(field, "This is no URL.") from None
    if parsed.scheme not in ("http", "https") or not host or not port:
        raise invalid(field, "The URL must begin with https:// and name a host.")
    if "@" in re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0]:  # also an empty one, which a parser drops
        raise invalid(field, "The URL may not hold a user or password.")
    if parsed.raw_fragment:
        raise invalid(field, "The URL may not hold a fragment.")
    address = _literal(host)
    if address is None:
        name = _plain(host)
        if not NAME.fullmatch(name) or NUMERIC.fullmatch(name):
            raise refused(host, field)
        is_allowed = allowed.has_name(host)
    else:
        is_allowed = allowed.has_address(address)
        if not is_allowed and not is_public(address):
            raise refused(host, field)
    if parsed.scheme != "https" and not is_allowed:
        raise invalid(field, "The URL must begin with https://.")
    return parsed


def refused(host: str, field: str = "url") -> ServiceError:
    """INVALID_OPTIONS for a host that is not of the public internet, by the name the tenant gave it."""
    return invalid(field, f"{host[:255]} may not be called from here: it is no host of the public internet.")


class Answer(NamedTuple):
    """What came back. `body` is at most as much as was to be read; `is_cut` tells that there was more."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_cut: bool


@dataclass
class Outbound:
    """Sends requests to addresses that tenants name. Made within a running event loop."""

    allowed: AllowedHosts = NOTHING_ALLOWED
    lookup: Lookup = field(default_factory=lambda: look_up)

    def __post_init__(self) -> None:
        self._resolver = _Guard(self.allowed, self.lookup)
        connector = aiohttp.TCPConnector(
            resolver=self._resolver,
            use_dns_cache=False,
            limit=CONNECTIONS,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,  # a small body may become a large one
            headers={"User-Agent": "threadloom", "Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        """Lets go of all connections."""
        await self._session.close()

    async def check(self, url: str, field: str = "url") -> None:
        """Raises INVALID_OPTIONS if the URL may not be called as its host resolves now; UNAVAILABLE if it does not."""
        parsed = check_url(url, self.allowed, field)
        host = parsed.raw_host or ""
        if _literal(host) is None:
            try:
                await self._resolver.addresses(host, parsed.port or 0, field)
            except OSError:
                raise unavailable(f"The host {host} cannot be found.") from None

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        seconds: float,
        max_bytes: int = ANSWER_BYTES,
    ) -> Answer:
        """One try of so many seconds in all; redirects are answers.

        Raises INVALID_OPTIONS for an address that may not be called, CannotReachError for one that is away.
        """
        parsed = check_url(url, self.allowed)
        try:
            async with asyncio.timeout(seconds):
                return await self._request(method, parsed, headers or {}, body, max_bytes)
        except TimeoutError:
            raise CannotReachError(f"No complete answer within {seconds:g} s.") from None
        except aiohttp.ClientConnectorDNSError:
            raise CannotReachError(f"The host {parsed.raw_host} cannot be found.") from None
        except (aiohttp.ClientSSLError, ssl.SSLError, aiohttp.ClientConnectorCertificateError):
            raise CannotReachError("TLS failed; the certificate may not be valid for the host.") from None
        except aiohttp.ClientConnectorError:
            raise CannotReachError("The host did not accept the connection.") from None
        except (aiohttp.ClientError, OSError):
            raise CannotReachError("The connection broke before a complete answer.") from None

    async def _request(
        self, method: str, url: URL, headers: Mapping[str, str], body: bytes | None, max_bytes: int
    ) -> Answer:
        sending = self._session.request(
            method,
            url,
            headers=headers,
            data=body,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None),  # the caller's covers all of it
        )
        async with sending as response:
            read = bytearray()
            while len(read) <= max_bytes:
                chunk = await response.content.read(max_bytes + 1 - len(read))
                if not chunk:
                    break
                read += chunk
            is_cut = len(read) > max_bytes
            if is_cut:
                response.close()  # or leaving would read the rest
            return Answer(response.status, response.headers, bytes(read[:max_bytes]), is_cut)


async def look_up(host: str, port: int) -> Sequence[str]:
    """All addresses of a name, as the machine's resolver knows them; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class _Guard(AbstractResolver):
    """Gives a connection only addresses that were checked: it connects to these and looks nothing up again."""

    def __init__(self, allowed: AllowedHosts, lookup: Lookup) -> None:
        self._allowed, self._lookup = allowed, lookup

    async def addresses(self, host: str, port: int, field: str = "url") -> list[Address]:
        """All addresses of a name; INVALID_OPTIONS if one of them may not be called. Raises OSError."""
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                found = await self._lookup(host, port)
        except (TimeoutError, UnicodeError):
            raise OSError(socket.EAI_AGAIN, "no answer") from None
        addresses: list[Address] = []
        for raw in found:
            try:
                addresses.append(ip_address(raw))
            except ValueError:
                raise refused(host, field) from None
        if not addresses:
            raise OSError(socket.EAI_NONAME, "no address")
        if not self._allowed.has_name(host):
            for address in addresses:
                if not is_public(address) and not self._allowed.has_address(address):
                    raise refused(host, field)
        return addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """As aiohttp asks."""
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self.addresses(host, port)
        ]

    async def close(self) -> None:
        """Holds nothing."""


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _plain(host: str) -> str:
    return host.lower().removesuffix(".")
