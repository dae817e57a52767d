"""Fast forms, which the tokenizers library runs, of tokenizers that come without one: a bare tokenizer.model of
sentencepiece, as Llama's authors publish it, and ByT5, one token a byte."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mamba_fsdp.errors import UserError, first_line

# Files by one of which `transformers` knows more than tokenizer.model says.
OTHER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
CHECKED = ["The quick BROWN fox, it's 3.14159  and 1,000,000;\n\n\tdef f(x):\r\n    return x", "",
           " na\u00efve nai\u0308ve \ufb01ne \u4f60\u597d \U0001f600 "]
REMEDY = "make token ids with it and give get_dataset.py these: --text_column=input_ids --tokenizer=none"


def sentencepiece_file(name: str | Path) -> Path | None:
    """The file of sentencepiece's that `name` is, or that is all there is in this folder; else None."""
    path = Path(name)
    if path.is_dir() and not any((path / file).exists() for file in OTHER_FILES):
        path /= "tokenizer.model"
    return path if path.suffix == ".model" and path.is_file() else None


def from_sentencepiece(path: Path) -> Any:
    """A `transformers` tokenizer that encodes as the BPE in this file of sentencepiece's does. Raises UserError."""
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ImportError:
        raise UserError(f"tokenizer {path}: needs the packages sentencepiece and protobuf: .venv/bin/pip install "
                        "sentencepiece protobuf") from None
    try:
        original = SentencePieceProcessor(model_file=str(path))
        proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())  # type: ignore[attr-defined]
    except Exception as error:  # whatever its C++ raises
        raise UserError(f"tokenizer {path}: is no file of sentencepiece's ({first_line(error)})") from error
    kinds = {name: number for name, number in proto.SentencePiece.Type.items()}
    vocabulary = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    merges: list[tuple[str, str]] = []  # sentencepiece joins whatever two pieces make one, the best first
    for piece in sorted(proto.pieces, key=lambda piece: -piece.score):
        text = piece.piece
        if piece.type == kinds["NORMAL"]:
            pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
            merges += sorted((pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary),
                             key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=original.id_to_piece(original.unk_id()), fuse_unk=True,
                                   byte_fallback=proto.trainer_spec.byte_fallback))
    blank = normalizers.Replace(" ", "\u2581")
    prefix = proto.normalizer_spec.add_dummy_prefix
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blank] if prefix else [blank])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    backend.add_tokens([AddedToken(piece.piece, normalized=False, special=False) for piece in proto.pieces
                        if piece.type == kinds["USER_DEFINED"]])
    if any(backend.encode(text, add_special_tokens=False).ids != original.encode(text) for text in CHECKED):
        raise UserError(f"tokenizer {path}: has no fast form that encodes as it does; {REMEDY}")
    names = {"bos": original.bos_id(), "eos": original.eos_id(), "unk": original.unk_id()}
    return _wrapped(backend, {f"{name}_token": original.id_to_piece(number)
                              for name, number in names.items() if number >= 0})


def fast_form(name: str | Path, form: Any) -> Any:
    """Of a `transformers` tokenizer that has none of its own, one that encodes as it does. Raises UserError."""
    if type(form).__name__ != "ByT5Tokenizer":
        raise UserError(f"tokenizer {name}: {type(form).__name__} has no fast form (tokenizer.json); {REMEDY}")
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that are their character
    others = [byte for byte in range(256) if byte not in plain]
    letters = {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + at) for at, byte in enumerate(others)}}
    special = form.get_added_vocab()
    vocabulary = {letter: form.convert_tokens_to_ids(chr(byte)) for byte, letter in letters.items()}
    backend = Tokenizer(models.BPE({**vocabulary, **special}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return _wrapped(backend, {"eos_token": form.eos_token, "unk_token": form.unk_token, "pad_token": form.pad_token})


def _wrapped(backend, names):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
