"""The files of a scaffold as jinja templates, and their rendering."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2


def render(template: str, **values: Any) -> str:
    """The text of a template of this folder; a name that it lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Python and Markdown, never HTML; names are checked before they get here
    )
    text = environment.get_template(template).render(**values)
    return re.sub(r"\n{4,}", "\n\n\n", text)
