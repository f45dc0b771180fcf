"""Numbers of bytes as text: with binary prefixes for messages and buffers, with decimal ones for memory and disks."""

from __future__ import annotations

__all__ = ["byte_unit", "decimal_bytes", "format_bytes"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(size: float) -> str:
    """Return `size` in bytes with a binary prefix, such as ``64 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the bytes of one unit, and its name, for sizes up to `largest`."""
    power = 0
    while power < len(_UNITS) - 1 and largest >= 999.5 * 1000**power:
        power += 1
    return 1000.0**power, _UNITS[power]


def decimal_bytes(size: float) -> str:
    """Return `size` in bytes to three digits with a decimal prefix, such as ``31.4 GB``."""
    scale, unit = byte_unit(size)
    value = size / scale
    digits = 0 if value >= 99.95 or unit == "B" else 1 if value >= 9.995 else 2
    number = f"{value:,.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if digits else number} {unit}"
