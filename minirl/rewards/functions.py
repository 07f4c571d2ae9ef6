"""Reward functions: by data source, or the user's own."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from os.path import realpath
from pathlib import Path
from traceback import extract_tb
from typing import Any

from minirl.config import ConfigError, CustomRewardConfig, RewardConfig, require
from minirl.registry import Registry, locate, nearest, option_names
from minirl.rewards import gsm8k
from minirl.rewards.scoring_process import import_file
from minirl.tools.threads import run_function

Score = float | Mapping[str, Any]

RewardFunction = Callable[[str, str, Any, Mapping[str, Any]], Awaitable[Score]]
"""(data_source, solution_str, ground_truth, extra_info) -> a score, or a mapping with `score`."""

SCORERS: Registry[Callable[..., Score]] = Registry(
    "reward function for data_source", "name your own in reward.custom_reward_function"
)
"""Quick functions by data_source, called on the event loop."""

SCORERS.register("openai/gsm8k")(gsm8k.score_and_answer)
SCORERS.register("calculator")(gsm8k.score_and_answer)

_POSITIONAL = ("data_source", "solution_str", "ground_truth", "extra_info")
_GIVEN = {*_POSITIONAL, *(f"{name}s" for name in _POSITIONAL)}
"""What a manager gives, one by one or as lists."""


def load_reward_function(config: RewardConfig) -> RewardFunction:
    """The function of reward.custom_reward_function, or the one that chooses by data_source.

    reward.reward_kwargs are bound to it. A plain function of the user's runs in a thread, so it may
    wait or compute for long. A class is made once, with reward.reward_kwargs, and what it makes is
    called. ConfigError names what cannot be found or is not accepted.
    """
    if config.custom_reward_function is None:
        return _by_data_source(config.reward_kwargs)
    function = _load_custom(config.custom_reward_function)
    _check_options(function, config.reward_kwargs)
    if inspect.isclass(function):
        return partial(run_function, _make(function, config))
    _check_call(function, config.reward_kwargs)
    return partial(run_function, function, **config.reward_kwargs)


def _make(scorer: type, config: RewardConfig) -> Callable[..., Any]:
    require(
        config.reward_manager != "prime",
        "reward.reward_manager",
        config.reward_manager,
        "its processes cannot make a reward class; write naive or dapo",
    )
    try:
        made = scorer(**config.reward_kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.reward_kwargs: {error}") from error
    except Exception as error:  # of the user's class, whatever it is
        problem = f"{scorer.__name__}: {type(error).__name__}: {error}"
        raise ConfigError(f"reward.custom_reward_function: {problem}") from error
    _check_call(made, {})
    return made


def require_custom(custom: CustomRewardConfig | None, manager: str) -> CustomRewardConfig:
    """`custom`; ConfigError where it is null, and `manager` can do nothing without it."""
    if custom is None:
        raise ConfigError(
            "reward.custom_reward_function: got null; the functions by data_source score one "
            f"trajectory, at once: name your own for reward_manager={manager}, or set "
            "reward.reward_manager=naive"
        )
    return custom


def _by_data_source(options: Mapping[str, Any]) -> RewardFunction:
    known = set().union(*(option_names(SCORERS.find(name)) for name in SCORERS))
    for key in options.keys() - known:
        raise ConfigError(f"reward.reward_kwargs.{key}: no such option{nearest(key, known)}")

    scorer = cache(lambda data_source: SCORERS.build(data_source, options))

    async def score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> Score:
        return scorer(data_source)(data_source, solution_str, ground_truth, extra_info)

    return score


def _load_custom(config: CustomRewardConfig) -> Callable[..., Any]:
    key = "reward.custom_reward_function"
    if not config.path.endswith(".py"):
        try:
            function = locate(f"{config.path}:{config.name}", key)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    else:
        require(Path(config.path).is_file(), f"{key}.path", config.path, "no such file")
        try:
            module = import_file(config.path)
        except (Exception, SystemExit) as error:  # of the user's file, whatever it is
            raise ConfigError(
                f"{key}.path: {config.path} cannot be imported: {_line(config.path, error)}"
                f"{type(error).__name__}: {error}"
            ) from error
        if not hasattr(module, config.name):
            names = [n for n, v in vars(module).items() if inspect.isfunction(v)]
            raise ConfigError(
                f"{key}.name: {config.path} has no {config.name!r}{nearest(config.name, names)}"
            )
        function = getattr(module, config.name)
    if not callable(function):
        raise ConfigError(f"{key}.name: {config.name!r} in {config.path} is not a function")
    return function


def _check_call(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """It takes what a manager gives it by place: verl gives it by name, whatever the order."""
    key, given = "reward.custom_reward_function.name", ", ".join(_POSITIONAL)
    try:
        bound = inspect.signature(function).bind(*_POSITIONAL, **options)
    except TypeError as error:  # what is made of a class without __call__ is not callable
        raise ConfigError(f"{key}: it cannot be called with ({given}): {error}") from error
    for name, value in bound.arguments.items():
        if name in _GIVEN and name not in (value, f"{value}s"):
            raise ConfigError(f"{key}: its {name} would get {value}; write them as ({given})")


def _line(path: str, error: BaseException) -> str:
    """`line 3: ` of the file itself, though a library that it called may have raised."""
    file = realpath(path)
    if isinstance(error, SyntaxError) and realpath(error.filename or "") == file:
        return f"line {error.lineno}: "
    frames = [f for f in extract_tb(error.__traceback__) if realpath(f.filename) == file]
    return f"line {frames[-1].lineno}: " if frames else ""


def _check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    known = [name for name in known if name not in _GIVEN]
    for key in options.keys() - set(known):
        raise ConfigError(
            f"reward.reward_kwargs.{key}: the reward function has no such parameter"
            f"{nearest(key, known)}"
        )
