"""Shell text is read as bash reads it, wherever it can be known without running anything."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from stretto.convert.launch import find_command
from stretto.convert.shell import Shell, run, shown, unresolved
from stretto.errors import UsageError
from tests.convert.scripts import AMPIPE, GPT3_175B, MIXTRAL_8X7B


def words(text: str, **variables: str) -> list[str]:
    """Of the last command."""
    return [shown(word) for word in run(text, Shell(dict(variables)))[-1].words]


AS_BASH = (
    "torchrun a 'b c' \"d e\" f\\ g",
    'A="x  y"; torchrun $A "$A" ${A} \'$A\' "${A}z"',
    'A=(1 \'2 3\' "4"); torchrun ${A[@]} "${A[@]}" ${A[1]} "${A[*]}x" $A',
    "A=(1)\nA+=( 2 # three\n 3 )\nB=x\nB+=y\ntorchrun ${A[@]} $B",
    "N=3; torchrun $((N*2)) $(( $N + ${N} )) $((-7/2)) $((-7%3)) $(((1+2)*3))",
    'torchrun ${NO:-d} ${NO:-"e f"} ${NO-g} ${NO:+h} ${NO:=i}',
    "X=1; torchrun ${X:+yes} ${X:-no}",
    "torchrun a \\\n   b\\\nc \\\n# no comment of a command that goes on\n",
    "torchrun a # b\n",
    "torchrun a#b '#c'",
    "A=''; torchrun $A \"$A\" b",
    "A=' x y '; torchrun a$A'b'",
    'CMD="torchrun --a 1"; eval $CMD "--b \'c d\'"',
    'bash -c "torchrun --a 1 --b 2"',
    "torchrun a > /dev/null 2>&1 b",
    "torchrun a; echo done >/dev/null",
    "cat <<END >/dev/null\nit's $A\nEND\ntorchrun a",
    "if true; then B=1; fi\ntorchrun a",
    "f() {\n torchrun a b\n}\nf",
    'A="\n  --x 1 \\\n  --y 2\n"\ntorchrun $A',
    'export A=1 B="2 3"; torchrun $A $B',
    'torchrun "a\\"b" "c\\d" \'e\\f\'',
    "A=1 torchrun b",
    'A=1; torchrun $"$A b" $\'c d\' $ a$ "$"',
    "torchrun ${NO:-a b} ${NO:-'c  d'} \"${NO:-e  f}\" ${NO:-${ALSO:-g}}",
    "torchrun ${NO:=i} $NO; A=; echo ${A:+x}",
    "torchrun [0]*1+[1]*2 a=b --c=d",
    "torchrun a && echo ok >/dev/null || echo no",
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("text", [*AS_BASH, GPT3_175B, MIXTRAL_8X7B, AMPIPE], ids=range(len(AS_BASH) + 3))
def test_words_are_those_of_bash(text: str) -> None:
    """A `torchrun` that prints what it is given, zero bytes between."""
    spoken = """say() { printf "%s\\0" "$@" >&3; }
        torchrun() { say torchrun "$@"; }
        python() { say python "$@"; }
        tee() { cat >/dev/null; }
        export -f say torchrun
        set -f
    """
    ran = subprocess.run(
        ["bash", "-c", f"exec 3>&1 >/dev/null\n{spoken}{text}", "name", "one", "two", "three"],
        capture_output=True,
        check=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin"},
    )
    expected = ran.stdout.decode().split("\0")[:-1]
    shell = Shell({"1": "one", "2": "two", "3": "three"})
    found = [call.words for call in run(text, shell) if call.words[0] in ("torchrun", "python")]
    assert [list(call) for call in found] == [expected]


def test_what_is_not_known_stays_and_is_named() -> None:
    text = "N=$(nproc | head -1)\ntorchrun $1 --a $DATA/x --n $N --m $(($N*2)) ${A%.sh} `date`"
    call = run(text, Shell())[-1]
    assert [shown(word) for word in call.words] == [
        "torchrun",
        "$1",
        "--a",
        "$DATA/x",
        "--n",
        "$(nproc | head -1)",
        "--m",
        "$(($N*2))",
        "${A%.sh}",
        "`date`",
    ]
    assert unresolved(call.words[3]) == ["$DATA"]
    assert unresolved(call.words[5]) == ["$(nproc | head -1)"]


def test_what_may_not_run_is_not_assigned_and_said() -> None:
    text = """L=2
        for s in 1 2; do
            L=$s
        done
        case $M in
            a) H=3 ;;
        esac
        torchrun x.py --num-layers $L --hidden-size $H"""
    shell = Shell()
    assert [shown(word) for word in run(text, shell)[-1].words[2:]] == [
        "--num-layers",
        "2",
        "--hidden-size",
        "$H",
    ]
    assert shell.maybe == {"L": 3, "H": 6}
    assert [note.split(" is set")[0] for note in find_command(text, Shell()).notes] == [
        "line 3: L",
        "line 6: H",
    ]


def test_given_variables_are_not_changed_by_the_text() -> None:
    shell = Shell({"N": "4"}, frozenset({"N"}))
    assert run("N=1\nif true; then N=2; fi\ntorchrun $N", shell)[-1].words == ("torchrun", "4")
    assert shell.maybe == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\ntorchrun 'b", "line 2: the quote ' is not closed"),
        ('a "b', 'the quote " is not closed'),
        ("A=(1\n2", r"line 1: the bracket of A=\( is not closed"),
        ("a ${b", r"the bracket \{ is not closed"),
        ("X='eval $X'\neval $X", "eval within eval"),
        ("A=aaaaaaaaaa\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 6, "the value of A has more than"),
    ],
)
def test_texts_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(text, Shell())


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=2 x.py --num-layers 2", 16),
        ("torchrun --nproc-per-node=4 x.py --num-layers 2", 4),
        ("/opt/bin/torchrun --nproc_per_node gpu x.py --num-layers 2", None),
        ("python3 -m torch.distributed.run --nproc_per_node 2 x.py --num-layers 2", 2),
        ("torchrun --nproc_per_node 2 -m megatron.train --num-layers 2", 2),
        ("deepspeed --num_gpus 8 --num_nodes 3 x.py --num-layers 2", 24),
        ("WORLD_SIZE=6\nsrun python x.py --num-layers 2", 6),
        ("WORLD_SIZE=6\n--num-layers 2", None),
        ("torchrun --nnodes 1:4 --nproc_per_node 2 x.py --num-layers 2", None),
        ("python x.py --num-layers 2", None),
        ("# a comment\n\n--num-layers 2\n--hidden-size 4", None),
        ('srun -N 2 bash -c "torchrun --nproc_per_node 8 --nnodes 2 x.py --num-layers 2"', 16),
    ],
)
def test_the_launcher_says_the_ranks(text: str, ranks: int | None) -> None:
    if text.startswith("WORLD_SIZE=6\n--"):
        with pytest.raises(UsageError, match="there is no training command"):
            find_command(text, Shell())
        return
    found = find_command(text, Shell())
    assert found.ranks == ranks
    assert found.arguments[:2] == ("--num-layers", "2")


def test_more_than_one_training_command_is_refused() -> None:
    with pytest.raises(UsageError, match="there are 2 training commands, on lines 1, 3; leave one of them"):
        find_command(
            "python a.py --num-layers 2\necho b.py --num-layers 3\npython b.py --num-layers 2", Shell()
        )
    with pytest.raises(UsageError, match="--megatron-file"):
        find_command("run.sh", Shell())


def test_a_command_that_may_not_run_is_read_and_said() -> None:
    found = find_command("if $x; then\n torchrun --nproc_per_node 2 a.py --num-layers 2\nfi", Shell())
    assert found.ranks == 2
    assert "read as if it ran once" in found.notes[0]
