"""Faults of `megarl exam` in TRL's trainers: what TRL notices, beside megarl's results on docs/benchmarks/exam.md.

TRL has an environment of its own, which `peers.py` makes. Model and rows are those of the exam's job ``tiny``. Repeat
the command to go on; outcomes are kept in benchmarks/against/trl_exam.json, which `megarl exam --peer` reads.

    python benchmarks/exam_trl.py [NAME …]
"""

from __future__ import annotations

import json
import sys

from peers import AGAINST, RUNS, execute, trl_python

from megarl.config import compose
from megarl.exam.runner import Runner
from megarl.exam.small_jobs import SUMS
from megarl.tasks import generate

OUTCOMES = AGAINST / "trl_exam.json"
SPLITS = ("train", "eval")


def main() -> None:
    folder = RUNS / "exam"
    runner = Runner(folder)
    try:
        runner.make_models(["sums"])
    finally:
        runner.close()
    taskset = compose([*SUMS, "run.dir=-"]).taskset
    files = {split: folder / f"{split}.parquet" for split in SPLITS}
    if missing := {split: path for split, path in files.items() if not path.is_file()}:
        sizes = {"train": taskset.train_size, "eval": taskset.eval_size, "warm_start": taskset.warm_start_size}
        generate(str(taskset.generate), missing, sizes, seed=taskset.seed, options=taskset.options)
    spec = {
        "model": str(folder / "files" / "sums"),
        **{split: str(path) for split, path in files.items()},
        "folder": str(folder / "trl"),
        "outcomes": str(OUTCOMES),
    }
    (folder / "spec.json").write_text(json.dumps(spec, indent=1))
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = folder / "trl.log"
    execute([str(trl_python()), str(AGAINST / "trl_exam.py"), str(folder / "spec.json"), *sys.argv[1:]], log, alone)
    sys.stdout.write(log.read_text())


if __name__ == "__main__":
    main()
