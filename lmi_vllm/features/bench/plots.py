"""Four plots of a run as one SVG, for light and dark themes, without a plotting library."""

from collections.abc import Sequence
from html import escape
from typing import Final

from lmi_vllm.features.bench.report import BenchReport, Times

WIDTH: Final = 460
HEIGHT: Final = 240
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 36
BINS: Final = 40
MAX_POINTS: Final = 400
STYLE: Final = """\
svg{font:12px system-ui,sans-serif;background:#fff}text{fill:#333}.t{font-size:14px;font-weight:600}
.g{stroke:#ddd}.l{fill:none;stroke:#2563eb;stroke-width:2}.a{fill:#2563eb22}.m{stroke:#b45309;\
stroke-dasharray:4 3}@media(prefers-color-scheme:dark){svg{background:#111}text{fill:#ddd}
.g{stroke:#333}.l{stroke:#60a5fa}.a{fill:#60a5fa22}.m{stroke:#f59e0b}}"""

Point = tuple[float, float]


def plots(report: BenchReport) -> str:
    """Return the SVG document."""
    first, gaps, _, whole = report.times()
    panels = [
        _panel("Output tokens per second", "seconds", _throughput(report), is_area=True),
        _distribution(first),
        _distribution(gaps),
        _distribution(whole),
    ]
    placed = "".join(
        f'<g transform="translate({number % 2 * WIDTH},{40 + number // 2 * HEIGHT})">{panel}</g>'
        for number, panel in enumerate(panels)
    )
    width, height = 2 * WIDTH, 2 * HEIGHT + 48
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img"><style>{STYLE}</style>'
        f'<text class="t" x="16" y="26">{escape(report.subject)}</text>{placed}</svg>\n'
    )


def _throughput(report: BenchReport) -> list[Point]:
    """Return tokens per second over time; an answer's tokens are spread evenly over its stream."""
    seconds = max(report.run.seconds, 1e-9)
    bins = [0.0] * BINS
    for one in report.good:
        begin = one.began if one.first_token is None else one.first_token
        end = one.ended if one.last_token is None else one.last_token
        low, high = (min(BINS - 1, int(at / seconds * BINS)) for at in (begin, end))
        for number in range(low, high + 1):
            bins[number] += one.output_tokens / (high - low + 1)
    width = seconds / BINS
    return [(number * width, tokens / width) for number, tokens in enumerate(bins)]


def _distribution(times: Times) -> str:
    """Return the panel of the cumulative distribution of one latency, in milliseconds."""
    values = sorted(value * 1000 for value in times.values)
    title = times.title.capitalize()
    if not values:
        return _frame(title, "milliseconds") + f'<text x="{LEFT + 12}" y="{HEIGHT / 2}">none</text>'
    step = max(1, len(values) // MAX_POINTS)
    ranks = [*range(0, len(values), step), len(values) - 1]
    points = [(values[rank], 100 * (rank + 1) / len(values)) for rank in ranks]
    return _panel(f"{title}: percent below", "milliseconds", [(values[0], 0.0), *points])


def _panel(title: str, unit: str, points: Sequence[Point], *, is_area: bool = False) -> str:
    right = max((x for x, _ in points), default=0) or 1.0
    top = max((y for _, y in points), default=0) or 1.0
    placed = [
        (
            LEFT + x / right * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM),
        )
        for x, y in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    floor = HEIGHT - BOTTOM
    area = f"{LEFT},{floor} {line} {placed[-1][0]:.1f},{floor}" if placed and is_area else ""
    return (
        _frame(title, unit, right, top)
        + (f'<polygon class="a" points="{area}"/>' if area else "")
        + f'<polyline class="l" points="{line}"/>'
    )


def _frame(title: str, unit: str, right: float = 1.0, top: float = 1.0) -> str:
    parts = [f'<text class="t" x="{LEFT}" y="20">{escape(title)}</text>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        parts += [
            f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(share * top)}</text>',
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{_short(share * right)}</text>",
        ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(unit)}</text>')
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.3g}"  # noqa: PLR2004
