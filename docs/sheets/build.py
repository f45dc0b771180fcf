"""Makes the two printable pages beside it from outputs stored in the lessons: ``python docs/sheets/build.py``."""

from __future__ import annotations

import html
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
SHEETS = Path(__file__).resolve().parent

# name, call, what it does, bytes that the busiest rank has to move at least, and the picture in words
COLLECTIVES = [
    (
        "broadcast", "dist.broadcast(x, src=0)", "S",
        "One rank's tensor on all ranks: equal weights at the start.",
        "Before, each rank has a row of its own; after it, every rank has rank 0's row.",
    ),
    (
        "scatter", "dist.scatter(piece, pieces, src=0)", "(N−1)/N · S",
        "Piece r of the root goes to rank r.",
        "Before, rank 0 has a row of four; after it, each rank has one of the four.",
    ),
    (
        "gather", "dist.gather(piece, pieces, dst=0)", "(N−1)/N · S",
        "All pieces on the root.",
        "Before, each rank has one number; after it, rank 0 has all four.",
    ),
    (
        "reduce", "dist.reduce(x, dst=0)", "S",
        "The sum on the root. Do not use what the others hold then.",
        "Before, each rank has a row; after it, rank 0 has the sum of all rows, the others parts of it.",
    ),
    (
        "all_reduce", "dist.all_reduce(x)", "2(N−1)/N · S",
        "The sum on all ranks: gradients under DDP, which divides by N.",
        "Before, each rank has a row; after it, every rank has the sum of all rows.",
    ),
    (
        "all_gather", "dist.all_gather_single(whole, piece)", "(N−1)/N · S",
        "All pieces on all ranks: parameters under FSDP.",
        "Before, each rank has one number; after it, every rank has all four.",
    ),
    (
        "reduce_scatter", "dist.reduce_scatter_single(piece, x)", "(N−1)/N · S",
        "Rank r keeps piece r of the sum: gradients under ZeRO and FSDP.",
        "Before, each rank has a row; after it, rank r has element r of the sum of all rows.",
    ),
    (
        "all_to_all", "dist.all_to_all_single(out, x)", "(N−1)/N · S",
        "Piece c of rank r goes to rank c: tokens to their experts.",
        "Before, each rank has a row of one colour; after it, a column of every colour: the transpose.",
    ),
]

STYLE = """
@page { size: A4; margin: 9mm 11mm }
* { box-sizing: border-box }
body { font: 9.6pt/1.32 "DejaVu Sans", Verdana, sans-serif; color: #1a1a1a; max-width: 188mm; margin: 0 auto }
@media screen { body { margin: 6mm auto; padding: 0 4mm } }
h1 { font-size: 17pt; margin: 0 0 1mm } h2 { font-size: 10.5pt; margin: 2.6mm 0 .6mm } p { margin: 0 0 1.2mm }
code, pre { font-family: "DejaVu Sans Mono", monospace; font-size: 8.4pt }
pre { background: #f3f4f6;
  padding: 1.2mm 2mm; margin: 0 0 1mm; white-space: pre-wrap; font-size: 7.1pt; line-height: 1.25 }
.cards { display: grid; grid-template-columns: 1fr 1fr; gap: 2.2mm 6mm }
.cards > div { border-top: .3mm solid #999; padding-top: .8mm }
.cards h2 { margin-top: 0 }
.cards img { display: block; height: 29mm; max-width: 100%; object-fit: contain; object-position: left; margin: .6mm 0 }
h2 code { float: right; font-weight: normal; font-size: 7.8pt }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .5mm 1.5mm; border-top: .2mm solid #bbb }
ol { margin: 0; padding-left: 5mm } li { margin-bottom: .9mm }
footer { font-size: 7.5pt; color: #444; margin-top: 1.5mm }
"""


def cells(lesson: str) -> list:
    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def picture(name: str) -> str:
    """The stored picture of a collective, as base64."""
    return next(
        output.data["image/png"].replace("\n", "")
        for cell in cells("02")
        if re.search(rf'^before_after\(before, after, "{name}[ "]', cell.source, re.MULTILINE)
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    )


def printed(function: str) -> str:
    """What the cell of lesson 02 that runs ``function`` printed, without the numbers of cells."""
    (cell,) = (cell for cell in cells("02") if re.search(rf"    launch\({function}\b", cell.source))
    text = "".join(output.get("text", "") for output in cell.outputs)
    text = re.sub(r"cell \[\d+\], ", "", text).split("\n# counts")[0]
    return html.escape(re.sub(r"\n\n+", "\n", text).strip())


def page(title: str, body: str) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def collectives() -> str:
    """The page with all eight collectives."""
    parts = []
    for name, call, least, what, words in COLLECTIVES:
        parts.append(
            f"<div><h2>{name} <code>{call}</code></h2>\n"
            f'<img alt="{words}" src="data:image/png;base64,{picture(name)}">\n'
            f"<p>{what} <b>{least}</b></p></div>\n"
        )
    return page("The collectives", COLLECTIVES_PAGE.replace("CARDS", "".join(parts)))


def hangs() -> str:
    """The page for the moment when a job stands still."""
    body = HANGS_PAGE
    for function in ("skip_wild_batches", "send_then_recv", "uneven"):
        body = body.replace(function.upper(), printed(function))
    return page("It hangs: the first ten minutes", body)


COLLECTIVES_PAGE = """
<h1>The collectives</h1>
<p>N ranks (here 4). S is the size in bytes of the full tensor: what you pass to all_reduce, broadcast, reduce; the
output of all_gather; the input of reduce_scatter and all_to_all; all pieces together for gather and scatter. A colour
is a rank, stripes are a sum. <b>In bold:</b> the bytes that the busiest rank must move, at least.</p>
<div class="cards">
CARDS</div>
<h2>Worth knowing by heart</h2>
<table>
<tr><td>all_reduce = reduce_scatter + all_gather &nbsp; broadcast = scatter + all_gather</td> <td>A ring does
all_reduce in 2(N−1) steps of S/N bytes.</td></tr>
<tr><td>algbw = S / time &nbsp; busbw = algbw × the factor before S above (1 where there is none)</td> <td>7 billion
gradients in bf16 on 8 ranks: 14 GB × 2 · 7/8 = 24.5 GB sent by each, every step.</td></tr>
<tr><td colspan="2"><b>The rule.</b> All ranks of a group make the same calls, in the same order, with the same sizes,
types and operation. Around a collective ask of every <code>if</code>: can two ranks disagree here?</td></tr>
</table>
<footer>From lesson 02 of “Distributed deep learning, run for real”, CC BY 4.0. Pictures: real runs on 4 ranks. Before
PyTorch 2.13, all_gather_single was all_gather_into_tensor, and reduce_scatter_single was
reduce_scatter_tensor.</footer>
"""

HANGS_PAGE = """
<h1>It hangs: the first ten minutes</h1>
<p>Somebody waits for a call that another rank never makes. <b>The error shows on healthy ranks: look for the rank
that stands somewhere else.</b> Save the evidence before you restart.</p>
<ol>
<li><b>Is every process alive?</b> If one has died, the others say <code>Connection closed by peer</code> or
<code>reset by peer</code>. Find the first failure; the others follow from it. SIGKILL without a traceback:
look at memory.</li>
<li><b>Where does each rank stand?</b> <code>python where.py</code> on each host asks them all, also by SIGUSR1
(<code>faulthandler.register</code>); else <code>py-spy dump --nonblocking --pid PID</code>. Which one is in another
line, or has returned? On a GPU the line is a later one, the first that needs a result:
<code>.item()</code>, a print, a copy.</li>
<li><b>Which call is each rank in?</b> After the time-out NCCL's watchdog logs <code>SeqNum</code> and
<code>OpType</code> per rank. Compare numbers of one group only; new logs name it (<code>PG GUID</code>), old ones do
not. Who waits in one group shows one number: look for the rank that is silent, or has enqueued less.</li>
<li><b>All stand in the same line?</b> Then stacks do not tell; groups may be used in different order. Under NCCL,
PyTorch's Flight Recorder keeps the last 2,000 operations of each rank and writes them at the time-out, to
<code>~/.cache/torch/comm_lib_trace_rank_N</code>; <code>torchfrtrace</code> compares ranks. NCCL from 2.24 on:
<code>ncclras</code> lists ranks whose counts lag.</li>
<li><b>Make it small.</b> Two to four ranks on CPUs, <code>timeout=</code> of seconds,
<code>TORCH_DISTRIBUTED_DEBUG=DETAIL</code>: it names another call, size or type and the missing rank. It does not see
equal calls in another order, nor another <code>ReduceOp</code>.</li>
</ol>
<h2>One rank skipped a call: it stands apart</h2>
<pre>SKIP_WILD_BATCHES</pre>
<h2>All wait, in a circle: each sends first (use <code style="float:none">batch_isend_irecv</code>)</h2>
<pre>SEND_THEN_RECV</pre>
<h2>Another size: gloo ends the process</h2>
<pre>UNEVEN</pre>
<h2>What you see, and where to look</h2>
<table>
<tr><th>evidence</th><th>look for</th></tr>
<tr><td>one rank has returned, or runs other code</td><td>a collective behind <code>if rank == 0</code>, a loss, a
file check; fewer batches on one rank; an exception caught on one rank</td></tr>
<tr><td>it hangs much longer than your time-out</td><td>a sub-group: <code>new_group</code> does not inherit
<code>timeout=</code> (measured with gloo, PyTorch 2.13)</td></tr>
<tr><td>SIGABRT, <code>op.preamble.length &lt;= op.nbytes</code></td><td>sizes or types differ; the rank that died
need not be the culprit</td></tr>
<tr><td>no hang, but wrong numbers, on all ranks alike</td><td>two calls of equal size swapped; another
<code>ReduceOp</code></td></tr>
</table>
<h2>Before it happens</h2>
<p>Pass <code>timeout=</code> to <code>init_process_group</code> <i>and</i> to <code>new_group</code> (default: 10
minutes with NCCL, 30 with gloo). Decide together: reduce the condition first, with MAX, so that all ranks take the
same branch. Log rank and step.</p>
<footer>From lessons 00, 02, 03 and 14 of “Distributed deep learning, run for real”, CC BY 4.0. The tables are the
output of <code>launch</code> on 4 CPU ranks.</footer>
"""


if __name__ == "__main__":
    for name, text in {"collectives": collectives(), "hangs": hangs()}.items():
        (SHEETS / f"{name}.html").write_text(text, encoding="utf-8")
