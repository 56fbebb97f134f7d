#!/usr/bin/env python3
"""The same as ``megarl convert megatron-to-hf``."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
