"""Loads tokenizers by name or path, or trains them on the input; saves them so that `transformers` can load them."""

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
SMALLEST_VOCABULARY = 257  # every byte and the eos
# The library allocates a vocabulary's memory at once, and ends the process if there is less.
LARGEST_VOCABULARY = 1 << 24
# Text that tokenizers with the same vocabulary treat differently: case, digits, space, accents, other scripts.
SAMPLES = [
    "The quick BROWN fox, it's 3.14159  and 1,000,000;\n\n\tdef f(x):\r\n    return x != None",
    "na\u00efve nai\u0308ve \ufb01ne  \u4f60\u597d\u4e16\u754c \u0417\u0434\u0440 \U0001f600\u200d \u00a0x",
]
SPACES = str.maketrans(
    {"\u0120": " ", "\u2581": " ", "\u010a": "\n"}
)  # the letters that stand for white space in vocabularies
IDENTITY = "ids:"  # each identity's start; change it with the way to compute one
ANOTHER_TOKENIZER = (
    "use one tokenizer for both (get_dataset.py --tokenizer=FOLDER takes any), or give "
    "--allow_other_tokenizer=true if you know that they fit"
)
GENERIC = "PreTrainedTokenizerFast"  # the class that takes a tokenizer.json as it is
MAKE_IDS = "make token ids with it and import these: get_dataset.py --text_column=input_ids --tokenizer=none"


def without_panic(read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns read(*arguments, **options). A panic of the library's Rust code is not an Exception; it becomes a
    ValueError."""
    try:
        return read(*arguments, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(error) from None


def with_os_errors(write: Callable[..., Any], *arguments: Any) -> None:
    """Calls write(*arguments). The library's Rust code raises a bare Exception for an error of the disk; it becomes an
    OSError."""
    try:
        write(*arguments)
    except Exception as error:
        raise parse_os_error(error) or error from None


def read_backend(path: Path) -> Tokenizer:
    """Returns the tokenizer in a tokenizer.json. Raises UserError if the file begins with a byte order mark, OSError, and
    what the library raises for a damaged file."""
    content = read_bytes(path)
    if content.startswith(codecs.BOM_UTF8):
        raise UserError(
            f"{path} begins with a byte order mark, but JSON does not allow one; remove it: "
            f"sed -i '1s/^\\xef\\xbb\\xbf//' {shlex.quote(str(path))}"
        )
    return without_panic(Tokenizer.from_str, content.decode())


class TextTokenizer:
    """A tokenizer that encodes and decodes text, with the facts that a token store records.

    eos: its id, None if there is none; separators: ids of the tokens that can stand at the ends of a document;
    vocab_size: one more than the largest id; identity: see `identity_of`.
    transformers_form: the `transformers` tokenizer that holds `backend`, if it comes from one.
    prefix: the id of the bos that stands before each text, or nothing.
    special_is_text: read text that spells a special token, as a page about tokenizers does, like any other text.

    Threads share a tokenizer. Before version 0.23 the library lets no thread change a tokenizer while another encodes,
    so all settings are made here and none later.
    """

    def __init__(
        self,
        backend: Tokenizer,
        eos_token: str | None,
        transformers_form: Any = None,
        special_is_text: bool = True,
    ):
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = special_is_text
        self.backend = backend
        self.eos_token = eos_token
        self._transformers_form = transformers_form
        self.prefix: list[int] = []
        self._is_amended = False  # whether it differs from `transformers_form`
        self.eos = backend.token_to_id(eos_token) if eos_token else None
        bos_token = getattr(transformers_form, "bos_token", None)
        self.separators = [backend.token_to_id(token) for token in (eos_token, bos_token) if token]
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1

    @functools.cached_property
    def identity(self) -> str:
        return identity_of(self.backend)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of one text after the prefix, without other tokens that some tokenizers add at its ends. Text
        that spells a special token is that token in a prompt (`load_words`), and text in a document."""
        return self.prefix + self.backend.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text as `encode` does, none for a text without any, using all cores. Raises UserError
        for text that the tokenizer can't encode."""
        try:
            encodings = without_panic(
                self.backend.encode_batch_fast, texts, add_special_tokens=False
            )
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"the tokenizer can't encode this text ({first_line(error)}); add the token that it lacks to its "
                "vocabulary, or take another tokenizer"
            ) from error
        return [self.prefix + encoding.ids if encoding.ids else [] for encoding in encodings]

    def decode(self, tokens: list[int]) -> str:
        return self.backend.decode(tokens, skip_special_tokens=False)

    def without_dropout(self) -> str:
        """Switches the random choice of merges off; returns a line if there was one."""
        share = getattr(self.backend.model, "dropout", None)
        if not share:
            return ""
        self.backend.model.dropout = None
        self._is_amended = True
        return f"the tokenizer drops {share:.0%} of its merges at random: switched off, or the same text had other ids each time"

    def put_before_texts(self, bos: str) -> None:
        """Makes the tokenizer, in this program and in `transformers`, add this token to each text, or none if it is
        empty, and nothing else."""
        template = f"{bos} $A".strip()
        special: list[tuple[str, int]] = []
        if bos:
            special = [(bos, self.backend.get_vocab()[bos])]
        self.backend.post_processor = processors.TemplateProcessing(
            single=template, pair=f"{template} $B", special_tokens=special
        )
        self.prefix = [number for _, number in special]
        self._is_amended = True

    def settle_bos(self, wanted: bool) -> str:
        """Makes the tokenizer add to a text what documents have there: its bos if that is `wanted`, else nothing. Returns
        a line if it added something that is not wanted. Raises UserError if it has no bos that is wanted."""
        nothing = self.backend.encode("", add_special_tokens=True)
        is_added = nothing.special_tokens_mask
        added = [token for token, mask in zip(nothing.tokens, is_added) if mask]
        before = [token for token in added if token != self.eos_token]
        if not wanted:
            if not added:
                return ""
            self.put_before_texts("")
            advice = "; --bos=true keeps a bos" if before else ""
            return (
                f"the tokenizer adds {' '.join(added)} to each text: documents are stored with one eos and without other "
                f"added tokens, and the tokenizer of runs and exports adds none{advice}"
            )
        named = [getattr(self._transformers_form, "bos_token", None), *before]
        bos = next((token for token in named if token), "")
        if not bos or bos == self.eos_token:
            what = f"is its eos {bos}, which stands between documents" if bos else "is missing"
            raise UserError(
                f"--bos=true puts the tokenizer's bos before each document, but it {what}"
            )
        self.put_before_texts(bos)
        return ""

    def save(self, folder: Path) -> None:
        """Writes a folder that AutoTokenizer.from_pretrained takes."""
        make_folder(folder, parents=True)
        file = folder / "tokenizer_config.json"
        settings = {
            "eos_token": self.eos_token,
            "model_max_length": 10**30,
            "clean_up_tokenization_spaces": False,
            # Without it transformers 4 adds token_type_ids, which a Mamba's generate refuses.
            "model_input_names": ["input_ids", "attention_mask"],
        }
        if self._transformers_form:
            save = functools.partial(
                with_os_errors, self._transformers_form.save_pretrained, folder
            )
            retry_io(save, folder)
            settings = json.loads(read_bytes(file))
            if self._is_amended:
                settings |= {"add_bos_token": bool(self.prefix), "add_eos_token": False}
        elif self.prefix:
            settings |= {
                "bos_token": self.backend.id_to_token(self.prefix[0]),
                "add_bos_token": True,
            }
        write_object(file, {**settings, "tokenizer_class": GENERIC})
        write_atomically(folder / TOKENIZER_JSON, self.backend.to_str())


class NoTokenizer(TextTokenizer):
    """The tokenizer of token ids that come without one. Its backend is None; its eos is -1 if none is known.
    Raises UserError if the eos is outside the vocabulary."""

    def __init__(self, eos_token: str, vocab_size: int):
        self.identity = ""
        self.eos_token = eos_token
        self.backend = None  # type: ignore[assignment]
        self.prefix = []
        self.eos = int(eos_token or -1)
        self.separators = [self.eos]
        self.vocab_size = vocab_size
        if self.eos >= vocab_size:
            raise UserError(
                f"--eos_token={eos_token} is beyond --vocab_size={vocab_size}; give one more than the largest token id"
            )

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Raises UserError if a text is not empty, as rows without token ids are."""
        if any(texts):
            raise UserError(
                "the input contains text, but --tokenizer=none is for token ids; name the column of ids with "
                "--text_column, or another tokenizer"
            )
        return [[] for _ in texts]

    def save(self, folder: Path) -> None:
        """Writes nothing."""


def identity_of(backend: Tokenizer) -> str:
    """Returns a text that is equal for tokenizers that encode alike, whatever their names and whoever wrote their
    files.

    It is a digest of the tokens with their ids, and of the ids of texts that contain all tokens. `backend` is not changed:
    a copy of it, without truncation and padding, encodes these texts.
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
    `transformers` makes of it. Yields nothing if no tokenizer there has a fast form."""
    if folder is None:
        return
    with contextlib.suppress(Exception):  # the libraries raise whatever a file runs into
        yield identity_of(read_backend(folder / TOKENIZER_JSON))
    with contextlib.suppress(Exception):
        if is_file(folder / "tokenizer_config.json"):
            yield identity_of(load_for_transformers(folder).backend_tokenizer)


def check_tokenizer(
    first: object, identity: str, second: object, second_identities: Iterable[str]
) -> None:
    """Raises UserError if the places `first` and `second` are known to have different tokenizers.

    They are if none of `second_identities`, all of one tokenizer, equals `identity`. The first equal one ends the
    search.
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


def import_with(tokenizer: Path | None) -> str:
    """Returns advice for data that exceeds a model's vocabulary. tokenizer: the model's, None if none is known."""
    return (
        f"import the data with the model's tokenizer: {import_command('INPUT')} "
        f"--tokenizer={tokenizer or 'FOLDER'}"
    )


def training_size(name: str) -> int | None:
    """Returns the vocabulary size in `train:SIZE`, or None for another name. Raises UserError for an impossible
    size."""
    if not name.startswith("train:"):
        return None
    try:
        size = parse_integer(name.removeprefix("train:"))
    except ValueError:
        size = 0
    if not SMALLEST_VOCABULARY <= size <= LARGEST_VOCABULARY:
        raise UserError(
            f"tokenizer {name!r}: write train:SIZE with a vocabulary of at least {SMALLEST_VOCABULARY} (every byte and "
            f"the end of a document), at most {LARGEST_VOCABULARY:,} tokens, such as train:4096"
        )
    return size


def train(texts: Iterable[str], vocab_size: int, eos_token: str = END_OF_TEXT) -> TextTokenizer:
    """Returns a byte-level BPE for documents, trained on the texts, of at most vocab_size tokens including the eos.

    Equal texts give equal tokenizers.
    """
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
    """Returns the fast tokenizer of a folder or a name on the Hugging Face Hub, as transformers has it.

    A tokenizer.json is taken as it is. A class of transformers could amend it; if the folder names no class, transformers
    4 even chooses one by the folder's name. Never runs code that comes with a tokenizer. Raises UserError with a message
    that ends with `remedy`.
    """
    if not exists(name):
        prepare_hub(str(name))
    name = check_tokenizer_path(name)
    import transformers  # late: importing it takes seconds

    try:
        file = transformers.utils.cached_file(
            str(name), TOKENIZER_JSON, _raise_exceptions_for_missing_entries=False
        )
        options = {"trust_remote_code": False}
        read = transformers.AutoTokenizer.from_pretrained
        if file:
            pre_tokenizer = read_backend(Path(file)).pre_tokenizer
            if hasattr(pre_tokenizer, "add_prefix_space"):  # transformers 4 would change it
                options["add_prefix_space"] = pre_tokenizer.add_prefix_space
            read = transformers.PreTrainedTokenizerFast.from_pretrained
        form = without_panic(read, str(name), **options)
    except UserError:
        raise
    except Exception as error:  # the libraries raise whatever a file runs into
        raise UserError(
            f"tokenizer {name}: can't be loaded ({first_line(error)[:200]}); wanted is {WANTED_TOKENIZER}; a sentencepiece "
            f"or tiktoken file needs its model's files too{remedy}"
        ) from error
    if not getattr(form, "is_fast", False):
        raise UserError(
            f"tokenizer {name}: {type(form).__name__} has no fast form (tokenizer.json); {MAKE_IDS}"
        )
    return form


def load_words(path: str | Path) -> TextTokenizer:
    """Returns the tokenizer of a folder or name for prompts: text that spells a special token is read as that token.

    Importing transformers takes a second, so it is left out if the folder's two files suffice. Raises UserError.
    """
    path = check_tokenizer_path(path)
    try:
        fields = json.loads(read_bytes(Path(path, "tokenizer_config.json")))
        if fields["tokenizer_class"] not in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            raise ValueError("transformers may amend its files")
        backend = read_backend(Path(path, TOKENIZER_JSON))
        eos = fields["eos_token"]
        if isinstance(eos, dict):
            eos = eos["content"]
        tokenizer = TextTokenizer(backend, eos, special_is_text=False)
        if fields.get("add_bos_token"):
            bos = fields["bos_token"]
            tokenizer.put_before_texts(bos["content"] if isinstance(bos, dict) else bos)
        return tokenizer
    except Exception:  # let transformers say what is wrong
        form = load_for_transformers(path)
        return TextTokenizer(form.backend_tokenizer, form.eos_token, form, special_is_text=False)


def load(name: str, eos_token: str | None = None) -> TextTokenizer:
    """Returns the tokenizer for documents of a name on the Hugging Face Hub, a `transformers` folder or a
    tokenizer.json.

    eos_token: the token that ends documents, by default the tokenizer's own. Raises UserError if the tokenizer or this
    token is missing.
    """
    path = check_tokenizer_path(os.path.expanduser(name))
    if is_file(path):
        form = None
        try:
            backend = read_backend(path)
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"tokenizer {name}: {path.name} can't be read ({first_line(error)}); wanted is {WANTED_TOKENIZER}"
            ) from error
    else:
        form = load_for_transformers(path, "; train:4096 trains one on the input")
        backend = form.backend_tokenizer
        eos_token = eos_token or form.eos_token
    if backend.token_to_id(eos_token or "") is None:
        raise UserError(
            f"tokenizer {name}: its vocabulary lacks the eos_token {eos_token!r}; name the token that ends a document "
            "with --eos_token"
        )
    if form:
        form.eos_token = eos_token
    return TextTokenizer(backend, eos_token, form)
