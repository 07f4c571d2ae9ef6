import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.tools import ToolError
from minirl.tools.calculator import MAX_CHARACTERS, CalculatorTool, evaluate, format_number


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("10 - 4 - 3", "3"),
        ("100 / 10 / 2", "5"),
        ("7 / 2", "3.5"),
        ("1 / 3", "0.333333333333"),
        ("-2 / 3", "-0.666666666667"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("0.1 + 0.2", "0.3"),
        (".5 * 4", "2"),
        ("2. * 3", "6"),
        ("--5", "5"),
        ("2 * -(3 + 1)", "-8"),
        ("1,200.50 * 2", "2401"),
        ("6 × 7 ÷ 2 − 1", "20"),  # noqa: RUF001
        ("99 * 99 * 99", "970299"),
        ("10000000000000 + 0.5", "10000000000000.5"),
        ("1 / 10000000000000000", "1E-16"),
        ("  ( 1 )  ", "1"),
    ],
)
def test_value(expression, expected):
    assert format_number(evaluate(expression)) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "ends where a number was expected"),
        ("3 +", "ends where a number was expected"),
        ("2 ** 3", "cannot read '**' at character 3"),
        ("5 5", "cannot read '5' at character 3"),
        ("2(3)", "cannot read '(' at character 2"),
        ("1,2345", "cannot read ',' at character 2"),
        ("(1 + 2", "a ')' is missing"),
        ("1)", r"cannot read ')' at character 2"),
        ("__import__('os')", "cannot read '_' at character 1"),
        ("1 / (2 - 2)", "division by zero"),
        ("1 % 0", "division by zero"),
        ("1 // 0", "division by zero"),
        ("(" * 60 + "1" + ")" * 60, "nested deeper"),
        ("-" * 60 + "1", "nested deeper"),
        ("1" * (MAX_CHARACTERS + 1), "longer than 1000 characters"),
    ],
)
def test_what_cannot_be_read_is_said(expression, message):
    with pytest.raises(ToolError) as error:
        evaluate(expression)
    assert message in str(error.value)


numbers = st.integers(0, 999).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=12,
)


@given(expressions)
def test_agrees_with_python(expression):
    tokens = expression.replace("(", " ( ").replace(")", " ) ").replace("-", " - ").split()
    exact = " ".join(f"Fraction({t})" if t.isdigit() else t for t in tokens)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(expression)
    else:
        assert evaluate(expression) == expected


@given(st.text("0123456789+-*/%(). ,x", max_size=MAX_CHARACTERS))
def test_any_text_is_a_number_or_a_tool_error(text):
    with contextlib.suppress(ToolError):
        format_number(evaluate(text))


async def test_tool():
    tool = CalculatorTool({})
    response, reward, metrics = await tool.execute("id", {"expression": "6 * 7"})
    assert (tool.name, response.text, reward, metrics) == ("calculator", "42", 0.0, {})
    assert "'expression' is a required property" in tool.find_problem({})
    assert tool.find_problem({"expression": 3}).startswith("expression: 3 is not of type")
