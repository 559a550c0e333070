"""Check of request origins, because a browser lets any web page open a WebSocket to this machine."""

from __future__ import annotations

import http
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

HOSTS = "127.0.0.1", "localhost", "::1"
"""Names of this machine; other hosts are rejected, such as a page's whose address was rebound to this machine."""


@contextmanager
def own_pages_only() -> Iterator[None]:
    """Context in which servers of `websockets` accept only requests of their own pages and of programs.

    viser has no option for such a check.

    Raises:
        RuntimeError: if none was started, as the check would be missing.
    """
    import websockets.asyncio.server as server  # pyright: ignore[reportMissingImports]

    serve = server.serve
    started = []

    def checked(*arguments: Any, process_request: Callable[..., Any] | None = None, **options: Any) -> Any:  # noqa: ANN401
        def process(connection: Any, request: Any) -> Any:  # noqa: ANN401 - of websockets
            if not is_own(request.headers.get("Host"), request.headers.get("Origin")):
                return connection.respond(http.HTTPStatus.FORBIDDEN, "expected a page of this viewer\n")
            return process_request(connection, request) if process_request else None

        started.append(True)
        return serve(*arguments, process_request=process, **options)

    server.serve = checked
    try:
        yield
    finally:
        server.serve = serve
    if not started:
        raise RuntimeError("viser has not started its server as expected: pages of others would be accepted")


def is_own(host: str | None, origin: str | None) -> bool:
    """Whether a request to `host` from `origin` is from one of our own pages; programs have no origin."""
    try:
        named = urlsplit(f"//{host or ''}").hostname
    except ValueError:
        return False
    return named in HOSTS and origin in (None, f"http://{host}")
