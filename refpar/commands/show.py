"""`refpar show`: a layout drawn in the terminal, without a model being run."""
from __future__ import annotations

import json
from typing import Callable, NamedTuple

from refpar.cli import layout_of
from refpar.named import parse_model
from refpar.trace import writable


class Job(NamedTuple):
    """A drawing, as text and as data; `write` makes the files that were asked for beside it."""
    draw: Callable[[], str]
    describe: Callable[[], dict]
    json: bool
    write: Callable[[], None]


def prepare(world, args) -> Job:
    """Refuse what cannot be drawn."""
    if args.what not in DRAWINGS:
        wrong = "nothing is named" if args.what is None else f"{args.what!r} cannot be drawn"
        raise ValueError(f"{wrong}; name {' or '.join(DRAWINGS)}")
    if (args.algorithm or args.node) and args.what != "messages":
        raise ValueError(f"{args.what} takes no --algorithm and no --node: only messages are those of a collective")
    if args.sequence is not None and args.what not in ("volumes", "work"):
        raise ValueError(f"{args.what} takes no --sequence: only volumes and work grow with it")
    if args.collective is not None and args.what != "messages":
        raise ValueError(f"{args.what} takes no {args.collective!r}: only messages are those of a collective")
    if (args.costs or args.latency is not None or args.plot or args.trace) and args.what != "schedule":
        raise ValueError(f"{args.what} takes no --costs, --latency, --plot or --trace: only a schedule is drawn in time")
    draw, describe, *files = DRAWINGS[args.what](args)
    return Job(draw, describe, args.json, files[0] if files else lambda: None)


def mesh(args):
    """The map of ranks; alone, that of the survey's figure 5."""
    from refpar.show import mesh
    layout = layout_of(args, args.mesh or "dp=2,pp=2,cp=2,tp=2")
    return lambda: mesh.draw(layout), lambda: mesh.describe(layout)


def shards(args):
    """What each rank holds."""
    from refpar.show import shards
    model, layout = parse_model(args.model or "llama"), layout_of(args, args.mesh or "dp=2,tp=2")
    shards.check(model, layout)
    return lambda: shards.draw(model, layout, args.model or "llama"), lambda: shards.describe(model, layout)


def messages(args):
    """The messages of one collective, or of one layer."""
    from refpar.show import layers, messages
    name = args.collective
    layout = layout_of(args, args.mesh or ("tp=2" if name in layers.LAYERS else "dp=4"))
    if name not in messages.CALLS and name not in layers.LAYERS:
        raise ValueError(f"{'no collective is named' if name is None else f'there is no collective {name!r}'}; "
                         f"name one of {', '.join(messages.CALLS)}, or a layer: {', '.join(layers.LAYERS)}")
    if layout.ranks > messages.MOST:
        raise ValueError(f"mesh {layout} has {layout.ranks} ranks, and messages are drawn for at most {messages.MOST}")
    return layer(args, layout) if name in layers.LAYERS else collective(args, layout)


def layer(args, layout):
    """What a layer sends, forward and backward."""
    from refpar.show import layers
    if args.algorithm is not None or args.size is not None:
        raise ValueError(f"{args.collective} is a layer, and takes no --algorithm and no --size")
    model, kind = parse_model(args.model or layers.MODELS.get(args.collective, "llama-tiny")), args.collective
    layers.check(model, layout, kind)
    return lambda: layers.draw(layers.describe(model, layout, kind)), lambda: layers.describe(model, layout, kind)


def collective(args, layout):
    """What a collective sends, round by round."""
    from refpar.show import messages
    name, size = args.collective, 2 * layout.ranks if args.size is None else args.size
    if size > messages.LARGEST:
        raise ValueError(f"--size {size} is more than the {messages.LARGEST} elements that can be told apart")
    known, how = messages.ALGORITHMS.get(name, {}), messages.How(args.algorithm, args.node)
    if args.algorithm is not None and args.algorithm not in known:
        raise ValueError(f"{name} has no algorithm {args.algorithm!r}; it has {', '.join(known) or 'one, which needs no name'}")

    def described():
        return messages.describe(layout, name, size, how)
    return lambda: messages.draw(described()), described


def volumes(args):
    """What one layer sends as the sequence grows: the survey's strategies, Transformer and Mamba."""
    from refpar.show import volumes
    layout, model = layout_of(args, args.mesh or "tp=8"), parse_model(args.model or "llama")
    longest = args.sequence or volumes.LONGEST
    volumes.check(model, layout, longest)
    return lambda: volumes.draw(model, layout, longest), lambda: volumes.describe(model, layout, longest)


def work(args):
    """The FLOPs of one layer: the survey's, and those counted, for each way to cut it."""
    from refpar.show import volumes, work
    layout, model = layout_of(args, args.mesh or "tp=8"), parse_model(args.model or "llama")
    length = args.sequence or work.DEFAULT
    volumes.check(model, layout, length)
    work.check(model)
    return lambda: work.draw(model, layout, length), lambda: work.describe(model, layout, length)


def schedule(args):
    """A pipeline's schedule as a grid, in time, with its bubble."""
    from refpar.schedules.model import schedule_of
    from refpar.schedules.simulate import Costs
    from refpar.show import clocked, picture, schedule
    layout, times = layout_of(args, args.mesh or "pp=4"), args.costs or (1, 1, 1)
    if len(times) != 3:
        raise ValueError(f"--costs must be three times, of F, B and W, and there are {len(times)}")
    if max(times) == 0:
        raise ValueError("--costs must not all be 0: no time would pass")
    costs = Costs(*times, latency=args.latency or 0)
    if args.plot:
        picture.check(args.plot)
    if args.trace:
        writable(args.trace)
        clocked.check(layout)
    micros = args.micro_batches or 2 * layout.pp
    if layout.pp * micros > schedule.MOST:
        raise ValueError(f"pp={layout.pp} stages of {micros} micro-batches are more than the {schedule.MOST} that are drawn")
    made = schedule_of(layout, micros)

    def write():
        if args.plot:
            picture.save(schedule.simulate(made, costs), args.plot)
        if args.trace:
            clocked.record(layout, made.micros, costs, args.trace)
    return lambda: schedule.draw(made, costs), lambda: schedule.describe(schedule.simulate(made, costs), costs), write


DRAWINGS: dict[str, Callable] = {"mesh": mesh, "shards": shards, "messages": messages, "volumes": volumes, "work": work,
                                 "schedule": schedule}


def run(world, job: Job) -> int:
    """Print it."""
    if world.main:
        job.write()
        print(json.dumps(job.describe()) if job.json else job.draw())
    return 0
