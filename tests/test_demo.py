"""The command line: the demo on a tiny model, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentkv.cli import main
from agentkv.testing.tiny_files import save_folder
from agentkv.testing.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama", max_position_embeddings=4096)
    return save_folder(model, tmp_path_factory.mktemp("demo"))


@pytest.mark.parametrize("agents", [1, 9])
def test_demo_shows_what_sharing_did(
    folder: Path, agents: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["demo", "--agents", str(agents), "--max-tokens", "5", "--model", str(folder)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    figures = {
        name: tuple(int(figure.replace(",", "")) for figure in found.groups())
        for name in ("KV blocks held", "prompt tokens computed")
        if (found := re.search(rf"{name}\W+([\d,]+)\W+([\d,]+)", shown))
    }
    held, alone = figures["KV blocks held"]
    computed, asked = figures["prompt tokens computed"]
    assert f"{agents} sessions hold {held} blocks, not {alone}" in shown
    # Four branches follow the agents, and each turn after the first computes its own tokens alone.
    assert asked > 1000 * (agents + 4)
    assert computed < 1000 + 200 * (agents + 4)
    assert shown.count("mean logprob") == 4
    assert shown.count("\nbranch ") == 4
    assert shown.count(" adopted mean") == 1
    assert len(re.findall(r"[├└]─ s\d+ ", shown)) == agents
    assert (alone > 2 * held) == (agents > 2)


def test_a_model_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--model", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize(
    "arguments", [[], ["demo", "--agents", "0"], ["demo", "--max-tokens", "0"], ["demo", "--x"]]
)
def test_wrong_arguments_exit_with_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: agentkv" in capsys.readouterr().err
