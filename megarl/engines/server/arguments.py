"""Command line of an engine, read as ``vllm serve`` reads it."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from megarl.engines.client.names import COLD, cold_mark


def server_arguments() -> Namespace:
    """Parse and check this process's command line. The model is ``--model``, or the folder of published weights for an
    engine restarted with them (``sync.cold_interval``).

    The parser comes from vLLM's command object, because the parser's module moves between versions.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command, parser = ServeSubcommand(), FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers())
    options = sys.argv[1:]
    at = options.index("--model")
    arguments: Namespace = parser.parse_args(["serve", options[at + 1], *options[:at], *options[at + 2 :]])
    cold = os.environ.get(COLD)
    arguments.model = cold if cold and cold_mark(Path(cold)).is_file() else arguments.model_tag
    command.validate(arguments)
    return arguments
