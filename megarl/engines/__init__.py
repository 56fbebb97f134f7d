"""Rollout engines: their rows, vLLM servers, code inside vLLM, and clients.

Code here imports nothing of ``learn`` and ``train``. ``server``, ``sync``, ``tracing`` and ``cpu`` run inside
vLLM. ``client`` and ``fleet`` need no torch.
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
    "sync.link",
    "sync.shared",
    "tracing.points",
    "tracing.traced_engine",
)
"""Modules that other packages may import."""
