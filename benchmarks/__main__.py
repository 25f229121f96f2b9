"""`python -m benchmarks NAME`, from a checkout; without a name, the list of them."""

from benchmarks.commands import bench
from stretto.cli.main import main

if __name__ == "__main__":
    main(bench, "python -m benchmarks")
