"""Ranks, sizes and tables as text."""

from __future__ import annotations

import re


def rank_label(ranks: list[int]) -> str:
    """``rank 2``, ``ranks 0-3`` or ``ranks 0,2``."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return "ranks " + ",".join(parts)


def align(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> str:
    """Rows of text as columns of equal width; ``right`` names the columns to align to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


_PLACE = re.compile(
    r"(NODE_|GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME|NNODES|NPROC_PER_NODE|"
    r"(SLURM_(?!CONF$)|SLURMD_|OMPI_|PMI_|PMIX_|MPI_|MV2_|FLUX_|JSM_|LSB_|PALS_|TORCHELASTIC_|PET_).*"
)


def tells_place(variable: str) -> bool:
    """Whether programs are told their place among ranks by this variable: torchrun's, Slurm's, MPI's and others'."""
    return _PLACE.fullmatch(variable) is not None
