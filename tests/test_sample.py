"""sample.py: the trained model's own probabilities, whatever is in the script, at a cost that does not grow."""

import inspect
import re
import subprocess
import sys
import uuid
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from helpers import ONE_THREAD, ROOT, SCRIPT, checkpoint, make_data, run_script, tiny_flags

import sample
from train_gpt import BLOCK, Settings

MIX = "        v = v if value_embedding_TC is None else v + value_embedding_TC.view_as(v)\n"
PREVIOUS_TOKEN = (MIX, "        k = (k + F.pad(k, (0, 0, 0, 0, 1, 0))[:-1]) / 2\n" + MIX)  # a cache would miss it
ONE_BLOCK = dict(sequence_length=1024, stages="1 1 1 1 1  1 1 1 1 1  0 1 1 1 1")  # the window in every stage
# The windows at a step of six, and the long ones that the positions were fitted to; for the last step there is a longer
# one, to which they are not.
WINDOWS = {3: ([1, 2], [1, 2]), 6: ([2, 4], [1, 2, 3]), "one block": ([1, 1], [1])}


def variant(path: Path, *edits: tuple[str, str]) -> Path:
    """The script with each old text, which must be there once, replaced by the new one."""
    source = SCRIPT.read_text()
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    path.write_text(source)
    return path


def train(folder: Path, script: Path = SCRIPT, **changes) -> Path:
    settings = (
        dict(sequence_length=512, num_iterations=6, save_every=3, document_token=256, batch_sequences=2) | changes
    )
    result = run_script(tiny_flags(**settings), folder, script=script)
    assert result.returncode == 0, result.stderr
    return checkpoint(folder, 6)


def shake(path: Path) -> Path:
    """The same checkpoint with weights that no longer hold the zeros of the start, behind which a fault could hide."""
    saved = torch.load(path, weights_only=True)
    random = torch.Generator().manual_seed(3)
    for weight in saved["state"]["model"].values():
        scale = 0.5 if weight.ndim < 2 else weight.size(1) ** -0.5
        weight.copy_(torch.randn(weight.shape, generator=random) * scale)
    torch.save(saved, path)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with checkpoints of steps 3 and 6 of a run whose windows grow."""
    folder = make_data(tmp_path_factory.mktemp("trained"))
    shake(train(folder))
    return folder


def text(count: int) -> list[int]:
    return [256, *torch.randint(256, (count - 1,), generator=torch.Generator().manual_seed(5)).tolist()]


def plain_logits(script, path: Path, tokens: list[int], at: int | str, **changes) -> torch.Tensor:
    """The logits of every next token from one forward pass over the whole text, by the script's model."""
    saved = torch.load(path, weights_only=True)
    gpt = script.GPT(script.Settings(**saved["settings"] | changes), use_flex=False)
    gpt.load_state_dict(saved["state"]["model"])
    windows, fitted_to = WINDOWS[at]
    gpt.rotary.fit(fitted_to)
    padded = torch.tensor(tokens + [0] * (-len(tokens) % BLOCK))
    with torch.no_grad():
        return gpt.logits(gpt.hidden(padded, torch.tensor(windows)))[: len(tokens), :257]


def assert_same_logits(model: sample.Model, tokens: list[int], expected: torch.Tensor) -> None:
    for length in [1, 2, 100, *range(BLOCK - 1, len(tokens), BLOCK), *range(BLOCK, len(tokens), BLOCK), len(tokens)]:
        torch.testing.assert_close(model.next_logits(tokens[:length]), expected[length - 1], rtol=1e-4, atol=1e-4)


def test_probabilities_are_those_of_one_forward_pass_over_the_whole_text(trained):
    tokens, path = text(1000), checkpoint(trained, 6)
    model = sample.Model(str(path), "", SCRIPT, False)
    assert_same_logits(model, tokens, plain_logits(sample.load_script(SCRIPT), path, tokens, 6))


def test_a_text_longer_than_the_reach_of_the_last_token_changes_nothing_but_the_cost(tmp_path):
    path = shake(train(make_data(tmp_path), **ONE_BLOCK))
    model, tokens = sample.Model(str(path), "", SCRIPT, False), text(1500)
    assert model.max_blocks == 4  # two layers, each with a window of one block; tokens before those, and a last block
    seen = []
    hidden, model.gpt.hidden = model.gpt.hidden, lambda inputs, *more: seen.append(len(inputs)) or hidden(inputs, *more)
    expected = plain_logits(sample.load_script(SCRIPT), path, tokens, "one block", val_sequence_length=1536)
    assert_same_logits(model, tokens, expected)
    assert max(seen) == 4 * BLOCK


@pytest.mark.parametrize("step", [3, 6])
def test_the_windows_are_those_of_the_checkpoints_step(trained, step):
    path, tokens = checkpoint(trained, step), text(600)
    assert int(torch.load(path, weights_only=True)["step"]) == step
    shake(path)
    assert_same_logits(
        sample.Model(str(path), "", SCRIPT, False),
        tokens,
        plain_logits(sample.load_script(SCRIPT), path, tokens, step),
    )


def test_an_idea_that_looks_at_the_previous_token_is_continued_as_its_script_would(tmp_path):
    make_data(tmp_path)
    script_path = variant(tmp_path / "idea.py", PREVIOUS_TOKEN)
    path = shake(train(tmp_path, script_path, **ONE_BLOCK))
    script, options = sample.load_script(script_path), Namespace(seed=1, tokens=200, temperature=0, top_k=0)
    prompt = text(300)[1:]
    written = list(sample.continuation(sample.Model(str(path), "", script_path, True), prompt, options))
    expected = [256, *prompt]
    for _ in range(200):  # one forward pass over everything for every token
        expected.append(int(plain_logits(script, path, expected, "one block")[-1].argmax()))
        if expected[-1] == 256:
            break
    assert written == [token for token in expected[1 + len(prompt) :] if token != 256] and len(written) > 5
    old = plain_logits(sample.load_script(SCRIPT), path, expected, "one block")
    assert (old - plain_logits(script, path, expected, "one block")).abs().max() > 0.1  # the idea matters


@pytest.mark.parametrize("path", sorted(ROOT.glob("records/*/train_gpt.py")), ids=lambda path: path.parent.name)
def test_a_record_is_sampled_with_the_logits_of_its_own_validation(path, tmp_path, monkeypatch):
    script = sample.load_script(path)
    s = script.make_settings({"dtype": "float32"}, 1, False)
    one = {name: 1024 for name in ("val_sequence_length", "val_tokens") if hasattr(s, name)}  # sequence
    trainer = script.Trainer(replace(s, **one), script.World(0, 1, torch.device("cpu")))
    about = dict(run_id=str(uuid.uuid4()), source=path.read_text(), data=[], settings=asdict(s))
    progress = dict(step=450, position=[0, 0], seconds=1.0, state=dict(model=trainer.model.state_dict()))
    torch.save(about | progress, tmp_path / "record.pt")
    model = sample.Model(str(shake(tmp_path / "record.pt")), "", path, True)
    trainer.model.load_state_dict(model.gpt.state_dict())
    tokens, seen, logits = text(1025), [], trainer.model.logits
    monkeypatch.setattr(trainer.model, "logits", lambda x: seen.append(logits(x)) or seen[-1])
    pair = torch.tensor(tokens[:-1], dtype=torch.int32), torch.tensor(tokens[1:])
    shard_and_step = Namespace(read=lambda *where: pair), 450
    trainer.validate(*shard_and_step[: len(inspect.signature(trainer.validate).parameters)])  # some have one window
    expected = seen[0].flatten(0, -2)[:, : s.vocab_size]
    assert model.max_blocks * model.block >= 512
    for length in (1, 2, 127, 128, 129, 255, 256, 257, 500, 1000, 1024):
        if length > model.max_blocks * model.block:
            break  # no sequence was so long in training
        torch.testing.assert_close(model.next_logits(tokens[:length]), expected[length - 1], rtol=1e-4, atol=1e-4)


def test_a_temperature_of_zero_takes_the_likeliest_and_top_k_leaves_out_the_rest():
    logits, random = torch.tensor([0.0, 3.0, 1.0, 2.9]), torch.Generator().manual_seed(1)
    assert {sample.choose(logits, 0, 0, random) for _ in range(50)} == {1}
    assert {sample.choose(logits, 1e-45, 0, random) for _ in range(50)} == {1}
    assert {sample.choose(logits, 1.0, 1, random) for _ in range(50)} == {1}
    assert {sample.choose(logits, 5.0, 2, random) for _ in range(200)} == {1, 3}
    assert {sample.choose(logits, 5.0, 0, random) for _ in range(500)} == {0, 1, 2, 3}


def test_draws_follow_the_probabilities_at_the_temperature():
    logits, random = torch.tensor([0.0, 1.0, 2.0]), torch.Generator().manual_seed(1)
    draws = torch.tensor([sample.choose(logits, 2.0, 0, random) for _ in range(5000)])
    weights = torch.tensor([1.0, 2.718281828**0.5, 2.718281828])
    torch.testing.assert_close(draws.bincount() / 5000, weights / weights.sum(), atol=0.02, rtol=0)


def test_text_stops_where_a_document_starts_and_never_holds_the_tables_padding(trained):
    model = sample.Model(str(checkpoint(trained, 6)), "", SCRIPT, False)
    assert model.gpt.head.weight.size(0) == 384 and model.next_logits([256]).shape == (257,)
    script = [72, 105, 256, 33]
    model.next_logits = lambda tokens: torch.eye(257)[script[len(tokens) - 3]]
    assert list(sample.continuation(model, [65, 66], Namespace(seed=1, tokens=4, temperature=0, top_k=0))) == [72, 105]


def run_sample(folder: Path, *arguments: str, script: Path = ROOT / "sample.py"):
    return subprocess.run(
        [sys.executable, str(script), *arguments], cwd=folder, capture_output=True, timeout=300, env=ONE_THREAD
    )


def test_a_seed_gives_the_same_text_again_and_the_text_starts_with_the_prompt(trained):
    which = ["latest", "--seed", "3"], [str(checkpoint(trained, 6)), "--seed", "3"], ["--seed", "4"]
    first, again, other = (
        run_sample(trained, *words, "--prompt", "def f(é", "--tokens", "40").stdout for words in which
    )
    assert first == again != other
    assert first.startswith("def f(é".encode()) and first.endswith(b"\n")


def sample_here(folder, monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.chdir(folder)
    code = sample.main(["--tokens", "5", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_comment_that_differs_is_a_warning(trained, tmp_path, monkeypatch, capsys):
    edits = (
        ('    """Logits with a softcap', '    """The logits with a softcap'),
        ("BLOCK = 128  # tokens;", "BLOCK = 128  # tok;"),
    )
    script = variant(tmp_path / "commented.py", *edits)
    code, out, err = sample_here(trained, monkeypatch, capsys, "--script", str(script))
    assert code == 0 and out
    assert err == f"sample: only comments differ between {script} and the script that trained this checkpoint\n"


def test_a_script_that_differs_is_named_and_must_be_chosen(trained, tmp_path, monkeypatch, capsys):
    script = variant(tmp_path / "train_gpt.py", PREVIOUS_TOKEN)
    difference = f"sample: the script that trained this checkpoint differs from {script} in CausalSelfAttention"
    code, out, err = sample_here(trained, monkeypatch, capsys, "--script", str(script))
    assert (code, err) == (0, difference + "\n") and out
    (tmp_path / "sample.py").write_text((ROOT / "sample.py").read_text())
    result = run_sample(trained, script=tmp_path / "sample.py")
    assert result.returncode == 2 and result.stdout == b""
    assert result.stderr.decode().startswith(difference + "; add --script ") and result.stderr.count(b"\n") == 1
    record = tmp_path / "records/2025-01-01_Test/train_gpt.py"
    record.parent.mkdir(parents=True)
    record.write_text(SCRIPT.read_text())
    assert (
        run_sample(trained, script=tmp_path / "sample.py").stderr.decode() == f"{difference}; add --script {record}\n"
    )
    assert run_sample(trained, "--script", str(record), script=tmp_path / "sample.py").stderr == b""


def test_a_script_that_differs_in_many_places_is_one_line(trained, tmp_path):
    (tmp_path / "train_gpt.py").write_bytes((ROOT / "records/2025-01-04_SoftCap/train_gpt.py").read_bytes())
    (tmp_path / "sample.py").write_bytes((ROOT / "sample.py").read_bytes())
    told = run_sample(trained, script=tmp_path / "sample.py").stderr.decode()
    assert told.count("\n") == 1 and re.search(r" differs from \S+ in (\w+, ){4}\w+ and \d+ more; add --script ", told)


def test_a_forward_pass_that_does_more_than_hidden_and_logits_is_refused(trained, tmp_path, monkeypatch, capsys):
    edit = "self.logits(self.hidden(inputs_T, windows))"
    script = variant(tmp_path / "more.py", (edit, edit.replace("inputs_T, windows", "inputs_T.flip(0), windows")))
    code, out, err = sample_here(trained, monkeypatch, capsys, "--script", str(script))
    assert (code, out) == (2, "") and "differs from" in err.splitlines()[0]
    assert "is not that of its logits" in err.splitlines()[1] and len(err.splitlines()) == 2


def damaged(saved: Path) -> None:
    """Checkpoints that nobody can use, beside the good one."""
    whole = saved.read_bytes()
    Path("half.pt").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    Path("flipped.pt").write_bytes(flipped)

    def edited(name: str, **changes) -> None:
        torch.save(torch.load(saved, weights_only=True) | changes, name)

    checkpoint = torch.load(saved, weights_only=True)
    edited("never.pt", settings=checkpoint["settings"] | dict(num_iterations=0))
    edited("other.pt", settings=checkpoint["settings"] | dict(cooldown_shape="cosine"))
    edited("wide.pt", settings=checkpoint["settings"] | dict(model_dim=64))
    edited("words.pt", settings=checkpoint["settings"] | dict(vocab_size=300))
    edited("sourceless.pt", source="def (")
    edited("stateless.pt", state={})
    checkpoint["state"]["model"]["head.weight"].fill_(float("nan"))
    torch.save(checkpoint, "nan.pt")


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["nowhere.pt"], "nowhere.pt: not a checkpoint"),
        (["data/tiny_val_000000.bin"], "not a checkpoint, or a damaged one"),
        (["half.pt"], "not a checkpoint, or a damaged one"),
        (["flipped.pt"], "not a checkpoint, or a damaged one"),
        (["never.pt"], "--num_iterations 0: this must hold"),
        (["other.pt"], "another script's checkpoint: it differs in cooldown_shape"),
        (["wide.pt"], "size mismatch"),
        (["words.pt"], "a vocabulary of 300 tokens is neither bytes (257) nor GPT-2's (50257)"),
        (["sourceless.pt"], "invalid syntax"),
        (["stateless.pt"], "'model' (KeyError)"),
        (["nan.pt"], "weights are not finite"),
        (["latest", "--checkpoint_dir", "empty"], "/empty: train with --save_every, or say where"),
        (["--script", "nowhere.py"], "--script nowhere.py: not a training script (FileNotFoundError"),
        (["--script", "text.py"], "--script text.py: not a training script (SyntaxError"),
        (["--script", "empty.py"], "empty.py: module 'train_gpt' has no attribute 'read_checkpoint'"),
        (["--tokens", "0"], "--tokens 0"),
        (["--tokens", "many"], "many"),
        (["--temperature", "-1"], "--temperature -1"),
        (["--temperature", "nan"], "nan"),
        (["--top_k", "-3"], "--top_k -3"),
        (["--topk", "3"], "--topk"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(trained, arguments, complaint, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    damaged(checkpoint(trained, 6))
    Path("text.py").write_text("it was a dark and stormy night")
    Path("empty.py").write_text("")
    assert sample.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and complaint in output.err and output.err.count("\n") == 1


def test_a_reader_that_closes_the_pipe_is_no_error(trained):
    command = [sys.executable, str(ROOT / "sample.py"), "--tokens", "9000", "--top_k", "200", "--temperature", "2"]
    with subprocess.Popen(
        command, cwd=trained, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ONE_THREAD
    ) as process:
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
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(sample.UserError, match="pip install tiktoken"):
        sample.tokenizer(Settings.vocab_size)

    class StandIn:
        """Says what it was asked for; the real one would fetch its vocabulary from the network."""

        get_encoding = staticmethod(lambda name: StandIn() if name == "gpt2" else None)
        encode_ordinary = staticmethod(lambda text: [len(word) for word in text.split()])
        decode_single_token_bytes = staticmethod(lambda token: b"x" * token)

    monkeypatch.setitem(sys.modules, "tiktoken", StandIn)
    encode, decode = sample.tokenizer(Settings.vocab_size)
    assert encode("one three") == [3, 5] and decode(3) == b"xxx"
