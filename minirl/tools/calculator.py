"""A calculator: a parser of arithmetic expressions, exact, without `eval`."""

import operator
import re
from collections.abc import Callable
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from typing import Any, ClassVar

from minirl.tools.base import BaseTool, ToolError, ToolResponse

MAX_CHARACTERS = 1_000
MAX_DEPTH = 50
"""Of parentheses and signs within one another."""
DIGITS = 12
"""Significant digits of a result that is not whole; more where its whole part is longer."""


class CalculatorTool(BaseTool):
    """Evaluates `expression`; what it cannot read is told to the model with the place."""

    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Numbers, + - * / // % and parentheses, e.g. (3 + 4) * 2",
                    }
                },
                "required": ["expression"],
            },
        },
    }

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """The value of `parameters["expression"]`, as text."""
        return ToolResponse(format_number(evaluate(parameters["expression"]))), 0.0, {}


def evaluate(expression: str) -> "int | Fraction":
    """The exact value of an expression of numbers, `+ - * / // %`, signs and parentheses.

    Numbers are whole or decimal, with or without thousands separators (`1,200.50`). `//` rounds
    down and `%` has the sign of the divisor, as in Python. ToolError says what cannot be read, and
    where. Time and memory are bounded: no operator makes a number longer than both its operands.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {MAX_CHARACTERS} characters")
    parser = _Parser(expression)
    value = parser.sum(0)
    if parser.token:
        raise parser.unexpected()
    return value


def format_number(value: "int | Fraction") -> str:
    """A whole number in full, anything else as a decimal of 12 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    precision = max(DIGITS, len(str(abs(int(value)))) + 2)
    context = Context(prec=precision, rounding=ROUND_HALF_EVEN)
    decimal = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    decimal = decimal.normalize(context)
    return f"{decimal:f}" if decimal.adjusted() >= -DIGITS else str(decimal)


_TOKEN = re.compile(r"\s*(\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+\.?\d*|\.\d+|//|\*\*|\S)", re.ASCII)
_NUMBER = re.compile(r"\.?\d", re.ASCII)
Number = int | Fraction
_ALIASES = {"×": "*", "·": "*", "÷": "/", "−": "-"}  # noqa: RUF001


class _Parser:
    """Recursive descent: sum := product (+|- product)*; product := atom (*|/|//|% atom)*."""

    def __init__(self, text: str) -> None:
        self._matches = list(_TOKEN.finditer(text))
        self._next = -1
        self._advance()

    def sum(self, depth: int) -> Number:
        value = self._product(depth)
        while self.token in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value += sign * self._product(depth)
        return value

    def unexpected(self) -> ToolError:
        if not self.token:
            return ToolError("the expression ends where a number was expected")
        place = self._matches[self._next].start(1) + 1
        return ToolError(f"cannot read {self.token!r} at character {place} of the expression")

    def _product(self, depth: int) -> Number:
        value = self._atom(depth)
        while self.token in _OPERATORS:
            calculate = _OPERATORS[self._take()]
            right = self._atom(depth)
            if calculate is not operator.mul and right == 0:
                raise ToolError("division by zero")
            value = calculate(value, right)
        return value

    def _atom(self, depth: int) -> Number:
        if depth > MAX_DEPTH:
            raise ToolError(f"the expression is nested deeper than {MAX_DEPTH} levels")
        if self.token in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            return sign * self._atom(depth + 1)
        if self.token == "(":
            self._take()
            value = self.sum(depth + 1)
            if self.token != ")":
                raise self.unexpected() if self.token else ToolError("a ')' is missing")
            self._take()
            return value
        if not _NUMBER.match(self.token):
            raise self.unexpected()
        digits = self._take().replace(",", "")
        return int(digits) if digits.isdigit() else Fraction(digits)

    def _take(self) -> str:
        token = self.token
        self._advance()
        return token

    def _advance(self) -> None:
        self._next += 1
        text = self._matches[self._next][1] if self._next < len(self._matches) else ""
        self.token = _ALIASES.get(text, text)


_OPERATORS: dict[str, Callable[[Number, Number], Number]] = {
    "*": operator.mul,
    "/": Fraction,
    "//": operator.floordiv,
    "%": operator.mod,
}
