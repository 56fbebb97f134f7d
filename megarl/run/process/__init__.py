"""The supervisor's tools for processes of its machine: fork servers, the reaper, ports, stacks."""
