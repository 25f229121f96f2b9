"""`stretto convert`: where settings and the listing go, and that no file is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.convert import convert
from stretto.config import load_settings
from stretto.errors import StrettoError, UsageError
from tests.convert.commands import GPT3_175B, table

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 "
    "--train-iters 100 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 --disable-bias-linear"
)


def run(*arguments: str, text: str | None = None) -> tuple[str, str]:
    """Standard output and standard error."""
    ran = CliRunner().invoke(convert, list(arguments), input=text, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.stdout, ran.stderr


def test_settings_go_to_standard_output_and_the_listing_to_standard_error(tmp_path: Path) -> None:
    settings, listing = run("--megatron", f"{FLAGS} --overlap-grad-reduce --mock-data --zzz", "--world", "2")
    path = tmp_path / "a.toml"
    path.write_text(settings, encoding="utf-8")
    assert load_settings(path).parallel.dp == 2
    for words in ("taken: 9", "not needed: 2", "lacking: 1", "unknown: 1", "--zzz", "model.layers = 4"):
        assert words in listing


def test_a_file_is_written_and_never_replaced_unasked(tmp_path: Path) -> None:
    log, out = tmp_path / "log.txt", tmp_path / "out.toml"
    log.write_text(table(GPT3_175B, save="/here"), encoding="utf-8")
    asked = ("--megatron-file", str(log), "--world", "256", "-o", str(out))
    printed, errors = run(*asked)
    assert f"wrote {out}" in printed
    assert errors == ""
    found = load_settings(out)
    assert (found.parallel.dp, found.checkpoint.dir, found.name) == (2, "/here", "out")

    before = out.read_text(encoding="utf-8")
    with pytest.raises(UsageError, match=r"the file is there; name another, or give --force"):
        run(*asked, "--megatron", "--lr 1e-4")
    assert out.read_text(encoding="utf-8") == before
    run(*asked, "--megatron", "--lr 1e-4", "--force")
    assert load_settings(out).optimizer.lr == 1e-4


def test_a_command_may_come_by_standard_input() -> None:
    settings, _ = run("--megatron-file", "-", text=f"torchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS}")
    assert "dp = 2" in settings


def test_strict_writes_nothing_where_a_flag_is_lacking_or_unknown(tmp_path: Path) -> None:
    out = tmp_path / "out.toml"
    for more in ("--mock-data", "--zzz"):
        with pytest.raises(
            StrettoError, match="--strict: 1 flags are lacking or unknown; nothing was written"
        ):
            run("--megatron", f"{FLAGS} {more}", "--world", "1", "--strict", "-o", str(out))
        assert not out.exists()
    run("--megatron", f"{FLAGS} --overlap-grad-reduce", "--world", "1", "--strict", "-o", str(out))
    assert out.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give a command line"),
        (("--megatron-file", "nowhere.sh"), "cannot read file of flags nowhere.sh"),
        (("--megatron", "--num-layers $N"), r"what \$N is, the text does not say"),
        (("--megatron", FLAGS, "-o", "/nowhere/at/all.toml"), "the folder /nowhere/at does not exist"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(*arguments)
