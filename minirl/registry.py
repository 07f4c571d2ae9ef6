"""Named components: by registered name, or by `package.module:attribute`."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Interchangeable functions or classes; their keyword-only arguments are their options.

    >>> losses = Registry("policy loss")
    >>> @losses.register("vanilla")
    ... def vanilla(inputs, *, clip_ratio: float = 0.2): ...
    >>> losses.build("vanilla", {"clip_ratio": 0.3})  # a partial
    >>> losses.find("my_package.losses:mine")  # whatever can be imported works where a name does
    """

    def __init__(self, kind: str, own: str = "write your own as package.module:name") -> None:
        self.kind = kind
        self.own = own
        """What to do for one that is not there."""
        self._entries: dict[str, F] = {}

    def __iter__(self):
        return iter(sorted(self._entries))

    def register(self, name: str) -> Callable[[F], F]:
        """Decorate a function or class to make it available as `name`."""

        def decorator(entry: F) -> F:
            if name in self._entries and not _same_source(self._entries[name], entry):
                owner = self._entries[name].__module__
                raise ValueError(f"{self.kind} {name!r} is already registered by {owner}")
            self._entries[name] = entry
            return entry

        return decorator

    def find(self, name: str) -> F:
        """Return the entry called `name`; ValueError names the nearest one when there is none."""
        if ":" in name:
            return locate(name, self.kind)
        if name not in self._entries:
            hint = f"{nearest(name, self._entries)}; {self.own}"
            raise ValueError(f"unknown {self.kind} {name!r}{hint}")
        return self._entries[name]

    def build(self, name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
        """Return `name` with `options` bound, each checked against its signature."""
        entry = self.find(name)
        known = option_names(entry)
        for key in options.keys() - known:
            raise ValueError(f"{self.kind} {name!r} has no option {key!r}{nearest(key, known)}")
        return partial(entry, **options)


def option_names(entry: Callable[..., Any]) -> set[str]:
    """Names of the keyword-only parameters of a function or class."""
    parameters = inspect.signature(entry).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def locate(path: str, kind: str = "object") -> Any:
    """Import `package.module:attribute` (or with a dot); ValueError says what is missing."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name:
        raise ValueError(f"{kind} {path!r}: write it as package.module:attribute")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # of the module's own code, whatever it is
        problem = f"it cannot be imported: {type(error).__name__}: {error}"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            problem = f"no module {missing!r} can be imported"
        raise ValueError(f"{kind} {path!r}: {problem}") from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ValueError(
            f"{kind} {path!r}: {module_name} has no {attribute!r}{nearest(attribute, names)}"
        )
    return getattr(module, attribute)


def require_methods(found: Any) -> None:
    """ValueError for a class without a method that its base class leaves to it."""
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ValueError(f"{found.__qualname__} has no method `{'`, `'.join(missing)}`; write it")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint to append to an error: the closest known name, and all of them when they are few."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return hint + (f" (known: {', '.join(known) or 'none'})" if len(known) <= 30 else "")


def _same_source(left: Any, right: Any) -> bool:
    """True for a module that was executed twice (as `__main__` and under its own name)."""
    return left.__qualname__ == right.__qualname__ and (
        inspect.getsourcefile(left) == inspect.getsourcefile(right)
    )
