"""All layouts of a cluster, planned and ranked."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from course_utils.recorded import Run
from course_utils.transformer import RECOMPUTE, TransformerConfig

from .clusters import GpuCluster
from .evidence import plan_inputs
from .held import fullest, reserve
from .layout import Layout, broken_rules
from .plans import Plan
from .published import PublishedRun
from .rates import CONSTANTS
from .step_time import StepModel

#: What rules of legality are about.
RULED = ("tp", "pp", "dp", "cp", "virtual", "microbatch", "replicas", "ep", "sequence_parallel")


@dataclass(frozen=True)
class Search:
    """All layouts of a cluster."""

    plans: tuple[Plan, ...]  # legal ones, fastest first; of equally fast ones the one with less memory
    refused: Mapping[str, int]  # number of illegal ones by kind of the first reason: that of `broken_rules`, or memory

    @cached_property
    def best(self) -> tuple[Plan, ...]:
        """The best plan of each choice of degrees (tp, cp, pp, dp), fastest first."""
        found: dict[tuple, Plan] = {}
        for each in self.plans:
            found.setdefault(each.layout.degrees, each)
        return tuple(found.values())


def search(model: TransformerConfig, cluster: GpuCluster, batch: int, **restrict: object) -> Search:
    """Plan every layout of the cluster's GPUs.

    Tried are all degrees whose product is the number of GPUs; micro-batches of 1, 2, 4, 8 and 16 sequences; up to 8
    virtual stages, where they divide the layers; all ZeRO stages (with a pipeline 2 and 3 only if 1 is excluded: they
    hold more and take as long) and three kinds of recomputation; experts divided in all ways; without a pipeline also
    HSDP, a replica in each node. Each field of `Layout` can be given a value or several instead, such as ``tp=8`` or
    ``recompute=("none", "full")``, also those that are not searched (`precision`, `unequal_stages`, `order`, ...).
    """
    defaults = {each.name: each.default for each in fields(Layout)} | {"zero": (0, 1, 2, 3), "recompute": RECOMPUTE}
    if set(restrict) - set(defaults):
        raise ValueError(f"unknown {sorted(set(restrict) - set(defaults))}; a layout has {', '.join(sorted(defaults))}")
    free = {name: _choices(restrict, name, default) for name, default in defaults.items() if name not in RULED}
    combinations = [dict(zip(free, values, strict=True)) for values in itertools.product(*free.values())]
    refused: Counter[str] = Counter()
    plans, times = [], StepModel(model, cluster, CONSTANTS)
    for degrees in _ruled(model, cluster, restrict):
        sets = [each for each in combinations if _worth_trying(degrees, each["zero"], free["zero"])]
        if not sets:
            continue
        kind, text = next(broken_rules(model, cluster, Layout(**degrees, **sets[0]), batch), (None, ""))
        if kind == "value":
            raise ValueError(text)
        if kind is not None:
            refused[kind] += len(sets)
            continue
        for each in sets:
            layout = Layout(**degrees, **each)
            held = fullest(model, layout, batch)
            if (total := sum(held)) + reserve(layout, held) > cluster.card.memory_bytes:
                refused["memory"] += 1
            else:
                made = times.step(layout, batch, held)
                plans.append((made.seconds, total, len(plans), made))
    return Search(tuple(each for *_, each in sorted(plans)), dict(refused))


def _worth_trying(degrees: Mapping[str, int], zero: int, stages: tuple[int, ...]) -> bool:
    """Leave out stages that change nothing for these degrees, or make it worse."""
    if degrees["dp"] * degrees["cp"] == 1:
        return zero == min(stages)
    if degrees["pp"] > 1 and zero > max(1, min(stages)):
        return False
    return degrees["replicas"] == 1 or zero >= 1


def _ruled(model: TransformerConfig, cluster: GpuCluster, restrict: Mapping[str, object]) -> Iterator[dict[str, int]]:
    """Yield every choice of `RULED`."""
    gpus, nodes = cluster.gpus, cluster.gpus // cluster.per_node
    parts = [_choices(restrict, name, _divisors(gpus)) for name in ("tp", "pp", "cp")]
    for tp, pp, cp in itertools.product(*parts):
        dp, rest = divmod(gpus, max(1, tp * pp * cp))
        if rest or not dp or dp not in _choices(restrict, "dp", dp):
            continue
        chunks = _divisors(model.layers // pp) + _divisors((model.layers + 2) // pp) if pp > 1 else [1]
        if True in _choices(restrict, "unequal_stages", False) and pp > 1:
            chunks = [v for v in range(1, 9) if pp * v <= model.layers]
        hybrid = (1, nodes) if pp == 1 and nodes > 1 and dp % nodes == 0 and dp * cp > nodes else (1,)
        defaults = {
            "virtual": sorted({v for v in chunks if v <= 8}), "microbatch": (1, 2, 4, 8, 16), "replicas": hybrid,
            "ep": [n for n in _divisors(model.experts) if cp * dp % n == 0] or 1, "sequence_parallel": True,
        }
        options = {name: _choices(restrict, name, default) for name, default in defaults.items()}
        for values in itertools.product(*options.values()):
            yield {"tp": tp, "pp": pp, "dp": dp, "cp": cp, **dict(zip(options, values, strict=True))}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _choices(restrict: Mapping[str, object], name: str, default: object) -> tuple:
    value = restrict.get(name, default)
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def place(run: Run | PublishedRun) -> tuple[int | None, int]:
    """Return the place of a published run's degrees, from 1, among all that can run on its GPUs, and how many can.

    The search keeps all but degrees, micro-batch and virtual stages; contexts are divided only where the run does.
    """
    model, machine, layout, batch = plan_inputs(run)
    free = {"tp", "pp", "dp", "microbatch", "virtual"} | ({"cp"} if layout.cp > 1 else set())
    kept = {each.name: getattr(layout, each.name) for each in fields(Layout) if each.name not in free}
    found = search(model, machine, batch, **kept)
    ranks = {each.layout.degrees: rank for rank, each in enumerate(found.best, 1)}
    return ranks.get(layout.degrees), len(found.best)
