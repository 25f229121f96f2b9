"""What changes a model or its memory is noted or refused; what is to be appended, a shell takes as it is."""

from __future__ import annotations

import re
import shlex

import pytest

from stretto.convert.megatron import convert
from stretto.errors import UsageError
from tests.convert.test_flags import LLAMA, MIXTRAL, MOE, OWN, settings


@pytest.mark.parametrize(
    ("command", "noted", "words"),
    [
        (f"{MOE} --expert-model-parallel-size 2", True, "room for all rows, 2 times the mean"),
        (f"{MOE} --expert-model-parallel-size 4", True, "room for all rows, 4 times the mean"),
        (f"{MIXTRAL} --expert-model-parallel-size 2", True, "parallel.ep_buffer = 1.5"),
        (f"{MOE} --expert-model-parallel-size 2 --moe-expert-capacity-factor 1", False, "ep_buffer"),
        (MOE, False, "ep_buffer"),
        (f"{OWN} --tensor-model-parallel-size 2 --sequence-parallel", True, 'parallel.recompute = "gathers"'),
        (
            f"{OWN} --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full",
            False,
            "gathers it again",
        ),
        (f"{OWN} --tensor-model-parallel-size 2", False, "gathers it again"),
        (
            f"{MOE} --ampipe-degree 2 --attention-dropout 0.1 --hidden-dropout 0.1",
            True,
            "attention that drops",
        ),
        (f"{MIXTRAL} --ampipe-degree 2 --attention-dropout 0.2", True, "(0.2 here)"),
        (f"{MIXTRAL} --ampipe-degree 2 --attention-dropout 0", False, "attention that drops"),
        (f"{MIXTRAL} --attention-dropout 0.2", False, "attention that drops"),
    ],
)
def test_what_changes_the_memory_or_fails_later_is_noted(command: str, noted: bool, words: str) -> None:
    made = convert([command], ranks=8)
    assert any(words in note for note in made.notes) == noted
    assert (words in made.text) == noted


SCORES = (
    *("--moe-router-score-function sigmoid", "--moe-router-num-groups 4", "--moe-router-group-topk 2"),
    *("--moe-router-topk-scaling-factor 2.5", "--moe-router-enable-expert-bias"),
)
ROUTERS = ("--moe-use-sinkhorn", "--moe-apply-probs-on-input")


@pytest.mark.parametrize("flag", [*SCORES, *ROUTERS])
def test_other_routers_are_other_models_and_refused(flag: str) -> None:
    said = (
        "this router .* another model" if flag in ROUTERS else "scores experts by a softmax of all: .*by hand"
    )
    for base in (MOE, MIXTRAL) if flag in ROUTERS else (MIXTRAL,):
        with pytest.raises(UsageError, match=f"{re.escape(flag)}: .*{said}"):
            convert([f"{base} {flag}"], ranks=8)
    assert settings(convert([f"{OWN} {flag}"], ranks=8)) == settings(convert([OWN], ranks=8))


def test_deepseeks_router_is_that_of_stretto() -> None:
    made = settings(convert([" ".join((MOE, *SCORES))], ranks=8)).model
    assert [getattr(made, key) for key in ("router", "groups", "top_groups", "scaling", "bias_rate")] == [
        *("sigmoid", 4, 2, 2.5, 0.001)
    ]
    with pytest.raises(UsageError, match=r"--moe-router-num-groups 4: .*append --moe-router-score-function"):
        convert([f"{MOE} --moe-router-num-groups 4"], ranks=8)


def test_a_softmax_of_all_scores_is_qwens() -> None:
    for base in (MOE, MIXTRAL):
        with pytest.raises(UsageError, match=r"sum to 1 in .*; of Qwen3-MoE they need not"):
            convert([f"{base} --moe-router-pre-softmax"], ranks=8)
    qwen = settings(convert([f"{MIXTRAL} --qk-layernorm --moe-router-pre-softmax"], ranks=8))
    assert qwen.model.config["norm_topk_prob"] is False  # type: ignore[union-attr]
    convert([f"{MOE} --moe-router-pre-softmax --moe-router-topk 1"], ranks=8)


@pytest.mark.parametrize(
    "command",
    [
        f"{OWN} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        f"{OWN} --pipeline-model-parallel-size 2 --num-layer-list 1,1",
        f"{OWN} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|tL'",
        f"{LLAMA} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|L'",
        f"{MOE} --moe-layer-freq [1,0]",
    ],
)
def test_what_is_to_be_appended_is_appended_as_it_is(command: str) -> None:
    """Behind the command itself, and within the quotes of `--megatron "..."`."""
    with pytest.raises(UsageError) as refused:
        convert([command], ranks=8)
    said = str(refused.value)
    found = re.search(r"(?:append |such as )(--[a-z-]+ )?('[^']*'|\S+)", said)
    assert found is not None, said
    hint = f"{found[1] or '--moe-layer-freq '}{found[2]}"
    assert '"' not in hint
    [shell] = shlex.split(f'"{command} {hint}"')  # as a shell reads it
    settings(convert([shell], ranks=8))
