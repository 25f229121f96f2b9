"""Stages as a text: the long words, Megatron-Core's letters, and what is wrong with a text that says none."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.config import ParallelSettings
from stretto.config.stage_text import EMBEDDING, LAYER, LOSS, Stages, evenly, read_stages

E, T, L = EMBEDDING, LAYER, LOSS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("embedding|layer*3|layer*3|loss", [[E], [T] * 3, [T] * 3, [L]]),
        ("embedding layer*2 | layer, layer, loss", [[E, T, T], [T, T, L]]),
        ("embedding,decoder|decoder|loss", [[E, T], [T], [L]]),
        # Of Megatron-Core's documentation and help, without the layer that predicts further tokens.
        ("Et*3|(tt|)*29,L", [[E, T, T, T], *[[T, T]] * 29, [L]]),
        ("E||t|L", [[E], [], [T], [L]]),
        ("E|(t|)*3,||L", [[E], [T], [T], [T], [], [], [L]]),
        ("Ettt|tt*2L", [[E, T, T, T], [T, T, T, L]]),
        ("EtL", [[E, T, L]]),
        ("|EtL|", [[], [E, T, L], []]),
        ("E(|tt)*2,L", [[E], [T, T], [T, T, L]]),
        ("E((t|)*2|)*2L", [[E, T], [T], [], [T], [T], [], [L]]),
        ("Et|*3L", [[E, T], [], [], [L]]),
    ],
)
def test_texts(text: str, expected: list[list[str]]) -> None:
    found = read_stages(text)
    assert [list(words) for words in found.of] == expected
    assert found.layers == sum(words.count(T) for words in expected)
    assert ParallelSettings(pp=len(expected), split=text).stages_asked == len(expected)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.data())
def test_what_is_written_is_read_again(layers: list[int], data: st.DataObject) -> None:
    kept = [at for at, count in enumerate(layers) if count]
    first = data.draw(st.integers(0, kept[0] if kept else len(layers) - 1))
    last = data.draw(st.integers(kept[-1] if kept else first, len(layers) - 1))
    stages = Stages(
        tuple((*[E][: at == first], *[T] * count, *[L][: at == last]) for at, count in enumerate(layers))
    )
    assert read_stages(stages.text) == stages
    for count in (0, 1, 7, 30):
        near = evenly(count, len(layers))
        assert near.layers == count
        assert len(near.of) == len(layers)
        assert read_stages(near.text) == near


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("embeding|layer|loss", "'embeding' is no word of a stage; did you mean embedding?"),
        ("E|lair|L", "'lair' is no word of a stage; did you mean layer?"),
        ("E|x|L", "'x' is no word of a stage; known are embedding (E), layer (t), loss (L)"),
        ("blocks.4", "Modules that begin stages are a list, as in ['blocks.4']"),
        (
            "",
            "embedding comes once, as the first of all words, and is there 0 times: write 'embedding,loss'",
        ),
        ("Et|t", "loss comes once, as the last of all words, and is there 0 times"),
        ("t|E|t|L", "is elsewhere: write 'embedding,layer||layer|loss'"),
        ("E|L|t", "is elsewhere: write 'embedding||layer,loss'"),
        ("Et|tm|L", "no layers that predict further tokens (mtp, m) are captured: leave them out"),
        ("E(t|*3", "a parenthesis is opened and not closed"),
        ("Et)*3|L", "a parenthesis is closed that was not opened"),
        ("*3|L", "what is repeated comes before a star"),
        ("E(t*99999)*99999L", "makes more than 100,000 stages and layers"),
        ("Et*9999999999999999999L", "makes more than 100,000 stages and layers"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        ParallelSettings(split=text)
    written = re.search(r"write '([^']*)'", str(refused.value))
    if written is not None:
        assert isinstance(read_stages(written[1]), Stages)


def test_parentheses_within_each_other_without_end_are_refused() -> None:
    with pytest.raises(ValueError, match="too many parentheses"):
        read_stages("(" * 100_000)
