"""The transport of every real model: one HTTP client, server-sent events, limits.

Rules:

1. One client serves all adapters of a `Transport`, whoever opened it, and is closed
   with the last of them. Adapters that are given none share one.
2. An async generator of httpx2 is left in two ways only: at its end, or by a
   cancellation that reaches it in its own read. Any other way leaves the
   generators inside it to the garbage collector, which closes nothing in time.
3. A key stands in a header and nowhere else: not in a repr, an error or an address.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json  # accepts the half characters that msgspec refuses
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast
from urllib.parse import urlsplit

import msgspec
import trio

from trio_agent.errors import ConfigError, ProviderError, StreamInterruptedError
from trio_agent.model.base import Emit, ModelOutput, ModelRequest
from trio_agent.model.failure import event_refusal, refusal, retry_after_seconds, scrub
from trio_agent.model.wire import encode, member
from trio_agent.protocol.items import Phase
from trio_agent.protocol.text import Json

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS: Final = 10.0
READ_IDLE_SECONDS: Final = 180.0
REQUEST_SECONDS: Final = 3_600.0

MAX_EVENT_BYTES: Final = 64 * 1_048_576
"""One event: the last one of a Responses stream repeats the whole answer, escaped."""

MAX_STREAM_BYTES: Final = 512 * 1_048_576
"""All bytes of one stream, counted as they come from the network."""

_ERROR_BODY_BYTES: Final = 65_536
_LINGER_SECONDS: Final = 0.1
"""How long a complete answer waits for the server's end of stream, to keep the connection."""
_CLOSE_SECONDS: Final = 1.0

Delta: TypeAlias = tuple[str, Phase]

_ALIVE: Final[Sequence[Delta]] = (("", "final_answer"),)


class AnswerReader(Protocol):
    """Turns the events of one stream into deltas and, at the end, into the output."""

    @property
    def done(self) -> bool:
        """Whether the event was seen after which nothing counts."""
        ...

    def feed(self, data: str) -> Sequence[Delta]:
        """Take one event's data; return the text that it brings.

        Raises:
            ProviderError: If the event is an error, or over a limit.
        """
        ...

    def finish(self) -> ModelOutput:
        """Return the output; the stream has ended.

        Raises:
            StreamInterruptedError: If it ended before its answer was complete.
        """
        ...


def decode_event(data: str) -> dict[str, Json]:
    """Return the JSON object in an event's *data*; half characters are kept.

    Raises:
        StreamInterruptedError: If it is anything else.
    """
    try:
        event: Json = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
    if isinstance(event, dict):
        return cast("dict[str, Json]", event)
    raise StreamInterruptedError("the model's stream held an event that is no JSON object")


# ---------------------------------------------------------------- the client


def require_httpx2(extra: str) -> None:
    """Check, without importing it, that httpx2 is installed.

    Raises:
        ConfigError: It names the command that installs it.
    """
    if importlib.util.find_spec("httpx2") is None:
        raise ConfigError(
            f'this model needs the package httpx2: pip install "trio-agent[{extra}]"'
        )


def _default_client() -> httpx2.AsyncClient:
    import httpx2  # noqa: PLC0415  # 35 ms that only a real model costs

    return httpx2.AsyncClient(
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        follow_redirects=False,
    )


class _Shared:
    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.client = client
        self.users = 0


class Transport:
    """One HTTP client for any number of adapters, routers and sessions.

    The client is made when the first of them opens it and closed when the last has
    left. Each `trio.run` has its own. Proxies come from the usual environment
    variables.

    Args:
        make_client: Makes the client; default: one with no limit of connections.
    """

    def __init__(self, make_client: Callable[[], httpx2.AsyncClient] | None = None) -> None:
        self._make = _default_client if make_client is None else make_client
        self._shared: trio.lowlevel.RunVar[_Shared | None] = trio.lowlevel.RunVar(
            "trio_agent.model.http.Transport", default=None
        )

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[httpx2.AsyncClient]:
        """Hold the client open for the length of the block.

        Entering is a checkpoint. Leaving closes what is not used any more, even
        when cancelled.

        Raises:
            ConfigError: If httpx2 is not installed.
        """
        await trio.lowlevel.checkpoint()
        shared = self._shared.get()
        if shared is None:
            try:
                shared = _Shared(self._make())
            except ImportError as exc:
                raise ConfigError(
                    'this model needs the package httpx2: pip install "trio-agent[http]"'
                ) from exc
            self._shared.set(shared)
        shared.users += 1
        try:
            yield shared.client
        finally:
            shared.users -= 1
            if shared.users == 0:
                self._shared.set(None)  # before the await: who comes now makes a new one
                with trio.move_on_after(_CLOSE_SECONDS, shield=True):
                    await shared.client.aclose()


SHARED_TRANSPORT: Final = Transport()
"""The transport of all adapters that are given none."""


# ---------------------------------------------------------------- addresses and keys


def checked_base_url(url: str, *, with_key: bool) -> str:
    """Return *url* without a trailing slash.

    Raises:
        ConfigError: If it is no absolute HTTP address, holds a user, a query or a
            fragment (where secrets hide), or would carry a key unencrypted to
            another machine.
    """
    parts = urlsplit(url.strip())
    if (
        parts.username is not None
        or parts.password is not None
        or parts.query
        or parts.fragment
    ):
        raise ConfigError("a base URL must hold no user, password, query or fragment")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"a base URL must begin with https:// or http://, not {url!r}")
    if with_key and parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ConfigError(
            f"{url} would carry the key unencrypted: use https, or pass api_key='' if the"
            " server needs none"
        )
    return url.strip().rstrip("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Access:
    """Where requests go and with which key: from arguments, else from the environment.

    An empty key is one that the user does not want to send.

    Args:
        api_key: The key; default: the variable *key_variable*.
        base_url: The server; default: the variable *url_variable*, else *default_url*.
        key_variable: Named in errors.
        url_variable: Named in errors.
        default_url: The provider's own server, the only one that must have a key.

    Raises:
        ConfigError: If a key is missing or could stand in no header, or the address
            is unsafe: see `checked_base_url`. The key is never shown.
    """

    def __init__(
        self,
        *,
        api_key: str | None,
        base_url: str | None,
        key_variable: str,
        url_variable: str,
        default_url: str,
    ) -> None:
        key = os.environ.get(key_variable, "") if api_key is None else api_key
        url = base_url or os.environ.get(url_variable) or default_url
        self.key = key.strip()
        if any(not "!" <= character <= "~" for character in self.key):
            raise ConfigError(f"the key ({key_variable}) holds characters that no key has")
        self.url = checked_base_url(url, with_key=bool(self.key))
        self.first_party = urlsplit(self.url).hostname == urlsplit(default_url).hostname
        if self.first_party and not self.key:
            raise ConfigError(
                f"{default_url} needs a key: set {key_variable}, or pass api_key=...; for a"
                f" server of your own set {url_variable}, or pass base_url=..."
            )

    def binding(self, family: str, model: str) -> str:
        """Return what sealed parts are bound to: a protocol, a model and, if not its
        maker's, the server.
        """
        return f"{family}/{model}" if self.first_party else f"{family}/{model}@{self.url}"


# ---------------------------------------------------------------- the model


class HttpModel:
    """What all adapters share: sending a request, reading the stream, mapping failures.

    An adapter adds two pure parts: `body`, the request, and `reader`, the answer.

    Args:
        label: The provider's name in errors.
        model: The model's name.
        url: Where requests go.
        headers: Sent with every request; where the key is.
        secrets: What errors must not show.
        transport: The client; default: the one that all adapters share.
        connect_timeout: Seconds until a connection stands.
        read_timeout: Seconds of silence, before the answer or within it.
        request_timeout: Seconds for a whole answer.
    """

    def __init__(
        self,
        *,
        label: str,
        model: str,
        url: str,
        headers: Mapping[str, str],
        secrets: tuple[str, ...] = (),
        transport: Transport | None = None,
        connect_timeout: float = CONNECT_SECONDS,
        read_timeout: float = READ_IDLE_SECONDS,
        request_timeout: float = REQUEST_SECONDS,
    ) -> None:
        if not model.strip():
            raise ConfigError(f"{label}: the model's name is blank")
        for limit in (connect_timeout, read_timeout, request_timeout):
            if not limit > 0:
                raise ConfigError(f"{label}: time limits must be positive, not {limit}")
        self.label: Final = label
        self.model: Final = model
        self._url = url
        self._headers = {
            "accept": "text/event-stream",
            "accept-encoding": "identity",  # packed, small events would wait for each other
            "content-type": "application/json",
            **headers,
        }
        self._secrets = secrets
        self._transport = SHARED_TRANSPORT if transport is None else transport
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._request_timeout = request_timeout

    def __repr__(self) -> str:
        """Show the model and the address; never the key."""
        return f"{type(self).__name__}({self.model!r}, url={self._url!r})"

    @property
    def name(self) -> str:
        """The name that frontends show."""
        return self.model

    def open(self) -> AbstractAsyncContextManager[object]:
        """Hold the HTTP client open: see `Transport.open`."""
        return self._transport.open()

    def body(self, request: ModelRequest) -> dict[str, Json]:
        """Return *request* in the provider's form."""
        raise NotImplementedError

    def reader(self, request: ModelRequest) -> AnswerReader:
        """Return what reads the answer to *request*."""
        raise NotImplementedError

    async def respond(self, request: ModelRequest, emit: Emit) -> ModelOutput:
        """Ask the provider once; see `Model.respond`.

        Works with and without `open`; without it, a client lives for this call.
        When it is left, in whatever way, no connection of it is in use.

        Raises:
            StreamInterruptedError: If the answer broke off, fell silent or took
                longer than the whole-request limit.
            AuthError: If the provider refused the credentials.
            ContextOverflowError: If the request is larger than the model's window.
            ProviderError: For every other refusal, and if no connection was made.
            ConfigError: If httpx2 is not installed.
        """
        content = encode(self.body(request))
        reader = self.reader(request)
        async with self._transport.open() as client:
            with trio.move_on_after(self._request_timeout):
                await self._exchange(client, content, reader, emit)
                return reader.finish()
        raise StreamInterruptedError(
            f"{self.label}: no complete answer within {self._request_timeout:g} s"
        )

    async def _exchange(
        self, client: httpx2.AsyncClient, content: bytes, reader: AnswerReader, emit: Emit
    ) -> None:
        import httpx2  # noqa: PLC0415  # the client is there, so this costs nothing

        request = client.build_request(
            "POST",
            self._url,
            content=content,
            headers=self._headers,
            timeout=httpx2.Timeout(
                connect=self._connect_timeout,
                read=self._read_timeout,
                write=self._read_timeout,
                pool=None,
            ),
        )
        try:
            response = await client.send(request, stream=True)
        except httpx2.HTTPError as exc:
            raise self._failure(exc) from exc
        try:
            response.encoding = "utf-8-sig"  # an event stream is UTF-8, perhaps with a mark
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if response.status_code != 200 or kind != "text/event-stream":
                raise await self._refusal(response, kind)
            await self._read(response, reader, emit)
        finally:
            with trio.move_on_after(_CLOSE_SECONDS, shield=True):
                await response.aclose()

    async def _read(self, response: httpx2.Response, reader: AnswerReader, emit: Emit) -> None:
        import httpx2  # noqa: PLC0415  # the client is there, so this costs nothing

        events = aiter(httpx2.EventSource(response, MAX_EVENT_BYTES))
        feed = reader.feed
        try:
            while not reader.done:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return  # noqa: ASYNC910  # the read that found the end was one
                except httpx2.HTTPError as exc:
                    raise self._failure(exc) from exc
                # An event without text is a sign of life: a long call is not silence.
                for text, phase in feed(event.data) or _ALIVE:
                    await emit(text, phase)
                self._check_length(response)
        except BaseException:
            await _unwind(events)  # noqa: ASYNC102  # waits for nothing: see there
            raise
        with trio.move_on_after(_LINGER_SECONDS):
            await _exhaust(events)

    async def _refusal(self, response: httpx2.Response, kind: str) -> ProviderError:
        """Read the body of an answer that is no stream, and say what it means."""
        status = response.status_code
        text = (await _bounded_body(response)).decode(errors="replace")
        if status != 200:
            return refusal(
                self.label,
                status,
                text,
                retry_after=retry_after_seconds(
                    {name.lower(): value for name, value in response.headers.items()},
                    now=time.time(),
                ),
                secrets=self._secrets,
            )
        try:
            found: Json = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if member(found, "error"):
            return event_refusal(self.label, found, secrets=self._secrets)
        return ProviderError(
            scrub(
                f"{self.label}: the server answered with {kind or 'no type'} instead of an"
                f" event stream: {text[:500]}",
                self._secrets,
            ),
            status=status,
        )

    def _check_length(self, response: httpx2.Response) -> None:
        if response.num_bytes_downloaded > MAX_STREAM_BYTES:
            raise ProviderError(
                f"{self.label}: the stream has more than {MAX_STREAM_BYTES:,} bytes"
            )

    def _failure(self, exc: httpx2.HTTPError) -> ProviderError:
        """Translate what httpx2 raises."""
        import httpx2  # noqa: PLC0415  # it has raised, so it is there

        words = scrub(f"{self.label}: {str(exc) or type(exc).__name__}", self._secrets)
        if isinstance(exc, httpx2.SSEError):
            return ProviderError(words)
        if isinstance(exc, httpx2.ReadTimeout):
            return StreamInterruptedError(
                f"{self.label}: no byte within {self._read_timeout:g} s"
            )
        if isinstance(exc, (httpx2.ConnectTimeout, httpx2.ConnectError, httpx2.ProxyError)):
            return ProviderError(
                scrub(f"{self.label}: no connection to {self._url}: {exc}", self._secrets),
                retryable=True,
            )
        if isinstance(exc, (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)):
            return ProviderError(words)
        return StreamInterruptedError(words)


async def _exhaust(events: AsyncIterator[object]) -> None:  # noqa: ASYNC910  # each read is
    """Read *events* to their end; what breaks off now does not matter any more."""
    import httpx2  # noqa: PLC0415  # the events come from it

    try:
        async for _ in events:
            pass
    except httpx2.HTTPError:
        pass


async def _unwind(events: AsyncIterator[object]) -> None:
    """Leave *events*, and all generators inside them, by a cancellation in their read.

    The shield waits for nothing: its scope is cancelled from the start.
    """
    with trio.CancelScope(shield=True) as scope:
        scope.cancel(reason="the answer is not wanted any more")
        await _exhaust(events)


async def _bounded_body(response: httpx2.Response) -> bytes:
    """Return the first 64 KiB of a body; less, if it breaks off or falls silent."""
    import httpx2  # noqa: PLC0415  # the response comes from it

    found = bytearray()
    chunks = response.aiter_bytes()
    try:
        while len(found) < _ERROR_BODY_BYTES:
            found += await anext(chunks)
    except (StopAsyncIteration, httpx2.HTTPError):
        pass
    finally:
        await _unwind(chunks)  # noqa: ASYNC102  # waits for nothing: see there
    return bytes(found[:_ERROR_BODY_BYTES])
