import pytest

from minirl.registry import Registry, locate, nearest, option_names


@pytest.fixture
def losses() -> Registry:
    registry: Registry = Registry("policy loss")

    @registry.register("vanilla")
    def vanilla(inputs, *, clip_ratio: float = 0.2):
        return inputs, clip_ratio

    @registry.register("gspo")
    def gspo(inputs):
        return inputs

    return registry


def test_names_are_found_and_listed_in_order(losses: Registry) -> None:
    assert list(losses) == ["gspo", "vanilla"]
    assert losses.find("gspo")(3) == 3
    assert losses.build("vanilla", {"clip_ratio": 0.3})(1) == (1, 0.3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vanila", {}, "unknown policy loss 'vanila'; did you mean 'vanilla'? (known: gspo, van"),
        (
            "zzz",
            {},
            "unknown policy loss 'zzz' (known: gspo, vanilla); write your own as package.module:na",
        ),
        ("vanilla", {"clip_rato": 1}, "has no option 'clip_rato'; did you mean 'clip_ratio'?"),
        ("vanilla", {"inputs": 1}, "'vanilla' has no option 'inputs'"),
        ("gspo", {"x": 1}, "'gspo' has no option 'x' (known: none)"),
        ("no_such_package:f", {}, "no module 'no_such_package' can be imported"),
        ("json.no_such_part:f", {}, "no module 'json.no_such_part' can be imported"),
        ("json:dupms", {}, "json has no 'dupms'; did you mean 'dumps'?"),
        (":f", {}, "write it as package.module:attribute"),
    ],
)
def test_what_cannot_be_found(losses: Registry, name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        losses.build(name, options)
    assert message in str(caught.value)


def test_import_paths_work_where_a_name_does(losses: Registry) -> None:
    import json

    assert losses.find("json:dumps") is locate("json.dumps") is json.dumps
    assert losses.build("json:dumps", {"indent": 1})([1]) == "[\n 1\n]"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_part", "ModuleNotFoundError: No module named 'no_such_part'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("int('x')", "ValueError: invalid literal"),
        ("raise SystemExit('set a key first')", "SystemExit: set a key first"),
    ],
)
def test_an_error_inside_a_found_module_is_told_with_its_name(
    losses: Registry, tmp_path, monkeypatch, source: str, error: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_loss.py").write_text(source)
    with pytest.raises(ValueError) as caught:
        losses.find("broken_loss:f")
    assert str(caught.value).startswith(
        f"policy loss 'broken_loss:f': it cannot be imported: {error}"
    )


def test_a_name_belongs_to_one_owner(losses: Registry) -> None:
    with pytest.raises(ValueError, match="'gspo' is already registered by test_registry"):
        losses.register("gspo")(lambda inputs: inputs)
    assert losses.register("gspo")(losses.find("gspo"))  # a module that is executed twice


def test_only_keyword_only_parameters_are_options() -> None:
    class Manager:
        def __init__(self, function, path=".", *, rate: float, depth: int = 1) -> None: ...

    assert option_names(Manager) == {"rate", "depth"}


def test_many_names_are_not_all_listed() -> None:
    assert nearest("x", [f"name{i}" for i in range(31)]) == ""
    assert nearest("name3", [f"name{i}" for i in range(31)]) == "; did you mean 'name3'?"
