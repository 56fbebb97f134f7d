"""The ``megarl`` command. Heavy imports happen inside the commands, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import megarl
from megarl.config.verl import command as import_verl
from megarl.core.processes.machine import uncollected
from megarl.diff import command as diff
from megarl.exam import command as exam
from megarl.planner.model_cost import DEVICES
from megarl.run.data import command as data_command
from megarl.run.data.command import separated
from megarl.run.launch import starter
from megarl.run.watch import command as watch
from megarl.weights.checkpoint.convert.command import add_arguments
from megarl.weights.drafts import command as add_model

if TYPE_CHECKING:
    from megarl.config import Config

DESCRIPTION = """Reinforcement learning for language models on Megatron-Core and vLLM.

Settings are hydra overrides: `megarl train experiment=quickstart trainer.steps=20 parallel=pp2`.
Repeat a command to resume its job."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="megarl", description=DESCRIPTION, formatter_class=raw)
    parser.add_argument(
        "--version", action="version", version=f"megarl {megarl.__version__}", help="print megarl's version and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text.partition("\n")[0], description=text, formatter_class=raw)

    train = add(
        "train",
        "Run a training job: engines, explorer and trainer ranks (only trainer ranks if it learns from files). The "
        "same command resumes it.",
    )
    train.add_argument("overrides", nargs="*", help="hydra overrides, e.g. experiment=quickstart trainer.steps=20")
    train.add_argument(
        "--check",
        action="store_true",
        help="validate settings, data and model; print which process would run where; start and write nothing",
    )
    train.add_argument(
        "--nodes", type=int, metavar="N", help="with --check: number of nodes to check for, all like this machine"
    )
    train.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="with --check: GPUs of a node (default: this machine's)"
    )
    train.add_argument(
        "--verbose", action="store_true", help="with --check: also print the memory of each phase, and every node"
    )
    train.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="sweep: a job for each combination of values such as algorithm=grpo,rloo (docs/sweeps.md)",
    )
    train.add_argument(
        "--index", type=int, metavar="N", help="with -m: run only combination N, counted from 0 (for job arrays)"
    )
    train.add_argument("--count", action="store_true", help="with -m: print the number of combinations")
    starter.add_arguments(add("init", starter.DESCRIPTION))
    plan = add(
        "plan",
        "Predict a step of a job from config.json, settings and data sheets; print the fastest grids, placements and "
        "engines for a number of GPUs. Needs no GPU and no weights (docs/planning.md).",
    )
    plan.add_argument("overrides", nargs="*", help="hydra overrides: experiment=NAME, or model.path=DIR alone")
    plan.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default %(default)s)")
    plan.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default %(default)s")
    plan.add_argument("--gpu", default="h100", choices=sorted(DEVICES), help="kind of GPU (default %(default)s)")
    plan.add_argument(
        "--lengths",
        metavar="P50,P99,MAX",
        help="tokens of responses: median, 99th percentile, most (default: a guess from rollout.max_response_tokens)",
    )
    plan.add_argument("--from", dest="run_dir", metavar="RUN", help="take settings and lengths from a run's record")
    plan.add_argument("--top", type=int, default=3, metavar="N", help="plans to print (default %(default)s)")
    bench = add(
        "bench",
        "Measure models on the held-out tasks: accuracy, pass@k, majority@k with confidence intervals, side by side on "
        "one page (docs/bench.md). The same command continues after a stop.",
    )
    bench.add_argument(
        "overrides",
        nargs="*",
        metavar="MODEL|override",
        help="models (directory of an HF checkpoint, run:DIR, or run:DIR@STEP), and hydra overrides, e.g. "
        "taskset.eval=math500.parquet evaluation.samples=8 evaluation.temperature=0.6",
    )
    bench.set_defaults(models=[])
    bench.add_argument("--check", action="store_true", help="validate settings, rows and models, start nothing")
    explore = add(
        "explore",
        "Run the engines and the explorer of a run whose trainer is a separate program (`megarl train "
        "run.mode=train`); start them in any order. Ends with the run (docs/modes.md).",
    )
    explore.add_argument("overrides", nargs="*", help="hydra overrides, the same as the trainer's")
    explore.add_argument(
        "--number",
        type=int,
        default=0,
        metavar="N",
        help="number of this explore program, unique within the run, from 0",
    )
    scale = add(
        "scale",
        "Change the engines of a run while it trains: `megarl scale RUN engines=N` or `tp=M` (docs/elastic.md).",
    )
    scale.add_argument("run_dir", metavar="RUN", help="the run's directory, e.g. runs/quickstart")
    scale.add_argument(
        "settings",
        nargs="+",
        metavar="engines=N",
        help="number of engines; or tp=M of each engine; program=explore-1 names the program",
    )
    store = add(
        "store",
        "Run the PostgreSQL server of a run whose engines and trainer are separate programs (store=postgres). Ends "
        "with the run, or on SIGTERM (docs/modes.md).",
    )
    store.add_argument("overrides", nargs="*", help="hydra overrides, the same as the trainer's")
    data = add("data", data_command.DESCRIPTION)
    data_command.add_arguments(data)
    doctor = add("doctor", "List what this machine has and lacks: packages, kernels, ports, memory.")
    doctor.add_argument("--host", default="127.0.0.1", help="address on which ports are tried (default %(default)s)")
    doctor.add_argument(
        "--bundle",
        metavar="RUN",
        help="also write megarl-bundle.zip here: logs, settings, metrics, versions of a run and of this machine, "
        "without weights and rows, so that others can find out why a job failed",
    )
    report = add("report", "Write the HTML report, the reward curve and the answer samples of a run again.")
    report.add_argument(
        "run_dir", help="the run's directory, e.g. runs/quickstart; for a sweep's directory: print its results"
    )
    watch.add_arguments(add("watch", watch.TEXT))
    replay = add(
        "replay",
        "Compute a kept step of a run again, on one process, and name the first stage that differs from what was "
        "trained (docs/alarms.md).",
    )
    replay.add_argument("run_dir", metavar="RUN", help="directory of a run with trainer.keep_batches=true")
    replay.add_argument("--step", type=int, required=True, metavar="N", help="number of the step, from 1")
    replay.add_argument("--weights", metavar="CHECKPOINT", help="checkpoint of the step before (default: the run's)")
    replay.add_argument(
        "--same-grid", action="store_true", help="compute on as many processes as the run, where every bit counts"
    )
    diff.add_arguments(add("diff", diff.DESCRIPTION))
    add_arguments(add("convert", "Convert checkpoints between HF and Megatron-Core, reshard them, list their content."))
    add_model.add_arguments(add("add-model", add_model.DESCRIPTION))
    exam.add_arguments(add("exam", exam.DESCRIPTION))
    sandbox = add("sandbox", "Test the sandbox for programs on this machine, or offer it to other machines.")
    actions = sandbox.add_subparsers(dest="action", required=True, metavar="action")
    check = actions.add_parser("check", help="prove the isolation on this machine, or test a service")
    check.add_argument("--url", help="URL of a service (reward.code.url), whose key is in MEGARL_SANDBOX_KEY")
    serve = actions.add_parser(
        "serve", help="offer this machine's sandbox over HTTP, with the key in MEGARL_SANDBOX_KEY"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    serve.add_argument("--port", type=int, default=8765, help="default %(default)s")
    serve.add_argument("--workers", type=int, help="programs at a time (default: one for each core)")
    serve.add_argument(
        "--queue", type=int, default=64, help="requests that may wait (default %(default)s); further ones are refused"
    )
    for action in (check, serve):
        action.add_argument(
            "--python", help="interpreter for programs, with its packages (reward.code.python); found by default"
        )
    rewards = add("rewards", "Explain verdicts, or offer this machine's reward workers to a job (reward.hosts).")
    rewards_actions = rewards.add_subparsers(dest="action", required=True, metavar="action")
    explain = rewards_actions.add_parser(
        "explain", help="print what a verifier asked for, read and compared for each row of a file (docs/rewards.md)"
    )
    explain.add_argument("file", help="parquet, json or jsonl file of verl's rows, each with a response")
    explain.add_argument("overrides", nargs="*", help="hydra overrides, e.g. 'reward.routes={my_set: math}'")
    offer = rewards_actions.add_parser("serve", help="offer reward workers to a job, with the key in MEGARL_JOB_KEY")
    offer.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    offer.add_argument("--port", type=int, default=8766, help="default %(default)s; 0 takes a free one and prints it")
    offer.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes at a time (default: one for each core)"
    )
    offer.add_argument(
        "--output",
        default="reward_output.log",
        help="file with the output of reward functions, truncated when long (default %(default)s)",
    )
    config = add(
        "config",
        "Print the settings that overrides compose to, as JSON.\n`megarl config import-verl FILE` turns a script or "
        "YAML file of verl's into an experiment (docs/from_verl.md).",
    )
    config.set_defaults(import_verl=False)
    config.add_argument("overrides", nargs="*", help="hydra overrides")
    config.add_argument(
        "--reference", action="store_true", help="print docs/settings.md instead: every setting, its values and meaning"
    )
    config.add_argument(
        "--changed", action="store_true", help="print the settings that differ from their defaults, one on each line"
    )
    for command in (train, bench, explore, store, data, config, plan):
        command.add_argument(
            "--config-dir",
            metavar="DIR",
            help="folder with further files of configs/, e.g. experiment/mine.yaml (docs/own_experiments.md)",
        )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command. A user's mistake logs one line and exits with status 2, a failed job with 1, Ctrl-C with 130."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    from megarl.run.process.interrupt import INTERRUPT

    with INTERRUPT:
        try:
            status = _run(arguments)
            INTERRUPT.check()
            _tell(status)
            return status
        except BaseException:
            if not INTERRUPT.seen:
                raise
    logging.error("megarl %s: interrupted", arguments.command)
    sys.stdout.flush()
    os._exit(130)  # otherwise half-imported libraries would print errors


def _tell(status: int) -> None:
    """Write the head's exit status to ``MEGARL_STATUS``, which slurm/common.sh reads: ``srun`` exits with the largest
    status of all nodes, lost ones included."""
    if (path := os.environ.get("MEGARL_STATUS")) and os.environ.get("SLURM_PROCID") == "0":
        try:
            with open(path, "w") as file:
                file.write(str(status))
        except OSError as error:  # the command has ended: its status must not change
            logging.warning(
                "MEGARL_STATUS=%s cannot be written (%s): the job script takes srun's status, %d here; let the "
                "container see that folder (MEGARL_MOUNTS)",
                path,
                error.strerror,
                status,
            )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the words of a command (None: ``sys.argv``). Overrides may stand before and after options, which argparse
    does not support. Exits with status 2 if a word is wrong."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["data"] and (look := data_command.look(words[1:])) is not None:
        return look
    if words[:2] == ["config", import_verl.NAME]:
        return import_verl.parse(words[2:])
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    if arguments.command == "data":
        data_command.read_words(arguments, parser)
    if arguments.command == "bench":
        arguments.models, arguments.overrides = separated(arguments.overrides)
        if not arguments.models:
            parser.error("bench: give a model: the directory of an HF checkpoint, run:DIR, or run:DIR@STEP")
        if any(word.startswith("model.path=") for word in arguments.overrides):
            parser.error("bench: model.path is what MODEL names; leave it out")
        arguments.overrides += _left_out(arguments)
    return arguments


def _left_out(arguments: argparse.Namespace) -> list[str]:
    """Return a bench's default overrides: its first model, a run name, and a placeholder for training rows, which a
    bench does not read."""
    from megarl.run.launch.sweep import quoted

    given = {word.partition("=")[0].lstrip("+") for word in arguments.overrides}
    words = [f"model.path={quoted(arguments.models[0])}"]
    words += [] if given & {"run.name", "run.dir"} else ["run.name=bench"]
    return words + ([] if "taskset.train" in given else ["taskset.train=unread"])


def _run(arguments: argparse.Namespace) -> int:
    from megarl.core.errors import InputError, JobError

    try:
        return COMMANDS[arguments.command](arguments)
    except InputError as error:
        logging.error("megarl %s: %s", arguments.command, error)
        return 2
    except JobError as error:
        logging.error("megarl %s: %s", arguments.command, error)
        logging.error("once the cause is fixed, the same command resumes the run")
        return 1
    except OSError as error:
        if error.filename is None:
            raise  # not a path that the user gave
        logging.error("megarl %s: %s: %s", arguments.command, error.filename, error.strerror)
        return 2


def _train(arguments: argparse.Namespace) -> int:
    from megarl.config import compose
    from megarl.config.overrides import check_experiment
    from megarl.core.errors import ConfigError

    if (arguments.nodes is not None or arguments.gpus_per_node is not None) and (
        arguments.multirun or not arguments.check
    ):
        raise ConfigError(
            "--nodes and --gpus-per-node are what --check assumes of one job; a job takes the nodes that its "
            "launcher gives it"
        )
    check_experiment(arguments.overrides)
    if arguments.multirun:
        return _sweep(arguments)
    if arguments.count or arguments.index is not None:
        raise ConfigError("--index and --count need a sweep; add -m")
    config = compose(
        arguments.overrides, own=arguments.config_dir
    )  # before the slow imports: a mistyped key is reported immediately
    if config.run.mode in ("explore", "bench"):
        raise ConfigError(
            f"run.mode={config.run.mode} belongs to `megarl {config.run.mode}`; leave it out, or run that command"
        )
    return _check_job(config, arguments) if arguments.check else _run_job(config)


def _init(arguments: argparse.Namespace) -> int:
    starter.run(arguments)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    with uncollected():
        from megarl.run.planning import run

    return run(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from megarl.config import compose
    from megarl.run.process.process import ForkServers

    config = compose(arguments.overrides, own=arguments.config_dir)
    is_forked = config.run.fork_servers and config.parallel.backend == "gloo" and not arguments.check
    servers = ForkServers([config.rollout.num_threads], ["megarl.run.launch.bench"]) if is_forked else None
    try:
        with uncollected():
            from megarl.run.launch.bench import run_bench

        return run_bench(arguments.models, config, servers, check_only=arguments.check)
    finally:
        if servers is not None:
            servers.close()


def _explore(arguments: argparse.Namespace) -> int:
    from megarl.config import compose

    own = ["run.mode=explore", f"run.number={arguments.number}"]
    return _run_job(compose([*arguments.overrides, *own], own=arguments.config_dir))


def _scale(arguments: argparse.Namespace) -> int:
    from megarl.run.launch.scale import scale

    scale(arguments.run_dir, arguments.settings)
    return 0


def _store(arguments: argparse.Namespace) -> int:
    from megarl.config import compose
    from megarl.run.launch.store import serve

    return serve(compose(arguments.overrides, own=arguments.config_dir))


def _run_job(config: Config) -> int:
    servers = None
    if config.run.fork_servers and config.parallel.backend == "gloo":  # CUDA does not work in a forked process
        from megarl.rewards.pool.child import fork_root
        from megarl.run.process.process import ForkServers

        fork_root()
        servers = ForkServers([config.rollout.num_threads, config.trainer.num_threads], ["megarl.run.launch.job"])
    try:
        with uncollected():
            from megarl.run.launch.job import run

        return run(config, servers)
    finally:
        if servers is not None:
            servers.close()


def _check_job(config: Config, arguments: argparse.Namespace) -> int:
    from megarl.core.errors import ConfigError

    with uncollected():
        from megarl.run.checks.job import check, check_sizes
        from megarl.run.nodes import gpu_state
        from megarl.run.nodes.fit import planned
        from megarl.run.nodes.plan import NodeInfo
        from megarl.run.run_dir.prepare import no_bytecode

    nodes = 1 if arguments.nodes is None else arguments.nodes
    if nodes < 1:
        raise ConfigError(f"--nodes={nodes}: a job has one or more")
    gpus = len(gpu_state.visible()) if arguments.gpus_per_node is None else arguments.gpus_per_node
    with no_bytecode():
        elsewhere, verbose = arguments.gpus_per_node is not None, arguments.verbose
        check(config, nodes=nodes, dry=True, elsewhere=elsewhere, verbose=verbose)
        usable = check_sizes if Path(config.model.path).is_dir() else lambda config: None
        logging.info("%s", planned(config, [NodeInfo(rank, "", "all", gpus) for rank in range(nodes)], usable, verbose))
    logging.info("the settings, data and model fit; nothing was started or written")
    if arguments.gpus_per_node is not None:
        logging.info("not checked: what is installed on those machines, their memory and disks (run.dir, store.folder)")
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    from megarl.run.launch.sweep import combinations, run_sweep

    if arguments.count:
        sys.stdout.write(f"{len(combinations(arguments.overrides, own=arguments.config_dir))}\n")
        return 0
    return run_sweep(arguments.overrides, arguments.index, check_only=arguments.check, own=arguments.config_dir)


def _doctor(arguments: argparse.Namespace) -> int:
    from megarl.run.report.doctor import examine

    text, healthy = examine(arguments.host)
    sys.stdout.write(text)
    if arguments.bundle is not None:
        from megarl.run.report.doctor import write_bundle

        target = write_bundle(Path(arguments.bundle), text, Path("megarl-bundle.zip"))
        sys.stdout.write(f"wrote {target}; logs may hold texts of your rows: look before you send it\n")
    return 0 if healthy else 1


def _report(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from megarl.config import load_resolved
    from megarl.run.job_store import database_of_run
    from megarl.run.launch.sweep import runs_of, table_of
    from megarl.run.report.html import write_report

    run_dir = Path(arguments.run_dir)
    resolved = run_dir / "resolved.json"
    if not resolved.is_file() and (runs := runs_of(run_dir)):
        sys.stdout.write(f"{table_of(runs)}\n")
        logging.info("%s is a sweep; `megarl report '%s'` writes the report of one run", run_dir, runs[0])
        return 0
    url = load_resolved(resolved).store.url if resolved.is_file() else ""
    with database_of_run(url, run_dir, read_only=True):
        sys.stdout.write(f"{write_report(run_dir)}\n")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from megarl.run.replay import replay

    weights = None if arguments.weights is None else Path(arguments.weights)
    return replay(Path(arguments.run_dir), arguments.step, weights=weights, same_grid=arguments.same_grid)


def _convert(arguments: argparse.Namespace) -> int:
    from megarl.weights.checkpoint.convert.command import run

    return run(arguments)


def _sandbox(arguments: argparse.Namespace) -> int:
    from megarl.core.errors import SandboxError

    try:
        if arguments.action == "serve":
            from megarl.sandbox.service import serve

            return serve(arguments.host, arguments.port, arguments.workers, arguments.queue, arguments.python)
        from megarl.sandbox.client import open_sandbox

        sys.stdout.write(f"programs are isolated: {open_sandbox(arguments.url, arguments.python).describe()}\n")
        return 0
    except SandboxError as error:
        logging.error("megarl sandbox: %s", error)
        return 1


def _rewards(arguments: argparse.Namespace) -> int:
    return _explain(arguments) if arguments.action == "explain" else _offer(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from megarl.config import compose
    from megarl.config.rewards import RewardConfig
    from megarl.run.data.show import explanations

    config = compose(arguments.overrides).reward if arguments.overrides else RewardConfig()

    async def write() -> None:
        async for text in explanations(Path(arguments.file), config):
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    asyncio.run(write())
    return 0


def _offer(arguments: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from megarl.core.errors import ConfigError
    from megarl.core.processes import heartbeat
    from megarl.rewards.pool.child import PrintedOutput
    from megarl.rewards.pool.host import serve

    key = os.environ.get("MEGARL_JOB_KEY", "")

    def started(port: int) -> None:
        logging.info("up to %d reward processes on %s:%d; Ctrl-C ends it", arguments.workers, arguments.host, port)

    if arguments.workers < 1:
        raise ConfigError(f"--workers {arguments.workers}: must be at least 1")
    heartbeat.begin()  # a job's watchdog would end a host that never begins its work
    try:
        asyncio.run(
            serve(
                arguments.host, arguments.port, key, arguments.workers, started, PrintedOutput(Path(arguments.output))
            )
        )
    except ValueError as error:
        raise ConfigError(f"MEGARL_JOB_KEY: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"--host {arguments.host} --port {arguments.port}: {error.strerror}; take another port or address"
        ) from error
    return 0


def _config(arguments: argparse.Namespace) -> int:
    import json

    from megarl.config import compose, to_dict
    from megarl.config.settings_page import changed, reference

    if arguments.import_verl:
        return import_verl.run(arguments)
    if arguments.reference:
        sys.stdout.write(reference())
        return 0
    composed = compose(arguments.overrides, own=arguments.config_dir)
    if arguments.changed:
        sys.stdout.write("".join(f"{name}={value}\n" for name, value in changed(composed)))
        return 0
    sys.stdout.write(json.dumps(to_dict(composed), indent=1) + "\n")
    return 0


COMMANDS = {
    "train": _train,
    "init": _init,
    "plan": _plan,
    "bench": _bench,
    "explore": _explore,
    "scale": _scale,
    "store": _store,
    "data": data_command.run,
    "doctor": _doctor,
    "report": _report,
    "watch": watch.run,
    "replay": _replay,
    "diff": diff.run,
    "convert": _convert,
    "add-model": add_model.run,
    "exam": exam.run,
    "sandbox": _sandbox,
    "rewards": _rewards,
    "config": _config,
}

if __name__ == "__main__":
    sys.exit(main())
