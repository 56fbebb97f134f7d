"""Rollout engines: their rows, vLLM servers, code inside vLLM, and clients.

Code here imports nothing of ``learn`` and ``train``. ``server``, ``sync`` and ``cpu`` run inside vLLM. ``client`` and
``fleet`` need no torch.
"""

FACE = (
    "client.client",
    "client.control",
    "client.engine_choice",
    "client.frames",
    "client.gather",
    "client.leftovers",
    "client.names",
    "client.probe",
    "fleet",
    "server.arguments",
    "sync.link",
    "sync.shared",
)
"""Modules that other packages may import."""
