#!/usr/bin/env python3
"""The same as ``megarl convert hf-to-megatron``."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
