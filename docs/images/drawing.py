"""A few shapes as SVG, for the pictures of the concept pages.

No picture has a background, and every colour is a class: whoever reads in the dark gets light lines.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

# Class: (in the light, in the dark), for what is filled and for what is drawn or written.
FILLS = {
    "free": ("#f3f4f6", "#21262d"),
    "writable": ("#fde68a", "#78520f"),
    "committed": ("#99e2d0", "#0b5f55"),
    "evictable": ("#bfdbfe", "#1e4272"),
    "kept": ("#ddd6fe", "#4c3a86"),
    "gone": ("#fecaca", "#7a1f1f"),
    "plain": ("#ffffff", "#0d1117"),
}
LINES = {"ink": ("#1f2937", "#e6edf3"), "quiet": ("#6b7280", "#9198a1"), "loud": ("#c2410c", "#fb923c")}
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class Drawing:
    """An SVG that grows by calls; positions and sizes are in pixels, and text is centred on its position."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self.parts = [f"<title>{escape(title)}</title>"]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, text: str = "", *, size: int = 12,
        line: str = "ink", dashed: bool = False,
    ) -> None:  # fmt: skip
        """Add a rectangle with a text in its middle."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'class="{fill} {line}-line"{dashes}/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2, text, size=size)

    def text(
        self, x: float, y: float, text: str, *, size: int = 12, colour: str = "ink", anchor: str = "middle",
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Add one line of text."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" dy="0.35em" font-size="{size}" text-anchor="{anchor}" '
            f'class="{colour}-text"{weight}>{escape(text)}</text>'
        )

    def line(
        self, *points: tuple[float, float], colour: str = "quiet", arrow: bool = False, dashed: bool = False
    ) -> None:
        """Add straight lines from point to point, with a head at the end for an `arrow`."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        head = f' marker-end="url(#{colour}-head)"' if arrow else ""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<path d="{path}" fill="none" class="{colour}-line"{head}{dashes}/>')

    def svg(self) -> str:
        """Return the picture."""
        light, dark = (self._rules(i) for i in (0, 1))
        heads = "".join(
            f'<marker id="{name}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" class="{name}-head"/></marker>'
            for name in LINES
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}" role="img">\n'
            f"<style>\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n</style>\n"
            f"<defs>{heads}</defs>\n{body}\n</svg>\n"
        )

    @staticmethod
    def _rules(theme: int) -> str:
        fills = [f".{name} {{ fill: {colours[theme]} }}" for name, colours in FILLS.items()]
        lines = [
            f".{name}-line {{ stroke: {colours[theme]} }} "
            f".{name}-text, .{name}-head {{ fill: {colours[theme]} }}"
            for name, colours in LINES.items()
        ]
        return "\n".join(fills + lines)
