"""Text to tokens and back, built from GGUF metadata and from tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from pagedkv.errors import UsageError  # noqa: E402
from pagedkv.runner.gguf_tokenizer import tokenizer_from_gguf  # noqa: E402
from pagedkv.runner.tokenizer import Tokenizer  # noqa: E402

# The 256 symbols that stand for bytes in byte-level BPE.
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ 1", "1 2", "Ã ©"]
TOKENS = [*BYTES, "he", "ll", "hell", "hello", "Ġhello", "12", "Ġ1", "Ã©", "<s>", "</s>", "<tool>"]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def metadata(**changes: Any) -> dict[str, Any]:
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": [NORMAL] * (len(TOKENS) - 3) + [CONTROL, CONTROL, USER_DEFINED],
        "merges": MERGES,
        "bos_token_id": TOKENS.index("<s>"),
        "eos_token_id": TOKENS.index("</s>"),
    }
    gguf = {f"tokenizer.ggml.{key}": value for key, value in {**values, **changes}.items()}
    return {**gguf, "tokenizer.chat_template": TEMPLATE}


def build(**changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(metadata(**changes), where="test.gguf")


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [TOKENS[token] for token in tokenizer.encode(text)]


def test_merges_apply_by_rank_within_words() -> None:
    assert pieces(build(), "hello hello") == ["hello", "Ġhello"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["Ġ", "1", "2"]),  # every digit by itself
        ("gpt-2", ["Ġ1", "2"]),  # a number with the space before it
        ("llama-bpe", ["Ġ", "12"]),  # up to three digits, without the space
        ("qwen2", ["Ġ", "1", "2"]),
        ("tekken", ["Ġ", "1", "2"]),
        ("default", ["Ġ", "12"]),
    ],
)
def test_pre_tokenizer_splits_numbers_its_own_way(pre: str, expected: list[str]) -> None:
    assert pieces(build(pre=pre, add_bos_token=False), " 12") == expected


def test_control_tokens_are_recognised_and_skipped_in_text() -> None:
    tokenizer = build()
    ids = tokenizer.encode("<s>hello</s><tool>")
    assert [TOKENS[token] for token in ids] == ["<s>", "hello", "</s>", "<tool>"]
    assert tokenizer.decode(ids) == "hello<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello</s><tool>"


def test_begin_and_end_tokens_are_added_as_the_file_says() -> None:
    assert pieces(build(), "he") == ["he"]
    assert pieces(build(add_bos_token=True), "he") == ["<s>", "he"]
    assert pieces(build(add_bos_token=True, add_eos_token=True), "he") == ["<s>", "he", "</s>"]
    assert pieces(build(pre="llama-bpe"), "he") == ["<s>", "he"]
    tokenizer = build(add_bos_token=True)
    assert tokenizer.encode("he", add_special_tokens=False) == [TOKENS.index("he")]


@given(st.text(max_size=30))
def test_every_text_round_trips(text: str) -> None:
    for special in ("<s>", "</s>", "<tool>"):
        text = text.replace(special, "")
    assert PLAIN.decode(PLAIN.encode(text)) == text


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=40))
def test_streamed_pieces_joined_equal_the_whole_for_any_tokens(token_ids: list[int]) -> None:
    assert "".join(streamed(PLAIN, token_ids)) == PLAIN.decode(token_ids)


@given(st.text(max_size=20))
def test_stream_never_shows_a_part_of_a_character(text: str) -> None:
    shown = streamed(PLAIN, PLAIN.encode(text, add_special_tokens=False))
    assert "".join(shown) == PLAIN.decode(PLAIN.encode(text))
    assert "\ufffd" not in "".join(shown).replace("\ufffd", "", text.count("\ufffd"))
    for piece in shown[:-1]:
        piece.encode()  # no lone surrogates either


def test_stream_shows_each_character_with_its_last_byte() -> None:
    euro = [
        TOKENS.index(symbol)
        for symbol in tokenizers.pre_tokenizers.ByteLevel(False).pre_tokenize_str("€")[0][0]
    ]
    assert len(euro) == 3
    assert streamed(PLAIN, [TOKENS.index("he"), *euro, TOKENS.index("he")]) == ["he", "", "", "€", "he", ""]


@given(st.lists(st.integers(0, 6), max_size=12))
def test_streamed_words_keep_their_spaces_with_a_decoder_that_strips_the_first(token_ids: list[int]) -> None:
    words = Tokenizer(METASPACE)
    shown, whole = "".join(streamed(words, token_ids)), words.decode(token_ids)
    if "\ufffd" in whole:  # a run of bytes that is no UTF-8 is replaced as a whole, but shown as it comes
        assert "\ufffd" in shown
    else:
        assert shown == whole


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.put(token_id) for token_id in token_ids), stream.flush()]


def _metaspace() -> Any:
    vocab = {"▁a": 0, "▁": 1, "b": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "<s>": 6}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    backend.add_special_tokens(["<s>"])
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


PLAIN = build()
METASPACE = _metaspace()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: expected 'gpt2' .*, got 'bert', in test.gguf"),
        ({"pre": "viking"}, "tokenizer.ggml.pre: expected .*, got 'viking', in test.gguf"),
        ({"merges": ["h e", "h zz"]}, r"tokenizer.ggml.merges\[1\]: expected .*, got 'h zz', in test.gguf"),
    ],
)
def test_vocabulary_that_cannot_be_read_right_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(**changes)


def test_chat_template_lays_out_a_conversation() -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert PLAIN.apply_chat_template(messages) == "<s>user: hello</s>\nassistant:"
    assert PLAIN.apply_chat_template(messages, add_generation_prompt=False) == "<s>user: hello</s>\n"
    assert PLAIN.encode_chat(messages)[0] == TOKENS.index("<s>")


def test_chat_template_knows_the_helpers_that_templates_expect() -> None:
    def render(template: str, **variables: Any) -> str:
        tokenizer = Tokenizer(METASPACE, chat_template=template)
        return tokenizer.apply_chat_template([{"role": "user", "content": "é<"}], **variables)

    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "é<"}]'
    assert render("{% for x in [1, 2] %}{% break %}{% endfor %}{{ tools }}", tools="t") == "t"
    with pytest.raises(UsageError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def render(template: str) -> str:
    return Tokenizer(METASPACE, chat_template=template).apply_chat_template([{"role": "user", "content": ""}])


def test_marks_of_the_assistant_s_words_add_nothing_to_the_text() -> None:
    marked = (
        "a\n{% for m in messages %}\n  {% generation %}\n{{ m.role }}!\n  {%- endgeneration %}\n{% endfor %}"
    )
    assert render(marked) == "a\nuser!"
    assert render("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}") == "21"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", '{"b": "é<", "a": [1]}'),
        ("separators=(',', ':')", '{"b":"é<","a":[1]}'),
        ("sort_keys=True", '{"a": [1], "b": "é<"}'),
        ("ensure_ascii=True", r'{"b": "\u00e9<", "a": [1]}'),
        ("true", r'{"b": "\u00e9<", "a": [1]}'),
        ("indent=1", '{\n "b": "é<",\n "a": [\n  1\n ]\n}'),
    ],
)
def test_json_in_templates_takes_the_options_that_templates_pass(arguments: str, expected: str) -> None:
    assert render("{{ {'b': 'é<', 'a': [1]} | tojson(" + arguments + ") }}") == expected


def test_broken_template_refuses_conversations_and_no_plain_prompts() -> None:
    tokenizer = Tokenizer(METASPACE, chat_template="{% if %}")
    assert tokenizer.encode("b") == [2]
    with pytest.raises(UsageError, match="chat template: expected valid Jinja, got"):
        tokenizer.apply_chat_template([{"role": "user", "content": "b"}])


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // (messages | length - 1) }}",
        "{{ range(10**9) | length }}",
        "{{ 2.0 ** (messages | length + 9999) }}",
        "{{ 'a'.index(messages[0].role) }}",
        "{{ '{x}'.format() }}",
        "{{ messages | length | dictsort }}",
    ],
)
def test_bad_or_escaping_template_is_an_error(template: str) -> None:
    with pytest.raises(UsageError, match="chat template"):
        render(template)


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "hi"}], [{"role": 1}]])
def test_messages_without_roles_are_refused(messages: Any) -> None:
    with pytest.raises(UsageError, match="messages: expected mappings with a role, got"):
        PLAIN.apply_chat_template(messages)


def test_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(UsageError, match="chat template: expected one in the model's files, got none"):
        Tokenizer(METASPACE).apply_chat_template([{"role": "user", "content": "hi"}])


class TestFolder:
    def write(self, folder: Path, settings: dict[str, Any] | None = None, jinja: str | None = None) -> None:
        METASPACE.save(str(folder / "tokenizer.json"))
        if settings is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if jinja is not None:
            (folder / "chat_template.jinja").write_text(jinja)

    def chat(self, folder: Path) -> str:
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer is not None
        return tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])

    def test_without_tokenizer_json_has_no_tokenizer(self, tmp_path: Path) -> None:
        assert Tokenizer.from_folder(tmp_path) is None

    def test_alone_encodes_but_cannot_chat(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer is not None
        assert tokenizer.encode("b") == [2]
        assert tokenizer.chat_template is None

    def test_template_comes_from_its_own_file_first(self, tmp_path: Path) -> None:
        self.write(tmp_path, {"chat_template": "old", "bos_token": "<s>"}, "new {{ bos_token }}")
        assert self.chat(tmp_path) == "new <s>"

    def test_settings_hold_a_template_and_token_objects(self, tmp_path: Path) -> None:
        self.write(tmp_path, {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<s>"}})
        assert self.chat(tmp_path) == "<s>"

    def test_of_several_templates_the_default_is_taken(self, tmp_path: Path) -> None:
        templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        self.write(tmp_path, {"chat_template": templates})
        assert self.chat(tmp_path) == "d"

    @pytest.mark.parametrize("contents", ["{", "[]", "{}", '{"model": 1}'])
    def test_with_a_broken_file_is_refused_by_name(self, tmp_path: Path, contents: str) -> None:
        (tmp_path / "tokenizer.json").write_text(contents)
        with pytest.raises(UsageError, match=r"tokenizer\.json: expected"):
            Tokenizer.from_folder(tmp_path)


def test_text_that_utf_8_cannot_express_is_refused() -> None:
    with pytest.raises(UsageError, match="text: expected text that UTF-8 can express"):
        build().encode("\udcff")
