"""What a rank and the notebook agree on about the channels between them."""

from __future__ import annotations

MARK = b"\x1e"  # in what a rank prints: starts a record that is not text
STATUS_BYTES = 8192  # of a rank's status file for its last operation; reports of fatal errors follow

IDLE_SECONDS = 900  # after which a rank that has nothing to do ends by itself
