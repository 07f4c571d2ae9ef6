import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirl.chat import ChatBuilder, certify
from minirl.testing import ScriptedServer, byte_tokenizer, tiny_model
from minirl.tools.calculator import CalculatorTool
from minirl.types import TokenOutput

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def test_tokenizer_is_bytes_and_tags():
    text = "Grüße <tool_call>{}</tool_call> <|im_end|>\n\x00 世界"
    token_ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(token_ids) == text
    assert len(TOKENIZER) == 263
    assert len(TOKENIZER.encode("<tool_call></tool_call><tool_response></tool_response>")) == 4


def test_template_can_be_extended_turn_by_turn():
    chat = ChatBuilder(TOKENIZER)
    certify(chat)
    certify(chat, [CalculatorTool({}).tool_schema])
    assert chat.stop_token_ids[0] == END


@pytest.mark.parametrize("tied", [False, True])
def test_tiny_model_loads_and_answers(tmp_path, tied):
    path = tiny_model(tmp_path / "model", tied=tied, vocab_size=288, num_layers=1)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    token_ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(token_ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits
    assert logits.shape == (1, len(token_ids), 288)
    assert logits.std() > 0
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    assert (model.dtype, model.config.eos_token_id) == (torch.float32, END)


def test_tiny_model_is_seeded_and_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(7)
    paths = [tiny_model(tmp_path / str(i), seed=i // 2, num_layers=1) for i in range(3)]
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))
    first, same, other = ((p / "model.safetensors").read_bytes() for p in paths)
    assert first == same != other
    with pytest.raises(ValueError, match="vocab_size: got 100; the tokenizer needs 263"):
        tiny_model(tmp_path / "small", vocab_size=100)


async def generate(server, request_id="r", prompt=(1, 2), **params):
    return await server.generate(request_id, prompt_ids=list(prompt), sampling_params=params)


async def test_scripted_turns_per_conversation():
    server = ScriptedServer(TOKENIZER, ["a", "bc"], weight_version=3)
    first, other = await asyncio.gather(generate(server), generate(server, "s"))
    second = await generate(server, prompt=(1, 2, 3), seed=9)
    assert first == other
    assert TOKENIZER.decode(second.token_ids) == "bc<|im_end|>"
    assert second.logprobs == [server.logprob(t) for t in second.token_ids]
    assert (second.finish_reason, second.weight_version) == ("stop", 3)
    assert [(r.request_id, r.turn) for r in server.requests] == [("r", 0), ("s", 0), ("r", 1)]
    assert server.requests[2].prompt_ids == [1, 2, 3]
    assert server.requests[2].sampling_params == {"seed": 9}
    with pytest.raises(LookupError, match="the script has 2 turns"):
        await generate(server)


@pytest.mark.parametrize(
    ("max_tokens", "text", "reason"),
    [(2, "ab", "length"), (3, "abc", "length"), (4, "abc<|im_end|>", "stop")],
)
async def test_scripted_length(max_tokens, text, reason):
    output = await generate(ScriptedServer(TOKENIZER, ["abc"]), max_tokens=max_tokens)
    assert (TOKENIZER.decode(output.token_ids), output.finish_reason) == (text, reason)


async def test_scripted_functions_and_outputs():
    def plain(request_id, turn, prompt_ids):
        return f"{request_id}{turn}{len(prompt_ids)}"

    async def slow(request_id, turn, prompt_ids):
        await asyncio.sleep(0)
        return TokenOutput(token_ids=[5], logprobs=[-2.0], finish_reason="abort")

    output = await generate(ScriptedServer(TOKENIZER, plain), stop_token_ids=[0])
    assert output.token_ids == [*TOKENIZER.encode("r02"), 0]
    assert (await generate(ScriptedServer(TOKENIZER, slow))).finish_reason == "abort"


async def test_scripted_delays_reorder_replies():
    delays = {"a": 0.05, "b": 0.0}
    server = ScriptedServer(TOKENIZER, ["x"], delay_s=lambda request_id, turn: delays[request_id])
    order = []

    async def ask(request_id):
        await generate(server, request_id)
        order.append(request_id)

    await asyncio.gather(ask("a"), ask("b"))
    assert order == ["b", "a"]
    assert [r.request_id for r in server.requests] == ["a", "b"]
