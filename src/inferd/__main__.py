"""`python -m inferd` is the command `inferd`."""

from .daemon.cli import main

if __name__ == "__main__":
    main()
