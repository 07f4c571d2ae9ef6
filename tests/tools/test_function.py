import asyncio
import functools
import threading
from typing import Literal

import pytest

from minirl.tools import BaseTool, ToolResponse, function_tool
from minirl.tools.function import json_type, parse_docstring


@function_tool
def weather(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None
) -> dict:
    """Forecast the weather.

    Only for cities.

    Args:
        city (str): Name of the city,
            in English.
        days: How far to look.

    Returns:
        The forecast.
    """
    return {"city": city, "days": days, "unit": unit}


def test_schema_comes_from_annotations_and_docstring():
    assert isinstance(weather, BaseTool)
    assert weather.tool_schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast the weather.\n\nOnly for cities.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city, in English."},
                    "days": {"type": "integer", "description": "How far to look."},
                    "unit": {"enum": ["C", "F"]},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]
                    },
                },
                "required": ["city"],
            },
        },
    }


def test_arguments_are_checked():
    assert weather.find_problem({"city": "Oslo", "tags": None}) is None
    assert "'city' is a required property" in weather.find_problem({})
    assert "days" in weather.find_problem({"city": "Oslo", "days": "two"})
    assert "'when' was unexpected" in weather.find_problem({"city": "Oslo", "when": "now"})


def test_it_stays_a_function():
    assert weather("Oslo", days=2)["days"] == 2
    assert weather.__name__ == "weather"


async def test_results_become_text():
    response, reward, metrics = await weather.execute("id", {"city": "Tromsø"})
    assert response == ToolResponse('{"city": "Tromsø", "days": 1, "unit": "C"}')
    assert (reward, metrics) == (0.0, {})

    @function_tool
    async def echo(text: str) -> str:
        """Say it again."""
        await asyncio.sleep(0)
        return text

    assert (await echo.execute("id", {"text": "a"}))[0].text == "a"


async def test_a_whole_number_is_an_int_where_one_is_wanted():
    @function_tool
    def show(a: int, b: int | None, c: float, d: str | float) -> str:
        """Say what it is."""
        return repr((a, b, c, d))

    arguments = {"a": 3.0, "b": 3.0, "c": 3.0, "d": 3.0}
    assert show.find_problem(arguments) is None
    assert (await show.execute("id", arguments))[0].text == "(3, 3, 3.0, 3.0)"


async def test_a_plain_function_leaves_the_event_loop_free():
    released = threading.Event()

    @function_tool
    def wait() -> str:
        """Wait for the event loop."""
        assert released.wait(10)
        return threading.current_thread().name

    running = asyncio.create_task(wait.execute("id", {}))
    await asyncio.sleep(0)
    released.set()  # never reached if the function ran on the loop
    response, _, _ = await running
    assert response.text != threading.current_thread().name


async def test_exceptions_of_the_function_pass_through():
    @function_tool
    def stop() -> None:
        """Raise what threads and futures treat in a way of their own."""
        raise StopIteration("x")

    @function_tool
    def leave() -> None:
        """End the program."""
        raise SystemExit(1)

    with pytest.raises(RuntimeError, match="StopIteration"):
        await stop.execute("id", {})
    with pytest.raises(RuntimeError, match=r"leave raised SystemExit\(1\)"):
        await leave.execute("id", {})


async def test_an_async_function_in_a_plain_decorator_is_awaited():
    def decorated(function):
        return functools.wraps(function)(lambda **arguments: function(**arguments))

    @function_tool
    @decorated
    async def double(x: int) -> int:
        """Double a number."""
        return 2 * x

    assert (await double.execute("id", {"x": 4}))[0].text == "8"


async def test_keyword_only_parameters_are_hidden_from_the_model():
    @function_tool
    def look_up(key: str, *, table: dict) -> str:
        """Look a word up."""
        return table[key]

    assert list(look_up.parameters_schema["properties"]) == ["key"]
    assert "unexpected" in look_up.find_problem({"key": "a", "table": {}})
    response, _, _ = await look_up.execute("id", {"key": "a"}, table={"a": "b"})
    assert response.text == "b"


def test_functions_without_a_schema_are_refused():
    def no_doc(x: int): ...

    def no_type(x):
        """Text."""

    def stars(*numbers: int):
        """Text."""

    def odd(x: set):
        """Text."""

    for function, message in [
        (no_doc, "'no_doc': needs a docstring"),
        (no_type, "'no_type': write parameter 'x' as `x: type`"),
        (stars, "write parameter 'numbers'"),
        (odd, "'odd': x: no JSON schema for <class 'set'>"),
    ]:
        with pytest.raises(TypeError, match=message):
            function_tool(function)


def test_json_types():
    assert json_type(dict[str, float], "") == {
        "type": "object",
        "additionalProperties": {"type": "number"},
    }
    assert json_type(list, "") == {"type": "array"}
    assert json_type(bool | None, "") == {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
    with pytest.raises(TypeError, match="p: no JSON schema"):
        json_type(dict[int, str], "p")


def test_docstring_without_sections():
    assert parse_docstring("One.\n\nTwo: three.") == ("One.\n\nTwo: three.", {})
