"""`python`: runs the model's programs, each in a sandbox of its own."""

import asyncio
import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from minirl.registry import nearest
from minirl.tools.base import BaseTool, ToolResponse
from minirl.tools.sandbox import (
    ISOLATIONS,
    PROTECTIONS,
    Outcome,
    Protection,
    Sandbox,
    SandboxError,
    SandboxLimits,
    find_sandbox,
)

logger = logging.getLogger(__name__)

REMEDY = (
    "install bubblewrap (apt-get install bubblewrap), or let programs make user namespaces "
    "(container: --security-opt seccomp=unconfined; Ubuntu: "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0), or take it out of config.require"
)


class PythonTool(BaseTool):
    """Runs `code` in a fresh interpreter and tells what it printed and how it ended.

    Config, all optional: the fields of `SandboxLimits` (`timeout_s`, `memory_mb`, `processes`,
    `disk_mb`, `output_bytes`); `require`: protections without which to refuse the start, of
    `network, files, memory, processes`; `isolation`: `auto`, `bwrap`, `namespaces` or `none`;
    `packages: true` to show programs this environment's site-packages (numpy, sympy, ...);
    `max_concurrent`: programs at a time, the number of cores by default, of each process that runs
    agent loops.

    ValueError when the config is wrong or a required protection cannot be had here.
    """

    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "python",
            "description": (
                "Run a Python program and return what it prints. Every call is a new process in an "
                "empty directory: variables, imports and files of earlier calls are gone."
            ),
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {
                        "type": "string",
                        "description": "The whole program; print() what you want to see.",
                    }
                },
                "required": ["code"],
            },
        },
    }

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        _check(config)
        limits = SandboxLimits(**{key: config[key] for key in _LIMITS if key in config})
        self._sandbox = _make(
            config.get("isolation", "auto"), limits, config.get("packages", False)
        )
        self._free = asyncio.Semaphore(config.get("max_concurrent", len(os.sched_getaffinity(0))))
        missing = [name for name, in_force in self.protection.items() if not in_force]
        for name in config.get("require", []):
            if name in missing:
                raise ValueError(
                    f"config.require: {name}: cannot be had here by isolation "
                    f"{self._sandbox.isolation!r}; {REMEDY}"
                )
        logger.log(
            logging.WARNING if missing else logging.INFO,
            "tool %r: isolation %r; not protected: %s",
            self.name,
            self._sandbox.isolation,
            ", ".join(missing) or "nothing",
        )

    @property
    def protection(self) -> dict[Protection, bool]:
        """What programs were found to be unable to get around: network, files, memory, processes.

        Whatever it says, programs end with their call, and so do all processes they started; under
        isolation `none` unless one of them kills its supervisor.
        """
        return self._sandbox.protection

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """Output and, unless it is 0, the exit status of `parameters["code"]`."""
        async with self._free:
            outcome = await self._sandbox.run(parameters["code"])
        failed = float(outcome.returncode != 0)
        stopped = float(outcome.ending != "exit")
        text = describe(outcome, self._sandbox.limits)
        return ToolResponse(text), 0.0, {"failed": failed, "stopped": stopped}


def describe(outcome: Outcome, limits: SandboxLimits) -> str:
    """What the model is told: the output, and how the program ended when it did not end well."""
    output = outcome.output.decode("utf-8", "replace").rstrip("\n")
    words = _ending(outcome, limits)
    if not words:
        return output or "[no output]"
    return f"{output}\n[{words}]" if output else f"[{words}]"


def _ending(outcome: Outcome, limits: SandboxLimits) -> str:
    code = outcome.returncode
    if outcome.ending == "timeout":
        return f"stopped: it did not end within {limits.timeout_s:g} s"
    if outcome.ending == "output":
        return f"stopped: it printed more than {limits.output_bytes} bytes"
    if code == -signal.SIGXCPU:
        return f"stopped: it used more than {limits.timeout_s:g} s of CPU time"
    if code is not None and code < 0:
        names = {known.value: known.name for known in signal.Signals}  # not of every real-time one
        return f"ended by signal {names.get(-code, -code)}"
    return f"exit status {code}" if code else ""


_LIMITS = [field.name for field in fields(SandboxLimits)]
_NUMBERS = [*_LIMITS, "max_concurrent"]
_OTHER = {"require": list, "isolation": str, "packages": bool}


def _check(config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in _NUMBERS:
            _check_number(key, value)
        elif key in _OTHER:
            if not isinstance(value, _OTHER[key]):
                raise ValueError(f"config.{key}: got {value!r}; expected {_OTHER[key].__name__}")
        elif key != "type":
            raise ValueError(f"config.{key}: no such key{nearest(key, [*_NUMBERS, *_OTHER])}")
    for name in config.get("require", []):
        if name not in PROTECTIONS:
            raise ValueError(f"config.require: got {name!r}{nearest(str(name), PROTECTIONS)}")
    isolation = config.get("isolation", "auto")
    if isolation not in ("auto", *ISOLATIONS):
        raise ValueError(
            f"config.isolation: got {isolation!r}{nearest(isolation, ('auto', *ISOLATIONS))}"
        )


def _check_number(key: str, value: Any) -> None:
    kinds = (int, float) if key == "timeout_s" else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < float("inf"):
        expected = "a positive number" if key == "timeout_s" else "a positive whole number"
        raise ValueError(f"config.{key}: got {value!r}; expected {expected}")


def _make(isolation: Any, limits: SandboxLimits, packages: bool) -> Sandbox:
    try:
        if isolation == "auto":
            return find_sandbox(limits, packages=packages)
        sandbox = Sandbox(isolation, limits, packages=packages)
        sandbox.protection  # noqa: B018 - tries it
        return sandbox
    except SandboxError as error:
        raise ValueError(
            f"config.isolation: {isolation!r} does not work here: {error}; {REMEDY}"
        ) from error
