"""Renders a template of a self-contained HTML page. Every value is escaped.

The pages have no script, no font and make no request. Charts are inline SVG whose horizontal places
and lengths are shares of the page's width, so that text keeps its size on every screen. A table
repeats what a chart shows by color. A module for each page computes the values of its template.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dtrain.framing import clean

_TEMPLATES = Path(__file__).with_name("templates")


def rendered(template: str, styles: Sequence[str], **values: object) -> str:
    """Return the document. ``styles`` are the style sheets in the folder of templates; the template
    gets them as ``style``, and the hash for its Content-Security-Policy as ``digest``."""
    style = "".join((_TEMPLATES / name).read_text("utf-8") for name in styles)
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(
        style=style,
        digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        **values,
    )


def percent(part: float, whole: float = 1.0) -> str:
    """A place or a length of a chart of which ``whole`` is the width."""
    return f"{min(max(part / whole, 0.0), 1.0) * 100:.3f}%"


def _printable(value: object) -> object:
    """Remove control characters from text, before the template escapes it."""
    return value if isinstance(value, Markup) else clean(str(value))
