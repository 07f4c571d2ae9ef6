import textwrap

import pytest

from minirl.config import ConfigError
from minirl.tools import BaseTool, ToolResponse, function_tool, load_tools


class PlainTool(BaseTool):
    """A tool without a schema of its own."""

    async def execute(self, instance_id, parameters, **execute_kwargs):
        return ToolResponse("plain"), 0.0, {}


class NeedyTool(PlainTool):
    """Takes for granted what its config holds."""

    def __init__(self, config, tool_schema=None):
        self.url = config["url"]


@function_tool
def shout(text: str, *, mark: str = "!") -> str:
    """Say it loudly."""
    return text.upper() + mark


@pytest.fixture
def load(tmp_path):
    def write_and_load(text):
        path = tmp_path / "tools.yaml"
        path.write_text(textwrap.dedent(text))
        return load_tools(path)

    return write_and_load


PLAIN = """
- class_name: test_load.PlainTool
  config: {type: native, size: 3}
  tool_schema:
    type: function
    function:
      name: plain
      description: A tool.
      parameters:
        type: object
        properties: {x: {type: integer}}
        required: [x]
"""


async def test_tools_by_name_in_the_order_of_the_file(load):
    tools = load(
        f"tools:{PLAIN}"
        "- class_name: minirl.tools.calculator:CalculatorTool\n"
        "- {class_name: 'test_load:shout', config: {mark: '?'}}\n"
    )
    assert list(tools) == ["plain", "calculator", "shout"]
    assert tools["plain"].config == {"type": "native", "size": 3}
    assert "'a' is not of type 'integer'" in tools["plain"].find_problem({"x": "a"})
    assert (await tools["shout"].execute("id", {"text": "a"}))[0].text == "A?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tool: []", "expected `tools:` and a list"),
        ("tools: [", "not valid YAML"),
        ("tools: [{config: {}}]", "entry 1: class_name: missing"),
        (
            "tools: [{class_name: 'minirl.tools.calculator:CalculatorTol'}]",
            "entry 1: .*no 'CalculatorTol'; did you mean 'CalculatorTool'",
        ),
        ("tools: [{class_name: 'nowhere:Tool'}]", "no module 'nowhere'"),
        ("tools: [{class_name: Tool}]", "write it as package.module:attribute"),
        (
            "tools: [{class_name: 'minirl.tools.calculator:evaluate'}]",
            "neither a BaseTool class nor a @function_tool",
        ),
        (
            "tools: [{class_name: 'test_load:shout', tool_shema: {}}]",
            "tool_shema: no such key; did you mean 'tool_schema'",
        ),
        ("tools: [{class_name: 'test_load:shout', config: 3}]", "config: got 3"),
        (
            "tools: [{class_name: 'test_load:shout', config: {marc: x}}]",
            "config.marc: .*did you mean 'mark'",
        ),
        ("tools: [{class_name: 'test_load:PlainTool'}]", "entry 1: tool_schema: missing"),
        (
            "tools: [{class_name: 'test_load:PlainTool', tool_schema: {type: function}}]",
            "tool_schema: 'function' is a required property",
        ),
        (
            "tools: [{class_name: 'test_load:PlainTool', tool_schema: {type: function, function: "
            "{name: p, parameters: {type: object, properties: {x: {type: integr}}}}}}]",
            r"tool_schema.function.parameters.properties.x.type: not a JSON schema: 'integr'",
        ),
        ("tools: [{class_name: 'test_load:NeedyTool'}]", "entry 1: KeyError: 'url'"),
        ("tools: [{class_name: 'minirl.tools:BaseTool'}]", "BaseTool has no method `execute`"),
        ("tools: [{class_name: 'test_load:shout'}, {class_name: 'test_load:shout'}]", "entry 2: "),
    ],
)
def test_errors_name_file_entry_and_remedy(load, tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(text)
    assert str(error.value).startswith(str(tmp_path / "tools.yaml"))


def test_missing_file():
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read: No such file"):
        load_tools("nowhere.yaml")
