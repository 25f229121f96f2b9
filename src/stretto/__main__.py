"""`python -m stretto`: the command line, for launchers of modules (`torchrun -m stretto train ...`)."""

from stretto.cli.main import main

if __name__ == "__main__":
    main()
