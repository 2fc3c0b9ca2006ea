"""``gate.json`` of a user's own stack, from the launcher to the gate: the secret path, and the servers behind it."""

from exporter.contract.records import Record

GATE_FILE = "gate.json"
GATE_LOCK = "gate.lock"  # held by the gate as long as it runs, so that other hosts see that the stack is up
USER = "gpujob"  # who asks Prometheus and Alertmanager


class Upstream(Record):
    """A server behind the gate."""

    path: str  # below the secret path, with a slash at its end; empty for all other paths
    address: str  # host:port, or unix:PATH
    password: str | None = None  # of `USER`; None if it asks for none
    strip: bool = False  # whether the server knows nothing of the path


class GateFile(Record):
    """What the gate serves."""

    SCHEMA = 1
    port: int  # of loopback
    token: str  # first part of every path
    upstreams: tuple[Upstream, ...]  # the one with an empty path last
