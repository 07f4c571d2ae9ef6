"""What conversations are like: turns, lengths and tool latencies drawn from distributions."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minirl.config import ConfigError, require
from minirl.config.checks import share
from minirl.registry import nearest

KINDS = ("constant", "exponential", "lognormal", "trace")
AGENT = "benchmarks.async_vs_sync.agent:PlannedLoop"


@dataclass(frozen=True)
class Distribution:
    """Of lengths or seconds; `max` cuts what is drawn.

    In YAML: `0.5`, `{constant: 0.5}`, `{exponential: 0.3}` (its mean), `{lognormal: 0.3, sigma: 1}`
    (its mean, and the standard deviation of the logarithm), `{trace: FILE}` (a number per line, or
    the trajectories of a run, whose tool calls it then takes; relative to the workload's file).
    """

    kind: str
    mean: float = 0.0
    sigma: float = 1.0
    max: float = math.inf
    recorded: tuple[float, ...] = ()

    @classmethod
    def parse(cls, value: Any, key: str, folder: Path) -> "Distribution":
        """From YAML; ConfigError begins with `key`."""
        given: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"constant": value}
        for name in given.keys() - {*KINDS, "sigma", "max"}:
            raise ConfigError(f"{key}.{name}: no such key{nearest(str(name), KINDS)}")
        kinds = [name for name in KINDS if name in given]
        require(len(kinds) == 1, key, value, f"name one of {', '.join(KINDS)}")
        has_sigma = kinds == ["lognormal"] or "sigma" not in given
        require(has_sigma, f"{key}.sigma", given.get("sigma"), "lognormal alone has one")
        options = {name: _number(given[name], f"{key}.{name}") for name in given if name in LIMITS}
        if kinds == ["trace"]:
            return cls(
                "trace", recorded=_recorded(given["trace"], f"{key}.trace", folder), **options
            )
        return cls(kinds[0], mean=_number(given[kinds[0]], f"{key}.{kinds[0]}"), **options)

    def draw(self, random: np.random.Generator, scale: float = 1.0) -> float:
        """One value, times `scale`."""
        match self.kind:
            case "constant":
                value = self.mean
            case "exponential":
                value = random.exponential(self.mean)
            case "lognormal" if self.mean:
                value = random.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
            case "trace":
                value = self.recorded[random.integers(len(self.recorded))]
            case _:
                value = 0.0
        return float(min(value, self.max)) * scale


LIMITS = ("sigma", "max")


def _number(value: Any, key: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and 0 <= value < math.inf, key, value, "must be a number, 0 or more")
    return float(value)


def _recorded(name: Any, key: str, folder: Path) -> tuple[float, ...]:
    path = folder / str(name)
    require(path.is_file(), key, name, f"there is no file {path}")
    values: list[float] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            calls = [call["seconds"] for call in row["tool_calls"]] if type(row) is dict else [row]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path}: line {number}: got {line[:40]!r}; write a number of seconds, or the "
                "trajectory of a run, as its trajectories/*.jsonl have them"
            ) from None
        values += [_number(value, f"{path}: line {number}") for value in calls]
    require(bool(values), key, name, "holds no tool call")
    return tuple(values)


@dataclass(frozen=True)
class Turn:
    """One generation and the tool call after it."""

    response_tokens: int
    tool_s: float | None
    """None: no tool is called; the conversation ends."""
    observation_tokens: int = 0
    fails: bool = False


@dataclass(frozen=True)
class Plan:
    """One conversation, before it is held."""

    prompt_tokens: int
    turns: tuple[Turn, ...]

    @property
    def new_tokens(self) -> list[int]:
        """Per turn, what it reads and none before it has: the prompt, then tool results."""
        return [self.prompt_tokens, *(turn.observation_tokens for turn in self.turns[:-1])]

    @property
    def num_tokens(self) -> int:
        """At most, without what the chat template writes."""
        return sum(self.new_tokens) + sum(turn.response_tokens for turn in self.turns)

    def reading(self, new_tokens: Iterable[int]) -> "Plan":
        """The same, with these for `new_tokens`."""
        first, *later = new_tokens
        observations = zip(self.turns, [*later, 0], strict=True)
        turns = tuple(replace(turn, observation_tokens=n) for turn, n in observations)
        return replace(self, prompt_tokens=first, turns=turns)

    def row(self, uid: str, salt: int, others: Sequence["Plan"] = ()) -> dict[str, Any]:
        """As a row of a dataset, whose further samples have the turns of `others`. Prompts begin
        with `salt`, the last digit first, so that no prefix cache holds them, however short."""
        text = f"{salt:06}"[::-1].ljust(self.prompt_tokens, ".")[: self.prompt_tokens]
        return {
            "uid": uid,
            "prompt": [{"role": "user", "content": text}],
            "data_source": "planned",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "agent_name": AGENT,
            "extra_info": {"plans": [asdict(plan) for plan in (self, *others)]},
        }


@dataclass(kw_only=True)
class Workload:
    """What a YAML file in workloads/ says; lengths are tokens, of the byte tokenizer characters."""

    name: str
    about: str
    turns: Any
    """Generations per conversation; a tool call stands between two."""
    prompt_tokens: Any
    """Of the user's message."""
    response_tokens: Any = None
    """Of each generation."""
    response_s: Any = None
    """Instead of response_tokens: as many as the engine samples in this time for one conversation
    alone."""
    observation_tokens: Any = 0
    """Of each tool result."""
    tool_s: Any = 0
    """Latency of a tool call."""
    slow_share: float = 0.0
    """Of the tool calls that take `slow_factor` times as long."""
    slow_factor: float = 10.0
    failing_share: float = 0.0
    """Of the tool calls that end in an error, which the model is told."""
    folder: Path = Path()
    """Of the file, where traces are looked for."""

    def __post_init__(self) -> None:
        for name in ("slow_share", "failing_share"):
            _number(getattr(self, name), f"{self.name}.{name}")
        share(self.name, self, "slow_share", "failing_share")
        _number(self.slow_factor, f"{self.name}.slow_factor")
        both = (self.response_tokens is None) == (self.response_s is None)
        require(not both, f"{self.name}.response_tokens", None, "give it, or response_s")
        drawn = ("turns", "prompt_tokens", "observation_tokens", "tool_s", self.response_key)
        self._distributions = {
            name: Distribution.parse(getattr(self, name), f"{self.name}.{name}", self.folder)
            for name in drawn
        }

    @property
    def response_key(self) -> str:
        """The one that is given."""
        return "response_s" if self.response_tokens is None else "response_tokens"

    def draw(
        self, number: int, seed: int, *, token_s: float = 1.0, latency_scale: float = 1.0
    ) -> list[Plan]:
        """So many conversations. The i-th is the same however many there are.

        `token_s` is the time of a token of one conversation alone, for `response_s`.
        """
        per_s = 1 / token_s if self.response_tokens is None else 1.0
        return [
            self._plan(np.random.default_rng([seed, index]), per_s, latency_scale)
            for index in range(number)
        ]

    def _plan(self, random: np.random.Generator, per_s: float, latency_scale: float) -> Plan:
        def length(name: str, scale: float = 1.0, least: int = 1) -> int:
            return max(least, round(self._distributions[name].draw(random, scale)))

        num_turns, prompt_tokens = length("turns"), length("prompt_tokens")
        turns = []
        for index in range(num_turns):
            response_tokens = length(self.response_key, per_s)
            if index == num_turns - 1:
                turns.append(Turn(response_tokens, None))
                continue
            slow = self.slow_factor if random.random() < self.slow_share else 1.0
            seconds = self._distributions["tool_s"].draw(random, latency_scale * slow)
            observation = length("observation_tokens", least=0)
            fails = bool(random.random() < self.failing_share)
            turns.append(Turn(response_tokens, seconds, 0 if fails else observation, fails))
        return Plan(prompt_tokens, tuple(turns))
