"""The lines that a server prints about its own address work as they are."""

import pytest

from lmi_vllm.server.listeners import curl_line

URLS = {
    "IPv4": ("http://0.0.0.0:80", "http://127.0.0.1:80/invocations"),
    "IPv6": ("http://[::]:80", "http://[::1]:80/invocations"),
    "one address": ("http://10.0.0.1:80", "http://10.0.0.1:80/invocations"),
    "a socket": ("unix:/run/s", "--unix-socket /run/s http://localhost/invocations"),
}


@pytest.mark.parametrize(("url", "part"), URLS.values(), ids=URLS)
def test_curl_line_reaches_the_server(url: str, part: str) -> None:
    """An address of all interfaces is named by this machine's own, of the same family."""
    assert curl_line(url, has_key=False).startswith(f"curl -s {part} ")
