"""A folder of weights as safetensors: where it is, what is in it, and tensors or boxes of them.

A folder is named by its path, or by a model's name on the Hugging Face Hub, whose own library keeps a cache
and downloads what is lacking, if it can. Files are mapped into memory, and read where a tensor is asked for:
what a rank does not ask for takes none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stretto.errors import UsageError
from stretto.files.parse import parse_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Which file has which tensor, where there are several."""
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls them. Others (F8_E4M3 and the like) are of quantised weights, with scales."""

NEEDED = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "*.json",
    "tokenizer*",
    "*.model",
    "*.jinja",
    "*.txt",
)
"""Files of a model of the Hub: weights as safetensors, and what tokenizers are made of."""


def weights_folder(source: str) -> Path:
    """The folder of what `model.pretrained` names. Raises UsageError for a name that the Hub does not know,
    or that is not in the cache while the Hub cannot be reached."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute():
        raise UsageError(f"{source} is no folder here: name a folder of weights that every machine has")
    from huggingface_hub import snapshot_download  # comes with transformers

    try:
        return Path(snapshot_download(source, allow_patterns=list(NEEDED)))
    except Exception as error:  # whatever the network makes of it
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"model.pretrained = {source!r} is no folder here, and the Hub reports: {lines[0]}"
        ) from None


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A tensor in a file."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The tensors of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers of its files. Raises UsageError for a folder without weights, and for
        files that are absent, cut off, or of another kind."""
        self.folder = folder
        self._open: dict[str, Any] = {}
        self.stored: dict[str, WeightTensor] = {}
        listed = self._listed()
        for file in sorted(set(listed.values())) if listed is not None else [WEIGHTS]:
            try:
                handle: Any = safe_open(str(folder / file), "pt")  # carries no types
                self._open[file] = handle
                for name in handle.keys():  # noqa: SIM118
                    one = handle.get_slice(name)
                    self.stored[name] = WeightTensor(file, tuple(one.get_shape()), one.get_dtype())
            except FileNotFoundError:
                raise UsageError(f"{folder} lacks {file}, which its {INDEX} names: copy it there") from None
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{folder / file} cannot be read ({error}): copy or make it again") from None
        absent = next((name for name in listed or () if name not in self.stored), None)
        if absent is not None:
            raise UsageError(f"{folder / INDEX} names {absent}, which no file has: copy or make them again")

    def _listed(self) -> Mapping[str, str] | None:
        """Which file each tensor is in, by the index; None for a single file."""
        index = self.folder / INDEX
        if (self.folder / WEIGHTS).is_file():
            return None
        if not index.is_file():
            others = sorted(path.name for path in self.folder.glob("*.bin"))
            has = f"weights in {others[0]} alone" if others else "no weights"
            raise UsageError(
                f"{self.folder} has {has}: {WEIGHTS} or {INDEX} is needed, as `save_pretrained` and "
                "`stretto export` write them"
            )
        try:
            result: Mapping[str, str] = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
            for file in result.values():
                if not isinstance(file, str) or not file or Path(file).name != file:
                    raise ValueError(f"{file!r:.60} is no name of a file beside it")
            return dict(result)
        except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            raise UsageError(f"{index} cannot be read ({type(error).__name__}: {error})") from None

    @property
    def digest(self) -> str:
        """Differs for other names, shapes, dtypes and sizes of files; no value is read."""
        sizes = {one.file: (self.folder / one.file).stat().st_size for one in self.stored.values()}
        text = repr((sorted(self.stored.items()), sorted(sizes.items())))
        return hashlib.sha256(text.encode()).hexdigest()

    def meta(self, name: str) -> torch.Tensor:
        """Shape and dtype, without values."""
        one = self.stored[name]
        return torch.empty(one.shape, dtype=DTYPES[one.dtype], device="meta")

    def read(self, name: str) -> torch.Tensor:
        """The full tensor, in its own dtype, on the processor."""
        result: torch.Tensor = self._open[self.stored[name].file].get_tensor(name)
        return result

    def box(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """The box of a tensor that begins at `offsets`."""
        if not shape:
            return self.read(name)
        cut = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
        result: torch.Tensor = self._open[self.stored[name].file].get_slice(name)[cut]
        return result
