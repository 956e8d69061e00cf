"""Other vocabularies: bytes, numbers, a tokenizer.json, or an object of a recipe file."""

import json
import re
from operator import index

import fsspec
import numpy as np

import data
from configs import Config, UserError


class Bytes:
    """The UTF-8 bytes of a text, as in ByT5 (Xue et al. 2022): byte b has the id b + 3."""

    def __init__(self, size: int):
        self.size = size

    def encode(self, text: str):
        return np.frombuffer(text.encode(), np.uint8) + np.int32(3)

    def decode(self, ids) -> str:
        return bytes(i - 3 for i in ids).decode(errors="ignore")


class Numbers:
    """The ids themselves, for the source random:, such as "17 4"."""

    def __init__(self, size: int):
        self.size = size

    def encode(self, text: str):
        return list(map(int, text.split()))

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))


class OwnTokenizer(data.Tokenizer):
    """An object with encode(text), decode(ids) and size, whose ids begin at 3.

    Sentinels follow its ids.
    """

    file_name = ""

    def __init__(self, vocabulary, extra_ids: int):
        self.vocabulary, self.extra_ids = vocabulary, extra_ids
        self.size = vocabulary.size + extra_ids
        self.first_sentinel = self.size - 1 if extra_ids else None
        texts = [vocabulary.decode([i]) for i in range(3, vocabulary.size)]
        self.serialized = json.dumps([texts, extra_ids]).encode()

    def encode(self, texts):
        return [np.array(self.encode_text(text), np.int32) for text in texts]

    def encode_text(self, text: str) -> list[int]:
        ids = []
        for i, part in enumerate(re.split(r"(<extra_id_\d+>)", text)):
            number = int(part[10:-1]) if i % 2 else self.extra_ids
            if number < self.extra_ids:
                ids.append(self.first_sentinel - number)
            else:
                own = list(map(index, self.vocabulary.encode(part)))  # no decimals
                if own and not data.UNK <= min(own) <= max(own) < self.vocabulary.size:
                    raise UserError(
                        f"VOCABULARY.encode({part!r:.80}) gives the ids {own}."
                    )
                ids += own
        return ids

    def decode_ids(self, ids):
        text, part = "", []
        for i in ids:
            if i < self.vocabulary.size:
                part += [i] if i > data.UNK else []
            else:
                text += (
                    f"{self.vocabulary.decode(part)}<extra_id_{self.first_sentinel - i}>"
                )
                part = []
        return text + self.vocabulary.decode(part)


class JsonTokenizer(data.Tokenizer):
    """A tokenizer.json of Hugging Face, which their library reads itself."""

    file_name = "tokenizer.json"

    def __init__(self, serialized: bytes):
        import tokenizers

        self.processor = tokenizers.Tokenizer.from_buffer(serialized)
        self.processor.no_truncation()
        self.processor.no_padding()
        ids = range(self.processor.get_vocab_size())
        self.set_pieces(serialized, [self.processor.id_to_token(i) or "" for i in ids])

    def encode(self, texts):
        found = self.processor.encode_batch(texts, add_special_tokens=False)
        return [np.array(text.ids, np.int32) for text in found]

    def decode_ids(self, ids):
        return self.processor.decode(ids, skip_special_tokens=False)


def load(vocab: str, cfg: Config) -> data.Tokenizer:
    """Return the tokenizer of --data.vocab, unless it names a SentencePiece model."""
    extra_ids = cfg.data.extra_ids
    if vocab == "numbers":
        return OwnTokenizer(Numbers(cfg.model.vocab_size - extra_ids), extra_ids)
    if vocab == "bytes":
        # The published ByT5 has no extra ids: its sentinels are 11 bytes that UTF-8 lacks.
        return OwnTokenizer(Bytes(259 if extra_ids else 248), extra_ids or 11)
    if vocab.endswith(".json"):
        with fsspec.open(vocab) as file:
            return JsonTokenizer(file.read())
    raise UserError(
        f"--data.vocab {vocab} is neither train:N nor FILE.model, FILE.json, bytes or numbers."
    )
