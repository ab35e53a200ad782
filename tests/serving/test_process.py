"""Ports that servers are started on."""

import pathlib
import socket

from slime_cli.serving import process


def test_a_free_port_is_none_that_an_outgoing_connection_could_take():
    low, high = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [process.free_port() for _ in range(20)]
    assert not any(low <= port <= high for port in ports) and len(set(ports)) > 15
    with socket.socket() as s:
        s.bind(("127.0.0.1", ports[0]))


def test_a_port_in_use_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(process.random.SystemRandom, "sample", lambda self, population, k: [port])
        assert process.free_port() != port
