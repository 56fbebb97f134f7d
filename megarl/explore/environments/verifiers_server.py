"""Server of verifiers' tasksets (MIT), run by the Python of their virtual environment: it imports nothing of megarl.

    PYTHON -P verifiers_server.py rows '{"taskset": {"id": "gsm8k"}}' COUNT [--skip N] [--path DIR] > rows.jsonl
    PYTHON -P verifiers_server.py check '{"taskset": {"id": "gsm8k"}}'
    PYTHON -P verifiers_server.py serve '{"taskset": {"id": "gsm8k"}}' SOCKET

The JSON is verifiers' ``[env]`` block. Each connection is one episode in a forked process. Both sides write JSON lines:
the server ``{"pid"}``, then ``{"messages"}`` for each request to the model and ``{"done", "reward"}`` or ``{"error"}``
at the end; the client ``{"index"}`` of the task, then ``{"response"}``. Written for 0.4.0.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import json
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from openai import APIError, AsyncOpenAI

Ask = Callable[[list[Any]], Awaitable[str]]
HARNESS = "megarl_chat"
KEY = "MEGARL_VERIFIERS_KEY"
PARENT_S = 1.0
"""Seconds between two checks of the parent."""


class Chat(vf.Harness[vf.HarnessConfig]):
    """Harness that only asks the model, in this process: one request a turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        """Send one request with the whole conversation."""
        system, prompt = self.resolve_prompt(data)
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages_of(system, prompt))
            except APIError as error:  # a stop of the task, or a failure recorded in the trace
                return vf.ProgramResult(1, "", str(error))
        return vf.ProgramResult(0, "", "")


def messages_of(system: str | None, prompt: Any) -> list[Any]:
    """Return the chat messages of a prompt, a text or messages."""
    head = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*head, {"role": "user", "content": prompt}]
    return head + [message.model_dump(exclude_none=True) for message in prompt or []]


def environment_of(block: dict[str, Any]) -> Any:
    """Return the environment of an ``[env]`` block; roles without a harness use ``Chat``."""
    module = ModuleType(HARNESS)
    vars(module).update(Chat=Chat, __all__=["Chat"])
    sys.modules[HARNESS] = module
    taskset = block["taskset"]["id"]
    own = vf.default_harness_id(taskset) != "bash"
    roles = [name for name, value in vf.resolve_env_config(block) if isinstance(value, vf.AgentConfig)]
    for name in roles:
        role = {"runtime": {"type": "subprocess"}, **block.get(name, {})}
        block[name] = role if own else {"harness": {"id": HARNESS}, **role}
    ours = [name for name in roles if not block[name].get("client")]
    if len(ours) != 1:
        raise ValueError(f"roles {ours} ask the model that is trained; one may, give the others a client of their own")
    return vf.load_environment(vf.resolve_env_config(block))


async def play(environment: Any, task: Any, ask: Ask) -> float:
    """Play an episode and return its reward; ``await ask(messages)`` returns the model's response."""
    key = secrets.token_hex(16)
    os.environ[KEY] = key

    async def complete(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {key}":
            raise web.HTTPUnauthorized
        text = await ask((await request.json())["messages"])
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        body = {"id": secrets.token_hex(8), "object": "chat.completion", "created": int(time.time())}
        return web.json_response({**body, "model": "policy", "choices": [choice]})

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    client = vf.EvalClientConfig(base_url=url, api_key_var=KEY)
    try:
        async with environment.serving():
            episode = await environment.run_episode(task, vf.ModelContext(model="policy", client=client))
    finally:
        await runner.cleanup()
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    reward, parts = float(episode.traces[-1].reward), episode.traces[-1].rewards
    if not math.isfinite(reward):
        given = {name: part.value for name, part in parts.items() if part is not None}
        raise ValueError(f"the taskset's rewards {given} are no finite numbers")
    return reward


async def serve_episode(environment: Any, find: Callable[[int], Any], connection: socket.socket) -> None:
    """Serve one episode over a connection, then end this process."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=2**28)

    async def take() -> Any:
        line = await reader.readline()
        if not line:  # the explorer has closed the episode or died
            os.killpg(os.getpid(), signal.SIGKILL)
        return json.loads(line)

    def send(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    async def ask(messages: list[Any]) -> str:
        send({"messages": messages})
        return str((await take())["response"])

    send({"pid": os.getpid()})
    try:
        send({"done": True, "reward": await play(environment, find((await take())["index"]), ask)})
    except Exception as error:
        traceback.print_exc()  # to the explorer's log
        send({"error": f"{type(error).__name__}: {error}"})
    await writer.drain()
    await take()  # the client kills this process with its descendants


def serve(environment: Any, find: Callable[[int], Any], path: str) -> None:
    """Fork a process for each connection, until the parent dies."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    print(json.dumps({"ready": True}), flush=True)
    parent = os.getppid()
    threading.Thread(target=watch, args=(parent, os.path.dirname(path)), daemon=True).start()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap ended children automatically
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        try:
            asyncio.run(serve_episode(environment, find, connection))
        finally:
            os._exit(0)


def watch(parent: int, folder: str) -> None:
    """End this process after its parent's death, and remove the socket's folder."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def rows(environment: Any, skip: int, count: int) -> int:
    """Write tasks as rows and return their number; a row's prompt is the episode's first request."""
    written = 0
    for task in itertools.islice(environment.taskset, skip, skip + count):
        try:
            opening = asyncio.run(opening_of(environment, task))
        except Exception as error:
            sys.exit(f"task {task.data.idx}, after {written} rows: {reason_of(error)}")
        index, answer = task.data.idx, getattr(task.data, "answer", "")
        row: dict[str, Any] = {"data_source": source_of(environment), "prompt": opening, "ability": "verifiers"}
        row |= {"reward_model": {"style": "verifiers", "ground_truth": str(answer)}, "extra_info": {"index": index}}
        print(json.dumps(row), flush=True)
        written += 1
    return written


def source_of(environment: Any) -> str:
    """Data source of an environment's rows."""
    return f"verifiers/{environment.config.env_id}"


def reason_of(error: Exception) -> str:
    """Return an exception's text in one line, without pydantic's advice."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("For further")) or type(error).__name__


async def opening_of(environment: Any, task: Any) -> list[Any]:
    """Messages of an episode's first request."""
    first: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    async def ask(messages: list[Any]) -> str:
        if not first.done():
            first.set_result(messages)
        raise web.HTTPServiceUnavailable  # ends the episode

    try:
        await play(environment, task, ask)
    except RuntimeError as error:
        if not first.done():
            raise RuntimeError(f"task {task.data.idx} has asked no model: {error}") from error
    return first.result()


def write_rows(given: argparse.Namespace) -> None:
    """Write the rows requested by the command line."""
    if given.path:
        sys.path.insert(0, given.path)
    environment = loaded(given.env)
    if (written := rows(environment, given.skip, given.count)) < given.count:
        print(f"{written} rows, not {given.count}: the taskset has no more after --skip {given.skip}", file=sys.stderr)
    if not written:
        sys.exit(1)


def loaded(block: str) -> Any:
    """Environment of an ``[env]`` block in JSON. Ends this process if there is none."""
    try:
        return environment_of(json.loads(block))
    except ModuleNotFoundError as error:
        sys.exit(f"{reason_of(error)} The folder of a module that is not installed is named by --path or `path`.")
    except Exception as error:
        sys.exit(reason_of(error))


def find_in(tasks: list[Any], index: int) -> Any:
    """Return the task of a row. Raises ValueError if the index is out of range."""
    if not 0 <= index < len(tasks):
        raise ValueError(f"the taskset has {len(tasks)} tasks, and a row the index {index}; make the rows again")
    return tasks[index]


def main() -> None:
    """Run a command; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("rows", "check", "serve"):
        command = commands.add_parser(name)
        command.add_argument("env", help="verifiers' [env] block, as JSON")
        if name == "serve":
            command.add_argument("socket")
        if name == "rows":
            command.add_argument("count", type=int, help="tasks to write")
            command.add_argument("--skip", type=int, default=0, help="tasks before the first one that is written")
            command.add_argument("--path", help="folder in which the module of a taskset is that is not installed")
    given = parser.parse_args()
    if given.command == "rows":
        write_rows(given)
        return
    environment = loaded(given.env)
    tasks = environment.taskset
    asyncio.run(opening_of(environment, next(iter(tasks))))  # imports an episode's modules once, before the forks
    if given.command == "check":
        return
    known = list(tasks) if tasks.bounded else None

    def find(index: int) -> Any:
        return next(itertools.islice(tasks, index, None)) if known is None else find_in(known, index)

    serve(environment, find, given.socket)


if __name__ == "__main__":
    main()
