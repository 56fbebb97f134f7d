"""Tools of the supervisor for processes of its machine: fork servers, the reaper, ports, stacks."""
