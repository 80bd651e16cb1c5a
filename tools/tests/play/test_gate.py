"""Which names a server answers to. What is refused besides is tested on a running server."""

from __future__ import annotations

import pytest

from tokenmerge_tools.play.gate import served_names


@pytest.mark.parametrize(
    ("listens", "served"),
    [
        ("127.0.0.1", ["localhost", "127.0.0.1", "[::1]"]),
        ("[::1]", ["localhost", "127.0.0.1", "[::1]"]),
        ("::1", ["localhost", "127.0.0.1", "[::1]"]),
        ("fe80::1", ["[fe80::1]"]),
        ("192.168.1.5", ["192.168.1.5"]),
        ("Box.lan", ["box.lan"]),
        ("0.0.0.0", ["*"]),
        ("::", ["*"]),
    ],
)
def test_only_the_names_of_the_server_are_served(listens, served) -> None:
    assert served_names(listens) == served
