"""`python -m refpar COMMAND ...`"""
import sys

from refpar.cli import main

if __name__ == "__main__":
    sys.exit(main())
