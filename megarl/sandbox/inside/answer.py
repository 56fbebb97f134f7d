"""Runs in the program's process: calls its functions and encodes their return values. The program can manipulate all of
it."""

from __future__ import annotations

import os
import sys

import values  # type: ignore[import-not-found]  # a module of the bundle that the launcher brings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def find(namespace: dict[str, Any], function: str) -> Any:
    """Return a function of the program, or a method of its class ``Solution`` (as in LeetCode's tasks)."""
    if function in namespace:
        return namespace[function]
    solution = namespace.get("Solution")
    if solution is not None and hasattr(solution, function):
        return getattr(solution(), function)
    raise NameError(f"the program has no function {function!r}")


def call(namespace: dict[str, Any], function: str, arguments: str, out: int) -> None:
    """Write what the function returns for these arguments (JSON of ``values``) to the descriptor ``out``."""
    value = find(namespace, function)(*values.decode(values.loads(arguments)))
    data = values.dumps(values.encode(value)).encode()
    while data:
        data = data[os.write(out, data) :]


class _Objects:
    """The program's objects that the tests refer to by number."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.held: list[Any] = []

    def encode(self, value: Any) -> Any:
        return values.encode(value, self._hold)

    def _hold(self, value: Any) -> Any:
        self.held.append(value)
        return {"t": "handle", "v": len(self.held) - 1}

    def decode(self, data: Any) -> Any:
        return values.decode(data, lambda kind, number: self.held[number])

    def perform(self, request: dict[str, Any]) -> Any:
        kind = request["do"]
        if kind == "names":
            return self._names(request["names"])
        target = self.held[request["on"]]
        arguments = [self.decode(item) for item in request["args"]]
        if kind == "call":
            return self.encode(target(*arguments, **{k: self.decode(v) for k, v in request["named"].items()}))
        if kind == "get":
            return self.encode(getattr(target, arguments[0]))
        if kind == "set":
            return setattr(target, *arguments)
        if kind == "item":
            return self.encode(target[arguments[0]])
        if kind == "list":
            return self.encode(list(target))
        if kind == "length":
            return len(target)
        return str(target)

    def _names(self, wanted: list[str]) -> dict[str, Any]:
        found = {}
        for name in wanted:
            try:
                found[name] = self.encode(find(self.namespace, name))
            except NameError:
                continue
        return found


def serve(namespace: dict[str, Any], link: int) -> None:
    """Serve the tests' requests until they are done."""
    objects = _Objects(namespace)
    with os.fdopen(os.dup(link), "rb") as requests, os.fdopen(link, "wb") as replies:
        while True:
            head = requests.read(4)
            if len(head) < 4:
                return
            request = values.loads(requests.read(int.from_bytes(head, "little")).decode())
            try:
                reply = {"value": objects.perform(request)}
            except Exception as error:  # the tests may expect it
                reply = {"raised": [kind.__name__ for kind in type(error).__mro__], "message": str(error)[:1000]}
            data = values.dumps(reply).encode()
            replies.write(len(data).to_bytes(4, "little") + data)
            replies.flush()
            sys.stdout.flush()
