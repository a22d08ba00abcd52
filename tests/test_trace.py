"""A trace tells of every layer, collective and message of every rank, in order, and changes nothing."""
import json

import pytest

from refpar.comm.threads import ThreadWorld
from refpar.config import PRESETS, Layout
from refpar.oracle.run import run_sharded
from refpar.oracle.situation import Situation
from refpar.trace import Traced, writable

SITUATION = Situation(PRESETS["llama-tiny"], Layout(dp=2), documents=(64,))


def test_a_trace_of_a_run(world, tmp_path):
    path = tmp_path / "trace.json"
    traced = world.run(Traced(run_sharded, path), 2, SITUATION)
    assert [run.digests for run in traced] == [run.digests for run in ThreadWorld().run(run_sharded, 2, SITUATION)]
    events = json.loads(path.read_text())["traceEvents"]
    for rank, run in enumerate(traced):
        mine = [event for event in events if event["tid"] == rank]
        sends = [event for event in mine if event["cat"] == "message" and event["name"].startswith("send")]
        assert len(sends) == sum(messages for messages, _ in run.sent.values())
        layers = [event["name"] for event in mine if event["cat"] == "layer"]
        assert layers[0] == "0.embedding" and layers.count("1.attention") == layers.count("d 1.attention") == 2
        assert "all_reduce on dp" in {event["name"] for event in mine if event["cat"] == "communication"}
        assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in mine)


def test_a_file_of_text_gets_the_chart(world, tmp_path):
    """A line for each rank, a hundred columns of time."""
    path = tmp_path / "trace.txt"
    world.run(Traced(run_sharded, path), 2, SITUATION)
    lines = path.read_text().splitlines()
    assert [line[:6] for line in lines] == ["   0 |", "   1 |"] and {len(line) for line in lines} == {107}
    assert all(line[6:106].strip() for line in lines), "something is drawn for each"


def test_where_a_trace_can_be_written(tmp_path):
    assert writable(None) is None and writable(tmp_path / "t.json") == tmp_path / "t.json"
    for path in (tmp_path, tmp_path / "none" / "t.json"):
        with pytest.raises(ValueError, match="must be a file in a folder that is there"):
            writable(path)
