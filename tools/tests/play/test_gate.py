"""Which names a server answers to. What is refused besides is tested on a running server."""

from __future__ import annotations

import pytest

from tokenmerge_tools.play.gate import _is_served, served_names


@pytest.mark.parametrize(
    ("listens", "served"),
    [
        ("127.0.0.1", ["localhost", "127.0.0.1", "[::1]"]),
        ("[::1]", ["localhost", "127.0.0.1", "[::1]"]),
        ("::1", ["localhost", "127.0.0.1", "[::1]"]),
        ("fe80::1", ["[fe80::1]"]),
        ("192.168.1.5", ["192.168.1.5"]),
        ("Box.lan", ["box.lan"]),
    ],
)
def test_only_the_names_of_the_server_are_served(listens, served) -> None:
    assert served_names(listens) == served


@pytest.mark.parametrize("listens", ["0.0.0.0", "::"])
def test_a_server_for_everyone_has_addresses_and_names_of_its_machine(listens, monkeypatch) -> None:
    """A page can point its own name here, and no address: that would be another page."""
    monkeypatch.setattr("socket.gethostname", lambda: "Box")
    monkeypatch.setattr("socket.getfqdn", lambda: "box.lan")
    names = served_names(listens)
    for host in ("192.168.1.5:7860", "[fe80::1]:7860", "localhost", "box:7860", "box.lan", "box.local"):
        assert _is_served(host, names), host
    for host in ("evil.example", "evil.example:7860", "box.lan.evil.example", "", "192.168.1.5.evil.example"):
        assert not _is_served(host, names), host


def test_the_address_that_others_know_has_a_name_that_is_served() -> None:
    assert served_names("127.0.0.1", "https://Proxy.example:8443/play")[-1] == "proxy.example"
