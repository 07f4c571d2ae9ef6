"""Every name of SGLang's that minirl uses, in the sources of the SGLang that is installed. They are
read and not imported, which needs a GPU and all that SGLang depends on."""

import ast
import io
import pickle
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from minirl.config import load_config
from minirl.rollout.sglang_engine import engine_arguments, to_sampling_params
from minirl.rollout.sglang_weights import payloads

FOUND = find_spec("sglang")
pytestmark = pytest.mark.skipif(FOUND is None, reason="sglang is not installed")
FIELDS_OF_SERVER_ARGS = "arg_groups/fields"


def folder() -> Path:
    assert FOUND is not None and FOUND.submodule_search_locations
    return Path(FOUND.submodule_search_locations[0]) / "srt"


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((folder() / file).read_text())


def in_class(file: str, name: str) -> ast.ClassDef:
    [found] = [n for n in tree(file).body if isinstance(n, ast.ClassDef) and n.name == name]
    return found


def fields(file: str, name: str) -> set[str]:
    body = in_class(file, name).body
    return {
        n.target.id for n in body if isinstance(n, ast.AnnAssign) and type(n.target) is ast.Name
    }


def parameters(file: str, name: str, method: str) -> set[str]:
    methods = [n for n in in_class(file, name).body if getattr(n, "name", "") == method]
    assert methods, f"{name}.{method} is gone"
    arguments = methods[0].args
    return {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}


def test_the_engine() -> None:
    wanted = {"input_ids", "sampling_params", "return_logprob", "rid"}
    assert wanted <= parameters("entrypoints/engine.py", "Engine", "async_generate")
    parameters("entrypoints/engine.py", "Engine", "shutdown")
    known = set()
    for file in (folder() / FIELDS_OF_SERVER_ARGS).glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                known |= fields(f"{FIELDS_OF_SERVER_ARGS}/{file.name}", node.name)
    assert engine_arguments(load_config(["model.path=m"])).keys() <= known
    params = {"max_tokens": 1, "seed": 1, "temperature": 1, "top_p": 1, "top_k": 1, "min_p": 0}
    params |= {"stop_token_ids": [], "ignore_eos": True}
    known = fields("sampling/sampling_params.py", "SamplingParams")
    assert to_sampling_params(params).keys() <= known


@pytest.mark.parametrize(
    ("file", "owner", "method", "wanted"),
    [
        ("tokenizer_manager", "TokenizerManager", "auto_create_handle_loop", set()),
        ("tokenizer_manager", "TokenizerManager", "abort_request", {"rid"}),
        ("tokenizer_control_mixin", "TokenizerControlMixin", "flush_cache", {"timeout_s"}),
        ("tokenizer_control_mixin", "TokenizerControlMixin", "get_loads", set()),
        *(
            ("tokenizer_control_mixin", "TokenizerControlMixin", method, {"obj"})
            for method in (
                "release_memory_occupation",
                "resume_memory_occupation",
                "begin_weight_update",
                "end_weight_update",
                "update_weights_from_tensor",
            )
        ),
    ],
)
def test_the_manager(file: str, owner: str, method: str, wanted: set[str]) -> None:
    assert wanted <= parameters(f"managers/{file}.py", owner, method)


def test_what_travels() -> None:
    io_struct = "managers/io_struct.py"
    for request in ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"):
        assert "tags" in fields(io_struct, request)
    for request in ("BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"):
        in_class(io_struct, request)
    bucket = {"serialized_named_tensors", "load_format", "flush_cache"}
    assert bucket <= fields(io_struct, "UpdateWeightsFromTensorReqInput")
    assert {"success", "message"} <= fields(io_struct, "FlushCacheReqOutput")
    assert "num_waiting_reqs" in fields("managers/load_snapshot.py", "LoadSnapshot")
    assert "self.last_receive_tstamp" in (folder() / "managers/tokenizer_manager.py").read_text()


def test_the_meaning_of_an_answer() -> None:
    """The keys that to_token_output reads, where SGLang writes them."""
    source = (folder() / "managers/tokenizer_manager.py").read_text()
    for key in (
        "meta_info", "output_ids", "finish_reason", "num_retractions", "cached_tokens",
        "output_token_logprobs",
    ):  # fmt: skip
        assert f'"{key}"' in source, key


def test_its_unpickler_takes_our_payload() -> None:
    names = ("SafeUnpickler", "_safe_load_torch_storage")
    body = [n for n in tree("utils/common.py").body if getattr(n, "name", "") in names]
    assert len(body) == 2
    found: dict[str, Any] = {"pickle": pickle, "torch": torch, "io": io}
    exec(compile(ast.Module(body, []), "utils/common.py", "exec"), found)
    info = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], "offsets": [0]}
    init_info = {"num_bytes": 64, "ipc_handles": [{"storage_handle": b"one"}]}
    [payload] = payloads(init_info, info)
    [(_, content)] = found["SafeUnpickler"](io.BytesIO(payload)).load()
    assert content.dtype == torch.uint8 and content.numel() > 50
