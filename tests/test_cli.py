"""The command line: what it accepts, what it refuses, and how: one sentence, exit status 2, nothing written."""
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from started import ROOT, ended, require_mpi, start

from refpar import cli
from refpar.config import PRESETS, SCHEDULES, Layout, Training
from refpar.named import parse_model
from refpar.oracle.situation import PROOF, Situation

TINY = "llama-tiny,blocks=1,width=16,ffn=16,heads=2,kv_heads=1"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with texts that are no good, and one that is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("the cat sat on the mat. " * 40)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary.txt").write_bytes(b"ab\0cd" * 100)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "there").mkdir()
    (tmp_path / "bad.json").write_text("{")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "cut.npz").mkdir()
    (tmp_path / "cut.npz" / "step-000003.npz").write_bytes(b"PK\3\4 and no more")
    return tmp_path


REFUSED = [
    ("nope", "there is no command 'nope'; the commands are train, verify, show, bench"),
    ("train --foo", "unrecognized arguments: --foo"),
    ("train --mesh", "expected one argument"),
    ("train --mesh dp=0", "dp=0 in 'dp=0' must be a whole number of at least 1"),
    ("train --mesh dp=two", "dp=two"),
    ("train --mesh ep=2", "'ep' in 'ep=2' is no axis; the axes are dp, pp, cp, tp"),
    ("train --mesh dp=2,dp=2", "dp stands twice"),
    ("train --mesh pp=3 --schedule dualpipe", "3 ranks must be an even number"),
    ("train --mesh pp=2 --schedule gpipe --virtual-stages 2", "schedule gpipe: 2 virtual stages were asked for, and it has 1"),
    ("train --mesh pp=2,cp=2 --schedule sliced --cp ulysses", "schedule sliced hands on keys by tokens, and cp ulysses has them by heads"),
    ("train --mesh pp=2 --schedule fifo", "must be 1f1b"),
    ("train --mesh tp=2 --recompute some", "must be none or selective or full, or kinds of layers"),
    ("train --mesh tp=2 --tp-ring", "tp-ring is a form of sequence parallelism, and needs sp"),
    ("train --mesh cp=2 --cp rings", "must be ring"),
    ("train --model llama,padded_vocab=9", "padded_vocab=9 must be at least vocab=256"),
    ("train --mesh tp=2 --tp-ring", "mesh: tp-ring is a form of sequence parallelism, and needs sp"),
    ("train --mesh dp=2 --switch 3", "--switch must be a step and a mesh, such as 100:dp=2,tp=2, not '3'"),
    ("train --mesh dp=2 --switch 0:tp=2", "--switch must be a whole number of at least 1, not '0'"),
    ("train --mesh dp=2 --switch 3:tp=4", "--switch 3:tp=4 has 4 ranks, and mesh dp=2 has 2"),
    ("train --mesh dp=3 --switch 3:pp=3 --schedule dualpipe", "must be an even number"),
    ("train --mesh dp=2 --switch 9:tp=2 --steps 9", "--switch 9:tp=2 must come before the last of 9 steps"),
    ("train --mesh dp=2 --order dp,tp", "order dp,tp must name each of dp, pp, cp, tp once"),
    ("verify --mesh cp=2 --cp rings", "--cp must be ring or zigzag or striped or gather or ulysses or ulysses+ring, not 'rings'"),
    ("verify --mesh cp=2 --cp-mamba ring", "--cp-mamba must be gather or chain or scan or heads, not 'ring'"),
    ("verify --mesh tp=2 --tp-ring", "mesh: tp-ring is a form of sequence parallelism, and needs sp"),
    ("verify --each-schedule", "--each-schedule is of a mesh: name it by --mesh"),
    ("verify --mesh tp=2 --each-schedule", "--each-schedule is of a --mesh with pp of at least 2"),
    ("verify --mesh pp=2 --each-schedule --schedule gpipe", "takes no --schedule, --virtual-stages or --slices"),
    ("verify --mesh tp=2 --node 0", "--node must be a whole number of at least 1, not '0'"),
    ("train --model nope", "there is no preset 'nope'"),
    ("train --model llama,heads=5", "heads=5 must be a multiple of kv_heads=2"),
    ("train --model llama,head_width=7", "head_width=7 must be even"),
    ("train --model mamba2,groups=3", "ssm_heads=8 must be a multiple of groups=3"),
    ("train --model llama,width=0", "width=0 must be a whole number of at least 1"),
    ("train --model llama,norm=batch", "norm=batch must be rms or layer"),
    ("train --model llama,mlp=relu", "mlp=relu must be swiglu or gelu or gelu_tanh"),
    ("train --model llama,attention_bias=true", "attention_bias=true must be none or qkv or all"),
    ("train --model llama,positions=sine", "positions=sine must be rope or learned or none"),
    ("train --model llama,rope_pairs=thirds", "rope_pairs=thirds must be interleaved or halves"),
    ("train --model llama,rope_scaling=yarn", "rope_scaling=yarn must be none or linear or ntk or llama3"),
    ("train --model llama,rope_factor=0.5", "rope_factor=0.5 must be at least 1"),
    ("train --model llama,rope_factor=inf", "rope_factor=inf must be at least 1, and finite"),
    ("train --model llama,rope_low=4", "rope_low=4.0 must be above 0 and below rope_high=4.0"),
    ("train --model llama,rope_original=0", "rope_original=0 must be a whole number of at least 1"),
    ("train --model llama,rope_scaling=ntk,head_width=2", "head_width=2 must be above 2 for rope_scaling=ntk"),
    ("train --model llama,window=-1", "window=-1 must be a whole number, or 0 for none"),
    ("train --model llama,softcap=-1", "softcap=-1.0 must be at least 0"),
    ("train --model llama,smoothing=1", "smoothing=1.0 must be at least 0 and below 1"),
    ("train --model llama,z_loss=nan", "z_loss=nan must be at least 0"),
    ("train --model llama,mlp_bias=perhaps", "mlp_bias=perhaps must be of the type bool"),
    ("train --model gpt2,longest=0", "longest=0 must be a whole number of at least 1"),
    ("train --model gpt2 --sequence 65", "longest=64 learned positions are too few for --sequence 65"),
    ("train --model gpt2 --sample 34", "longest=64 learned positions are too few for --sample 34 after a prompt of 32 bytes"),
    ("verify --model gpt2-uneven --sequence 68", "longest=67 learned positions are too few for the longest document, which has 68"),
    ("train --model llama,nope=1", "there is no field 'nope'"),
    ("train --model llama,blocks", "'blocks' must be written field=value"),
    ("train --model llama,vocab=100", "vocab=100 must be at least 256"),
    ("train --model nope.json", "the file nope.json cannot be read"),
    ("train --model bad.json", "the file bad.json is not JSON"),
    ("train --model deep.json", "the file deep.json is nested too deep"),
    ("train --model pipe.json", "pipe.json must be a regular file"),
    ("train --text /dev/zero", "/dev/zero is no regular file"),
    ("train --steps 0", "--steps must be a whole number of at least 1, not '0'"),
    ("train --rows x", "--rows must be a whole number of at least 1, not 'x'"),
    ("train --rate -1", "--rate must be a number of at least 0, not '-1'"),
    ("train --rate nan", "--rate must be a number of at least 0, not 'nan'"),
    ("train --dtype float16", "--dtype must be float32 or float64, not 'float16'"),
    ("train --optimizer adam", "--optimizer must be adamw or sgd, not 'adam'"),
    ("train --rows 8 --micro-batches 2 --micro-batch-size 3", "--rows 8 must be --micro-batch-size 3 x 2 micro-batches x dp=1"),
    ("train --text nope.txt", "the file nope.txt does not exist"),
    ("train --text there", "there is a directory"),
    ("train --text empty.txt", "the file empty.txt is empty"),
    ("train --text short.txt", "short.txt has 5 bytes"),
    ("train --text binary.txt", "binary.txt is binary"),
    ("train --text latin.txt", "latin.txt is binary"),
    ("train --out cut.npz", "the folder cut.npz has checkpoints already"),
    ("train --out good.txt/run", "cannot be made"),
    ("train --out /dev/null/run", "the folder /dev/null/run cannot be made, for /dev/null is no folder that can be written to"),
    ("train --out there --resume", "there has no checkpoint"),
    ("train --out nowhere --resume", "nowhere has no checkpoint"),
    ("train --out cut.npz --resume", "is cut short or damaged"),
    ("train --mesh dp=99999999999", "mesh: dp=99999999999 has 99999999999 ranks, and at most 4096 are taken"),
    ("show mesh --mesh dp=65,tp=64", "mesh: dp=65,tp=64 has 4160 ranks"),
    ("train --mesh dp=257", "mesh dp=257 has 257 ranks, and at most 256 can be threads of one process"),
    ("verify --mesh dp=4096", "at most 256 can be threads"),
    ("train --mesh ''", "--mesh must not be empty"),
    ("train --out ''", "--out must not be empty"),
    ("train --model ''", "--model must not be empty"),
    ("train --model llama,width=64,width=32", "width stands twice in 'llama,width=64,width=32'"),
    ("train --model llama,width=999999999", "its matrices have"),
    ("train --model llama,blocks=999999999", "blocks=999999999 have 1999999998 layers, and at most 4096 are taken"),
    ("train --rows 99999999999", "rows=99999999999 must be at most 1048576"),
    ("verify --sequence 99999999999", "sequence=99999999999 must be at most 1048576"),
    ("train --micro-batches 99999999999", "micro_batches=99999999999 must be at most 4096"),
    ("verify --rows 1048576 --sequence 1048576", "are 1099511627776 tokens a step, and at most 67108864 are taken"),
    ("verify --ignored 0,1.5", "--ignored must be a number from 0 to 1, not '1.5'"),
    ("verify --documents 3,513", "--documents 513 is longer than a step, which has 512 tokens"),
    ("train --seed 9223372036854775808", "--seed must be at most 9223372036854775807, not '9223372036854775808'"),
    ("train --model llama,norm_eps=inf", "norm_eps=inf must be finite"),
    ("show mesh --mesh dp=²", "dp=² in 'dp=²' must be a whole number of at least 1"),
    ("verify --last-rows 9", "--last-rows 9 must be at most the 8 rows of a step"),
    ("verify --rows 0", "--rows must be a whole number of at least 1, not '0'"),
    ("verify --documents 3,0", "--documents must be a whole number of at least 1, not '0'"),
    ("verify --fault nope", "nope"),
    ("bench nope", "'nope' cannot be measured; name collectives"),
    ("show", "nothing is named; name mesh or shards or messages or volumes or work or schedule"),
    ("show nope", "'nope' cannot be drawn"),
    ("show mesh all_reduce", "mesh takes no 'all_reduce'"),
    ("show messages", "no collective is named"),
    ("show messages nope", "there is no collective 'nope'"),
    ("show messages all_reduce --mesh dp=17", "mesh dp=17 has 17 ranks"),
    ("show messages all_reduce --size -1", "--size must be a whole number of at least 0"),
    ("show shards --mesh tp=2 --tp-ring", "mesh: tp-ring is a form of sequence parallelism, and needs sp"),
    ("show messages attention --model mamba2", "there is no attention in a model whose pattern is mamba2"),
    ("show messages attention --mesh pp=2", "mesh pp=2 has pp=2, and a layer stands on one stage"),
    ("show messages mlp --size 3", "mlp is a layer, and takes no --algorithm and no --size"),
    ("show mesh --sequence 8", "mesh takes no --sequence: only volumes and work grow with it"),
    ("show volumes attention", "volumes takes no 'attention'"),
    ("show volumes --mesh pp=2", "mesh pp=2 has pp=2, and a layer stands on one stage"),
    ("show volumes --mesh tp=65", "mesh tp=65 has 65 ranks, and volumes are compared for at most 64"),
    ("show volumes --sequence 1048577", "--sequence 1048577 must be at most 1048576"),
    ("show work --mesh pp=2", "leave pp out"),
    ("show work --model llama,window=8", "window=8, and the survey's FLOPs are those of attention without a window"),
    ("show volumes --model llama,cut=true", "the mixer is cut out"),
    ("show volumes --sequence 0", "--sequence must be a whole number of at least 1, not '0'"),
    ("show schedule --costs 1,2", "--costs must be three times, of F, B and W, and there are 2"),
    ("show schedule --costs 0,0,0", "--costs must not all be 0"),
    ("show schedule --costs 1,-1,1", "--costs must be a number of at least 0, not '-1'"),
    ("show schedule --latency inf", "--latency must be a number of at least 0, not 'inf'"),
    ("show schedule --trace nowhere/x.json", "--trace nowhere/x.json must be a file in a folder that is there"),
    ("show schedule --mesh pp=65 --trace x.json", "pp=65 is more than the 64 stages"),
    ("show schedule --micro-batches 99999999999", "pp=4 stages of 99999999999 micro-batches are more than the 16384 that are drawn"),
    ("show schedule --mesh pp=3 --schedule dualpipe", "3 ranks must be an even number"),
    ("show mesh --costs 1,1,1", "mesh takes no --costs, --latency, --plot or --trace"),
    ("show shards --mesh pp=12", "pp=12 is more than the model's 11 layers"),
]


@pytest.mark.parametrize("words, sentence", REFUSED, ids=[words for words, _ in REFUSED])
def test_bad_input_is_one_sentence_and_nothing_is_written(folder, capsys, words, sentence):
    before = sorted(folder.rglob("*"))
    status = cli.main(shlex.split(words))
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert sentence in err and err.startswith("refpar") and err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_a_checkpoint_of_another_run_is_refused(folder, capsys):
    run = ["train", "--text", "good.txt", "--sequence", "8", "--rows", "1", "--sample", "0", "--out", "run", "--steps"]
    assert cli.main([*run, "1", "--model", TINY]) == 0
    before = (folder / "run" / "log.jsonl").read_bytes()
    assert cli.main([*run, "1", "--model", TINY.replace("ffn=16", "ffn=18"), "--resume"]) == 2
    assert "is of another model: ffn is 16 there and 18 here" in capsys.readouterr().err
    assert cli.main([*run, "2", "--model", TINY, "--resume"]) == 2
    assert "is of another run: steps is 1 there and 2 here" in capsys.readouterr().err
    assert (folder / "run" / "log.jsonl").read_bytes() == before


def test_each_schedule_that_a_mesh_can_have_is_verified(capsys):
    assert cli.main(["verify", "--mesh", "pp=3", "--each-schedule", "--model", "llama-tiny", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in SCHEDULES if name not in ("1f1b", "dualpipe")) and out.count("  equal\n") == 8
    assert "left out, schedule dualpipe: 3 ranks must be an even number" in out and "VERIFIED: 8 sharded runs" in out


def test_refusal_as_a_user_sees_it(tmp_path):
    """In a process: no traceback, exit status 2; help is fast, for it imports no numpy room but the wire."""
    status, out, err = ended(start(tmp_path, "train", "--mesh", "dp=0"))
    assert (status, out) == (2, "") and err == "refpar train: mesh: dp=0 in 'dp=0' must be a whole number of at least 1\n"
    assert not list(tmp_path.iterdir())


def test_refusal_on_processes_is_printed_once(tmp_path):
    require_mpi()
    status, out, err = ended(start(tmp_path, "train", "--mesh", "dp=3", ranks=2))
    assert status == 2 and out == "" and not list(tmp_path.iterdir())
    assert err.count("refpar train: mesh dp=3 needs 3 ranks, and mpiexec started 2 processes") == 1 and "Traceback" not in err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_names_every_option(capsys, name):
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{flag}" in out for flag in cli.COMMANDS[name].options)
    assert max(map(len, out.splitlines())) <= 100


def test_every_option_is_taken_by_a_command():
    assert set(cli.OPTIONS) == {flag for command in cli.COMMANDS.values() for flag in command.options}


def test_alone_it_lists_the_commands(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["refpar"])
    assert cli.main() == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


SITUATIONS = [
    Situation(),
    Situation(PRESETS["mamba2-uneven"], Layout(dp=3)),
    Situation(replace(PRESETS["llama-tiny"], dropout=0.25, tied=True, pattern=("mlp", "attention")), Layout(dp=2), last_rows=3),
    Situation(training=replace(PROOF, rows=5, sequence=7, micro_batches=3, seed=4, dtype="float32", optimizer="sgd", clip=0.25)),
    Situation(layout=Layout(cp=2, tp=2, sp=True, tp_ring=True, cp_attention="ulysses+ring", cp_mamba="scan", node=2)),
    Situation(layout=Layout(dp=4), documents=(3, 5, 1), ignored=(0.0, 0.125, 1.0)),
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=Situation.command)
def test_a_situation_prints_as_the_command_that_repeats_it(situation):
    from refpar.commands.verify import situation_of
    words = shlex.split(situation.command())
    assert words[:4] == ["python", "-m", "refpar", "verify"]
    args = cli.parse("verify", words[4:])
    assert situation_of(args, parse_model(args.model), cli.layout_of(args, args.mesh)) == situation


def test_micro_batch_size_sets_what_is_left_open():
    def training(words):
        return cli.training_of(cli.parse("train", shlex.split(words)), Training(rows=16), ranks=2)
    assert training("--micro-batch-size 3 --micro-batches 4").rows == 24
    assert training("--micro-batch-size 3").rows == 6
    assert training("--micro-batch-size 2 --rows 12").micro_batches == 3
    assert training("--rows 12").micro_batches == 1


@pytest.mark.parametrize("ranks", [None, 2])
def test_ctrl_c_is_one_line(folder, ranks):
    if ranks:
        require_mpi()
    process = start(folder, "train", "--model", TINY, "--text", "good.txt", "--sequence", "8", "--rows", "2", "--mesh", "dp=2",
                    "--steps", "1000000", "--save-every", "2", "--out", "run", ranks=ranks)
    while not list(folder.glob("run/step-*.npz")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    status, _, err = ended(process, 20)
    assert status != 0 and err.splitlines().count("interrupted") == 1 and "Traceback" not in err
    assert ranks or status == 130


@pytest.mark.parametrize("words", [["--help"], ["show", "mesh"], ["verify", "--list-faults"]])
def test_a_closed_pipe_is_silence(folder, words):
    """What `| head -0` does: nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([sys.executable, "-m", "refpar", *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
                         env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, "")


def test_a_fault_is_repeated_by_the_command_it_prints(capsys):
    assert cli.main(["verify", "--fault", "mean-of-means"]) == 1
    last = capsys.readouterr().out.splitlines().pop()
    assert last.startswith("FAILS: step 1: the gradient") and "(python -m refpar verify --fault mean-of-means --model llama" in last
    assert cli.main(shlex.split(last[last.index("verify"):].rstrip(")"))) == 1
    assert capsys.readouterr().out.splitlines().pop() == last


def test_what_processes_do_not_see_threads_may(capsys, monkeypatch):
    from refpar.comm.threads import ThreadWorld
    from refpar.commands import verify
    monkeypatch.setattr("refpar.oracle.faults.property_of", lambda fault: lambda world, situation: None)
    world = ThreadWorld()
    world.kind, world.size = "processes", 1
    assert verify.run_fault(world, "reused-buffer") == 1 and "ranks are 1 process\n" in verify.heading(world)
    assert "NOT SEEN" in (out := capsys.readouterr().out) and out.endswith("see it:  python -m refpar verify --fault reused-buffer\n")
    with pytest.raises(ValueError, match="--fault reused-buffer shows on 3 ranks, and mpiexec started 1"):
        verify.prepare(world, cli.parse("verify", ["--fault", "reused-buffer"]))
