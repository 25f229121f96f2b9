"""Settings of the data that is trained on: one source of rows, or several by weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from stretto.files.settings_file import Settings


class SourceSettings(Settings):
    """Where rows are, and what they are."""

    kind: Literal["text", "chat", "pairs", "tokens"] = "text"
    """What a row is: "text"; "chat", a conversation, of which the answers of the assistant are predicted;
    "pairs", a prompt and a completion, which is predicted; "tokens", ids that were made before."""
    paths: list[str] = Field(default_factory=list)
    """Files and folders (UTF-8 text, .jsonl, .parquet; of tokens .jsonl, .parquet, .npy, .bin), relative to
    the working directory; of text none means the Python standard library's own source files."""
    text_field: str = Field(default="text", min_length=1)
    """The field (.jsonl) or column (.parquet) of the text."""
    prompt_field: str = Field(default="prompt", min_length=1)
    """The field or column of a pair's prompt."""
    completion_field: str = Field(default="completion", min_length=1)
    """The field or column of a pair's completion."""
    stream: str | None = Field(default=None, min_length=1)
    """What `datasets.load_dataset` is given: a name of the Hub, a folder, or "json", "parquet" or "text",
    whose files are `paths`. Its rows are read when they are needed, and none is kept (needs
    `pip install 'stretto[datasets]'`)."""
    subset: str | None = Field(default=None, min_length=1)
    """Of a stream that has several, the name of one."""
    split: str = Field(default="train", min_length=1)
    """The split of a stream."""
    shuffled_rows: int = Field(default=1000, ge=1)
    """How many rows of a stream are read and shuffled together; 1 leaves them in their order."""


class WeightedSource(SourceSettings):
    """One of several sources, each a `[[data.sources]]`. It is shuffled by itself, and begins again at its
    end."""

    weight: float = Field(default=1.0, ge=1e-3, le=1e3)
    """Its share of the rows, beside the weights of the others."""


class DataSettings(SourceSettings):
    """What to train on, and how it becomes tokens."""

    sources: list[WeightedSource] = Field(default_factory=list)
    """Several sources, in the place of the keys above."""
    sequence_length: int = Field(default=256, ge=1, le=2**31 - 1)
    """Tokens that the model sees at once."""
    document_masks: bool = False
    """Whether tokens see those of their own document alone, where a row has several; positions begin again
    with each, and the first token of the next is not predicted from the one before. Chats and pairs have a
    row each without it, and share rows with it."""
    bucket_lengths: list[Annotated[int, Field(ge=1, le=2**31 - 1)]] = Field(default_factory=list)
    """Each row is one document, filled up to the least of these lengths and `sequence_length`, and the rows
    of a step are of one of them; none means windows of all documents, one behind the other. Each length has
    a plan of its own."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """A folder, or a name of the Hub, with a tokenizer; without it that of `model.pretrained`, or one that is
    learned of the text."""
    vocab_size: int = Field(default=4096, ge=257, le=2**31 - 1)
    """Tokens of the byte-pair encoding: 256 bytes, the end of a text, and the merges learned; of ids made
    before, one more than the largest may be. A tokenizer that is given has its own."""
    held_out_fraction: float = Field(default=0.02, gt=0, le=0.5)
    """Share of each source that is never trained on."""
    cache_dir: str | None = Field(default=None, min_length=1)
    """Where tokens are kept between runs; by default `$XDG_CACHE_HOME/stretto` or `~/.cache/stretto`."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the order in which sequences are visited."""

    @property
    def each(self) -> list[tuple[str, SourceSettings, float]]:
        """(key, settings, weight) of each source; the key is for messages."""
        if not self.sources:
            return [("data", self, 1.0)]
        return [(f"data.sources[{at}]", one, one.weight) for at, one in enumerate(self.sources)]

    @property
    def is_windows(self) -> bool:
        """Whether rows are windows of one text."""
        are_files = [one.kind == "text" and one.stream is None for _, one, _ in self.each]
        return are_files == [True] and not self.bucket_lengths


OF_KIND = {"text_field": "text", "prompt_field": "pairs", "completion_field": "pairs"}
OF_STREAM = ("subset", "split", "shuffled_rows")


def faults_of_data(data: DataSettings, pretrained: str | None) -> Iterator[str]:
    """What does not fit within `[data]`, a line each. pretrained: `model.pretrained`."""
    default, names = SourceSettings(), [*SourceSettings.model_fields]
    for name in names:
        if data.sources and getattr(data, name) != getattr(default, name):
            yield f"data.{name} is of one source, and data.sources has several: give it in each"
    for key, one, _ in data.each:
        for name in (name for name in names if getattr(one, name) != getattr(default, name)):
            if OF_KIND.get(name, one.kind) != one.kind:
                yield f"{key}.{name} is of kind = {OF_KIND[name]!r}, and {key}.kind = {one.kind!r}: drop it"
            if name in OF_STREAM and one.stream is None:
                yield f"{key}.{name} is of a stream: drop it, or name one ({key}.stream)"
        if not one.paths and one.stream is None and one.kind != "text":
            yield f"{key}.paths is empty: name files of {one.kind}, or a stream ({key}.stream)"
    named = {"model.pretrained": pretrained, "data.tokenizer": data.tokenizer}
    given = [f"{name} = {value!r}" for name, value in named.items() if value is not None]
    own = DataSettings.model_fields["vocab_size"].default
    if given and data.vocab_size != own:
        yield (
            f"data.vocab_size = {data.vocab_size} is of a tokenizer that is learned, and {given[0]} brings "
            "its own: drop it"
        )
    if len(given) > 1:
        yield f"{' and '.join(given)} each bring a tokenizer: drop one"
    is_learned = data.kind == "text" and not data.sources and data.stream is None
    if not given and not is_learned and any(one.kind != "tokens" for _, one, _ in data.each):
        yield (
            "data.tokenizer: one is learned of a single source of plain text alone: name a folder that has "
            "one, or a model (model.pretrained)"
        )
