"""What the planner makes of one GPU's matrix products and attention, beside the rates that were recorded on it."""

from __future__ import annotations

import math
from typing import NamedTuple

from course_utils import recorded
from course_utils.hardware import GPUS

from . import planner


class Rate(NamedTuple):
    """A shape, and its TFLOP/s by the planner's formula (without the fitted share) and as recorded."""

    name: str
    modelled: float
    recorded: float


def rates_of_a_gpu() -> list[Rate]:
    """Return the rates of an H200: products in bf16 and FP8, attention forward and backward by two kernels."""
    card, found = GPUS["h200"], []
    stream = card.memory_bandwidth * planner.CONSTANTS.hbm
    for table, bits, precision in (("layer_products", 16, "bf16"), ("fp8_products", 8, "fp8")):
        for each in recorded.gpu_check(table)["products"]:
            shape = (each["rows"], each["columns"], each["inner"])
            best = planner.best_product("h100", precision)
            seconds = planner.product_seconds(*shape, card.sms, best, stream, bits / 8)
            rate = each["rate"] if bits == 16 else each["rate"]["a scale a tensor"]
            name = " x ".join(map(str, shape)) + f", {bits} bits"
            found.append(Rate(name, 2 * math.prod(shape) / seconds / 1e12, rate["value"]))
    for kernel, name in (("flash2", "flash"), ("flash3", "cudnn")):  # the planner's name, the record's
        both = recorded.gpu_check("attention")[name]["forward and backward"]
        for length, rate in zip(both["at"], both["value"], strict=True):
            modelled = planner.attention_rate("h200", kernel, length) / 1e12
            found.append(Rate(f"attention, {kernel}, {length} tokens", modelled, rate))
    return found
