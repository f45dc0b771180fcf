"""Write the table and the picture of `docs/architecture.md` from what the package's modules import.

    python docs/architecture.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "course_utils"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "architecture.svg"
MARKS = "<!-- parts -->", "<!-- end of parts -->"
APART = ("__init__", "__main__", "bootstrap")  # the names at the top, the command line, and what runs without a package


def parts() -> dict[str, list[Path]]:
    """The files of each module and folder of the package."""
    folders = {path.parent.name: sorted(path.parent.glob("*.py")) for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.stem: [path] for path in PACKAGE.glob("*.py") if path.stem not in APART}
    return dict(sorted((folders | modules).items()))


def _targets(file: Path) -> set[str]:
    """The parts that a file imports, also inside of functions; the names of the package itself count as `ranks`."""
    found, package = set(), list(file.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            words = [*base, *(node.module.split(".") if node.module else [])]
            if words[:1] == [PACKAGE.name]:
                found |= {words[1]} if len(words) > 1 else {alias.name for alias in node.names}
    return found


def arrows() -> dict[str, set[str]]:
    """Which parts each part imports."""
    known = parts()
    return {
        name: {t if t in known else "ranks" for file in files for t in _targets(file)} - {name}
        for name, files in known.items()
    }


def levels(uses: dict[str, set[str]]) -> dict[str, int]:
    """How far each part stands above those that import nothing. Raises ValueError where imports go in a circle."""
    found: dict[str, int] = {}

    def level(name: str, above: tuple[str, ...] = ()) -> int:
        if name in above:
            raise ValueError("imports in a circle: " + " -> ".join([*above[above.index(name) :], name]))
        if name not in found:
            found[name] = 1 + max((level(other, (*above, name)) for other in sorted(uses[name])), default=-1)
        return found[name]

    for name in uses:
        level(name)
    return found


def table() -> str:
    """The parts from the bottom to the top: what each is for, in the first sentence of its own text."""
    uses, rows = arrows(), ["| part | what it is for | it uses |", "|---|---|---|"]
    for name, _ in sorted(levels(uses).items(), key=lambda item: (item[1], item[0])):
        files = parts()[name]
        file = next((file for file in files if file.stem == "__init__"), files[0])
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))).split("\n\n")[0]
        link = f"{name}/" if file.stem == "__init__" else f"{name}.py"
        used = ", ".join(f"`{other}`" for other in sorted(uses[name])) or "nothing"
        rows.append(f"| [`{link}`](../course_utils/{link}) | {' '.join(text.split())} | {used} |")
    return "\n".join(rows)


def draw() -> None:
    """Draw the parts as boxes, each above all that it imports."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    uses = arrows()
    rows = defaultdict(list)
    for name, level in levels(uses).items():
        rows[level].append(name)
    users = {name: {other for other in uses if name in uses[other]} for name in uses}
    x: dict[str, float] = {}
    widest = max(map(len, rows.values()))
    for level in sorted(rows):
        below = {name: sum(x[other] for other in sorted(uses[name])) / max(len(uses[name]), 1) for name in rows[level]}
        names = sorted(rows[level], key=lambda name: (below[name] or len(users[name]), name))
        for place, name in enumerate(names):
            x[name] = (place + 0.5) * widest / len(names)
    plt.rcParams["svg.hashsalt"] = "architecture"
    arrow = {"arrowstyle": "-|>", "color": "#9AA5B1", "lw": 0.7}
    figure, axes = plt.subplots(figsize=(11, 1.05 * len(rows)))
    for level, names in rows.items():
        for name in names:
            for other in sorted(uses[name]):
                ends = {"xy": (x[other], levels(uses)[other] + 0.2), "xytext": (x[name], level - 0.2)}
                axes.annotate("", **ends, arrowprops=arrow, zorder=1)
            folder = (PACKAGE / name).is_dir()
            style = {"boxstyle": "round,pad=0.35", "fc": "#DCEBF7" if folder else "white", "ec": "#3B4A5A", "lw": 0.9}
            label = name.replace("_", "_\n", 1) if len(name) > 10 else name
            box = {"bbox": style, "zorder": 2, "fontsize": 8.5}
            axes.text(x[name], level, label + "/" * folder, ha="center", va="center", **box)
    axes.set(xlim=(0, widest), ylim=(-0.5, len(rows) - 0.5))
    axes.axis("off")
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None, "Creator": None})


def page() -> str:
    """The page with its table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = (re.escape(mark) for mark in MARKS)
    return re.sub(f"(?s)({begin}\n).*?({end})", lambda m: f"{m[1]}{table()}\n{m[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    draw()
    sys.exit()
