"""The bundled target with a chat template that loops over its input, as some models' templates do."""

from __future__ import annotations

from pathlib import Path

import secateur

MODEL = Path(secateur.__file__).parent / "bundled" / "target"
TEMPLATE = """\
{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}
{% if m.turns %}{% for a in range(m.turns) %}{% for b in range(m.turns) %}{% for c in range(m.turns) %}\
{% endfor %}{% endfor %}{% endfor %}{% endif %}{{ 'x' * (m.times or 0) }}{% endfor %}"""
FOREVER = {"role": "user", "content": "hi", "turns": 90_000}
"""A message that takes this template days to render."""


def looping_model(folder: Path) -> Path:
    """Write the model to `folder`."""
    for file in MODEL.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
