"""sample.py: the trained model's own probabilities, token by token, at a cost that does not grow with the text."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, TINY, flags, made_up_tokens, run_script, write_shard

import sample
from train_gpt import BLOCK, Hyperparameters, build_model

SMALL = Hyperparameters(vocab_size=257, document_token=256, num_layers=4, num_heads=4, model_dim=32, dtype="float32",
                        sequence_length=5 * BLOCK, bfloat16_embeddings=False)


@pytest.fixture(autouse=True)
def one_thread():
    """A single token's products are too small to share, and threads that wait for each other lose time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained_looking(settings: Hyperparameters):
    """A model without the zeros and ones that a fresh one starts with, behind which a fault could hide."""
    model = build_model(settings)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape) * (0.5 if param.ndim < 2 else param.size(1) ** -0.5))
    return model


def one_document(count: int) -> list[int]:
    return [256, *torch.randint(256, (count - 1,), generator=torch.Generator().manual_seed(5)).tolist()]


def training_losses(model, tokens: list[int], window_blocks: int) -> torch.Tensor:
    """The loss of each next token in the training forward, seen before their mean is taken."""
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        each = partial(F.cross_entropy, reduction="none")
        patch.setattr(F, "cross_entropy", each)
        return model(torch.tensor(tokens[:-1]), torch.tensor(tokens[1:]), torch.tensor(window_blocks))


def read_losses(reader: sample.Reader, tokens: list[int], pieces: int = 1) -> torch.Tensor:
    """The same from the reader, which gets the tokens one by one or in larger pieces."""
    losses = {}
    for first in range(0, len(tokens) - 1, pieces):
        last = min(first + pieces, len(tokens) - 1)
        losses[last - 1] = F.cross_entropy(reader.read(tokens[first:last]), torch.tensor(tokens[last]))
    return torch.stack([losses.get(i, torch.tensor(float("nan"))) for i in range(len(tokens) - 1)])


@pytest.mark.parametrize("window_blocks", [1, 2, 3, 9])
def test_probabilities_are_those_of_the_training_forward_across_blocks_and_the_windows_edge(window_blocks):
    model, tokens = trained_looking(SMALL), one_document(5 * BLOCK + 1)
    expected = training_losses(model, tokens, window_blocks)
    torch.testing.assert_close(read_losses(sample.Reader(model, window_blocks), tokens), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [
    replace(SMALL, num_kv_heads=2), replace(SMALL, num_layers=9), replace(SMALL, num_layers=1),
], ids=["grouped queries", "a layer without attention", "one layer"])
def test_probabilities_are_the_same_for_every_shape_of_model(settings):
    model, tokens = trained_looking(settings), one_document(5 * BLOCK + 1)[:3 * BLOCK + 1]
    expected = training_losses(model, tokens, 2)
    torch.testing.assert_close(read_losses(sample.Reader(model, 2), tokens), expected, rtol=1e-5, atol=1e-5)


def test_probabilities_agree_to_rounding_in_bfloat16():
    model, tokens = trained_looking(replace(SMALL, dtype="bfloat16")), one_document(3 * BLOCK + 1)
    gap = read_losses(sample.Reader(model, 2), tokens) - training_losses(build_as(model), tokens, 2)
    assert gap.abs().mean() < 0.02 and gap.mean().abs() < 0.005


def build_as(model):
    """A second model with the same weights: the reader changes the attentions of the first."""
    twin = build_model(replace(SMALL, dtype="bfloat16"))
    twin.load_state_dict({name.replace("attention.attention.", "attention."): value
                          for name, value in model.state_dict().items()})
    return twin


@pytest.mark.parametrize("pieces", [3, 100, 128, 200, 641])
def test_a_prompt_may_be_read_in_pieces_of_any_length(pieces):
    tokens = one_document(5 * BLOCK + 1)
    expected = training_losses(trained_looking(SMALL), tokens, 2)
    losses = read_losses(sample.Reader(trained_looking(SMALL), 2), tokens, pieces)
    given = ~losses.isnan()
    assert given.sum() == -(-(len(tokens) - 1) // pieces)
    torch.testing.assert_close(losses[given], expected[given], rtol=1e-5, atol=1e-5)


def test_the_cost_of_a_token_is_bounded_by_the_window(monkeypatch):
    keys_seen = []
    attend = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **more: (
        keys_seen.append((q.size(2), k.size(2))), attend(q, k, v, **more))[1])
    reader = sample.Reader(trained_looking(replace(SMALL, sequence_length=6 * BLOCK)), 2)
    settings = replace(SMALL, document_token=300)  # never drawn, so that the text gets long
    assert len(list(sample.continuation(reader, settings, [1] * 200, 500, 1.0, 0, seed=1))) == 500
    queries, keys = zip(*keys_seen, strict=True)
    assert sum(queries) == SMALL.num_layers * (1 + 200 + 499)  # every token is computed once
    assert max(keys) == 2 * BLOCK


def test_a_temperature_of_zero_takes_the_likeliest_and_top_k_leaves_out_the_rest():
    logits, random = torch.tensor([0.0, 3.0, 1.0, 2.9]), torch.Generator().manual_seed(1)
    assert {sample.choose(logits, 0, 0, random) for _ in range(50)} == {1}
    assert {sample.choose(logits, 1.0, 1, random) for _ in range(50)} == {1}
    assert {sample.choose(logits, 5.0, 2, random) for _ in range(200)} == {1, 3}
    assert {sample.choose(logits, 5.0, 0, random) for _ in range(500)} == {0, 1, 2, 3}


def test_draws_follow_the_probabilities_at_the_temperature():
    logits, random = torch.tensor([0.0, 1.0, 2.0]), torch.Generator().manual_seed(1)
    draws = torch.tensor([sample.choose(logits, 2.0, 0, random) for _ in range(5000)])
    weights = torch.tensor([1.0, 2.718281828 ** 0.5, 2.718281828])
    torch.testing.assert_close(draws.bincount() / 5000, weights / weights.sum(), atol=0.02, rtol=0)


def test_text_stops_where_a_document_starts_and_never_holds_the_tables_padding():
    class Scripted:
        """Wants to say 72, 105, a new document, 33; the padding's rows are likelier than all of them."""
        heard, script = [], [72, 105, 256, 33]

        def read(self, tokens):
            self.heard += tokens
            logits = torch.full((384,), -100.0)
            logits[self.script.pop(0)], logits[257:] = 0.0, 100.0
            return logits

    reader = Scripted()
    assert list(sample.continuation(reader, SMALL, [65, 66], 4, 1.0, 0, seed=1)) == [72, 105]
    assert reader.heard == [256, 65, 66, 72, 105]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which a tiny run has left its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    write_shard(folder / "train.bin", made_up_tokens(20_000, seed=1))
    write_shard(folder / "val.bin", made_up_tokens(3_000, seed=2))
    settings = TINY | dict(train_files="train.bin", val_files="val.bin", save_every=4)
    assert run_script(flags(**settings), folder).returncode == 0
    return folder


def run_sample(folder, *arguments: str, **how):
    return subprocess.run([sys.executable, str(ROOT / "sample.py"), *arguments], cwd=folder, capture_output=True,
                          timeout=120, **how)


def test_a_seed_gives_the_same_text_again_and_the_text_starts_with_the_prompt(trained):
    (checkpoint,) = trained.glob("checkpoints/*/*.pt")
    first, again, other = (run_sample(trained, *which, "--prompt", "def f(é", "--tokens", "80").stdout
                           for which in (["latest", "--seed", "3"], [str(checkpoint), "--seed", "3"], ["--seed", "4"]))
    assert first == again != other
    assert first.startswith("def f(é".encode()) and first.endswith(b"\n")


def test_the_window_is_that_of_the_checkpoints_step(trained):
    (checkpoint,) = trained.glob("checkpoints/*/*.pt")
    reader, settings = sample.load_reader(str(checkpoint), 100)
    assert reader.model.blocks[0].attention.window_blocks == settings.window_end // BLOCK == 3


@pytest.mark.parametrize("arguments, complaint", [
    (["nowhere.pt"], "sample: nowhere.pt: no such file or directory\n"),
    (["train.bin"], "sample: train.bin: not a checkpoint, or a damaged one (UnpicklingError)\n"),
    (["half.pt"], "sample: half.pt: not a checkpoint, or a damaged one (RuntimeError)\n"),
    (["record.pt"], "sample: record.pt: a checkpoint of another script than train_gpt.py, as its settings show "
                    "(cooldown_shape); give the path of one of its own\n"),
    (["latest", "--checkpoint_dir", "empty"], "no checkpoint in empty"),
    (["--tokens", "0"], "--tokens 0"),
    (["--tokens", "many"], "many"),
    (["--temperature", "-1"], "--temperature -1"),
    (["--temperature", "nan"], "nan"),
    (["--top_k", "-3"], "--top_k -3"),
    (["--topk", "3"], "--topk"),
])
def test_bad_input_gets_one_line_and_exit_code_2(trained, arguments, complaint, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    (saved,) = trained.glob("checkpoints/*/*.pt")
    Path("half.pt").write_bytes(saved.read_bytes()[:saved.stat().st_size // 2])
    checkpoint = torch.load(saved, weights_only=True)
    torch.save(checkpoint | dict(settings=checkpoint["settings"] | dict(cooldown_shape="cosine")), "record.pt")
    assert sample.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and complaint in output.err and output.err.count("\n") == 1


def test_a_reader_that_closes_the_pipe_is_no_error(trained):
    command = [sys.executable, str(ROOT / "sample.py"), "--tokens", "3000", "--top_k", "200", "--temperature", "2"]
    process = subprocess.Popen(command, cwd=trained, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def test_a_strangers_checkpoint_runs_no_code(tmp_path, capsys):
    class Mine:
        def __reduce__(self):
            return open, (str(tmp_path / "was here"), "w")

    torch.save(dict(settings=Mine(), step=1, state=dict(model={})), tmp_path / "stranger.pt")
    assert sample.main([str(tmp_path / "stranger.pt")]) == 2
    assert "not a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "was here").exists()


def test_gpt2_tokens_use_tiktoken_and_without_it_say_how_to_get_it(monkeypatch):
    gpt2 = Hyperparameters()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(sample.UserError, match="pip install tiktoken"):
        sample.tokens_of(gpt2)

    class StandIn:
        """Says what it was asked for; the real one would fetch its vocabulary from the network."""
        get_encoding = staticmethod(lambda name: StandIn() if name == "gpt2" else None)
        encode_ordinary = staticmethod(lambda text: [len(word) for word in text.split()])
        decode_single_token_bytes = staticmethod(lambda token: b"x" * token)

    monkeypatch.setitem(sys.modules, "tiktoken", StandIn)
    tokens = sample.tokens_of(gpt2)
    assert tokens.encode("one three") == [3, 5] and tokens.decode(3) == b"xxx"
    with pytest.raises(sample.UserError, match="1000 tokens is neither"):
        sample.tokens_of(replace(gpt2, vocab_size=1000, document_token=0))
