"""Where servers listen: ports, IPv6, all interfaces, and what is refused."""

import pathlib
import socket

import pytest

from slime_cli import addresses
from slime_cli.errors import UsageError
from slime_cli.options.groups import SlimeOptions
from slime_cli.serving import fleet

HAS_IPV6 = (
    pathlib.Path("/proc/net/if_inet6").exists()
    and "00000000000000000000000000000001" in pathlib.Path("/proc/net/if_inet6").read_text()
)


def options(host: str = "127.0.0.1", port: int | None = None) -> SlimeOptions:
    return SlimeOptions(sglang_router_ip=host, sglang_router_port=port)


def test_a_free_port_is_none_that_an_outgoing_connection_could_take():
    low, high = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [addresses.free_port() for _ in range(20)]
    assert not any(low <= port <= high for port in ports) and len(set(ports)) > 15
    with socket.socket() as s:
        s.bind(("127.0.0.1", ports[0]))


def test_a_port_in_use_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(addresses.random.SystemRandom, "sample", lambda self, population, k: [port])
        assert addresses.free_port() != port


@pytest.mark.parametrize(
    ("host", "port", "written"),
    [
        ("127.0.0.1", 80, "http://127.0.0.1:80"),
        ("::1", 80, "http://[::1]:80"),
        ("fe80::1", 1, "http://[fe80::1]:1"),
        ("node7", 9, "http://node7:9"),
    ],
)
def test_a_url_has_brackets_around_ipv6_alone(host, port, written):
    assert addresses.url(host, port) == written


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
@pytest.mark.parametrize("given", ["::1", "[::1]"])
def test_a_router_can_listen_on_ipv6_loopback(given):
    host, port = fleet.listening(options(given))
    assert host == "::1"
    with socket.create_server((host, port), family=socket.AF_INET6):
        with pytest.raises(UsageError, match=f"--sglang-router-port {port}: cannot listen on ::1"):
            fleet.listening(options("::1", port))


@pytest.mark.parametrize("port", [80000, 65536, 0, -1])
def test_a_port_that_is_none_is_refused_in_words(port):
    with pytest.raises(UsageError, match=f"--sglang-router-port {port}: no such port"):
        fleet.listening(options(port=port))


def test_a_port_that_is_taken_is_refused_whatever_the_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0", "localhost"):
            with pytest.raises(UsageError, match=f"--sglang-router-port {port}: cannot listen on {host}"):
                fleet.listening(options(host, port))


@pytest.mark.parametrize("host", ["192.0.2.77", "no.such.host.invalid", "", "300.1.1.1", "127.0.0.1:80"])
def test_an_address_of_no_interface_here_is_refused_in_words(host):
    with pytest.raises(UsageError, match="--sglang-router-ip .*cannot listen there"):
        fleet.listening(options(host))


@pytest.mark.parametrize(
    "everywhere", ["0.0.0.0", pytest.param("::", marks=pytest.mark.skipif(not HAS_IPV6, reason="no IPv6"))]
)
def test_all_interfaces_are_named_by_an_address_that_can_be_reached(everywhere):
    found = addresses.reachable(everywhere)
    assert found not in ("0.0.0.0", "::")
    family = socket.AF_INET6 if ":" in everywhere else socket.AF_INET
    with (
        socket.create_server((everywhere, 0), family=family) as server,
        socket.create_connection((found, server.getsockname()[1]), timeout=5),
    ):
        pass


def test_without_a_route_the_machine_s_own_name_or_loopback_is_named(monkeypatch):
    class Unreachable(socket.socket):
        def connect(self, where):
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(addresses.socket, "socket", Unreachable)
    monkeypatch.setattr(addresses.socket, "gethostbyname", lambda name: "10.1.2.3")
    assert addresses.reachable("0.0.0.0") == "10.1.2.3" and addresses.reachable("::") == "::1"
    assert addresses.reachable("10.9.9.9") == "10.9.9.9"


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("node7", False),
    ],
)
def test_what_counts_as_loopback(host, is_it):
    assert addresses.is_loopback(host) is is_it


@pytest.mark.parametrize(
    ("host", "is_it"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("no.such.host.invalid", False)]
)
def test_which_addresses_this_machine_has(host, is_it):
    assert addresses.is_mine(host) is is_it
