"""Emulated hosts: network namespaces with a link between them, ranks that live in them, and commands that run there.

`launch` loads this when it is given ``hosts=``; nothing here is imported before it is asked for.
"""

from __future__ import annotations

from course_utils.lazy import attach

_HOMES = {
    "results": ("HostResults", "as_possible", "hosts_available"), "commands": ("run_on_hosts",),
    "plan": ("Conditions", "conditions_of", "divide"), "pool": ("current", "side_by_side"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)

__getattr__, __dir__ = attach(__name__, _HOMES)
