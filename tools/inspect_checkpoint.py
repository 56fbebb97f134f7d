#!/usr/bin/env python3
"""The same as ``megarl convert inspect``."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "inspect", *sys.argv[1:]]))
