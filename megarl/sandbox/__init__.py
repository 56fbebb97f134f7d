"""Running untrusted programs: in bubblewrap on this machine, or on a host that offers it as a service
(``client.open_sandbox``)."""
