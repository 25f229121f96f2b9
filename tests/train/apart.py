"""A rank of a host with disks of its own: `apart.py CONFIG`, where rank N writes into `<run>-N`."""

from __future__ import annotations

import os
import sys

from stretto.cli.main import main
from stretto.config import load_settings
from stretto.saving import folder

if __name__ == "__main__":
    folder.SEEN_WITHIN_S = 0.2
    rank, config = os.environ["RANK"], sys.argv[1]
    changes = [f"output.run_dir={load_settings(config).run_dir}-{rank}"] if rank != "0" else []
    sys.argv = ["stretto", "train", config, *changes]
    main()
