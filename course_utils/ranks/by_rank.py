"""What each rank has shown, in folds of its own: HTML that a stored notebook shows too (private)."""

from __future__ import annotations

import base64
import itertools
import json
from html import escape

from .labels import rank_label


def folds(shown: dict[int, list[str | dict]]) -> dict[str, str]:
    """A fold for each rank with its lines, figures and tables, as a MIME bundle; ranks that agree share one."""
    groups: dict[str, list[int]] = {}
    for rank, items in shown.items():
        groups.setdefault(json.dumps(items), []).append(rank)
    html, text = [], []
    for ranks in groups.values():
        items = shown[ranks[0]]
        lines = [line for item in items for line in _plain(item).split("\n")]
        head = f"{rank_label(ranks)}: {len(lines)} line{'s' * (len(lines) != 1)}"
        html.append(f"<details><summary>{head}</summary>\n{_body(items)}\n</details>")
        text += [head, *(f"    {line}".rstrip() for line in lines)]
    return {"text/html": "\n".join(html), "text/plain": "\n".join(text)}


def _plain(item: str | dict) -> str:
    return item if isinstance(item, str) else item["text/plain"]


def _body(items: list[str | dict]) -> str:
    parts = []
    for is_text, some in itertools.groupby(items, lambda item: isinstance(item, str)):
        together = list(some)
        parts += [f"<pre>{escape(chr(10).join(together))}</pre>"] if is_text else map(_picture, together)
    return "\n".join(parts)


def _picture(bundle: dict[str, str]) -> str:
    """A figure or table as HTML that needs nothing beside it."""
    if "text/html" in bundle:
        return bundle["text/html"]
    if "image/png" in bundle:
        return f'<img src="data:image/png;base64,{bundle["image/png"]}">'
    if "image/svg+xml" in bundle:
        svg = base64.b64encode(bundle["image/svg+xml"].encode()).decode()
        return f'<img src="data:image/svg+xml;base64,{svg}">'
    return f"<pre>{escape(_plain(bundle))}</pre>"
