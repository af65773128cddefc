"""The command `inferd`, run as `python -m inferd`."""

from .cli import main

if __name__ == "__main__":
    main()
