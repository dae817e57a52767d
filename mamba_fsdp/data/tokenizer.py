"""Loads tokenizers by name or path, trains them, and saves them in a form that `transformers` can load."""

import codecs
import contextlib
import functools
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mamba_fsdp.data.hub import prepare_hub
from mamba_fsdp.errors import UserError, first_line
from mamba_fsdp.fields import parse_integer
from mamba_fsdp.importing.kinds import WANTED_TOKENIZER, check_tokenizer_path, import_command
from mamba_fsdp.storage.retry import (
    exists,
    is_file,
    make_folder,
    parse_os_error,
    read_bytes,
    retry_io,
    write_atomically,
)
from mamba_fsdp.storage.typed_json import write_object

TOKENIZER_JSON = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
MIN_VOCABULARY = 257  # every byte, and the eos
# The library allocates the memory of a vocabulary at once, and aborts the process if there is too little memory.
MAX_VOCABULARY = 1 << 24
# Texts that tokenizers with the same vocabulary can encode differently: case, digits, white space, accents, other scripts.
SAMPLES = [
    "The quick BROWN fox, it's 3.14159  and 1,000,000;\n\n\tdef f(x):\r\n    return x != None",
    "na\u00efve nai\u0308ve \ufb01ne  \u4f60\u597d\u4e16\u754c \u0417\u0434\u0440 \U0001f600\u200d \u00a0x",
]
# The letters that represent white space in vocabularies.
SPACES = str.maketrans({"\u0120": " ", "\u2581": " ", "\u010a": "\n"})
IDENTITY = (
    "ids:"  # the prefix of every identity; change it if identities are computed in another way
)
ANOTHER_TOKENIZER = (
    "use one tokenizer for both (get_dataset.py --tokenizer=FOLDER accepts any), or give "
    "--allow_other_tokenizer=true if you know that they fit"
)
GENERIC = "PreTrainedTokenizerFast"  # the class that uses a tokenizer.json without changes
MAKE_IDS = "make token ids with it, and import them: get_dataset.py --text_column=input_ids --tokenizer=none"


def without_panic(read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns read(*arguments, **options). Raises ValueError if the Rust code of the library panics: the
    library's PanicException is not a subclass of Exception."""
    try:
        return read(*arguments, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(error) from None


def read_backend(path: Path) -> Tokenizer:
    """Reads a tokenizer.json. Raises UserError if the file begins with a byte order mark, OSError if it can't be read, and
    any exception of the library if it is damaged."""
    content = read_bytes(path)
    if content.startswith(codecs.BOM_UTF8):
        raise UserError(
            f"{path} begins with a byte order mark, but JSON does not allow one; remove it: "
            f"sed -i '1s/^\\xef\\xbb\\xbf//' {shlex.quote(str(path))}"
        )
    return without_panic(Tokenizer.from_str, content.decode())


class TextTokenizer:
    """A tokenizer that encodes and decodes text, with the properties that a token store records.

    eos: the id of the token that ends documents; None if there is none. separators: the ids of the tokens that can be at the
    ends of a document. vocab_size: the largest id plus 1. identity: see `identity_of`. prefix: a list with the id of the
    bos that is put before each text, or an empty list.

    Threads share a tokenizer. In versions of the library before 0.23, a tokenizer can't be changed while another thread
    encodes with it. Therefore everything is configured before the first text is encoded.
    """

    def __init__(
        self,
        backend: Tokenizer,
        eos_token: str | None,
        pretrained: Any = None,
        special_is_text: bool = True,
    ):
        """eos_token: the token that ends documents. pretrained: the tokenizer of `transformers` that contains `backend`, if
        there is one. special_is_text: whether text that spells a special token, for example in an article about tokenizers,
        is encoded like any other text."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = special_is_text
        self.backend = backend
        self.eos_token = eos_token
        self._pretrained = pretrained
        self.prefix: list[int] = []
        self._is_changed = False  # whether this tokenizer differs from `pretrained`
        self.eos = backend.token_to_id(eos_token) if eos_token else None
        bos_token = getattr(pretrained, "bos_token", None)
        self.separators = [backend.token_to_id(token) for token in (eos_token, bos_token) if token]
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1

    @functools.cached_property
    def identity(self) -> str:
        return identity_of(self.backend)

    def encode(self, text: str) -> list[int]:
        """Returns the prefix and the ids of one text, without other tokens that some tokenizers add at its ends. Text that
        spells a special token becomes this token in a prompt (see `load_for_prompts`), but not in a document."""
        return self.prefix + self.backend.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, like `encode`, and uses all cores. The list of a text without any ids is empty.
        Raises UserError for text that the tokenizer can't encode."""
        try:
            encodings = without_panic(
                self.backend.encode_batch_fast, texts, add_special_tokens=False
            )
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"the tokenizer can't encode this text ({first_line(error)}); add the missing token to its "
                "vocabulary, or use another tokenizer"
            ) from error
        return [self.prefix + encoding.ids if encoding.ids else [] for encoding in encodings]

    def decode(self, tokens: list[int]) -> str:
        return self.backend.decode(tokens, skip_special_tokens=False)

    def disable_dropout(self) -> str:
        """Switches off the random choice of merges. Returns a message if it was switched on, else ""."""
        share = getattr(self.backend.model, "dropout", None)
        if not share:
            return ""
        self.backend.model.dropout = None
        self._is_changed = True
        return (
            f"the tokenizer drops {share:.0%} of its merges at random; this is switched off, so that the same text always "
            "has the same ids"
        )

    def set_prefix(self, bos: str) -> None:
        """Makes the tokenizer add the token `bos` before each text, and no other tokens, in this program and in
        `transformers`. If `bos` is empty, no token is added."""
        template = f"{bos} $A".strip()
        special: list[tuple[str, int]] = []
        if bos:
            special = [(bos, self.backend.get_vocab()[bos])]
        self.backend.post_processor = processors.TemplateProcessing(
            single=template, pair=f"{template} $B", special_tokens=special
        )
        self.prefix = [number for _, number in special]
        self._is_changed = True

    def configure_bos(self, wanted: bool) -> str:
        """Makes the tokenizer add its bos before each text if `wanted`, and no other tokens.

        Returns a message if the tokenizer added tokens that are not wanted, else "". Raises UserError if a bos is wanted, but
        the tokenizer does not have one."""
        nothing = self.backend.encode("", add_special_tokens=True)
        is_added = nothing.special_tokens_mask
        added = [token for token, mask in zip(nothing.tokens, is_added) if mask]
        before = [token for token in added if token != self.eos_token]
        if not wanted:
            if not added:
                return ""
            self.set_prefix("")
            advice = "; --bos=true keeps a bos" if before else ""
            return (
                f"the tokenizer adds {' '.join(added)} to each text; documents are stored with one eos and no other added "
                f"tokens, and the tokenizer of runs and exports adds no tokens{advice}"
            )
        named = [getattr(self._pretrained, "bos_token", None), *before]
        bos = next((token for token in named if token), "")
        if not bos or bos == self.eos_token:
            problem = "has no bos"
            if bos:
                problem = f"uses its eos {bos} as bos, and that token separates documents"
            raise UserError(
                f"--bos=true puts a bos before each document, but the tokenizer {problem}; leave out --bos"
            )
        self.set_prefix(bos)
        return ""

    def _save_pretrained(self, folder: Path) -> None:
        try:
            self._pretrained.save_pretrained(folder)
        except Exception as error:  # the library raises a plain Exception for an error of the disk
            raise parse_os_error(error) or error from None

    def save(self, folder: Path) -> None:
        """Writes the tokenizer to a folder, in the format that AutoTokenizer.from_pretrained reads."""
        make_folder(folder, parents=True)
        file = folder / "tokenizer_config.json"
        settings = {
            "eos_token": self.eos_token,
            "model_max_length": 10**30,
            "clean_up_tokenization_spaces": False,
            # Without this field, transformers 4 would return token_type_ids, and the generate method of a Mamba model would
            # reject them.
            "model_input_names": ["input_ids", "attention_mask"],
        }
        if self._pretrained:
            retry_io(self._save_pretrained, folder, folder)
            settings = json.loads(read_bytes(file))
            if self._is_changed:
                settings |= {"add_bos_token": bool(self.prefix), "add_eos_token": False}
        elif self.prefix:
            settings |= {
                "bos_token": self.backend.id_to_token(self.prefix[0]),
                "add_bos_token": True,
            }
        write_object(file, {**settings, "tokenizer_class": GENERIC})
        write_atomically(folder / TOKENIZER_JSON, self.backend.to_str())


class NoTokenizer(TextTokenizer):
    """Takes the place of the tokenizer if the input consists of token ids without one. The backend is None."""

    def __init__(self, eos_token: str, vocab_size: int):
        """eos_token: the id as text, or "" if it is not known; `eos` is then -1. Raises UserError if it is outside the
        vocabulary."""
        self.identity = ""
        self.eos_token = eos_token
        self.backend = None  # type: ignore[assignment]
        self.prefix = []
        self.eos = int(eos_token or -1)
        self.separators = [self.eos]
        self.vocab_size = vocab_size
        if self.eos >= vocab_size:
            raise UserError(
                f"--eos_token={eos_token} is not below --vocab_size={vocab_size}; set --vocab_size to the largest token id plus 1"
            )

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Returns an empty list for each text. Rows without token ids are read as empty texts. Raises UserError if a text is
        not empty."""
        if any(texts):
            raise UserError(
                "the input contains text, but --tokenizer=none is for token ids; name the column of ids with "
                "--text_column, or give a tokenizer"
            )
        return [[] for _ in texts]

    def save(self, folder: Path) -> None:
        """Does nothing."""


def identity_of(backend: Tokenizer) -> str:
    """Returns the identity of a tokenizer. Tokenizers that encode in the same way have the same identity, even if their names
    or files differ.

    The identity is a digest of the tokens with their ids, and of the ids of texts that contain all tokens. These texts are
    encoded by a copy of `backend` without truncation and padding.
    """
    backend = Tokenizer.from_str(backend.to_str())
    backend.no_truncation()
    backend.no_padding()
    vocabulary = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [token for token, _ in vocabulary]
    joined = [
        glue.join(tokens[at : at + 20]).translate(SPACES)
        for glue in ("", " ")
        for at in range(0, len(tokens), 20)
    ]
    encodings = backend.encode_batch_fast(SAMPLES + joined, add_special_tokens=False)
    content = [vocabulary, [encoding.ids for encoding in encodings]]
    return IDENTITY + hashlib.sha256(json.dumps(content).encode()).hexdigest()


def identities_in(folder: Path | None) -> Iterator[str]:
    """Yields the identities of the tokenizer in a folder: first of its tokenizer.json, then of the tokenizer that
    `transformers` loads from the folder. Yields nothing if neither can be loaded as a fast tokenizer."""
    if folder is None:
        return
    with contextlib.suppress(Exception):  # the libraries can raise any exception
        yield identity_of(read_backend(folder / TOKENIZER_JSON))
    with contextlib.suppress(Exception):
        if is_file(folder / "tokenizer_config.json"):
            yield identity_of(load_for_transformers(folder).backend_tokenizer)


def check_tokenizer(
    first: object, identity: str, second: object, second_identities: Iterable[str]
) -> None:
    """Raises UserError if `first` and `second` are known to have different tokenizers.

    first, second: names for the message, such as paths. identity: the identity of the first tokenizer; "" if it is not known.
    second_identities: the identities of the second tokenizer. One of them must equal `identity`; they are computed one
    after the other until it is found.
    """
    if not identity.startswith(IDENTITY):
        return
    different = ""
    for second_identity in second_identities:
        if second_identity == identity:
            return
        if second_identity.startswith(IDENTITY):
            different = second_identity
    if different:
        length = len(IDENTITY) + 8
        raise UserError(
            f"{first} and {second} have different tokenizers ({identity[:length]}, {different[:length]}): a token id "
            f"means different text in each; {ANOTHER_TOKENIZER}"
        )


def import_hint(tokenizer: Path | None) -> str:
    """Returns advice for data with token ids beyond a model's vocabulary. tokenizer: the path of the model's tokenizer; None
    if it is not known."""
    return (
        f"import the data with the model's tokenizer: {import_command('INPUT')} "
        f"--tokenizer={tokenizer or 'FOLDER'}"
    )


def parse_training_size(name: str) -> int | None:
    """Returns the vocabulary size in `train:SIZE`, or None for any other name. Raises UserError if the size is not possible."""
    if not name.startswith("train:"):
        return None
    try:
        size = parse_integer(name.removeprefix("train:"))
    except ValueError:
        size = 0
    if not MIN_VOCABULARY <= size <= MAX_VOCABULARY:
        raise UserError(
            f"tokenizer {name!r}: write train:SIZE with a vocabulary of at least {MIN_VOCABULARY} (every byte and "
            f"the end of a document) and at most {MAX_VOCABULARY:,} tokens, such as train:4096"
        )
    return size


def train(texts: Iterable[str], vocab_size: int, eos_token: str = END_OF_TEXT) -> TextTokenizer:
    """Trains a byte-level BPE tokenizer on the texts. Equal texts give equal tokenizers.

    vocab_size: the maximal number of tokens, with the eos."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos_token],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(backend, eos_token)


def load_for_transformers(name: str | Path, remedy: str = "") -> Any:
    """Loads the fast tokenizer of a folder or of a name on the Hugging Face Hub with transformers.

    A tokenizer.json is used without changes. A class of transformers could change it, and transformers 4 even chooses a class
    by the name of the folder if the folder does not name one. Code that comes with a tokenizer is never executed.

    remedy: the end of the message. Raises UserError if the tokenizer can't be loaded.
    """
    if not exists(name):
        prepare_hub(str(name))
    name = check_tokenizer_path(name)
    import transformers  # imported here because the import takes seconds

    try:
        file = transformers.utils.cached_file(
            str(name), TOKENIZER_JSON, _raise_exceptions_for_missing_entries=False
        )
        options = {"trust_remote_code": False}
        read = transformers.AutoTokenizer.from_pretrained
        if file:
            pre_tokenizer = read_backend(Path(file)).pre_tokenizer
            if hasattr(pre_tokenizer, "add_prefix_space"):  # transformers 4 would reset this option
                options["add_prefix_space"] = pre_tokenizer.add_prefix_space
            read = transformers.PreTrainedTokenizerFast.from_pretrained
        pretrained = without_panic(read, str(name), **options)
    except UserError:
        raise
    except Exception as error:  # the libraries can raise any exception
        raise UserError(
            f"tokenizer {name}: can't be loaded ({first_line(error)[:200]}); name {WANTED_TOKENIZER}; a sentencepiece "
            f"or tiktoken file needs its model's files too{remedy}"
        ) from error
    if not getattr(pretrained, "is_fast", False):
        raise UserError(
            f"tokenizer {name}: {type(pretrained).__name__} has no fast form (tokenizer.json); {MAKE_IDS}"
        )
    return pretrained


def load_for_prompts(path: str | Path) -> TextTokenizer:
    """Loads the tokenizer of a folder or a name for prompts: text that spells a special token becomes this token.

    transformers is only used if tokenizer.json and tokenizer_config.json in the folder are not sufficient, because importing
    it takes a second. Raises UserError if the tokenizer can't be loaded.
    """
    path = check_tokenizer_path(path)
    try:
        fields = json.loads(read_bytes(Path(path, "tokenizer_config.json")))
        if fields["tokenizer_class"] not in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            raise ValueError("this class can change the tokenizer")
        backend = read_backend(Path(path, TOKENIZER_JSON))
        eos = fields["eos_token"]
        if isinstance(eos, dict):
            eos = eos["content"]
        tokenizer = TextTokenizer(backend, eos, special_is_text=False)
        if fields.get("add_bos_token"):
            bos = fields["bos_token"]
            tokenizer.set_prefix(bos["content"] if isinstance(bos, dict) else bos)
        return tokenizer
    except Exception:  # transformers loads it, or raises an error with the reason
        loaded = load_for_transformers(path)
        return TextTokenizer(
            loaded.backend_tokenizer, loaded.eos_token, loaded, special_is_text=False
        )


def load(name: str, eos_token: str | None = None) -> TextTokenizer:
    """Loads a tokenizer for documents.

    name: a name on the Hugging Face Hub, a folder of `transformers`, or a tokenizer.json. eos_token: the token that ends
    documents; None: the eos of the tokenizer. Raises UserError if the tokenizer can't be loaded, or lacks this token.
    """
    path = check_tokenizer_path(os.path.expanduser(name))
    if is_file(path):
        pretrained = None
        try:
            backend = read_backend(path)
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"tokenizer {name}: {path.name} can't be read ({first_line(error)}); name {WANTED_TOKENIZER}"
            ) from error
    else:
        pretrained = load_for_transformers(path, "; train:4096 trains one on the input")
        backend = pretrained.backend_tokenizer
        eos_token = eos_token or pretrained.eos_token
    if not eos_token:
        raise UserError(
            f"tokenizer {name}: its files do not name an eos_token; name the token that ends a document with --eos_token"
        )
    if backend.token_to_id(eos_token) is None:
        raise UserError(
            f"tokenizer {name}: its vocabulary lacks the eos_token {eos_token!r}; name the token that ends a document "
            "with --eos_token"
        )
    if pretrained:
        pretrained.eos_token = eos_token
    return TextTokenizer(backend, eos_token, pretrained)
