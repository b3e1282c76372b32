"""A claim on a number line: what was expected, what we got with its interval, the paper's value."""

import math
from html import escape

from interp.case_studies.judge import Judgement

_WIDTH, _HEIGHT, _MARGIN = 200, 34, 6
_MIDDLE = 14


def strip_svg(judgement: Judgement) -> str:
    """An inline SVG, coloured by the page's style sheet; empty where there is no number to show."""
    value, expected = judgement.value, judgement.expected
    if value is None or expected is None or not math.isfinite(value):
        return ""
    paper = judgement.claim.paper_value
    paper_number = float(paper) if isinstance(paper, (int, float)) else None
    low_end, high_end = judgement.interval or (value, value)
    numbers = [value, low_end, high_end, expected.low, expected.high]
    if paper_number is not None:
        numbers.append(paper_number)
    finite = [number for number in numbers if math.isfinite(number)]
    low, high = min(finite), max(finite)
    room = (high - low) * 0.15 or max(abs(high), 1.0) * 0.15
    low, high = low - room, high + room

    def x(number: float) -> float:
        share = (min(max(number, low), high) - low) / (high - low)
        return _MARGIN + share * (_WIDTH - 2 * _MARGIN)

    left, right = x(expected.low), x(expected.high)
    y = _MIDDLE
    parts = [
        f'<line class="axis" x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y}" y2="{y}"/>',
        f'<rect class="expected" x="{left:.1f}" y="{y - 8}" '
        f'width="{max(right - left, 2):.1f}" height="16" rx="2"/>',
    ]
    if judgement.interval is not None and all(map(math.isfinite, judgement.interval)):
        parts.append(
            f'<line class="whisker" x1="{x(low_end):.1f}" x2="{x(high_end):.1f}" '
            f'y1="{y}" y2="{y}"/>'
        )
    parts.append(f'<circle class="ours" cx="{x(value):.1f}" cy="{y}" r="4.5"/>')
    if paper_number is not None:
        parts.append(f'<path class="paper" d="M{x(paper_number):.1f} {y + 9} l4 7 h-8 z"/>')
    words = f"ours {judgement.value_text()}, expected {judgement.expected_text()}"
    if judgement.paper_text():
        words += f", paper {judgement.paper_text()}"
    return (
        f'<svg class="strip" role="img" aria-label="{escape(words)}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"><title>{escape(words)}</title>'
        f"{''.join(parts)}</svg>"
    )
