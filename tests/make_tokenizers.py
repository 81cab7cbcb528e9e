"""Tokenizers like RoBERTa's, ALBERT's and BERT's, trained on a few words: no network is needed."""

from __future__ import annotations

from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

WORDS = (
    "Ada Moore works for Blue Harbour Works in San Marino .",
    "Yesterday Grace and Tony visited Oslo , unaffordably .",
    "Kestrel Labs opened a new bridge in Lisbon on Monday .",
) * 5
FRAMES = {"roberta": ("<s>", "</s>", "<pad>"), "albert": ("[CLS]", "[SEP]", "<pad>")}


def make_tokenizer(kind: str, folder: Path) -> Path:
    """Write the tokenizer.json of a model of this type, as it is published; return the folder."""
    folder.mkdir(exist_ok=True, parents=True)
    {"roberta": _roberta, "albert": _albert}.get(kind, _bert)().save(str(folder / "tokenizer.json"))
    return folder


def _roberta() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(WORDS, trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return made


def _albert() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    made.decoder = decoders.Metaspace()
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(WORDS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def _bert() -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted({letter for word in WORDS for letter in word if letter != " "})
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), "Ada", "bridge", "##able"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(special)
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made
