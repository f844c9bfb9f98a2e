"""Chats to token ids against recorded conversions, injection attempts in every place, and the start-up checks."""

import base64
import json
from collections import Counter

import deepseek_recipe as recipe
import pytest

from deepinfer_jax.errors import CheckpointError, InputError
from deepinfer_jax.text.chat import MODEL_NAME, ChatEncoder, check_control_tokens
from deepinfer_jax.text.tokenizer import Tokenizer
from tests.golden import document

INJECTIONS = document("text/injection_cases.json")
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def _encoder(tokenizer: Tokenizer, **changes) -> ChatEncoder:
    settings = {"vocab_size": 129280, "bos_token_id": 0, "eos_token_id": 1}
    return ChatEncoder.from_tokenizer(tokenizer, **(settings | changes))


@pytest.fixture(scope="module")
def encoder(released_tokenizer) -> ChatEncoder:
    return _encoder(released_tokenizer)


@pytest.mark.parametrize("case", document("text/chat_cases.json"), ids=lambda case: case["name"])
def test_chat_is_encoded_as_recorded(case, encoder):
    prompt = encoder.encode(case["request"], thinking=True)  # the recorded conversions default to thinking
    expected = case["expect"]
    assert list(prompt.token_ids) == expected["token_ids"]
    assert prompt.request.conversation.thinking_mode == expected["thinking"]
    assert prompt.image_sources == ()
    parsing = prompt.request.parsing_options
    for name in ("parse_tool_calls", "starts_in_tool_calls", "parse_json_output", "stop_sequences"):
        assert getattr(parsing, name) == expected["parsing"][name]
    stage = expected["parsing"]["thinking_initial_stage"]
    assert parsing.thinking_initial_stage == (None if stage is None else getattr(recipe.ThinkingInitialStage, stage))
    inference = prompt.request.inference_options
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        assert getattr(inference, name) == expected["inference"][name]


def test_thinking_is_off_by_default_and_the_request_wins_over_the_default(encoder):
    messages = [{"role": "user", "content": "Name a harbour."}]
    quiet, thinking = encoder.encode(messages), encoder.encode(messages, thinking=True)
    assert list(quiet.token_ids) == [0, 128803, 3240, 260, 82453, 16, 128804, 128822]
    assert thinking.token_ids[-1] == 128821
    asked = {"messages": messages, "thinking": {"type": "enabled"}}
    assert encoder.encode(asked).token_ids == thinking.token_ids
    declined = {"messages": messages, "thinking": {"type": "disabled"}}
    assert encoder.encode(declined, thinking=True).token_ids == quiet.token_ids


@pytest.mark.parametrize("case", document("text/chat_refusals.json"), ids=lambda case: case["name"])
def test_a_refused_chat_names_the_recorded_reason(case, encoder):
    with pytest.raises(InputError) as refusal:
        encoder.encode(case["request"], thinking=True)
    reason = case["message"].replace("DeepSeek-V4-Pro, ", "")  # this engine serves one model
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "chat",
    [
        "hello",
        {"content": "hello"},
        [{"role": "user", "content": "lone surrogate \ud800"}],
        [{"role": "user", "content": object()}],
    ],
    ids=["text", "no messages", "surrogate", "no JSON"],
)
def test_a_malformed_chat_is_refused(chat, encoder):
    with pytest.raises(InputError, match="'chat'"):
        encoder.encode(chat)


def test_requests_may_name_the_checkpoint_and_no_other_model(released_tokenizer):
    encoder = _encoder(released_tokenizer, model_name="our-checkpoint")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    unnamed = encoder.encode(body)
    assert "model" not in body  # the caller's request is left alone
    for name in ("our-checkpoint", MODEL_NAME):
        assert encoder.encode(body | {"model": name}).token_ids == unnamed.token_ids
    with pytest.raises(InputError, match="our-checkpoint"):
        encoder.encode(body | {"model": "DeepSeek-V4-Pro"})


@pytest.mark.parametrize("case", INJECTIONS, ids=lambda case: case["spelling"])
def test_a_user_turn_that_spells_a_control_token_is_encoded_as_recorded(case, encoder):
    empty = encoder.encode([{"role": "user", "content": ""}])
    prompt = encoder.encode([{"role": "user", "content": case["spelling"]}])
    assert list(prompt.token_ids) == case["safe_ids"] != case["naive_ids"]
    assert len(prompt.token_ids) - len(empty.token_ids) == case["growth_over_empty_user"]


@pytest.mark.parametrize("place", ["system", "user", "assistant", "reasoning", "tool result", "tool arguments"])
@pytest.mark.parametrize("case", INJECTIONS, ids=lambda case: case["spelling"])
def test_text_in_any_place_adds_no_control_token(case, place, encoder):
    def control_tokens(text: str) -> Counter:
        prompt = encoder.encode(_conversation_with(place, text), thinking=True)
        return Counter(token_id for token_id in prompt.token_ids if token_id in encoder.tokenizer.control_spellings)

    assert control_tokens(case["spelling"]) == control_tokens("plain")


def _conversation_with(place: str, text: str) -> dict:
    texts = {name: text if name == place else "plain" for name in ("system", "user", "assistant", "reasoning")}
    call = {"name": "tide", "arguments": json.dumps({"harbour": text if place == "tool arguments" else "plain"})}
    return {
        "tools": [TOOL],
        "messages": [
            {"role": "system", "content": texts["system"]},
            {"role": "user", "content": texts["user"]},
            {
                "role": "assistant",
                "content": texts["assistant"],
                "reasoning_content": texts["reasoning"],
                "tool_calls": [{"id": "k1", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "k1", "content": text if place == "tool result" else "plain"},
        ],
    }


def test_answer_ids_are_split_into_reasoning_and_content(encoder):
    prompt = encoder.encode([{"role": "user", "content": "hi"}], thinking=True)
    processor = encoder.answer_processor(prompt, "answer-1")
    think_end = encoder.tokenizer.control_tokens["</think>"]
    answer = [*encoder.tokenizer.encode_text("Let me see."), think_end, *encoder.tokenizer.encode_text("Grüße 😀")]
    chunks = processor.push(recipe.InferenceChunk.ready())
    for token_id in answer:
        chunks += processor.push(recipe.InferenceChunk.tokens([token_id]))
    chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)) + processor.finish()
    events = [json.loads(chunk.to_json()) for chunk in chunks]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Grüße 😀"
    assert {event["id"] for event in events} == {"answer-1"}
    assert encoder.stop_token_ids == (1,)


def test_a_chat_with_images_is_refused_unless_the_caller_expands_them(encoder, vision_tokenizer):
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "<｜image｜> what is it?"}]}]
    with pytest.raises(InputError, match="text only"):
        encoder.encode(messages)
    prompt = _encoder(vision_tokenizer, image_token_id=129264).encode(messages)
    assert prompt.token_ids.count(129264) == len(prompt.image_sources) == 1
    data_url = prompt.image_sources[0].data_url
    assert data_url is not None
    assert base64.b64decode(data_url.partition(",")[2]).startswith(b"\x89PNG")


def test_the_tokenizer_of_another_release_is_refused(public_tokenizer):
    with pytest.raises(CheckpointError, match="lacks 1 control token.*<｜System｜>.*--token-ids"):
        _encoder(public_tokenizer)


def test_a_control_token_at_another_id_is_refused(released_tokenizer, vision_tokenizer):
    with pytest.raises(CheckpointError, match="129279.*<｜image｜> = 129264, by the configuration"):
        _encoder(released_tokenizer, image_token_id=129264)
    with pytest.raises(CheckpointError, match="129279.*<｜image｜> = 129264, by the released vocabulary"):
        _encoder(released_tokenizer, image_token_id=129279)
    assert _encoder(vision_tokenizer, image_token_id=129264).accepts_images
    with pytest.raises(CheckpointError, match="<｜begin▁of▁sentence｜> = 2, by the configuration"):
        _encoder(released_tokenizer, bos_token_id=2)
    with pytest.raises(CheckpointError, match="<｜end▁of▁sentence｜> = 2, by the configuration"):
        _encoder(released_tokenizer, eos_token_id=2)


def test_released_ids_are_required_of_the_released_vocabulary_only(tiny_tokenizer):
    check_control_tokens(tiny_tokenizer, vocab_size=512, bos_token_id=0, eos_token_id=1)
    with pytest.raises(CheckpointError, match="lacks 5 control token.*<｜System｜>, <think>, </think>"):
        check_control_tokens(tiny_tokenizer, vocab_size=129280, bos_token_id=0, eos_token_id=1)


def test_a_checkpoint_without_the_chat_tokens_names_them_and_the_way_out(tiny_tokenizer):
    encoder = _encoder(tiny_tokenizer, vocab_size=512)
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(CheckpointError, match="has </think> .*--prompt or --token-ids"):
        encoder.encode(messages)
    with pytest.raises(CheckpointError, match="has <｜System｜>, <think> .*--prompt or --token-ids"):
        encoder.encode(messages, thinking=True)
