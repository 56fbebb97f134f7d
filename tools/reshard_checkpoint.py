#!/usr/bin/env python3
"""The same as ``megarl convert reshard``."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "reshard", *sys.argv[1:]]))
