"""Draw `docs/hang.svg`, the moving picture of the README, from cells that run now: `python docs/hang_picture.py`.

Lines appear when they appeared in the notebook. Who asks for less motion sees the last state.
"""

from __future__ import annotations

import time
from html import escape
from pathlib import Path

from jupyter_client.manager import start_new_kernel
from pygments.lexers import PythonLexer

CELLS = ["""\
import torch, torch.distributed as dist
from course_utils import launch""", """\
def step():
    loss = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() == 0:  # print the mean once
        dist.all_reduce(loss)
        print("mean loss:", loss.item() / dist.get_world_size())

launch(step, world_size=4, timeout=5)""", "launch(dist.get_rank, world_size=4)"]
PAUSE, LAST = 3, 5  # seconds before the third cell runs, and with all of it in view
WIDTH, LINE, LEFT = 840, 17, 58
STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre }
.page { fill: #fff; stroke: #d0d7de } .cell { fill: #f6f8fa } text { fill: #1f2328 } .dim { fill: #59636e }
.error { fill: #b42318 } .mark { fill: #ffe3e0 } .Keyword { fill: #8250df } .Comment { fill: #59636e }
.Literal { fill: #0a3069 }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; stroke: #3d444d } .cell { fill: #161b22 } text { fill: #e6edf3 }
  .dim, .Comment { fill: #9198a1 } .error { fill: #ff9b94 } .mark { fill: #5c1f1c }
  .Keyword { fill: #d2a8ff } .Literal { fill: #a5d6ff }
}
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
"""


def run() -> list[tuple[float, str, str]]:
    """Run the cells; return what they showed: seconds, kind of message, text."""
    manager, client = start_new_kernel(kernel_name="python3")
    shown, start = [], 0.0

    def listen(message: dict) -> None:
        content = message["content"]
        text = content.get("text") or content.get("evalue") or content.get("data", {}).get("text/plain", "")
        shown.append((time.monotonic() - start, message["msg_type"], text))

    try:
        client.execute_interactive(CELLS[0] + "\nlaunch(dist.barrier, world_size=4);", output_hook=lambda message: None)
        start = time.monotonic()
        client.execute_interactive(CELLS[1], output_hook=listen)
        time.sleep(PAUSE)
        client.execute_interactive(CELLS[2], output_hook=listen)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    return shown


def main() -> None:
    shown = run()
    total = shown[-1][0] + LAST
    error = next(text for _, kind, text in shown if kind == "error").splitlines()
    failed = next(at for at, kind, _ in shown if kind == "error")  # the picture begins with what matters
    body, frames, y = [], [], 14

    def seen(since: float, until: float | None = None) -> str:
        """The attribute of what is in view between two times."""
        name, end = f"t{len(frames)}", f" {until / total:.2%} {{ opacity: 0 }}" if until else ""
        frames.append(f"@keyframes {name} {{ 0% {{ opacity: 0 }} {since / total:.2%} {{ opacity: 1 }}{end} }}")
        hidden = "opacity: 0; " if until else ""
        return f' style="{hidden}animation: {name} {total:.2f}s {-failed:.2f}s step-end infinite"'

    def line(text: str, at: float, kind: str = "") -> str:
        return f'<text class="{kind}" x="{LEFT + 10}" y="{at + 12}">{escape(text)}</text>'

    def cell(number: int, since: float | None = None) -> None:
        nonlocal y
        rows = CELLS[number - 1].splitlines()
        body.append(f'<g{seen(since) if since else ""}><rect class="cell" x="{LEFT}" y="{y}" rx="4" '
                    f'width="{WIDTH - LEFT - 14}" height="{LINE * len(rows) + 10}"/>'
                    f'<text class="dim" x="14" y="{y + 18}">[{number}]:</text>')
        if number == 2:
            body.append(f'<rect class="mark"{seen(failed)} x="{LEFT + 4}" '
                        f'y="{y + 5 + LINE * 3}" width="{WIDTH - LEFT - 22}" height="{LINE}"/>')
        parts = [(str(kind).split(".")[1], escape(text)) for kind, text in PythonLexer().get_tokens(CELLS[number - 1])]
        coloured = "".join(f'<tspan class="{kind}">{text}</tspan>' if f".{kind} " in STYLE else text
                           for kind, text in parts)
        body.extend(f'<text x="{LEFT + 10}" y="{y + 17 + LINE * i}">{row}</text>'
                    for i, row in enumerate(coloured.splitlines()))
        body.append("</g>")
        y += LINE * len(rows) + 16

    cell(1)
    cell(2)
    passing = [(at, text.strip()) for at, kind, text in shown if kind == "stream"]
    for (at, text), (until, _) in zip(passing, [*passing[1:], (failed, "")], strict=True):
        if text:
            body.append(f"<g{seen(at, until)}>{line(text, y, 'dim')}</g>")
    body.append(f"<g{seen(failed)}>")
    for i, text in enumerate(("HangError: " + "\n".join(error)).splitlines()):
        body.append(line(text, y + i * LINE, "error" if i in (0, 2) else ""))
    body.append("</g>")
    y += LINE * len(error) + 12
    cell(3, failed + PAUSE)
    at, text = next((at, text) for at, kind, text in shown if kind == "execute_result")
    body.append(f'<g{seen(at)}>{line(text, y)}<text class="dim" x="14" y="{y + 12}">[3]:</text></g>')
    y += LINE + 14
    style = STYLE + "\n".join(frames)
    Path(__file__).with_name("hang.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
        f'<style>{style}</style><rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{y - 1}" rx="6"/>'
        f"{''.join(body)}</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    main()
