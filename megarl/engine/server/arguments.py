"""Command line of an engine, read as ``vllm serve`` reads it."""

from __future__ import annotations

import sys
from argparse import Namespace


def server_arguments() -> Namespace:
    """Parse and check this process's command line, which names the model by ``--model``.

    vLLM's command object is asked for its parser: the module of that has moved between versions, the command has not.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command, parser = ServeSubcommand(), FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers())
    options = sys.argv[1:]
    at = options.index("--model")
    arguments: Namespace = parser.parse_args(["serve", options[at + 1], *options[:at], *options[at + 2 :]])
    arguments.model = arguments.model_tag
    command.validate(arguments)
    return arguments
