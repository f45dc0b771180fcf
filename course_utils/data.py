"""The text that the course's models learn, by characters: Alice's Adventures in Wonderland by Lewis Carroll, 1865.

The text, `text/alice.txt`, is the story alone, from the first chapter's heading to the end; spaces around lines are
left out. Author (died 1898) and publication are long enough ago that it is in the public domain.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Windows", "tokens"]

SPLITS = ("train", "valid")
_TRAIN_SHARE = 0.9


@cache
def _codes(split: str) -> Tensor:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    text = bytearray((files(__package__) / "text" / "alice.txt").read_bytes())
    border = int(_TRAIN_SHARE * len(text))
    return torch.frombuffer(text, dtype=torch.uint8)[slice(border) if split == "train" else slice(border, None)]


def tokens(split: str = "train") -> Tensor:
    """Return the ASCII codes of a split, int64 (n,), all below 128: "train" is the first 90% of the text."""
    return _codes(split).long()


class Windows(Dataset):
    """The text in pieces of `context` tokens that do not overlap, each with its targets, the same one token later.

    Item i is `(x, y)`, both int64 (context,). `length` keeps the first so many windows. An instance holds no text, so
    it is cheap to send to a rank.
    """

    def __init__(self, split: str = "train", context: int = 64, length: int | None = None) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        most = (len(_codes(split)) - 1) // context
        if length is not None and not 1 <= length <= most:
            raise ValueError(f"length must be 1 to {most} for context {context} of {split!r}, got {length}")
        if most < 1:
            raise ValueError(f"context must be below {len(_codes(split))}, the tokens of {split!r}, got {context}")
        self.split, self.context, self.length = split, context, most if length is None else length

    def __len__(self) -> int:
        return self.length

    def batch(self, numbers: Iterable[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return the windows with these numbers on `device`: inputs and targets, both int64 (len(numbers), context)."""
        x, y = zip(*(self[i] for i in numbers), strict=True)
        return torch.stack(x).to(device), torch.stack(y).to(device)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -self.length <= index < self.length:
            raise IndexError(f"index must be below {self.length}, got {index}")
        start = index % self.length * self.context
        piece = _codes(self.split)[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]
