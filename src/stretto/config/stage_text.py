"""Stages as a text: what each has, stage by stage in the order of their numbers.

    embedding|layer*3|layer*3||loss        five stages, of which the fourth has nothing
    Et*3|(tt|)*29,m|L                      Megatron-Core's short form, of `--pipeline-model-parallel-layout`

`|` separates two stages; `x*3` and `(x|)*3` repeat what is before the star; commas and blanks mean
nothing. "embedding" is all that runs before the first layer, "loss" all that runs after the last one. Which
modules are layers is for who has the model (`stretto.capturing.split`).
"""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

EMBEDDING, LAYER, LOSS, MTP = "embedding", "layer", "loss", "mtp"
WORDS = {EMBEDDING: EMBEDDING, LAYER: LAYER, LOSS: LOSS, MTP: MTP, "decoder": LAYER, "layers": LAYER}
"""Every long word -> what it means; "decoder" is Megatron-Core's."""
LETTERS = {"E": EMBEDDING, "t": LAYER, "m": MTP, "L": LOSS}
"""Megatron-Core's letters, of which several are written in one."""

MOST = 100_000
"""Stages and layers of a text. No model has as many; it keeps a slip of the pen from filling the memory."""

_TOKEN = re.compile(r"[A-Za-z_]+|\d+|\S")
_KNOWN = "embedding (E), layer (t), loss (L)"


@dataclass(frozen=True, slots=True)
class Stages:
    """What a text says. of: the words of each stage, of which a stage may have none."""

    of: tuple[tuple[str, ...], ...]

    @property
    def layers(self) -> int:
        """Layers of all stages."""
        return sum(words.count(LAYER) for words in self.of)

    @property
    def text(self) -> str:
        """The stages as a text of long words."""
        counted = [[(word, len([*same])) for word, same in groupby(words)] for words in self.of]
        return "|".join(",".join(word if n == 1 else f"{word}*{n}" for word, n in words) for words in counted)


def of_counts(layers: Sequence[int]) -> Stages:
    """Stages of so many layers each, the embedding in the first and the loss in the last."""
    last = len(layers) - 1
    return Stages(
        tuple(
            (*[EMBEDDING][: at == 0], *[LAYER] * count, *[LOSS][: at == last])
            for at, count in enumerate(layers)
        )
    )


def evenly(layers: int, stages: int) -> Stages:
    """Stages of about equally many layers."""
    each, more = divmod(layers, stages)
    return of_counts([each + (at < more) for at in range(stages)])


def read_stages(text: str) -> Stages:
    """Read a text. Raises ValueError that quotes it, names what is wrong, and what to write."""
    try:
        items = " ".join(_items(deque(_TOKEN.findall(text)), inside=False))
        stages = Stages(tuple(tuple(group.split()) for group in items.split("|")))
        _check(stages)
    except ValueError as error:
        names = "" if "|" in text else f". Modules that begin stages are a list, as in [{text!r}]"
        raise ValueError(f"{text!r}: {error}{names}") from None
    except RecursionError:
        raise ValueError("a text of stages has too many parentheses within each other") from None
    return stages


def _items(tokens: deque[str], inside: bool) -> list[str]:
    """The words and bars up to the end, or to the closing parenthesis."""
    groups: list[list[str]] = []
    while tokens:
        token = tokens.popleft()
        if token == "(":
            groups.append(_items(tokens, inside=True))
        elif token == ")":
            if not inside:
                raise ValueError("a parenthesis is closed that was not opened: take it out")
            return [item for group in groups for item in group]
        elif token == "*":
            number = tokens.popleft() if tokens else ""
            if not groups or not number.isdecimal():
                raise ValueError(
                    "what is repeated comes before a star, and how often after it, as in layer*3"
                )
            if len(number) > len(str(MOST)) or len(groups[-1]) * int(number) > MOST:
                raise ValueError(
                    f"*{number} makes more than {MOST:,} stages and layers: give a smaller number"
                )
            groups[-1] = groups[-1] * int(number)
        elif token == "|":
            groups.append([token])
        elif token != ",":
            groups += [[word] for word in _words(token)]
    if inside:
        raise ValueError("a parenthesis is opened and not closed: add )")
    return [item for group in groups for item in group]


def _words(token: str) -> list[str]:
    if token in WORDS:
        return [WORDS[token]]
    if all(letter in LETTERS for letter in token):
        return [LETTERS[letter] for letter in token]
    near = difflib.get_close_matches(token.lower(), WORDS, n=1)
    hint = f"did you mean {WORDS[near[0]]}?" if near else f"known are {_KNOWN}"
    raise ValueError(f"{token!r} is no word of a stage; {hint}")


def _check(stages: Stages) -> None:
    """Raises ValueError where it is no layout of a model."""
    words = [word for stage in stages.of for word in stage]
    if MTP in words:
        raise ValueError(
            "no layers that predict further tokens (mtp, m) are captured: leave them out, or count each as a "
            "layer (t) if the model runs it as one"
        )
    for word, place, where in ((EMBEDDING, 0, "first"), (LOSS, -1, "last")):
        if words.count(word) != 1 or words[place] != word:
            had = f"is there {words.count(word)} times" if words.count(word) != 1 else "is elsewhere"
            mended = of_counts([stage.count(LAYER) for stage in stages.of]).text
            raise ValueError(f"{word} comes once, as the {where} of all words, and {had}: write {mended!r}")
