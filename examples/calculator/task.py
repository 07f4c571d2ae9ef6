"""The task: questions about integer arithmetic, and conversations that answer them, well or not."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

Messages = list[dict[str, Any]]

ONE_STEP = [
    "What is {}?",
    "Compute {}.",
    "Calculate {}.",
    "How much is {}?",
    "Please work out {}.",
    "Find the value of {}.",
]
TWO_STEPS = [
    "Take {}, then {}. What do you get?",
    "Compute {}. Then {}.",
    "First work out {}. Now {}. What is the result?",
    "Start with {} and {}.",
]
PHRASES = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}"}
LARGEST_NUMBER = 99
LARGEST_RESULT = 9999


@dataclass(frozen=True, slots=True)
class Question:
    """`Take 12 * 7, then subtract 9. What do you get?` has the steps `12 * 7` and `84 - 9`."""

    text: str
    steps: tuple[str, ...]

    @property
    def answer(self) -> int:
        """Value of the last step."""
        return evaluate(self.steps[-1])


def evaluate(expression: str) -> int:
    """Value of numbers joined by ` + `, ` - ` and ` * `, the product binding tighter."""
    terms = expression.replace(" - ", " + -").split(" + ")
    return sum(math.prod(map(int, term.split(" * "))) for term in terms)


def draw_questions(random: Random, taken: set[str]) -> Iterator[Question]:
    """Endless questions, none about a calculation in `taken`, which grows with each."""
    while True:
        question = _draw_two_steps(random) if random.random() < 0.4 else _draw_one_step(random)
        if str(question.steps) not in taken:
            taken.add(str(question.steps))
            yield question


def solve(question: Question, random: Random) -> Messages:
    """One call per step, then the answer in the form that is scored."""
    return [*_calls(question.steps), _say(f"#### {question.answer}")]


def guess(question: Question, random: Random) -> Messages:
    """No call: a number of the right size, out of thin air."""
    size = max(abs(question.answer), 9)
    return [_say(f"#### {random.randint(0, 2 * size)}")]


def ramble(question: Question, random: Random) -> Messages:
    """The right calls, but the answer in a form that is not scored."""
    return [*_calls(question.steps), _say(f"The answer is {question.answer}.")]


HABITS: dict[Callable[[Question, Random], Messages], float] = {
    solve: 0.25,
    guess: 0.2,
    ramble: 0.55,
}
"""Share of each in the warm-up conversations."""


def draw_conversation(question: Question, random: Random) -> Messages:
    """The question, answered in one of the HABITS."""
    (habit,) = random.choices(list(HABITS), list(HABITS.values()))
    return [{"role": "user", "content": question.text}, *habit(question, random)]


def recite(question: Question, random: Random) -> Messages:
    """The question in symbols, three times over: practice in copying. `?` is the first result."""
    first, *rest = question.steps
    lines = [first, *("?" + step[step.index(" ") :] for step in rest)]
    return [{"role": "user", "content": question.text}, _say("\n".join(lines * 3))]


def _draw_expression(random: Random, start: int, num_operators: int) -> str:
    """`start` and further numbers, with a result of 0 to LARGEST_RESULT."""
    while True:
        words = [str(start)]
        for _ in range(num_operators):
            words += [random.choice("+-*"), str(random.randint(1, LARGEST_NUMBER))]
        expression = " ".join(words)
        if 0 <= evaluate(expression) <= LARGEST_RESULT:
            return expression


def _draw_one_step(random: Random) -> Question:
    start = random.randint(1, LARGEST_NUMBER)
    expression = _draw_expression(random, start, random.choice([1, 2]))
    return Question(random.choice(ONE_STEP).format(expression), (expression,))


def _draw_two_steps(random: Random) -> Question:
    first = _draw_expression(random, random.randint(1, LARGEST_NUMBER), 1)
    second = _draw_expression(random, evaluate(first), 1)
    _, operator, number = second.split(" ")
    text = random.choice(TWO_STEPS).format(first, PHRASES[operator].format(number))
    return Question(text, (first, second))


def _calls(steps: tuple[str, ...]) -> Messages:
    messages: Messages = []
    for step in steps:
        call = {"name": "calculator", "arguments": {"expression": step}}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            }
        )
        messages.append({"role": "tool", "content": str(evaluate(step))})
    return messages


def _say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
