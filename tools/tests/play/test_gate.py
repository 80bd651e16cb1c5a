"""Which names a server answers to. What else the gate refuses is tested on a running server."""

from __future__ import annotations

import socket

import pytest

from tokenmerge_tools.play.gate import Gate, Visitors

OWN = socket.gethostname().lower()


@pytest.mark.parametrize(
    ("listens", "served", "refused"),
    [
        ("127.0.0.1", ["127.0.0.1:7860", "localhost", "[::1]:7860"], ["10.1.2.3", "evil.example", OWN + "x"]),
        ("::1", ["[::1]", "LocalHost:1"], ["[::2]", "evil.example"]),
        ("192.168.1.5", ["192.168.1.5:7860"], ["192.168.1.6", "evil.example", "localhost"]),
        ("box.lan", ["box.lan", "BOX.lan:7860"], ["lan", "x.box.lan"]),
        # Nobody can point an address here, only a name.
        ("0.0.0.0", ["10.1.2.3:7860", "localhost", "[::1]", OWN, OWN + ".local"], ["evil.example", "1.evil"]),
        ("::", ["10.1.2.3:7860", "[fe80::1]:7860"], ["evil.example"]),
    ],
)
def test_only_the_names_of_the_server_are_served(listens, served, refused) -> None:
    gate = Gate(None, listens, Visitors())
    assert [name for name in served if not gate._serves(name)] == []
    assert [name for name in (*refused, "", "[", "127.0.0.1@evil.example") if gate._serves(name)] == []


def test_a_visitor_is_there_while_a_connection_is_open() -> None:
    visitors = Visitors()
    assert "a" not in visitors
    visitors.come("a")
    visitors.come("a")
    visitors.leave("a")
    assert "a" in visitors
    visitors.leave("a")
    assert "a" not in visitors
    assert not visitors._connections  # nothing is kept of those who left
