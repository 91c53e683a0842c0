"""Self-contained pages: style and pictures are inside, and every text from outside is escaped."""

from __future__ import annotations

from typing import Any


def render_page(template: str, **variables: Any) -> str:
    """The page that a template under `templates` makes of these variables."""
    import jinja2

    loader = jinja2.PackageLoader("rtp_runtime.readiness.render", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(variables)
