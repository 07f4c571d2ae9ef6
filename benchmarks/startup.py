"""How long a run takes to its first gradient step, against starting the engine alone.

    python -m benchmarks.startup [CONFIG.yaml] [--repetitions 3] [--out FILE] [--record]

Both arms are processes of their own, timed from their start, in turn: A (the engine alone, until it
can generate) and B (`python -m minirl.train` until the first step is recorded).
"""

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.results import make_parser, start_load, table, write

ENGINE = """
import sys, uvloop
from pathlib import Path
from minirl.config import load_config
from minirl.rollout.vllm_server import VLLMServer

async def start():
    server = VLLMServer(load_config(sys.argv[1:]), log_file=Path("build/startup-engine.log"))
    async with server:
        await server.generate([1, 2, 3], {"max_tokens": 1}, "first")
        print("ready", flush=True)

if __name__ == "__main__":
    uvloop.run(start())
"""


def engine_alone(config: str) -> float:
    """Seconds until the engine has answered."""
    script = Path("build/startup_engine.py")
    script.parent.mkdir(exist_ok=True)
    script.write_text(ENGINE)
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(script), config], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "ready":
            seconds = time.monotonic() - started
            process.wait()
            return seconds
    raise SystemExit("the engine did not start; see build/startup-engine.log")


def first_step(config: str) -> float:
    """Seconds until minirl.train has recorded a step."""
    metrics = Path("build/startup/run/metrics.jsonl")
    metrics.unlink(missing_ok=True)
    settings = ["trainer.default_local_dir=build/startup", "trainer.experiment_name=run"]
    settings += ["trainer.total_training_steps=1", "trainer.resume_mode=disable"]
    settings += ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "minirl.train", config, *settings])
    while process.poll() is None:
        time.sleep(0.02)
        if metrics.exists() and '"step": 1' in metrics.read_text():
            seconds = time.monotonic() - started
            process.wait()
            return seconds
    raise SystemExit("minirl.train ended before its first step")


def main() -> None:
    """Measure, print, write."""
    parser = make_parser("startup", __doc__, repetitions=3)
    parser.add_argument("config", nargs="?", default="configs/debug/calculator_grpo.yaml")
    arguments = parser.parse_args()
    load, engine, train = start_load(), list[float](), list[float]()
    engine_alone(arguments.config)  # warms the file cache, as does the next
    first_step(arguments.config)
    for _ in range(arguments.repetitions):
        engine.append(engine_alone(arguments.config))
        train.append(first_step(arguments.config))
    extra = [b - a for a, b in zip(engine, train, strict=True)]
    rows = {"engine alone": engine, "first step": train, "difference": extra}
    report = table(["", "seconds"], rows.items())
    print(report)
    write(arguments, rows, "startup", load, report)


if __name__ == "__main__":
    main()
