"""NO_PROXY: the hosts that clients call without the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY.

Clients read `NO_PROXY`, `no_proxy` or either, so both are set. A host is written as all clients read it: an
address without a port and without brackets, which httpx rejects, and never a network, which many clients do
not know. In this form urllib and Node miss an IPv6 address, which no gateway of a run has.
"""

from __future__ import annotations

import ipaddress
import os
import re
import urllib.request
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
VARIABLES = ("NO_PROXY", "no_proxy")


def is_loopback(url: str) -> bool:
    """Return True if a URL leads to this machine, which no proxy can reach."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK


def no_proxy_variables(hosts: Iterable[str | None], environment: Mapping[str, str | None]) -> dict[str, str]:
    """Return `NO_PROXY` and `no_proxy` of an environment, extended by loopback and further hosts.

    If only one of them is set, it holds for both. A lone `*` already means all hosts; in a list, many clients
    do not read it so.
    """
    wanted, variables = dict.fromkeys([*LOOPBACK, *filter(None, hosts)]), {}
    for name, other in (VARIABLES, VARIABLES[::-1]):
        given = (environment.get(name) or environment.get(other) or "").strip(" ,")
        known = {entry.lower() for entry in re.split(r"[\s,]+", given)}
        added = [host for host in wanted if host.lower() not in known]
        variables[name] = given if given == "*" else ",".join([given, *added] if given else added)
    return variables


def bypass_proxies(hosts: Iterable[str | None] = ()) -> None:
    """Have the clients of this process and of its future children call loopback and `hosts` without a proxy.

    Proxies of the operating system, as macOS has them, stay in use: Python reads them only while no variable
    is set. Loopback is usually among their own exceptions.
    """
    if urllib.request.getproxies() and not urllib.request.getproxies_environment():
        return
    os.environ.update(no_proxy_variables(hosts, os.environ))
