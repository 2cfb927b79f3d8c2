"""Names of the host in requests, by which a server without a key detects DNS rebinding.

A web page may give its own name the address of this machine. Then a browser on this machine lets it read what
a server here answers, and only the header `Host` still has the page's name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from raylight._utils.no_proxy import LOOPBACK

OTHER_HOST = (
    "a server without a key answers requests to localhost only, and this one names another host; call it by "
    "127.0.0.1 or localhost, or start it with an API key"
)


def is_own_host(headers: Iterable[tuple[bytes, bytes]], names: Collection[str] = ()) -> bool:
    """Return True if a request is addressed to this machine by a name of loopback, or one of `names`."""
    hosts = [_name(value.decode("latin-1")) for field, value in headers if field == b"host"]
    return bool(hosts) and all(host in LOOPBACK or host in names for host in hosts)


def _name(host: str) -> str:
    """Return the name in a `Host` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
