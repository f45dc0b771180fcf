"""The solutions of the exercises of lesson 18; what stands between the marks is what a learner writes."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from lessons.parallelism_3d import planner


def plan_run(letter) -> tuple:
    """A layout, the GPU hours of the whole training, and the GB free on the fullest GPU."""
    ### BEGIN SOLUTION
    network = letter.port_gbit * 1e9 * letter.ports / letter.per_node  # of each GPU
    gpus = (letter.nodes - letter.lent_nodes) * letter.per_node
    machine = planner.own_cluster(letter.gpu, gpus, network=network)
    sequences = letter.tokens_of_step // letter.model.context
    for plan in planner.search(letter.model, machine, sequences, cp=1).plans:
        held = plan.memory.total + plan.reserve + letter.held_gb * 1e9
        free = machine.card.memory_bytes - held
        if free >= 0.1 * machine.card.memory_bytes:
            steps = letter.tokens / letter.tokens_of_step
            return plan.layout, steps * plan.seconds * gpus / 3600, free / 1e9
    ### END SOLUTION


def start(program: str, out: str, data: str) -> str:
    """The command line that both hosts get, with three paths; `{host}` stands for 0 and 1."""
    ### BEGIN SOLUTION
    meet = "--rdzv-backend=c10d --rdzv-endpoint=node0:29500 --rdzv-id=18"
    agents = "torchrun --nnodes=2 --nproc-per-node=2 " + meet
    model = "--layers=2 --hidden=64 --heads=4 --length=32 --batch=8 --steps=2"
    return f"{agents} {program} --out={out} --data={data} {model} --replicate=2"
    ### END SOLUTION


def repairs() -> dict:
    """For "hang", "silent" and "slow": the cause, and the edits, old text -> new text."""
    ### BEGIN SOLUTION
    skipped = "if 10 in mine[step * share :][:share]:\n            continue\n"
    chosen = "[each for each in gradients if each.dim() > 1]"
    log = """            seen = [p.grad.clone() for p in parameters]
            exchange(seen, *groups)
"""
    return {
        "hang": ("a step skipped on one rank", {skipped + "        ": ""}),
        "silent": ("gradients left out", {chosen: "gradients"}),
        "slow": ("an exchange for each micro-batch", {log: ""}),
    }
    ### END SOLUTION


def exchange(gradients: list, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over all ranks.

    gradients: tensors of this rank, float32, of the same shapes on all ranks.
    inside, across: the ranks of this host, and those with this rank's place on all hosts.
    """
    ### BEGIN SOLUTION
    local = inside.size()
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % local)])
    piece = padded.new_empty(len(padded) // local)
    dist.reduce_scatter_single(piece, padded, group=inside)
    narrow = piece.bfloat16()
    dist.all_reduce(narrow, group=across)
    piece = narrow.float()
    dist.all_gather_single(padded, piece, group=inside)
    parts = padded[: len(flat)].split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    ### END SOLUTION


def checkpoint(folder: str, step: int | None = None, state: dict | None = None):
    """Save the state after so many steps; without them, return the newest whole (steps, state).

    folder: exists, and all ranks of all hosts share it; if nothing was saved there, return None.
    state: {"model": …, "optimizer": …}, two state dictionaries, the same on all ranks.
    """
    ### BEGIN SOLUTION
    if step is None:
        saved = sorted(Path(folder).glob("step-*.pt"))
        return torch.load(saved[-1]) if saved else None
    if dist.get_rank() == 0:
        partial = Path(folder, f"partial-{step}")
        torch.save((step, state), partial)
        os.replace(partial, Path(folder, f"step-{step:06}.pt"))
    dist.barrier()
    ### END SOLUTION


def report(facts: dict) -> str:
    """A page of Markdown for the customer, from what was counted, measured and modelled.

    facts: name -> (number, unit, how it is known), or name -> a text.
    """
    ### BEGIN SOLUTION
    lines = ["# Report", "", "| what | figure | how we know |", "|---|---|---|"]
    for name, fact in facts.items():
        if isinstance(fact, str):
            lines.append(f"| {name} | {fact} | |")
        else:
            number, unit, known = fact
            lines.append(f"| {name} | {number:,.6g} {unit} | {known} |")
    lines += ["", "Not known: what overlaps. What is modelled assumes that nothing does."]
    dear = "cost" in facts and facts["cost"][0] > facts["budget"][0]
    advice = "do not start, it costs too much." if dear else "start, it is within the budget."
    lines += ["", f"Recommendation: {advice}"]
    return "\n".join(lines)
    ### END SOLUTION
