"""The recorded runs of the book: `python docs/record.py` makes docs/runs/ anew, `--check` compares them with what runs today.

A recording has the command on its first line (but for pictures), and then all that it printed.  Words, counts and bytes must be
the same; a number with a decimal point may differ by one unit in its last printed place, for machines round differently.
"""
import os
import re
import shlex
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs" / "runs"

# Layers as wide as those of the survey's models of 7 billion parameters: one block with both mixers.
SEVEN = ("llama,pattern=attention+mlp+mamba2,blocks=1,width=4096,heads=32,kv_heads=8,head_width=128,ffn=11008,"
         "ssm_heads=128,ssm_head_width=64,groups=8,state=128,conv=4")

# The recording -> what follows `python`, and the exit status that it must have.
COMMANDS = {
    "lesson00.txt": ("lessons/00_ranks_and_messages.py", 0),
    "lesson01.txt": ("lessons/01_collectives_from_nothing.py", 0),
    "lesson01_show.txt": ("lessons/01_collectives_from_nothing.py --ranks 3 --show", 0),
    "lesson02.txt": ("lessons/02_backward_by_hand.py", 0),
    "lesson02_fault.txt": ("lessons/02_backward_by_hand.py --fault no-document-mask", 1),
    "lesson02_scans.txt": ("lessons/02_scans.py", 0),
    "lesson03.txt": ("lessons/03_data_parallel.py", 0),
    "lesson03_fault.txt": ("lessons/03_data_parallel.py --fault local-count", 1),
    "lesson04.txt": ("lessons/04_tensor_parallel.py", 0),
    "lesson04_fault.txt": ("lessons/04_tensor_parallel.py --fault bias-on-every-rank", 1),
    "lesson05.txt": ("lessons/05_sequence_and_vocabulary.py", 0),
    "lesson05_fault.txt": ("lessons/05_sequence_and_vocabulary.py --fault largest-logit-of-a-rank", 1),
    "lesson06.txt": ("lessons/06_context_parallel.py", 0),
    "lesson06_fault.txt": ("lessons/06_context_parallel.py --fault local-lse", 1),
    "lesson07.txt": ("lessons/07_mamba_parallel.py", 0),
    "lesson07_fault.txt": ("lessons/07_mamba_parallel.py --fault halo-gradient-dropped", 1),
    "lesson08.txt": ("lessons/08_pipelines.py", 0),
    "lesson08_fault.txt": ("lessons/08_pipelines.py --fault normalised-after-backward", 1),
    "lesson09.txt": ("lessons/09_zero_bubble.py", 0),
    "lesson09_fault.txt": ("lessons/09_zero_bubble.py --fault put-off-and-not-scaled", 1),
    "lesson12.txt": ("lessons/12_all_axes.py", 0),
    "show_volumes.txt": (f"-m refpar show volumes --model {SEVEN} --mesh cp=8 --sequence 1048576", 0),
    "show_volumes_mesh.txt": (f"-m refpar show volumes --model {SEVEN} --mesh cp=4,tp=2 --sp --cp zigzag --sequence 1048576", 0),
    "show_work.txt": (f"-m refpar show work --model {SEVEN} --mesh tp=16 --sequence 4096", 0),
    "show_schedule.txt": ("-m refpar show schedule --mesh pp=4 --schedule 1f1b", 0),
    "show_schedule_zb.txt": ("-m refpar show schedule --mesh pp=4 --schedule zb-h1", 0),
    "show_shards_tp.txt": ("-m refpar show shards --model llama-tiny --mesh tp=4", 0),
    "show_shards_cp.txt": ("-m refpar show shards --model llama-tiny --mesh cp=4 --cp zigzag", 0),
    "show_mesh.txt": ("-m refpar show mesh --mesh dp=2,tp=2", 0),
    "show_messages.txt": ("-m refpar show messages all_reduce --mesh dp=3 --size 6 --algorithm ring", 0),
    "ring.svg": ("docs/draw.py", 0),
    "reach.svg": ("docs/draw_reach.py", 0),
    "orders.svg": ("docs/draw_orders.py", 0),
    "states.svg": ("docs/draw_states.py", 0),
    "axes.svg": ("docs/draw_axes.py", 0),
}

FRACTION = re.compile(r"(-?\d+\.\d+(?:e[-+]\d+)?)")


def recorded(name: str) -> str:
    """Run a command of the list; what its recording must be."""
    words, status = COMMANDS[name]
    run = subprocess.run([sys.executable, *shlex.split(words)], cwd=ROOT, capture_output=True, text=True, check=False,
                         env=os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"})
    if run.returncode != status:
        raise SystemExit(f"record: `python {words}` ended with status {run.returncode}, and must end with {status}\n{run.stderr}")
    lines = [line.rstrip() for line in run.stdout.splitlines()]
    head = [] if name.endswith(".svg") else [f"$ python {words}"]
    return "\n".join([*head, *lines]) + "\n"


def difference(was: str, now: str) -> str | None:
    """The first line in which two recordings differ; None where they agree."""
    for number, (old, new) in enumerate(zip_longest(was.splitlines(), now.splitlines()), 1):
        if old is None or new is None or not agree(old, new):
            return f"line {number}\n  was  {old}\n  now  {new}"
    return None


def agree(old: str, new: str) -> bool:
    """Two lines: the same words and whole numbers, and fractions within one unit of the last printed place."""
    old_parts, new_parts = FRACTION.split(old), FRACTION.split(new)         # words, fraction, words, fraction, ..., words
    if [part.split() for part in old_parts[::2]] != [part.split() for part in new_parts[::2]]:
        return False
    return all(abs(float(a) - float(b)) <= unit(a) * 1.000001 for a, b in zip(old_parts[1::2], new_parts[1::2]))


def unit(number: str) -> float:
    """One in the last printed place: "5.547" -> 0.001, "1.20e-05" -> 1e-07."""
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def main(words: list[str]) -> int:
    """Record or check; the exit status."""
    if words not in ([], ["--check"]):
        sys.stderr.write("usage: python docs/record.py [--check]\n")
        return 2
    wrong = 0
    for name in COMMANDS:
        path, text = RUNS / name, recorded(name)
        if not words:
            path.write_text(text)
            continue
        found = difference(path.read_text() if path.exists() else "", text)
        if found:
            wrong += 1
            print(f"docs/runs/{name} is not what runs today: {found}")
    strange = {path.name for path in RUNS.iterdir()} - set(COMMANDS)
    for name in sorted(strange):
        print(f"docs/runs/{name} is recorded by no command")
    print(f"{len(COMMANDS) - wrong} of {len(COMMANDS)} runs {'are as recorded' if words else 'recorded'}")
    return 1 if wrong or strange else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
