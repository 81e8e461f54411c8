"""The bundled target with a chat template of a kind that models do have, driven to the extreme: it loops over data."""

from __future__ import annotations

from pathlib import Path

import secateur

MODEL = Path(secateur.__file__).parent / "bundled" / "target"
TEMPLATE = """\
{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}
{% if m.turns %}{% for a in range(m.turns) %}{% for b in range(m.turns) %}{% for c in range(m.turns) %}\
{% endfor %}{% endfor %}{% endfor %}{% endif %}{{ 'x' * (m.times or 0) }}{% endfor %}"""
FOREVER = {"role": "user", "content": "hi", "turns": 90_000}
"""A message that this template renders for days."""


def looping_model(folder: Path) -> Path:
    """`folder`, as a model."""
    for file in MODEL.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
