"""`python -m mlx_ds4.convert`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
