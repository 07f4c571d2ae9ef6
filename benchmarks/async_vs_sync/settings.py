"""What a benchmark's YAML says: the engine, which workloads, how often."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.async_vs_sync.speed import LONG
from benchmarks.async_vs_sync.workload import Workload
from benchmarks.shapes import SHAPES, random_model
from minirl.config import Config, ConfigError, require
from minirl.registry import nearest, option_names
from minirl.testing import byte_tokenizer, tiny_model

FOLDER = Path(__file__).parent
MODES_IN_TURN = ["serial", "sync", "async"]
STEP_ARMS = [*MODES_IN_TURN, "over_sampled", "in_tail"]
"""Of whole steps: the modes, and async with rollout.over_sample_rate or actor.logprobs_in_tail."""
DTYPES = ("float32", "bfloat16")
TEMPLATE_TOKENS = 64
"""Per turn, more than the chat template and a tool's error message add to what is planned."""


@dataclass(kw_only=True)
class Case:
    """A workload with some numbers of conversations."""

    workload: str
    """A file in workloads/, without .yaml, or a path."""
    conversations: list[int]
    modes: list[str] = field(default_factory=lambda: list(MODES_IN_TURN))
    serial_up_to: int = 8
    """With more conversations `serial` is left out: it takes as many times as long."""
    latency_scale: float = 1.0
    """All latencies of the workload's tools, times this."""
    turns: int | None = None
    """Instead of the workload's."""
    repetitions: int | None = None
    """Instead of the benchmark's."""

    def modes_for(self, number: int) -> list[str]:
        """Those that are run with so many conversations."""
        return [m for m in self.modes if m != "serial" or number <= self.serial_up_to]

    def load(self) -> Workload:
        """The workload; its name says what is not as in its file."""
        workload = load_workload(self.workload)
        if self.turns is not None:
            name = f"{workload.name}, {self.turns} turns"
            workload = replace(workload, name=name, turns=self.turns)
        if self.latency_scale == 1:
            return workload
        return replace(workload, name=f"{workload.name}, latencies x {self.latency_scale:g}")


@dataclass(kw_only=True)
class WholeSteps:
    """Training steps over a workload, all in one run, by each arm in turn."""

    workload: str = "search"
    """Its lengths are tokens, not seconds."""
    prompts: int = 4
    """Per step; each is sampled rollout.n times."""
    arms: list[str] = field(default_factory=lambda: list(STEP_ARMS))
    over_sample_rate: float = 0.25
    latency_scale: float = 1.0

    def samples(self, n: int) -> int:
        """The most that are begun of a prompt, each with lengths and latencies of its own."""
        return n + math.ceil(round(n * self.over_sample_rate, 9))


@dataclass(kw_only=True)
class Settings:
    """A benchmark."""

    model: dict[str, Any]
    """Random weights at this shape: arguments of minirl.testing.tiny_model, or `shape`, a name in
    benchmarks/shapes.py, with `dtype`."""
    run: dict[str, Any]
    """The config of the run, as minirl.train has it."""
    repetitions: int = 3
    seed: int = 0
    cases: list[Case] = field(default_factory=list)
    full: list[Case] = field(default_factory=list)
    """With --full, these too."""
    steps: WholeSteps | None = None

    def repetitions_of(self, case: Case) -> int:
        """That count; one more warms up."""
        return case.repetitions or self.repetitions


def load_settings(path: Path) -> Settings:
    """From a file; ConfigError names the place, the value and what is allowed."""
    try:
        loaded = OmegaConf.load(path)
        settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Settings), loaded))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; say one of {_shipped(FOLDER)}") from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, TypeError) as error:  # no mapping, too
        problem = str(error).strip().splitlines()[0]
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{path}: {f'{key}: ' if key else ''}{problem}") from error
    assert isinstance(settings, Settings)
    for counted in (settings, *settings.cases, *settings.full):
        number = counted.repetitions
        require(number is None or number > 0, f"{path}: repetitions", number, "at least 1")
    require(bool(settings.cases), f"{path}: cases", [], "name a workload and conversations")
    require(settings.seed >= 0, f"{path}: seed", settings.seed, "0 or more")
    for case in [*settings.cases, *settings.full, *([settings.steps] if settings.steps else [])]:
        _check_case(case, str(path))
    cases = [*settings.cases, *settings.full]
    named = Counter((case.load().name, n) for case in cases for n in case.conversations)
    for (name, number), times in named.items():
        words = "name it once, pictures and curves are told apart by it; for more set repetitions"
        require(times == 1, f"{path}: {name} with {number} conversations", times, words)
    return settings


def _check_case(case: Case | WholeSteps, place: str) -> None:
    key = f"{place}: {case.workload}"
    name, known = ("modes", MODES_IN_TURN) if isinstance(case, Case) else ("arms", STEP_ARMS)
    given = getattr(case, name)
    require(bool(given), f"{key}: {name}", given, f"of {', '.join(known)}")
    for arm in given:
        require(arm in known, f"{key}: {name}", arm, f"of {', '.join(known)}")
    require(case.latency_scale >= 0, f"{key}: latency_scale", case.latency_scale, "0 or more")
    if isinstance(case, Case):
        counts = case.conversations
        require(min(counts, default=0) > 0, f"{key}: conversations", counts, "name one, or more")
        for number in counts:
            words = f"nothing is run with {number} conversations; set serial_up_to, or more modes"
            require(bool(case.modes_for(number)), f"{key}: modes", given, words)
        case.load()
    else:
        rate, response_s = case.over_sample_rate, load_workload(case.workload).response_s
        require(case.prompts > 0, f"{key}: prompts", case.prompts, "at least 1")
        require(rate >= 0, f"{key}: over_sample_rate", rate, "0 or more")
        require(response_s is None, f"{key}: response_s", response_s, "give response_tokens")


def load_workload(name: str) -> Workload:
    """Of workloads/, or of a path."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / "workloads" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"workload: there is no {name!r}; there are {_shipped(path.parent)}")
    try:
        given = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    require(isinstance(given, dict), str(path), given, "write `key: value` lines")
    known = [name for name in Workload.__dataclass_fields__ if name not in ("name", "folder")]
    for key in given:
        if key not in known:
            raise ConfigError(f"{path}: {key}: no such key{nearest(str(key), known)}")
    for key in ("about", "turns", "prompt_tokens"):
        require(key in given, f"{path}: {key}", None, "has to be given")
    return Workload(name=path.stem, folder=path.parent, **given)


def write_run(settings: Settings, folder: Path, model: Path, rows: Path) -> Path:
    """The config of the run in `folder`, as a file: one step of training per repetition and arm of
    `steps`, and one before them that is not counted."""
    steps = settings.steps
    num_steps = 1 + settings.repetitions * len(steps.arms) if steps else 1
    given = {
        "model": {"path": str(model)},
        "data": {
            "train_files": [str(rows)],
            "train_batch_size": steps.prompts if steps else 1,
            "shuffle": False,
            # The check of rows counts the tool's schema, which no prompt has; see check_lengths.
            "truncation": "left",
        },
        # Two updates in a step, so that it has a pass for old log-probabilities; see steps.py.
        "actor": {"ppo_epochs": 2, "logprobs_in_tail": bool(steps and "in_tail" in steps.arms)},
        "rollout": {
            "multi_turn": {
                "tool_config_path": str(FOLDER / "tools.yaml"),
                "tool_timeout_s": 3600.0,  # a call takes what it takes,
                "max_tool_response_length": 10**9,  # and says what is planned
            },
            "on_failure": "raise",
            "trace": None,
        },
        "reward": {
            "custom_reward_function": {"path": str(FOLDER / "agent.py"), "name": "compute_score"}
        },
        "trainer": {
            "default_local_dir": str(folder),
            "experiment_name": "run",
            "logger": ["jsonl"],
            "total_training_steps": num_steps,
            "val_before_train": False,
            "resume_mode": "disable",
        },
    }
    path = folder / "run.yaml"
    OmegaConf.save(OmegaConf.merge(given, settings.run), path)
    return path


def make_model(settings: Settings, folder: Path) -> Path:
    """Random weights and the byte tokenizer; the folder with them."""
    options = dict(settings.model)
    if shape := options.pop("shape", None):
        require(shape in SHAPES, "model.shape", shape, f"one of {', '.join(SHAPES)}")
        dtype = options.pop("dtype", "float32")
        require(dtype in DTYPES, "model.dtype", dtype, f"one of {', '.join(DTYPES)}")
        require(not options, "model", list(options), "shape says it all; beside it dtype only")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = random_model(shape, device, getattr(torch, dtype))
        byte_tokenizer().save_pretrained(model)
        return model.resolve()
    known = option_names(tiny_model)
    for name in options:
        require(name in known, "model", name, f"one of {', '.join(sorted(known))}, or shape")
    return tiny_model(folder / "model", **options)


def check_run(config: Config) -> None:
    """ConfigError for what the arms of a comparison do not have, or have of their own."""
    agent, rate = config.rollout.agent, config.rollout.over_sample_rate
    require(rate == 0, "rollout.over_sample_rate", rate, "give it under `steps`, for over_sampled")
    words = "conversations are timed in rank 0; set 0, or measure with python -m benchmarks.scaling"
    require(agent.num_workers == 0, "rollout.agent.num_workers", agent.num_workers, words)


def check_lengths(cases: Sequence[Case], settings: Settings, config: Config) -> None:
    """ConfigError where a conversation of any repetition is longer than the run's limits.

    Of responses that are given as times no more is known yet than that an engine samples a token
    per second: an agent loop refuses longer ones.
    """
    words = f"the engine's speed is measured with prompts of {LONG} tokens; set more under `run`"
    require(config.max_model_len > LONG, "rollout.max_model_len", config.max_model_len, words)
    steps, seed = settings.steps, settings.seed
    of_steps = []
    if steps:
        most = steps.prompts * steps.samples(config.rollout.n)
        of_steps.append(Case(workload=steps.workload, conversations=[most]))
    for case in [*cases, *of_steps]:
        workload = case.load()
        draws = range(seed, seed + settings.repetitions_of(case) + 1)
        plans = [plan for s in draws for plan in workload.draw(max(case.conversations), s)]
        around = TEMPLATE_TOKENS * max(len(plan.turns) for plan in plans)
        response = max(plan.num_tokens - plan.prompt_tokens for plan in plans) + around
        prompt = max(plan.prompt_tokens for plan in plans) + TEMPLATE_TOKENS
        for key, needed, limit in (
            ("rollout.response_length", response, config.rollout.response_length),
            ("data.max_prompt_length", prompt, config.data.max_prompt_length),
        ):
            words = f"a conversation of {workload.name} may need {needed}; set more under `run`"
            require(needed <= limit, key, limit, words)


def _shipped(folder: Path) -> str:
    return ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
