"""The job of a seed: what is to be trained, on which cluster, over which cable, and which host dies when."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from course_utils.transformer import PUBLISHED, TransformerConfig
from lessons.parallelism_3d import planner

from .faults import STEPS
from .helpers import Cable

#: Seed of the stored notebooks.
SEED = 52


@dataclass(frozen=True)
class Letter:
    """What the customer writes: a model, a cluster, and a budget."""

    model: TransformerConfig
    gpu: str  # as `planner.own_cluster` takes it
    nodes: int
    lent_nodes: int  # of these, to others
    per_node: int
    ports: int  # network ports of a node
    port_gbit: float  # Gb/s of a port
    held_gb: float  # that another program holds on each GPU
    tokens_of_step: int
    tokens: float  # of the whole training
    gpu_hours: float  # that may be spent, of the nodes that compute

    def __str__(self) -> str:
        network = f"{self.ports} port{'s' * (self.ports > 1)} of {self.port_gbit:g} Gb/s in each node"
        lent = f"          {self.lent_nodes} of the nodes are lent to another team for all of that time"
        held = f"          {self.held_gb:g} GB of each GPU are held by an inference server that stays"
        return "\n".join(filter(None, (
            f"model     {self.model.name}, sequences of {self.model.context:,} tokens",
            f"cluster   {self.nodes} nodes of {self.per_node} {self.gpu.upper()}, {network}",
            self.lent_nodes and lent, self.held_gb and held,
            f"step      {self.tokens_of_step:,} tokens",
            f"training  {self.tokens / 1e9:g} billion tokens, at most {self.gpu_hours:,.0f} GPU hours",
        )))


#: Models with GPU, nodes that compute, Gb/s of a port, and sequences of a step.
_SITUATIONS = (("Llama 3 8B", "h100", 4, 200, 256), ("Llama 3 70B", "h100", 8, 400, 256),
               ("Megatron 18.4B", "a100", 8, 200, 512), ("GPT-3 13B", "a100", 4, 100, 512),
               ("Llama 3 70B", "h200", 8, 200, 256), ("Megatron 39.1B", "a100", 16, 200, 512))
#: What is easily misread in a letter, and what is different then.
TRAPS: Mapping[str, Mapping[str, int]] = {
    "ports": {"ports": 1}, "held": {"held_gb": 20}, "lent": {"lent_nodes": 1},
}
#: Share of a GPU's memory that has to stay free, and GPU hours allowed for each that the best plan needs.
MARGIN, BUDGET = 0.1, 1.3


def cluster(letter: Letter) -> planner.GpuCluster:
    """The GPUs that compute, with the network of each and all of their memory."""
    network = 1e9 * letter.port_gbit * letter.ports / letter.per_node
    return planner.own_cluster(letter.gpu, (letter.nodes - letter.lent_nodes) * letter.per_node, network=network)


def gpu_hours(letter: Letter, plan: planner.Plan) -> float:
    """GPU hours of the whole training."""
    return letter.tokens / letter.tokens_of_step * plan.seconds * plan.cluster.gpus / 3600


def free_gb(letter: Letter, plan: planner.Plan) -> float:
    """GB that stay free on the fullest GPU."""
    return (plan.cluster.card.memory_bytes - plan.memory.total - plan.reserve) / 1e9 - letter.held_gb


def best_plan(letter: Letter) -> planner.Plan:
    """The fastest plan without context parallelism that leaves `MARGIN` of the memory free."""
    machine = cluster(letter)
    found = planner.search(letter.model, machine, letter.tokens_of_step // letter.model.context, cp=1)
    least = MARGIN * machine.card.memory_bytes / 1e9
    return next(plan for plan in found.plans if free_gb(letter, plan) >= least)


@dataclass(frozen=True)
class Job:
    """All that a seed decides beside the faults of the program."""

    seed: int
    letter: Letter
    best: planner.Plan  # for the letter, as `best_plan` finds it
    cable: Cable
    dies_before: int  # the step that the ranks of the lost host do not begin


@cache
def job(seed: int) -> Job:
    """The job of a seed; the next seed has another model, trap and step."""
    draw = random.Random(seed)
    name, gpu, nodes, port, sequences = _SITUATIONS[seed % len(_SITUATIONS)]
    model, trap = PUBLISHED[name], [*TRAPS][seed % len(TRAPS)]
    tokens = 1e9 * draw.randrange(20, 200, 10)
    given = {"ports": 8, "held_gb": 0, "lent_nodes": 0} | TRAPS[trap]
    given["lent_nodes"] *= nodes  # half of them
    letter = Letter(model=model, gpu=gpu, nodes=nodes + given["lent_nodes"], per_node=8, port_gbit=port,
                    tokens_of_step=sequences * model.context, tokens=tokens, gpu_hours=0, **given)
    cable = Cable(draw.choice((50e6, 100e6, 200e6)), draw.choice((0.2e-3, 0.5e-3, 1e-3)))
    best = best_plan(letter)
    letter = replace(letter, gpu_hours=round(BUDGET * gpu_hours(letter, best), -2))
    return Job(seed, letter, best, cable, 1 + seed // 2 % (STEPS - 1))
