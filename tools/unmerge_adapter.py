#!/usr/bin/env python3
"""The same as ``megarl convert unmerge-adapter``."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "unmerge-adapter", *sys.argv[1:]]))
