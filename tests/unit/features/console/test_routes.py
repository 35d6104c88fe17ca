"""The console over HTTP: its page without a key, its data with one."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from aiohttp.test_utils import TestClient

import lmi_vllm.features.console.routes as console_module
from lmi_vllm.features.console.routes import ConsoleOptions, group
from lmi_vllm.inference.start_progress import Phase
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web.request import Routes, WebOptions
from tests.conftest import ServeScripted
from tests.web.conftest import lifecycle_of

PAGE = Path(console_module.__file__).parent / "page"
FILES = sorted(path.name for path in PAGE.iterdir())
DATA = ("/console/state", "/console/settings")
EXPLAINED = {"options": [{"name": "dtype", "value": "float32"}], "warnings": ["one"]}


def explained() -> Mapping[str, object]:
    """Stand for what the commands hand over."""
    return EXPLAINED


def options(**others: object) -> WebOptions:
    """Return options with a console."""
    return WebOptions(groups=(group(ConsoleOptions(explained)),), **others)  # type: ignore[arg-type]


async def status(client: TestClient, path: str, method: str = "GET", **headers: str) -> int:
    """Return the status of a call with those headers, `_` for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await client.request(method, path, headers=named)).status


async def test_console_is_there_only_where_it_is_on(serve: ServeScripted) -> None:
    """Without it the paths are as unknown as any other."""
    client = await serve()
    assert [await status(client, path) for path in ("/console", *DATA)] == [404, 404, 404]
    client = await serve(options=options())
    assert [await status(client, path) for path in ("/console", *DATA)] == [200, 200, 200]


async def test_page_loads_only_files_of_this_server(serve: ServeScripted) -> None:
    """Every file the page names exists, each with a type and the policy that forbids the rest."""
    client = await serve(options=options())
    html = await (await client.get("/console")).text()
    named = set(re.findall(r'(?:src|href)="(console/[^"]+)"', html))
    assert {f"console/{name}" for name in ("console.css", "main.js", "theme.js")} <= named
    for name in {f"/{path}" for path in named} | {f"/console/{name}" for name in FILES}:
        if name == "/console/index.html":
            continue
        answer = await client.get(name)
        assert answer.status == 200, name
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("name", FILES)
def test_files_keep_to_the_policy(name: str) -> None:
    """No script or style inside markup, nothing from the network, no text that becomes markup."""
    text = (PAGE / name).read_text(encoding="utf-8")
    text = text.replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://|//cdn|@import|url\(", text) == []
    if name.endswith(".html"):
        assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", text) == []
    if name.endswith(".js"):
        wrong = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert re.findall(wrong, text) == []


def test_the_wheel_has_the_page() -> None:
    """What the package data leaves out would be missing from an installed server."""
    root = Path(__file__).parents[4]
    assert '"features/console/page/*"' in (root / "pyproject.toml").read_text(encoding="utf-8")


async def test_key_guards_the_data_and_not_the_page(serve: ServeScripted) -> None:
    """The page itself says nothing of this server, so it may ask for the key."""
    client = await serve(options=options(api_keys=("k",)))
    assert await status(client, "/console") == 200
    assert await status(client, "/console/main.js") == 200
    for path in (*DATA, "/adapters", "/metrics", "/console/unknown/../state"):
        assert await status(client, path) == 401, path
        assert await status(client, path, Authorization="Bearer wrong") == 401, path
    assert await status(client, "/console/state", Authorization="Bearer k") == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("[::1]:8080", 200),
        ("10.2.3.4", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_host_names_need_a_key(serve: ServeScripted, host: str, expected: int) -> None:
    """Without a key, a name that foreign DNS may point here gets neither page nor data."""
    client = await serve(options=options())
    for path in ("/console", *DATA):
        assert await status(client, path, Host=host) == expected
    assert await status(client, "/ping", Host=host) == 200
    keyed = await serve(options=options(api_keys=("k",)))
    if host.endswith("example"):
        assert await status(keyed, "/console/state", Host=host, x_api_key="k") == 200


async def test_other_sites_get_no_data(serve: ServeScripted) -> None:
    """A browser says which site asks; links to the page itself work from anywhere."""
    client = await serve(options=options())
    for site, expected in {"cross-site": 403, "same-site": 403, "same-origin": 200}.items():
        for path in DATA:
            assert await status(client, path, Sec_Fetch_Site=site) == expected, (site, path)
        assert await status(client, "/console", Sec_Fetch_Site=site) == 200


CHANGES = (
    ("POST", "/adapters?name=a&src=/b"),
    ("DELETE", "/adapters/a"),
    ("POST", "/server/logging?level=off"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/models?url=/b"),
    ("POST", "/invocations"),
)


@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_other_sites_change_nothing(serve: ServeScripted, method: str, path: str) -> None:
    """A form of another site that posts here is refused, unless CORS settings invite it."""
    profile = ServingProfile(model_name="demo", enable_lora=True)
    client = await serve(profile, options=options())
    assert await status(client, path, method, Sec_Fetch_Site="cross-site") == 403
    assert await status(client, path, method, Sec_Fetch_Site="same-origin") != 403
    assert await status(client, path, method) != 403
    cors = MappingProxyType({"Access-Control-Allow-Origin": "*"})
    invited = await serve(profile, options=options(cors_headers=cors))
    assert await status(invited, path, method, Sec_Fetch_Site="cross-site") != 403


async def test_cors_settings_do_not_open_the_console(serve: ServeScripted) -> None:
    """They are for the API: what the console shows stays unreadable for other sites."""
    cors = MappingProxyType({"Access-Control-Allow-Origin": "*"})
    client = await serve(options=options(cors_headers=cors))
    assert "Access-Control-Allow-Origin" in (await client.get("/models")).headers
    for path in ("/console", *DATA):
        answer = await client.get(path)
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
    answer = await client.options("/console/state", headers=preflight)
    assert "Access-Control-Allow-Origin" not in answer.headers


async def test_state_shows_a_start(serve: ServeScripted) -> None:
    """While the model loads: phase, seconds of each, and how far a download is."""
    client = await serve(options=options(), is_ready=False)
    start = lifecycle_of(client).start
    start.enter(Phase.DOWNLOAD)
    start.report({"bytes": 5, "bytes_total": 10})
    state = await (await client.get("/console/state")).json()
    assert (state["state"], state["phase"]) == ("PENDING", "download")
    assert state["download"] == {"bytes": 5, "bytes_total": 10}
    spent = {phase["name"]: phase["seconds"] for phase in state["phases"]}
    assert spent["settings"] >= 0
    assert spent["engine"] is None


async def test_state_counts_the_answers(serve: ServeScripted) -> None:
    """Requests of clients count, the console's own do not."""
    client = await serve(options=options())

    async def answered() -> float:
        state = await (await client.get("/console/state")).json()
        return float(state["answers"].get("200", 0))

    before = await answered()
    await client.post("/invocations", json={"inputs": "x"})
    assert await answered() == before + 1
    assert await answered() == before + 1


async def test_settings_equal_explain(serve: ServeScripted) -> None:
    """Unchanged, in one JSON object."""
    client = await serve(options=options())
    assert await (await client.get("/console/settings")).json() == EXPLAINED


async def test_inference_listener_has_no_console_of_its_own(serve: ServeScripted) -> None:
    """Who opens the listeners decides; without options there is none on any."""
    client = await serve(options=WebOptions(routes=Routes.INFERENCE))
    assert await status(client, "/console") == 404


async def test_polls_leave_no_line(serve: ServeScripted, caplog: pytest.LogCaptureFixture) -> None:
    """An open page would write a line every other second; a refusal still does."""
    client = await serve(options=options())
    with caplog.at_level(logging.INFO, "lmi_vllm.requests"):
        await client.get("/console/state")
        await client.get("/console/state", headers={"Sec-Fetch-Site": "cross-site"})
    lines = [record.getMessage() for record in caplog.records]
    assert [" 403 " in line for line in lines] == [True]
