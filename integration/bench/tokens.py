"""CPU of the front-end process per streamed token, ours against vLLM's server and the floor.

    python -m integration.bench tokens [--streams 64] [--tokens 128] [--rounds 5] [--step-ms 40]
        [--interval 8]

The floor is vLLM's AsyncLLM consumed without HTTP. vLLM's front end in Rust, `vllm-rs`, is
measured, too, if the wheel of this release is available. All run at once on the same engine
arguments and are measured in turns. The engine cores are processes of their own and do not count.
Nor does this process, the client. Figures are medians of the rounds. Each step of the engines takes
`--step-ms` at least (0: no limit), so that they leave the processor to the front ends and none of
these lags.

More figures show the parts of such a cost. `send` is one write of a row to each connection by a
process that does nothing else. `relay` is a process that first reads each row from another one,
which any front end behind ours would add. Lanes are also measured with an eighth of the tokens. The
difference shows the cost of a request and the cost of each of its tokens. `every 8` are servers
that deliver so many tokens together (`--interval`, vLLM's `stream_interval`; 1: none of them).
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import aiohttp

from integration.bench.cpu_time import cpu_seconds
from integration.bench.floor_process import floor
from integration.bench.results import Claim, Result, Table, spread
from integration.bench.rust_front_end import rust_front_end
from integration.bench.send_floor import relay_floor, send_floor
from integration.bench.servers import (
    PROMPT,
    STEP_VARIABLE,
    Running,
    our_command,
    running,
    their_command,
)
from lmi_vllm.features.bench.dialects import DIALECTS
from lmi_vllm.features.bench.plan import LoadPlan, LoadRequest


@dataclass(frozen=True)
class Lane:
    """One way to stream tokens: the path, the body, and how a token looks in the answer."""

    name: str
    path: str
    body: Callable[[int], Mapping[str, Any]]
    mark: bytes  # once in each row that carries a token, or more


PLAN: Final = LoadPlan(ignores_eos=True, temperature=0.0)


def _lmi(tokens: int, **more: Any) -> dict[str, Any]:
    body = DIALECTS["lmi"].body(LoadRequest(PROMPT, tokens), PLAN, "")
    return body | {"parameters": body["parameters"] | more}


def _openai(name: str, tokens: int) -> dict[str, Any]:
    """Return a body without usage, whose row would count as one with a token."""
    body = DIALECTS[name].body(LoadRequest(PROMPT, tokens), PLAN, "")
    return {key: body[key] for key in body if key != "stream_options"} | {
        "model": "lmi",
        "temperature": 0,
    }


COMPLETIONS: Final = Lane(
    "completions", "/v1/completions", partial(_openai, "completions"), b"data: {"
)
CHAT: Final = Lane("chat", "/v1/chat/completions", partial(_openai, "chat"), b"data: {")
LMI_PLAIN: Final = Lane(
    "LMI, no logprobs", "/invocations", lambda n: _lmi(n, logprobs=False), b'"token":'
)
LMI: Final = Lane("LMI, logprobs", "/invocations", _lmi, b'"token":')


SHORTER: Final = 8  # times fewer tokens, to tell a request's cost from a token's
PARTED: Final = (
    "ours: LMI, no logprobs", "ours: completions", "vLLM: completions", "vllm-rs: completions",
)  # fmt: skip


async def load(url: str, lane: Lane, streams: int, tokens: int) -> int:
    """Run so many streams at once, see that each is whole, and return how many rows came."""
    body = lane.body(tokens)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def one() -> int:
            async with session.post(lane.path, json=body) as response:
                raw = await response.read()
            if response.status != 200 or b'"error"' in raw:
                raise AssertionError(raw[-300:])
            return raw.count(lane.mark)

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


def cost(server: Running, lane: Lane, streams: int, tokens: int) -> tuple[float, float]:
    """Return the CPU microseconds the server's front end spent per token, and tokens per row.

    vLLM joins the tokens of a consumer that lags: a server that is slower than the engine sends
    fewer rows for the same tokens, and its cost per token looks better than it is.
    """
    before = cpu_seconds(server.process.pid)
    rows = asyncio.run(load(server.url, lane, streams, tokens))
    spent = cpu_seconds(server.process.pid) - before
    return spent / (streams * tokens) * 1e6, streams * tokens / rows


def of_streams(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark of streams, which run at the pace of a step."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=int, default=40)
    return parser


def main() -> Result:
    """Measure in turns."""
    parser = of_streams(__doc__)
    parser.add_argument("--interval", type=int, default=8)
    given = parser.parse_args()
    if given.step_ms:
        os.environ[STEP_VARIABLE] = str(given.step_ms)
    size = (given.streams, given.tokens)
    found: dict[str, list[tuple[float, float]]] = {}
    with (
        send_floor() as sender,
        relay_floor(sender) as relay,
        floor() as bare,
        running(our_command, "/ping") as ours,
        running(their_command, "/health") as theirs,
        rust_front_end() as rust,
        ExitStack() as stack,
    ):
        measures: dict[str, Callable[[], tuple[float, float]]] = {
            "send": lambda: sender.cost(*size, given.step_ms),
            "relay": lambda: relay(*size, given.step_ms),
            "floor": lambda: bare.cost(*size, None),
            "floor, logprobs": lambda: bare.cost(*size, 0),
        }
        servers = {"ours": ours, "vLLM": theirs}
        if not isinstance(rust, str):
            servers["vllm-rs"] = rust
        if given.interval > 1:
            servers |= _with_interval(stack, given.interval)
        measures |= _lanes(servers, size)
        for measure in measures.values():
            measure()  # warm up
        for _ in range(given.rounds):
            for name, measure in measures.items():
                found.setdefault(name, []).append(measure())
    notes = [f"vllm-rs was not measured: {rust}"] if isinstance(rust, str) else []
    return _result(found, size, notes)


def _lanes(
    servers: Mapping[str, Running], size: tuple[int, int]
) -> dict[str, Callable[[], tuple[float, float]]]:
    """Return what measures each lane of each server; only ours have those of LMI's form."""
    short = (size[0], size[1] // SHORTER)
    measures: dict[str, Callable[[], tuple[float, float]]] = {}
    for server, process in servers.items():
        for lane in (LMI_PLAIN, LMI, COMPLETIONS, CHAT):
            name = f"{server}: {lane.name}"
            if server.startswith("ours") or lane in (COMPLETIONS, CHAT):
                measures[name] = partial(cost, process, lane, *size)
            if name in PARTED:
                measures[_short(name)] = partial(cost, process, lane, *short)
    return measures


def _with_interval(stack: ExitStack, interval: int) -> dict[str, Running]:
    """Start both servers again, with this `stream_interval`; return them by name."""
    option = {"OPTION_STREAM_INTERVAL": str(interval)}
    ours = running(our_command, "/ping", option)
    theirs = running(
        lambda port: [*their_command(port), "--stream-interval", str(interval)], "/health"
    )
    return {
        f"{name} every {interval}": stack.enter_context(server)
        for name, server in (("ours", ours), ("vLLM", theirs))
    }


def _short(name: str) -> str:
    return f"{name}, short"


def _result(
    found: Mapping[str, list[tuple[float, float]]], size: tuple[int, int], notes: list[str]
) -> Result:
    medians = {name: statistics.median(c for c, _ in values) for name, values in found.items()}
    rows = [
        [
            name,
            spread([cost for cost, _ in values]),
            f"{statistics.median(joined for _, joined in values):.2f}",
        ]
        for name, values in found.items()
        if not name.endswith(_short(""))
    ]
    title = "CPU microseconds of the front-end process per token, {} streams of {} tokens"
    head = ["server and lane", "median (least to most)", "tokens a row"]
    claims = [Claim(text, value, target) for text, value, target in ratios(medians)]
    parted = [
        [name, *(f"{part:.1f}" for part in parts(medians[name], medians[_short(name)], size[1]))]
        for name in PARTED
        if name in medians
    ]
    return Result(
        [
            Table(title.format(*size), head, rows),
            Table(
                "What these are made of: CPU microseconds",
                ["server and lane", "a request, once", "each token"],
                parted,
            ),
        ],
        claims,
        notes=notes,
    )


def parts(long: float, short: float, tokens: int) -> tuple[float, float]:
    """Return what a request and what each of its tokens cost, of two costs a token.

    `long` is that of answers of so many tokens, `short` that of answers of `SHORTER` times fewer.
    """
    fewer = tokens // SHORTER
    token = (long * tokens - short * fewer) / (tokens - fewer)
    return (long - token) * tokens, token


def ratios(medians: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yield what is claimed, the ratio found, and its target."""
    plain, full = medians["ours: LMI, no logprobs"], medians["ours: LMI, logprobs"]
    rust = medians.get("vllm-rs: completions")
    if rust is not None:
        yield "LMI without logprobs / vllm-rs completions", plain / rust, 1.0
    yield "LMI without logprobs / floor", plain / medians["floor"], 0.8
    yield "LMI without logprobs / vLLM completions", plain / medians["vLLM: completions"], 0.5
    yield "LMI with logprobs / LMI without", full / plain, 1.25
    yield "LMI with logprobs / floor with logprobs", full / medians["floor, logprobs"], 1.2
    for lane in ("completions", "chat"):
        ours = medians[f"ours: {lane}"]
        if rust is not None:
            yield f"{lane} / vllm-rs {lane}", ours / medians[f"vllm-rs: {lane}"], 1.0
        yield f"{lane} / vLLM {lane}", ours / medians[f"vLLM: {lane}"], 0.7
