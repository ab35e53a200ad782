"""Where servers listen and how others reach them: IPv4, IPv6, names, and all interfaces at once.

A host is what a socket binds (``127.0.0.1``, ``::1``, ``0.0.0.0``, ``node7``), without brackets; a URL has them around
IPv6.
"""

import errno
import ipaddress
import os
import pathlib
import random
import socket
import urllib.parse

from slime_cli.errors import UsageError

LOOPBACK = "127.0.0.1"
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that documentation has for itself: no packet is sent there, the kernel says which of its own it would use.
"""


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def numeric(host: str) -> str:
    """The address that a name stands for, as it is written before a port; the router takes no names (0.3.2)."""
    found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return f"[{found}]" if ":" in found else found


def checked(host: str, option: str) -> str:
    """``host`` as a socket takes it. Raises UsageError when nothing can listen there."""
    host = host.strip().removeprefix("[").removesuffix("]")
    try:
        _bind(host, 0)
    except OSError as error:
        fix = "give an address of this machine (ip addr lists them); 0.0.0.0 or :: for all of them"
        raise UsageError(f"{option} {host}: cannot listen there ({error.strerror or error})", fix) from None
    return host


def is_mine(host: str) -> bool:
    """An address, or the name of one, that this machine has."""
    try:
        _bind(host, 0)
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable(host: str = "0.0.0.0") -> str:
    """``host``, or where it means all interfaces, the address at which other machines reach this one.

    Loopback where the machine has no other address.
    """
    if host not in ("0.0.0.0", "::"):
        return host
    family = _family(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
            return probe.getsockname()[0]
        except OSError:  # no route to anywhere
            return _named() if family == socket.AF_INET else "::1"


def _named() -> str:
    """The address that this machine's own name stands for."""
    try:
        return socket.gethostbyname(os.uname().nodename)
    except OSError:
        return LOOPBACK


def free_port(host: str = LOOPBACK) -> int:
    """A port that nobody listens on right now, of those that the kernel gives to no outgoing connection.

    An engine listens on it half a minute later or more: of the kernel's own range it was gone by then (seen on a busy
    machine).
    """
    for port in (*random.SystemRandom().sample(range(15000, _first_of_the_kernels()), k=100), 0):
        try:
            return _bind(host, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UsageError(
                    f"cannot listen on {host} ({error.strerror or error})", "give an address of this machine"
                ) from None
    raise UsageError(f"no port is free on {host}", "end what listens there")


def require_free(host: str, port: int, option: str) -> None:
    """Raises UsageError when the port is none, or somebody listens on it already."""
    if not 1 <= port <= 65535:
        raise UsageError(
            f"{option} {port}: no such port", "ports are 1 to 65535; any free one is taken when the option is left out"
        )
    try:
        _bind(host, port)
    except OSError as error:
        fix = "choose a port from 1024 on" if error.errno == errno.EACCES else "choose another port"
        raise UsageError(f"{option} {port}: cannot listen on {host} port {port} ({error.strerror})", fix) from None


def _bind(host: str, port: int) -> int:
    """The port, the kernel's choice for 0, that a server could listen on there. Raises OSError."""
    with socket.socket(_family(host)) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind((host, port))
        return trial.getsockname()[1]


def _family(host: str) -> socket.AddressFamily:
    """Raises OSError (gaierror) for a name that stands for no address."""
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _first_of_the_kernels() -> int:
    try:
        return max(int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), 16000)
    except (OSError, ValueError):
        return 32768


def is_local(url: str) -> bool:
    """Loopback and private addresses, which a proxy from the environment must not be asked for."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or "." not in host or host.endswith((".local", ".internal"))
    return address.is_loopback or address.is_private or address.is_link_local
