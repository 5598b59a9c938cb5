"""A tiny tokenizer of the SentencePiece kind, in Llama 2's layout: "▁" for spaces, byte tokens for the rest."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

_WORDS = "the sea was a ship of and to in that he"


def write_sentencepiece_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: <unk>, <s>, </s>, 256 byte tokens, letters, some words."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for character in "▁\n" + "".join(map(chr, range(33, 127))):
        vocab.setdefault(character, len(vocab))
    for word in _WORDS.split():
        stem = "▁"
        for letter in word:
            if stem + letter not in vocab:
                vocab[stem + letter] = len(vocab)
                merges.append((stem, letter))
            stem += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
