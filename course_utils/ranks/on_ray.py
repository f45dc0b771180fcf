"""Whether a call runs on a Ray cluster, ``launch(fn, on="ray")`` or ``COURSE_ON=ray``, and the way there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

from . import errors

_CONNECT = 30.0  # seconds in which Ray must have found its cluster


def pool_for(on: str | None, here: list[str]) -> Any:
    """The ranks of the cluster if they are to be there, as ``on`` or the variable ``COURSE_ON`` says, else None.

    What the list ``here`` names is only on the notebook's own machine: refused with ``on``, else the ranks stay here.
    """
    name, wanted = ("COURSE_ON", os.environ.get("COURSE_ON") or "here") if on is None else ("on", on)
    if wanted not in ("ray", "here"):
        raise errors.refusal(ValueError, f"{name} is {wanted!r}; allowed are 'ray' and 'here' (this machine)")
    if here and wanted == "ray":
        if on is not None:
            raise errors.refusal(ValueError, f"{here[0]}= needs the notebook's own machine: leave out on='ray'")
        print(f"COURSE_ON=ray: a call with {here[0]}= runs on the notebook's own machine")
    if here or wanted == "here":
        return None
    if find_spec("ray") is None or not hasattr(os, "eventfd"):
        raise errors.refusal(RuntimeError, "on='ray' needs Linux, and Ray, which `make ray` installs")
    _connect()
    from . import ray_pool

    return ray_pool.launched


def _connect() -> None:
    """Join the cluster, unless the notebook has."""
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        within(_CONNECT, lambda: ray.init(address, logging_level=logging.ERROR, log_to_driver=False))
        ray._private.worker.print_to_stdstream = lambda *_, **__: None  # the state of a node that has gone: 70 lines
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:  # also another version of Ray or Python
        text = f"no Ray cluster could be joined (RAY_ADDRESS={address}); `ray start --head` starts one. Ray says: "
        raise errors.refusal(RuntimeError, text + (str(error) or f"nothing within {_CONNECT:g} s")) from None


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What ``work`` returns; TimeoutError past the time. With its head gone, Ray does not keep limits of its own."""
    outcome: Future = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(seconds)
