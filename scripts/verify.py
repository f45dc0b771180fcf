"""Is a checkpoint as it was written? Holds each piece of it against the CRC-32 that torch.save has put beside it.

    python verify.py run/step-000000100

PyTorch does not look at these sums when it loads. train.py asks `damage` before it goes on from a checkpoint.
"""

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from torch.distributed.checkpoint import FileSystemReader


def damage(path: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """Return what is wrong with a checkpoint, a sentence for each file; of `ranks`, each reads its share."""
    try:
        pieces = [*FileSystemReader(path).read_metadata().storage_data.values()]
    except Exception as error:  # bytes that are no pickle raise nearly anything
        return [f"{path / '.metadata'} cannot be read: {error}"]
    found = []
    for piece in pieces[rank::ranks]:
        file = path / piece.relative_path
        try:
            data = np.fromfile(file, np.uint8, piece.length, offset=piece.offset)
            whole = zipfile.ZipFile(io.BytesIO(data)).testzip() is None
        except (OSError, zipfile.BadZipFile):
            whole = False
        if not whole:
            found.append(f"{file} is not as it was written")
    return sorted({*found})


if __name__ == "__main__":
    said = damage(Path(sys.argv[1]))
    print(*said or ["as it was written"], sep="\n")
    raise SystemExit(bool(said))
