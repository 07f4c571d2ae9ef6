"""The program of the processes in which `prime` runs a reward function.

It is started by its path and imports nothing but the standard library, so that a process is there
in a few hundredths of a second: what else is imported is what the reward function imports. The
parent sends pickles (it is trusted) and reads one line of JSON each: `{"ready": true}` at first,
then `{"result": ...}` or `{"error": traceback}`; when the function cannot be loaded, it just ends.
"""

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1


def import_file(path: str | Path) -> ModuleType:
    """The module in a file, which need not be on the import path."""
    name = f"minirl_custom_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it is a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by its name
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Load the function that the parent names, then score what it sends, until it hangs up."""
    _end_with_parent()
    # What the function prints or reads must not get between us and the parent.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    path, name, options, sys.path = pickle.load(requests)
    module = import_file(path) if path.endswith(".py") else importlib.import_module(path)
    function = partial(getattr(module, name), **options)
    answer = json.dumps({"ready": True})
    while True:
        print(answer, file=answers, flush=True)
        try:
            arguments = pickle.load(requests)
        except EOFError:
            return
        answer = _answer(function, arguments)


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    try:
        result = function(*arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        if isinstance(result, Mapping):
            result = {**result, "pred": None if (p := result.get("pred")) is None else str(p)}
        return json.dumps({"result": result}, default=_plain)
    except Exception:  # of user code: the parent makes it the failure of this trajectory
        return json.dumps({"error": traceback.format_exc()})


def _plain(value: Any) -> Any:
    """Numbers that JSON does not know (numpy's, sympy's) as Python's; anything else as text."""
    return float(value) if hasattr(value, "__float__") else str(value)


def _end_with_parent() -> None:
    """However the parent ends: a reward function that hangs would not notice a closed pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
