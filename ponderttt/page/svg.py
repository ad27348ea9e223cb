"""One plot panel as SVG text: scales, axes, lines and dots. Colours are classes of the page's CSS.

Coordinates are rounded to a tenth, so that the same numbers give the same bytes.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
Range = tuple[float, float]

WIDTH, HEIGHT = 300, 212
LEFT, RIGHT, TOP, BOTTOM = 54, 8, 8, 36


def spanning(values: Iterable[float], room: float = 0.06) -> Range:
    """The range of values with some room on both sides; something sensible for one value or none.

    >>> spanning([0.0, 10.0], room=0.1)
    (-1.0, 11.0)
    """
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    gap = (high - low) * room or abs(high) * room or 1.0
    return low - gap, high + gap


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers inside a range, about as many as wanted.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    r"""A short number with a true minus sign.

    >>> number(0.5), number(2000.0), number(-1.0) == "\N{MINUS SIGN}1"
    ('0.5', '2000', True)
    """
    return f"{value:.6g}".replace("-", "\N{MINUS SIGN}")


def place(value: float) -> str:
    """A coordinate, never minus zero."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")


@dataclass
class Panel:
    """A drawing with two linear axes; `parts` are drawn in the order they came."""

    x: Range
    y: Range
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    parts: list[str] = field(default_factory=list)

    def at(self, point: Point) -> Point:
        """Where a point of the data lies in the drawing."""
        (x0, x1), (y0, y1) = self.x, self.y
        across = (point[0] - x0) / (x1 - x0)
        up = (point[1] - y0) / (y1 - y0)
        inner_width = self.width - self.left - RIGHT
        inner_height = self.height - TOP - BOTTOM
        return self.left + across * inner_width, TOP + (1 - up) * inner_height

    def axes(self, x_name: str, y_name: str, *, y_ticks: bool = True) -> None:
        """Grid lines, tick labels and the names of the axes."""
        base = self.height - BOTTOM
        for value in ticks(*self.x, self.width // 75):
            x = place(self.at((value, self.y[0]))[0])
            self.text(x, place(base + 15), number(value), "tick middle")
        for value in ticks(*self.y) if y_ticks else ():
            y = self.at((self.x[0], value))[1]
            self._segment((self.left, y), (self.width - RIGHT, y), "grid")
            self.text(place(self.left - 6), place(y + 4), number(value), "tick end")
        self._segment((self.left, base), (self.width - RIGHT, base), "axis")
        middle = place((self.left + self.width - RIGHT) / 2)
        self.text(middle, place(self.height - 5), x_name, "name middle")
        if y_name:
            centre = place((TOP + base) / 2)
            turn = f' transform="rotate(-90 12 {centre})"'
            self.text("12", centre, y_name, "name middle", turn)

    def line(self, points: Sequence[Point], kind: str) -> None:
        """A line through points; none for fewer than two."""
        known = [p for p in points if all(map(math.isfinite, p))]
        if len(known) > 1:
            path = " ".join(f"{place(x)},{place(y)}" for x, y in map(self.at, known))
            self.parts.append(f'<polyline class="line {kind}" points="{path}"/>')

    def dots(self, points: Sequence[Point], kind: str, radius: float = 3) -> None:
        """One circle per point, as a single path: many circles would be many bytes."""
        r = place(radius)
        span = place(2 * radius)
        marks = []
        for x, y in map(self.at, points):
            start = f"M{place(x - radius)} {place(y)}"
            marks.append(f"{start}a{r} {r} 0 1 0 {span} 0a{r} {r} 0 1 0 -{span} 0")
        if marks:
            self.parts.append(f'<path class="dots {kind}" d="{"".join(marks)}"/>')

    def dot(self, point: Point, kind: str, about: str, radius: float = 3.5) -> None:
        """A circle that tells what it is."""
        x, y = map(place, self.at(point))
        title = f"<title>{html.escape(about)}</title>"
        self.parts.append(
            f'<circle class="dots {kind}" cx="{x}" cy="{y}" r="{radius}">{title}</circle>'
        )

    def stroke(self, start: Point, end: Point, kind: str) -> None:
        """A straight stroke between two points of the data."""
        self._segment(self.at(start), self.at(end), kind)

    def box(self, x: Range, y: Range, kind: str) -> None:
        """A filled rectangle between two points of the data."""
        x0, y1 = self.at((x[0], y[0]))
        x1, y0 = self.at((x[1], y[1]))
        size = f'width="{place(x1 - x0)}" height="{place(y1 - y0)}"'
        self.parts.append(f'<rect class="{kind}" x="{place(x0)}" y="{place(y0)}" {size}/>')

    def text(self, x: str, y: str, words: str, kind: str, more: str = "") -> None:
        """Words at a place of the drawing."""
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}"{more}>{html.escape(words)}</text>')

    def _segment(self, start: Point, end: Point, kind: str) -> None:
        (x0, y0), (x1, y1) = start, end
        ends = f'x1="{place(x0)}" y1="{place(y0)}" x2="{place(x1)}" y2="{place(y1)}"'
        self.parts.append(f'<line class="{kind}" {ends}/>')

    def render(self, label: str) -> str:
        """The drawing, with words for those who cannot see it."""
        about = html.escape(label, quote=True)
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{about}">'
        return head + "".join(self.parts) + "</svg>"
