"""Write the policy of a run as a Hugging Face folder, for transformers, vLLM and other runs.

    python -m minirl.export RUN [STEP] OUT [--dtype bfloat16|float32]

RUN is a run directory (runs/<experiment>), STEP a checkpoint's (the latest unless given), OUT a
folder that does not exist yet. Weights are safetensors in model.dtype unless --dtype says
otherwise; the tokenizer, the chat template and generation_config.json come along. Of a run with
model.lora_rank the weights are merged, and OUT/adapter is the adapter alone, in PEFT's format.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from minirl.config import Config, ConfigError, load_config, run_config_file
from minirl.trainer import checkpoint, lora
from minirl.trainer.buckets import WeightBuckets
from minirl.trainer.fsdp import check_model_folder, empty_model, read_weights


def export(run: Path, out: Path, *, step: int | None = None, dtype: str | None = None) -> Path:
    """Write `out` from a checkpoint of the run directory `run` and return the checkpoint.

    `out` appears when it is complete. Raises ConfigError for a run, step or folder that is not
    there, or an `out` that is.
    """
    if out.exists():
        raise ConfigError(f"{out}: is there already; name a folder that is not")
    config = _config_of(run)
    source = find_checkpoint(run, step)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was cut off
    model = empty_model(config.model.path, config.model)
    if config.model.lora_rank:
        _fill_with_merged(model, config, source, partial)
    else:
        checkpoint.load_weights(source, "actor", model)
    model.to(getattr(torch, dtype or config.model.dtype)).save_pretrained(partial)
    _save_tokenizer(config, partial)
    _save_generation_config(config, partial)
    partial.rename(out)
    return source


@torch.no_grad()
def _fill_with_merged(model: PreTrainedModel, config: Config, source: Path, folder: Path) -> None:
    """Of a run that trains an adapter: what the engine got. The adapter goes to folder/adapter."""
    adapted = read_weights(config.model.path, config.model)
    lora.add_adapter(adapted, config.model, seed=0)
    checkpoint.load_weights(source, "actor", adapted)
    folder.mkdir(parents=True)
    lora.save_adapter(adapted, folder / "adapter")
    for bucket in WeightBuckets(adapted, max_bytes=2**30, dtype=torch.float32):
        for name, tensor in bucket:
            model.get_parameter(name).copy_(tensor)


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """That of `step`, or the latest; ConfigError lists those that are there."""
    found = dict(checkpoint.complete(run / "checkpoints"))
    if not found:
        raise ConfigError(f"{run}: has no checkpoint; trainer.save_freq makes them")
    if step is not None and step not in found:
        raise ConfigError(f"{run}: has no checkpoint of step {step}, but of {sorted(found)}")
    return found[max(found) if step is None else step]


def _config_of(run: Path) -> Config:
    file = run_config_file(run)
    config = load_config([str(file)])
    try:
        check_model_folder(config.model.path)
    except ConfigError as error:
        hint = "a relative path counts from the folder in which the run was started"
        raise ConfigError(f"{file}: {error} ({hint})") from error
    return config


def _save_tokenizer(config: Config, out: Path) -> None:
    model = config.model
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    if model.chat_template:
        tokenizer.chat_template = Path(model.chat_template).read_text()
    tokenizer.save_pretrained(out)


def _save_generation_config(config: Config, out: Path) -> None:
    """The model's own, in place of what transformers makes of its config.json: it may name more
    tokens that end an answer, and how to sample."""
    name = "generation_config.json"
    found = cached_file(config.model.path, name, _raise_exceptions_for_missing_entries=False)
    if found is not None:
        shutil.copyfile(found, out / name)


def main() -> None:
    """`python -m minirl.export`."""
    parser = argparse.ArgumentParser(
        prog="python -m minirl.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("step", type=int, nargs="?", metavar="STEP")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    arguments = parser.parse_args()
    try:
        source = export(arguments.run, arguments.out, step=arguments.step, dtype=arguments.dtype)
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"wrote {arguments.out} from {source}")


if __name__ == "__main__":
    main()
