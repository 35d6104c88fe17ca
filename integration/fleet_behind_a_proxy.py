"""Three servers behind HAProxy and nginx, 24 adapters in S3: killed, rolled, joined by a fourth.

The short form of `make fleet`, on the scripted engine: proves that no request is lost (the proxy
tries 503 and cut connections on another server), that each is answered by the adapter it names, and
that every server has exactly what calls through the proxy have registered and not removed.
"""

import os
from pathlib import Path

import pytest

from integration.conftest import StartServer
from integration.fleet.course import Plan, run
from integration.fleet.proxies import PROXIES, is_installed

ALWAYS = "haproxy"  # the second takes a minute more, for the same course
CASES = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(
                not is_installed(name), reason=f"needs {name}: apt-get install {name}"
            ),
            pytest.mark.skipif(
                name != ALWAYS and "LMI_TEST_PROXIES" not in os.environ,
                reason="needs LMI_TEST_PROXIES=1",
            ),
        ],
    )
    for name in PROXIES
]


@pytest.mark.parametrize("proxy", CASES)
def test_fleet_loses_no_request_and_crosses_no_adapter(
    server_process: StartServer, tmp_path: Path, proxy: str
) -> None:
    """A kill -9, a fourth server, a rolling restart, calls through whichever answers."""
    found = run(Plan(proxy), server_process, tmp_path)
    load = found.load
    assert (load.lost, load.cut, load.crossed, found.unknown) == ([], [], [], [])
    # A killed server is named until its last report is a minute old.
    removed = found.calls[-1]
    assert removed.startswith(("removed: 200", "removed: 202"))
    assert removed.count("has not read the change") == removed.startswith("removed: 202")
