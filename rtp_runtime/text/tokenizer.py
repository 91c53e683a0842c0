"""A checkpoint's tokenizer: text to ids and back, chats to text, and the ids that end a text.

tokenizer.json is read by the `tokenizers` library itself, which starts in a tenth of a second; other formats go
through transformers, which takes seconds. GGUF vocabularies are not read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rtp_runtime.errors import CheckpointError, RequestError
from rtp_runtime.text.chat import ChatTemplate
from rtp_runtime.text.files import chat_templates, named_tokens, read_object, stop_ids

_OTHER_FORMATS = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


class Backend(Protocol):
    """The library that does the work."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class Tokenizer:
    """Text to ids and back, with the chat template and stop ids of one checkpoint."""

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        templates: Mapping[str, str],
        stop_ids: Sequence[int] = (),
        where: str = "the checkpoint",
    ) -> None:
        self._backend = backend
        self._templates = dict(templates)
        self._compiled: dict[str, ChatTemplate] = {}
        self._where = where
        self.special_tokens = dict(special_tokens)
        """Named tokens: bos_token, eos_token, …"""
        eos = backend.token_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*stop_ids, *([] if eos is None else [eos])]))
        """Ids that end a text: of generation_config.json, config.json and the tokenizer, each once."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. A model's embedding may have more rows."""
        return self._backend.vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are not text."""
        return self._backend.special_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with `add_special_tokens`, with what the tokenizer puts around it (often a first bos)."""
        return self._backend.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary are nothing."""
        special = self.special_ids if skip_special_tokens else frozenset()
        return self._backend.decode([each for each in ids if each not in special])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation by the checkpoint's chat template. Encode it with `add_special_tokens=False`.

        Raises RequestError when there is no template or it refuses the messages, ConfigError for a bad template.
        """
        template = self._template("tool_use" if tools is not None and "tool_use" in self._templates else "default")
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables)

    def _template(self, name: str) -> ChatTemplate:
        if name not in self._templates:
            raise RequestError(f"{self._where} has no chat template. Use generate with a prompt instead.")
        if name not in self._compiled:
            where = f"the chat template of {self._where}"
            self._compiled[name] = ChatTemplate(self._templates[name], self.special_tokens, where=where)
        return self._compiled[name]


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer in a checkpoint's directory, or None when it has none.

    Raises CheckpointError for tokenizer files that cannot be read, ConfigError for the small files beside them.
    """
    root = Path(directory)
    config = read_object(root / "tokenizer_config.json")
    tokens = named_tokens(root, config)
    if (root / "tokenizer.json").is_file():
        backend: Backend = _load_json(root / "tokenizer.json", config, tokens)
    elif any((root / name).is_file() for name in _OTHER_FORMATS):
        from rtp_runtime.text.transformers_backend import load_with_transformers

        backend, named = load_with_transformers(root)
        tokens = {**named, **tokens}
    else:
        return None
    templates = chat_templates(root, config)
    return Tokenizer(backend, special_tokens=tokens, templates=templates, stop_ids=stop_ids(root), where=str(root))


class JsonBackend:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        # A file may have been saved with truncation or padding switched on; neither belongs to a prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id


def _load_json(path: Path, config: Mapping[str, Any], tokens: Mapping[str, str]) -> JsonBackend:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}. Fetch the file again.") from error
    _add_declared_tokens(tokenizer, config, tokens)
    return JsonBackend(tokenizer)


def _add_declared_tokens(tokenizer: Any, config: Mapping[str, Any], tokens: Mapping[str, str]) -> None:
    """Tokens that tokenizer_config.json declares and tokenizer.json does not mark: they match whole, as a unit."""
    import tokenizers

    marked = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    entries = declared.items() if isinstance(declared, dict) else ()
    for token_id, fields in sorted(entries, key=lambda entry: int(entry[0])):
        known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        token = tokenizers.AddedToken(**{key: fields[key] for key in known if key in fields})
        if token.content not in marked and tokenizer.token_to_id(token.content) in (None, int(token_id)):
            tokenizer.add_tokens([token])
    named = [token for token in tokens.values() if token not in marked and tokenizer.token_to_id(token) is not None]
    tokenizer.add_special_tokens(named)
