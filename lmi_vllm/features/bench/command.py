"""`bench`: put load on an endpoint, ours or another server's, and report the figures."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import LmiError
from lmi_vllm.features.bench.dialects import DIALECTS, ServerDialect
from lmi_vllm.features.bench.http_client import HttpTarget, http_client
from lmi_vllm.features.bench.plan import LengthRange, LoadPlan
from lmi_vllm.features.bench.report import BenchReport
from lmi_vllm.features.bench.run import Client, LoadRun
from lmi_vllm.translate.configuration import Configuration

EXIT_INTERRUPTED = 130
LINE_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser, _: Configuration) -> None:
    """Declare the flags of `bench`."""
    where = parser.add_argument_group("where")
    where.add_argument("url", nargs="?", help="of the server, for example http://127.0.0.1:8080")
    where.add_argument(
        "--dialect",
        choices=tuple(DIALECTS),
        default="lmi",
        help="of the payload: lmi, tgi, or OpenAI's completions or chat",
    )
    where.add_argument("--path", help="where to post, instead of the dialect's own route")
    where.add_argument("--model", default="lmi", help="`model` of OpenAI's payloads")
    where.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="sent with each request; the key of LMI_API_KEY is, too",
    )
    where.add_argument(
        "--sagemaker",
        metavar="ENDPOINT",
        help="invoke a SageMaker endpoint (SigV4) instead of a URL",
    )
    where.add_argument("--region", help="of the endpoint; else AWS's own configuration")
    where.add_argument("--component", help="inference component of the endpoint")
    where.add_argument("--endpoint-url", help="another address of SageMaker's runtime")
    load = parser.add_argument_group("load")
    load.add_argument(
        "-c",
        "--concurrency",
        type=_count,
        metavar="N",
        help="requests at once (default 8; with --rate the most, default no bound)",
    )
    load.add_argument(
        "-r",
        "--rate",
        type=_positive,
        metavar="R",
        help="requests a second on average, as a Poisson process",
    )
    load.add_argument(
        "-n",
        "--number",
        type=_count,
        metavar="N",
        help="requests in all (default 100, or no bound with --duration)",
    )
    load.add_argument(
        "-d", "--duration", type=_positive, metavar="S", help="seconds in which requests begin"
    )
    load.add_argument(
        "--prompt-words",
        type=_span,
        default=LengthRange(32, 32),
        metavar="N|N-M",
        help="length of prompts, about a token a word (default 32)",
    )
    load.add_argument(
        "--output-tokens",
        type=_span,
        default=LengthRange(64, 64),
        metavar="N|N-M",
        help="most tokens of answers (default 64)",
    )
    load.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one a line")
    load.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME[:WEIGHT]",
        help="a share of the requests names it; `base` is none",
    )
    load.add_argument("--no-stream", action="store_true", help="ask for whole answers")
    load.add_argument(
        "--ignore-eos",
        action="store_true",
        help="answers end at --output-tokens only (lmi, tgi and vLLM know this)",
    )
    load.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="of sampling; 0 is greedy (default: what the server does unasked)",
    )
    load.add_argument(
        "--timeout",
        type=_positive,
        default=240.0,
        metavar="S",
        help="for a whole answer (default 240)",
    )
    load.add_argument("--seed", type=int, default=0, help="of lengths, words and arrivals")
    load.add_argument(
        "--no-probe",
        action="store_true",
        help="begin at once, without one request that has to succeed",
    )
    out = parser.add_argument_group("results")
    out.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is stdout")
    out.add_argument("--quiet", action="store_true", help="no lines while it runs")


def run(arguments: argparse.Namespace, environ: Mapping[str, str], _: Configuration) -> int:
    """Run the load; 0, 1 when no request succeeded, 130 when it was interrupted."""
    plan = _plan(arguments)
    if bool(arguments.url) == bool(arguments.sagemaker):
        raise LmiError("bench: give either a URL or --sagemaker ENDPOINT")
    return asyncio.run(_run(arguments, plan, environ))


async def _run(arguments: argparse.Namespace, plan: LoadPlan, environ: Mapping[str, str]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with _client(arguments, plan, environ) as client:
        load = LoadRun(plan, client)
        if not arguments.no_probe:
            await _probe(load, stop)
        showing = None if arguments.quiet else asyncio.create_task(_show(load))
        if not stop.is_set():
            await load.run(stop)
        if showing is not None:
            showing.cancel()
    report = BenchReport(load, _subject(arguments, plan))
    _write(report, arguments)
    if stop.is_set():
        return EXIT_INTERRUPTED
    return 0 if report.good else 1


async def _show(load: LoadRun) -> None:
    """Say where the run is every few seconds, until cancelled."""
    number = "" if load.plan.number is None else f"/{load.plan.number}"
    while True:
        await asyncio.sleep(LINE_SECONDS)
        done = f"{len(load.outcomes)}{number} done, {load.in_flight} in flight"
        failed = sum(not outcome.is_good for outcome in load.outcomes)
        print(f"{load.now():.0f} s: {done}, {failed} failed", file=sys.stderr, flush=True)


async def _probe(load: LoadRun, stop: asyncio.Event) -> None:
    """Send one request first: a mistake in the command is one error and not a hundred."""
    probing = asyncio.create_task(load.probe())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({probing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not probing.done():
        probing.cancel()
        return
    outcome = probing.result()
    if outcome.error is not None:
        raise LmiError(
            f"bench: the first request failed: {outcome.error}: {outcome.example} "
            "(--no-probe skips this request)"
        )


@asynccontextmanager
async def _client(
    arguments: argparse.Namespace, plan: LoadPlan, environ: Mapping[str, str]
) -> AsyncIterator[Client]:
    dialect = DIALECTS[arguments.dialect]
    if arguments.sagemaker:
        from lmi_vllm.features.bench.sagemaker_client import SageMakerClient, SageMakerTarget

        yield SageMakerClient(
            SageMakerTarget(
                arguments.sagemaker, dialect, arguments.model, arguments.region,
                arguments.component, arguments.endpoint_url,
            ),
            plan,
        )  # fmt: skip
        return
    if not arguments.url.startswith(("http://", "https://")):
        raise LmiError(f"bench: a URL begins with http:// or https:// (got {arguments.url})")
    url, path = arguments.url.rstrip("/"), _path(arguments, dialect)
    headers = _headers(arguments.header, environ)
    async with http_client(HttpTarget(url, path, dialect, arguments.model, headers), plan) as http:
        yield http


def _path(arguments: argparse.Namespace, dialect: ServerDialect) -> str:
    own = dialect.whole_path if arguments.no_stream else dialect.path
    return f"/{(arguments.path or own).lstrip('/')}"


def _headers(given: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    headers = {}
    if key := environ.get("LMI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    for text in given:
        name, separator, value = text.partition(":")
        if not separator or not name.strip():
            raise LmiError("bench: --header is NAME:VALUE")
        headers[name.strip()] = value.strip()
    return headers


def _plan(arguments: argparse.Namespace) -> LoadPlan:
    number = arguments.number
    if number is None and arguments.duration is None:
        number = 100
    concurrency = arguments.concurrency
    if concurrency is None:
        concurrency = 0 if arguments.rate else 8
    return LoadPlan(
        concurrency=concurrency,
        rate=arguments.rate or 0.0,
        number=number,
        seconds=arguments.duration,
        prompt_words=arguments.prompt_words,
        output_tokens=arguments.output_tokens,
        prompts=_prompts(arguments.prompts),
        adapters=_adapters(arguments.adapter),
        is_streaming=not arguments.no_stream,
        ignores_eos=arguments.ignore_eos,
        temperature=arguments.temperature,
        timeout_seconds=arguments.timeout,
        seed=arguments.seed,
    )


def _prompts(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is no UTF-8 text"
        raise LmiError(f"bench: --prompts {path}: {reason}") from error
    if not (prompts := tuple(line for line in lines if line.strip())):
        raise LmiError(f"bench: --prompts {path}: the file holds no prompt")
    return prompts


def _adapters(given: list[str]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for text in given:
        name, separator, weight = text.rpartition(":")
        if not separator:
            name, weight = text, "1"
        try:
            found[name] = _positive(weight)
        except (ValueError, argparse.ArgumentTypeError):
            raise LmiError(
                f"bench: --adapter {text}: a weight is a number above 0 (NAME:WEIGHT)"
            ) from None
    return found


def _subject(arguments: argparse.Namespace, plan: LoadPlan) -> str:
    where = mask_urls(arguments.url) if arguments.url else f"SageMaker {arguments.sagemaker}"
    how = f"{plan.rate:g} a second" if plan.rate else f"{plan.concurrency} at once"
    kind = "streamed" if plan.is_streaming else "whole"
    return f"{where}: {arguments.dialect}, {kind}, {how}"


def _write(report: BenchReport, arguments: argparse.Namespace) -> None:
    document: dict[str, Any] = report.document()
    if arguments.json == "-":
        print(json.dumps(document, indent=1))
        return
    print("\n".join(report.lines()))
    if arguments.json is None:
        return
    try:
        Path(arguments.json).write_text(f"{json.dumps(document)}\n", encoding="utf-8")
    except OSError as error:
        raise LmiError(f"bench: cannot write {arguments.json}: {error.strerror}") from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0 (got {text})")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0 (got {text})")
    return number


def _temperature(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _positive(text)


def _span(text: str) -> LengthRange:
    low, _, high = text.partition("-")
    try:
        span = LengthRange(_count(low), _count(high or low))
    except argparse.ArgumentTypeError:
        span = LengthRange(1, 0)
    if span.low > span.high:
        raise argparse.ArgumentTypeError(f"expected N or N-M, 1 <= N <= M (got {text})")
    return span
