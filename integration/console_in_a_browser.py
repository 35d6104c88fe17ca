"""The console in a real browser: what a person sees of a start, of requests, adapters and settings.

Proves that the page works while the model loads, in every dialect, on a phone, in the dark and
without a mouse. It shows the server's errors unchanged, and no text as markup.
"""

import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.browser import Visit, chromium
from integration.client import call, wait_until
from integration.conftest import RunningServer, StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.hub_server import Repository, hub_server

TABS = ("Overview", "Playground", "Adapters", "Settings")
KEY = "the-key-of-the-console"
Open = Callable[..., Visit]

# The lowest contrast of any visible text with what is behind it, and the text.
LOWEST_CONTRAST = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const paint = canvas.getContext("2d", { willReadFrequently: true });
  const over = (colors) => {
    paint.clearRect(0, 0, 1, 1);
    for (const color of colors) { paint.fillStyle = color; paint.fillRect(0, 0, 1, 1); }
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  let worst = [99, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
    if (node.closest(".unseen, .skip, option, :disabled")) continue;
    const layers = [];
    for (let one = node; one; one = one.parentElement) {
      layers.unshift(getComputedStyle(one).backgroundColor);
    }
    const [back, text] = [over(layers), over([...layers, getComputedStyle(node).color])];
    const [high, low] = [light(back), light(text)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < worst[0]) worst = [ratio, walker.currentNode.textContent.trim().slice(0, 60)];
  }
  return worst;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all tests here."""
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Open the console of a server; afterwards no page may have complained."""
    visits: list[Visit] = []

    def open_page(url: str, *, until: str | None = "Ready", **options: Any) -> Visit:
        visits.append(Visit(browser, url, **options))
        return visits[-1].open(until=until)

    yield open_page
    for one in visits:
        one.close()


def send(page: Any, prompt: str, dialect: str = "sse", tokens: str = "20") -> None:
    """Ask in the playground, and wait for the end of the answer."""
    page.get_by_label("Dialect").select_option(dialect)
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("Most tokens").fill(tokens)
    page.get_by_role("button", name="Send").click()
    page.locator("#stop").wait_for(state="hidden")


def raw_bytes(page: Any) -> str:
    """Return the bytes that the playground shows, its own line above them left out."""
    return "".join(page.locator("#raw .chunk:not(.meta) .data").all_text_contents())


def text_of(answer: str) -> str:
    """Return what the rows of an answer say, whatever its dialect and framing."""
    found = ""
    for line in answer.splitlines():
        text = line.removeprefix("data: ")
        if not text or text == "[DONE]":
            continue
        row = json.loads(text)
        choice = (row.get("choices") or [{}])[0]
        delta = choice.get("delta", {}).get("content") or choice.get("text") or ""
        token = row["token"]["text"] if "token" in row else row.get("generated_text", "")
        found += delta or token
    return found


@pytest.mark.vllm
def test_a_real_start_is_watched_phase_by_phase(server_process: StartServer, visit: Open) -> None:
    """From the open port on: each phase as it runs, then a model that answers."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    server = server_process("--demo", "--port", "0")
    url = server.wait_listening()
    one = visit(url, until="Starting")
    page = one.page
    page.locator("li.current[data-phase=engine]").wait_for(timeout=120_000)
    one.picture("starting")
    assert page.locator("li.past[data-phase=download] .time").inner_text() != ""
    page.locator("#status", has_text="Ready").wait_for(timeout=120_000)
    assert page.locator(".steps li.past").count() == 5
    detail = page.locator("li[data-phase=engine] .detail").inner_text()
    assert re.search(r"weights \d+\.\d s \(.* of .* MB, 1 of 1 files", detail)
    assert re.search(r"KV cache \d+\.\d s \(.*tokens\)", detail)
    assert page.title().startswith("Ready: ")
    one.tab("Playground")
    send(page, "The capital of France is")
    assert "Paris" in page.locator("#answer").inner_text()


def test_a_download_shows_its_bytes(
    server_process: StartServer, visit: Open, tmp_path: Path
) -> None:
    """Half of the weights have come: so says the bar, in numbers and for a screen reader."""
    files = {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "model.safetensors": bytes(40 << 20),
    }
    with hub_server(acme__tiny=Repository(files)) as hub:
        hub.chunk_pause = threading.Event()
        environ = {"HF_MODEL_ID": "acme/tiny", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        server = server_process("--port", "0", environ=environ)
        one = visit(server.wait_listening(), until="Starting")
        step = one.page.locator("li.current[data-phase=download]")
        step.locator(".detail", has_text="20 MiB of 40 MiB, 1 of 2 files").wait_for()
        assert step.get_by_role("progressbar").get_attribute("aria-valuenow") == "50"
        one.picture("download")
        hub.chunk_pause.set()


@pytest.mark.vllm
@pytest.mark.parametrize("dialect", ["sse", "jsonlines", "json", "chat", "completions"])
def test_each_dialect_streams_text_and_bytes(
    demo_server: RunningServer, visit: Open, dialect: str
) -> None:
    """The text is what the rows say, the bytes are what came, and the command asks for the same."""
    call(demo_server.url, "/invocations", {"inputs": "The first takes longer.", "stream": True})
    one = visit(demo_server.url)
    one.tab("Playground")
    page = one.page
    page.get_by_label("Temperature").fill("0")
    send(page, "What is the capital of Norway?", dialect)
    text, raw = page.locator("#answer").text_content(), raw_bytes(page)
    assert "Oslo" in text
    assert "HTTP 200" in page.locator("#raw .chunk.meta").first.inner_text()
    command = page.locator("#curl").inner_text()
    again = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert text == text_of(raw) == text_of(again.stdout)
    assert "tokens/s" in page.locator("#figures").inner_text() or dialect == "json"
    one.picture("playground" if dialect == "jsonlines" else f"playground-{dialect}")


@pytest.mark.vllm
def test_tgi_streams_where_it_is_on(
    tgi_server: RunningServer, demo_server: RunningServer, visit: Open
) -> None:
    """TGI's stream answers in TGI mode; elsewhere the choice says which option is off."""
    one = visit(tgi_server.url)
    one.tab("Playground")
    send(one.page, "The capital of France is", "tgi")
    assert "Paris" in one.page.locator("#answer").inner_text()
    assert raw_bytes(one.page).startswith('data: {"index":1,"token":{')
    other = visit(demo_server.url)
    option = other.page.locator("#dialect option[value=tgi]")
    assert option.is_disabled()
    assert "option.tgi_compat is off" in option.inner_text()


@pytest.mark.vllm
def test_an_adapter_is_registered_used_and_removed(demo_server: RunningServer, visit: Open) -> None:
    """By the form, in the playground's list, and away again after a second click."""
    one = visit(demo_server.url)
    page = one.page
    one.tab("Adapters")
    page.get_by_label("Name").fill("shouting")
    page.get_by_label("Source").fill(str(DEMO_MODEL_DIR / "adapters" / "capitals"))
    page.get_by_role("button", name="Register").click()
    row = page.locator("#adapters tbody tr", has_text="shouting")
    row.wait_for()
    one.picture("adapters")
    one.tab("Playground")
    page.get_by_label("Adapter", exact=True).select_option("shouting")
    send(page, "The capital of France is")
    assert "PARIS" in page.locator("#answer").inner_text()
    assert '"adapters":"shouting"' in page.locator("#curl").inner_text()
    one.tab("Adapters")
    row.get_by_role("button").click()
    assert "shouting" in [
        item["name"] for item in call(demo_server.url, "/adapters").json()["adapters"]
    ]
    row.get_by_role("button", name="Really remove shouting?").click()
    row.wait_for(state="detached")
    assert "shouting" not in [
        item["name"] for item in call(demo_server.url, "/adapters").json()["adapters"]
    ]


@pytest.mark.vllm
def test_refusals_are_shown_as_the_server_says_them(
    demo_server: RunningServer, visit: Open
) -> None:
    """A parameter out of range and an adapter that is not there: status and body, unchanged."""
    one = visit(demo_server.url)
    page = one.page
    one.tab("Playground")
    page.get_by_label("Temperature").fill("-3")
    send(page, "x")
    body = {"inputs": "x", "parameters": {"max_new_tokens": 20, "temperature": -3}, "stream": True}
    answer = call(demo_server.url, "/invocations", body, headers={"Accept": "text/event-stream"})
    shown = page.locator("#play-error").inner_text()
    assert shown.startswith(str(answer.status))
    assert answer.body.decode().strip() in shown
    one.picture("refusal")
    page.get_by_label("More parameters").fill("{nonsense")
    assert "not a JSON object" in page.locator("#more-error").inner_text()
    one.tab("Adapters")
    page.get_by_label("Name").fill("bad")
    page.get_by_label("Source").fill("/nowhere")
    page.get_by_role("button", name="Register").click()
    page.locator("#adapter-error").wait_for()
    refusal = call(demo_server.url, "/adapters", {"name": "bad", "src": "/nowhere", "pin": False})
    assert refusal.body.decode().strip() in page.locator("#adapter-error").inner_text()


@pytest.mark.vllm
def test_plots_and_meters_follow_the_work(demo_server: RunningServer, visit: Open) -> None:
    """What is generated while the page is open shows in figures, curves and memory."""
    one = visit(demo_server.url)
    page = one.page
    asked = threading.Event()

    def work() -> None:
        body = {
            "inputs": "The moon is",
            "parameters": {"max_new_tokens": 60, "ignore_eos_token": True},
        }
        while not asked.is_set():
            call(demo_server.url, "/invocations", body)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    try:
        curve = page.locator(".plot .line.one").first
        assert wait_until(lambda: (curve.get_attribute("d") or "").count("L") > 6, 60)
        median = page.locator(".plot", has_text="Time to first token").locator("li b").first
        assert wait_until(lambda: median.inner_text().endswith("s"), 30)
        one.picture("overview")
        page.emulate_media(color_scheme="dark")
        one.picture("overview-dark")
    finally:
        asked.set()
        for worker in workers:
            worker.join()
    assert "tokens, 256 MiB" in page.locator(".meter", has_text="KV cache").inner_text()
    assert page.get_by_role("meter", name="Main memory").is_visible()


@pytest.mark.vllm
def test_settings_say_where_values_come_from(demo_server: RunningServer, visit: Open) -> None:
    """The table of `explain`: set values first, defaults on request, found by a search."""
    one = visit(demo_server.url)
    one.tab("Settings")
    rows = one.page.locator("#settings-rows tr")
    assert wait_until(lambda: rows.count() > 5, 10)
    set_ones = rows.count()
    assert "serving.properties line" in rows.filter(has_text="max_model_len").first.inner_text()
    one.picture("settings")
    one.page.get_by_label("Defaults too").check()
    assert rows.count() > set_ones
    one.page.get_by_label("Search").fill("predict_timeout")
    assert rows.count() == 1


def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(
    server_process: StartServer, visit: Open
) -> None:
    """Without the key nothing of the server is shown; with it, it stays out of every storage."""
    environ = {"LMI_API_KEY": KEY, "OPTION_MODEL_NAME": "secretive"}
    server = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
    url = server.url_when_ready(20)
    one = visit(url, until="Key needed")
    page = one.page
    assert page.get_by_role("dialog").is_visible()
    assert call(url, "/console/state").status == 401
    assert page.locator("#model").text_content() == "lmi_vllm"
    one.picture("key")
    page.get_by_role("textbox", name="API key").fill("a wrong one")
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("The server does not know this key.").wait_for()
    page.get_by_role("textbox", name="API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()
    page.locator("#status", has_text="Ready").wait_for()
    one.tab("Playground")
    send(page, "hello")
    assert page.locator("#answer").inner_text() != ""
    assert "$LMI_API_KEY" in page.locator("#curl").inner_text()
    assert KEY not in page.content()
    assert page.evaluate("JSON.stringify(localStorage) + document.cookie").count(KEY) == 0
    page.reload()
    page.locator("#status", has_text="Ready").wait_for()
    page.get_by_role("button", name="Forget key").click()
    page.locator("#status", has_text="Key needed").wait_for()
    assert page.evaluate("sessionStorage.length") == 0
    assert KEY not in server.stderr


def test_text_of_the_model_is_never_markup(
    shared_scripted_server: RunningServer, visit: Open
) -> None:
    """The scripted engine repeats the prompt: its tags stay text, here and in errors."""
    markup = "<img src=x onerror=document.title='owned'> <script>document.title='owned'</script>"
    one = visit(shared_scripted_server.url)
    page = one.page
    one.tab("Playground")
    for dialect in ("json", "sse"):
        send(page, markup, dialect, tokens="100")
        assert "<img src=x onerror=" in page.locator("#answer").inner_text()
    one.tab("Adapters")
    page.get_by_label("Name").fill(markup)
    page.get_by_label("Source").fill("/nowhere")
    page.get_by_role("button", name="Register").click()
    page.locator("#adapter-error").wait_for()
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()


def test_a_long_answer_can_be_stopped(shared_scripted_server: RunningServer, visit: Open) -> None:
    """Stop ends the request on the server, and the playground is ready for the next."""
    one = visit(shared_scripted_server.url)
    page = one.page
    one.tab("Playground")
    before = disconnects(shared_scripted_server.url)
    page.get_by_label("Prompt", exact=True).fill("word " * 200)
    page.get_by_label("Most tokens").fill("200")
    page.keyboard.press("Control+Enter")
    page.locator("#answer span").first.wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator("#stop").wait_for(state="hidden")
    assert wait_until(lambda: disconnects(shared_scripted_server.url) == before + 1, 10)
    assert "lmi_requests_in_flight 0.0" in metrics(shared_scripted_server.url)
    assert page.get_by_role("button", name="Send").is_enabled()


def metrics(url: str) -> str:
    """Return what the server exports."""
    return call(url, "/metrics").body.decode()


def disconnects(url: str) -> float:
    """Return how many clients of LMI's dialect have gone so far."""
    name = 'lmi_client_disconnects_total{dialect="lmi"}'
    rows = [row for row in metrics(url).splitlines() if row.startswith(name)]
    return sum(float(row.split()[-1]) for row in rows)


def test_hidden_page_does_not_poll(shared_scripted_server: RunningServer, visit: Open) -> None:
    """A hidden page does not poll; a shown one does again, at once."""
    one = visit(shared_scripted_server.url, until=None)
    page = one.page
    page.clock.install()
    one.open()
    hide = "value => { Object.defineProperty(document, 'hidden', {value, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    before = one.polls()
    page.clock.run_for(60_000)
    assert one.polls() <= before + 1  # one may have been on its way
    settled = one.polls()
    page.clock.run_for(60_000)
    assert one.polls() == settled
    with page.expect_request("**/console/state"):
        page.evaluate(hide, False)


# Wider than any font that a phone may have, whichever of them this machine has.
WIDEN = """() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { letter-spacing: .25em !important; }");
  document.adoptedStyleSheets = [sheet];
}"""


@pytest.mark.parametrize("letters", ["usual", "wide"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_with_contrast(
    shared_scripted_server: RunningServer, visit: Open, scheme: str, letters: str
) -> None:
    """375 pixels are enough for each tab in any font, and texts have the contrast of WCAG AA."""
    size = {"width": 375, "height": 812}
    one = visit(
        shared_scripted_server.url, viewport=size, color_scheme=scheme, device_scale_factor=2
    )
    if letters == "wide":
        one.page.evaluate(WIDEN)
    for tab in TABS:
        one.tab(tab)
        if tab == "Playground":
            send(one.page, "A short prompt for a small screen", tokens="7")
        assert one.page.evaluate("document.documentElement.scrollWidth") <= 375, tab
        assert one.page.locator("nav").evaluate("node => node.scrollWidth <= node.clientWidth"), tab
        ratio, text = one.page.evaluate(LOWEST_CONTRAST)
        assert ratio >= 4.5, (tab, text)
        if letters == "usual":
            one.picture(f"phone-{tab.lower()}-{scheme}")


def test_the_theme_is_the_systems_until_it_is_chosen(
    shared_scripted_server: RunningServer, visit: Open
) -> None:
    """Dark where the system is; the button goes on to light, and a reload remembers."""
    one = visit(shared_scripted_server.url, color_scheme="dark", reduced_motion="reduce")
    page = one.page

    def ground() -> object:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = ground()
    page.get_by_role("button", name="Theme: as the system").click()
    assert page.get_by_role("button", name="Theme: light").is_visible()
    assert ground() != dark
    page.reload()
    page.get_by_role("button", name="Theme: light").click()
    assert ground() == dark
    moving = "document.getAnimations().filter(one => one.playState === 'running').length"
    assert page.evaluate(moving) == 0


def test_tabs_are_reached_by_keys_alone(shared_scripted_server: RunningServer, visit: Open) -> None:
    """Arrows move between tabs, and every field of the page has a name."""
    one = visit(shared_scripted_server.url)
    page = one.page
    page.get_by_role("tab", name="Overview").focus()
    for name in (*TABS[1:], TABS[0]):
        page.keyboard.press("ArrowRight")
        assert page.get_by_role("tab", name=name, selected=True).is_visible()
    fields = "[...document.querySelectorAll('input, select, textarea')]"
    unnamed = fields + ".filter(one => !one.labels.length).length"
    assert page.evaluate(unnamed) == 0


def test_with_a_management_address_only_that_has_the_console(
    server_process: StartServer, visit: Open
) -> None:
    """The inference address says nothing; the page leaves asking the model to a command."""
    environ = {"SERVING_MANAGEMENT_ADDRESS": "http://127.0.0.1:0"}
    server = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
    management = server.wait_for_line("Management on ", 20).split()[-1]
    url = server.url_when_ready(20)
    assert call(url, "/console").status == 404
    assert call(url, "/console/state").status == 404
    one = visit(management)
    one.tab("Playground")
    assert one.page.get_by_role("button", name="Send").is_disabled()
    command = one.page.locator("#curl").inner_text()
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("data: ")
