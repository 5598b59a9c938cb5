"""The start-up timeline as a picture: a bar per stage, one under the other, those that everyone waited for in red."""

from html import escape

from server.telemetry.timeline import Row, Startup

_ROW_PX, _LABEL_PX, _BARS_PX = 18, 230, 760
_COLOURS = {"master": "#4c78a8", "loader": "#f58518", "arbiter": "#72b7b2", "model": "#54a24b", "web": "#b279a2"}
_CRITICAL = "#d62728"


def draw_waterfall(view: Startup) -> str:
    """An SVG document."""
    rows = view.stages
    total_s = max([row.begin_s + row.seconds for row in rows] + [view.ready_s or 0.0, 1e-3])
    scale = _BARS_PX / total_s
    height = _ROW_PX * (len(rows) + 2)
    width = _LABEL_PX + _BARS_PX + 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="4" y="13">{_title(view)}</text>',
    ]
    parts += [_bar(row, index + 1, scale) for index, row in enumerate(rows)]
    if view.ready_s:
        x = _LABEL_PX + view.ready_s * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_ROW_PX}" y2="{height}" stroke="black"/>')
    return "\n".join([*parts, "</svg>"])


def _title(view: Startup) -> str:
    if view.ready_s is None:
        return "starting; seconds since exec"
    return f"ready after {view.ready_s:.3f} s; seconds since exec; red: everyone waited for it"


def _bar(row: Row, index: int, scale: float) -> str:
    y = index * _ROW_PX
    x, width = _LABEL_PX + row.begin_s * scale, max(1.0, row.seconds * scale)
    stroke = f' stroke="{_CRITICAL}" stroke-width="2"' if row.is_critical else ""
    fill = _COLOURS.get(row.role, "gray")
    return (
        f'<text x="4" y="{y + 13}">{escape(row.role)} {escape(row.stage)}</text>'
        f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW_PX - 6}" fill="{fill}"{stroke}/>'
        f'<text x="{x + width + 4:.1f}" y="{y + 13}">{row.seconds:.3f}</text>'
    )
