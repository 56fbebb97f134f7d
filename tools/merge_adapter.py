#!/usr/bin/env python3
"""The same as ``megarl convert merge-adapter``."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "merge-adapter", *sys.argv[1:]]))
