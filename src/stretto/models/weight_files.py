"""A folder of weights as safetensors: where it is, what is in it, and tensors or boxes of them.

A folder is named by its path, or by a model's name on the Hugging Face Hub, whose own library keeps a cache
and downloads what is lacking, if it can. Files are mapped into memory, and read where a tensor is asked for:
what a rank does not ask for takes none.

`weights_of` compares them with a model: every tensor of one is in the other, with its shape. All faults are
reported at once, before anything is loaded; a value is read only where a tie must be checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from stretto.errors import UsageError, listed
from stretto.files.parse import parse_json
from stretto.models.adapters import base_of, plain_names
from stretto.models.gpt import GPT
from stretto.models.transformers_adapter import WeightRecipe, may_ignore, may_lack, recipes_for

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


# --- a model's weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Weights:
    """files: of a folder. of: name of a parameter, or of a buffer that is saved -> the name that recipes have
    it under, which a tie may have another of. recipes: by that name."""

    files: WeightFiles
    of: dict[str, str]
    recipes: dict[str, WeightRecipe]


def weights_of(model: nn.Module, folder: Path) -> Weights:
    """A folder's weights for a model, which may be on "meta"; of an adapted one, for what is adapted.

    Raises UsageError for a folder that has none, and for weights that lack something, have what the model has
    no use for, or another shape or kind of dtype, or two values for what the model ties.
    """
    prefix, model = base_of(model)
    files = WeightFiles(folder)
    strange = {one.dtype: name for name, one in files.stored.items() if one.dtype not in DTYPES}
    if strange:
        dtype, name = next(iter(strange.items()))
        raise UsageError(
            f"{folder}: {name} is {dtype}: quantised weights are not trained; take those in bfloat16"
        )
    stored = {name: files.meta(name) for name in files.stored}
    plain = plain_names(model)
    state = model.state_dict(keep_vars=True)
    known: dict[str, torch.Tensor] = {}
    for own, name in plain.items():
        known.setdefault(name, state[own])
    found = (
        [WeightRecipe((name,), {name: one}) for name, one in stored.items()]
        if isinstance(model, GPT)
        else recipes_for(model, stored, known)
    )
    recipes = {name: recipe for recipe in found for name in recipe.makes}
    result = Weights(files, {}, recipes)
    faults = list(_faults(model, known, result))
    if faults:
        raise UsageError("\n".join(f"{folder}: {fault}" for fault in faults))
    of = {f"{prefix}{own}": result.of[name] for own, name in plain.items() if name in result.of}
    return replace(result, of=of)


def _faults(model: nn.Module, known: Mapping[str, torch.Tensor], weights: Weights) -> Iterator[str]:
    own, recipes = isinstance(model, GPT), weights.recipes
    ties: dict[int, list[str]] = {}
    for name, tensor in known.items():
        ties.setdefault(id(tensor), []).append(name)
    lacking, shapes, kinds = list[str](), list[str](), list[str]()
    for names in ties.values():
        there = [name for name in names if name in recipes]
        tensor = known[names[0]]
        if not there:
            lacking += [] if not own and may_lack(model, names[0]) else names[:1]
            continue
        weights.of.update(dict.fromkeys(names, there[0]))
        for name in there:
            stored = recipes[name].makes[name]
            if stored.shape != tensor.shape:
                shapes.append(f"{name} is {list(stored.shape)}, and the model's {list(tensor.shape)}")
            elif stored.is_floating_point() != tensor.is_floating_point():
                kinds.append(f"{name} is {stored.dtype}, and the model's {tensor.dtype}")
        key = "model.tie_embeddings" if own else "model.config.tie_word_embeddings"
        yield from _of_a_tie(weights, there, key)
    unused = [
        recipe.names[0]
        for name, recipe in recipes.items()
        if name not in known and (own or not (may_ignore(model, name) or may_ignore(model, recipe.names[0])))
    ]
    if lacking:
        yield f"the weights lack {listed(lacking)}: they are of another model, or of a part of this one"
    if unused:
        kind = type(model).__name__
        yield f"the weights have {listed(unused)}, of which a {kind} has no use: they are of another model"
    if shapes:
        yield f"{listed(shapes)}: give the shape that the weights have (model.config)"
    if kinds:
        yield f"{listed(kinds)}: these weights are not trained"


def _of_a_tie(weights: Weights, there: list[str], key: str) -> Iterator[str]:
    values = [(name, weights.recipes[name]) for name in there]
    if len(values) < 2 or any(recipe.make is not None for _, recipe in values):
        return
    (first, recipe), *rest = values
    for name, other in rest:
        if recipe.makes[first].shape == other.makes[name].shape and not torch.equal(
            weights.files.read(recipe.names[0]), weights.files.read(other.names[0])
        ):
            yield (f"{first} and {name} differ, and the model has one tensor for both: set {key} = false")
