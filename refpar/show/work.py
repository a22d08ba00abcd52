"""The FLOPs of one layer in the terminal: the survey's section 5 beside what is counted, by term, for each way to cut the work."""
from __future__ import annotations

from refpar.config import Layout, Model
from refpar.plan.survey import Sizes
from refpar.plan.survey_work import TERMS, Cut, Term, corrected
from refpar.show.volumes import with_both

WAYS = ("dp", "tp", "cp")
DEFAULT = 4096


def check(model: Model):
    """ValueError where the survey's terms are not those of the model."""
    if model.window:
        raise ValueError(f"model: window={model.window}, and the survey's FLOPs are those of attention without a window")


def describe(model: Model, layout: Layout, length: int) -> dict:
    """Term -> operations of one layer forward, of as many rows as ranks, on each rank in the mean: as printed, and by each way."""
    ranks = layout.ranks
    return {"ranks": ranks, "tokens": length, "terms": [told(term, with_both(model), ranks, length) for term in TERMS]}


def told(term: Term, model: Model, ranks: int, length: int) -> dict:
    """One term, and the corrections that change it."""
    z = Sizes.of(model, ranks, length)
    return {"layer": term.kind, "term": term.name, "printed": term.printed, "figure": term.figure(z) / ranks,
            "ours": {way: corrected(term, z, Cut(way, ranks)) / ranks for way in WAYS}, "backward": float(term.backward),
            "differs": [step.why for step in term.steps if any(step.to(7.0, z, Cut(way, ranks)) != 7.0 for way in WAYS)]}


def draw(model: Model, layout: Layout, length: int) -> str:
    """A line a term, and the corrections that change it."""
    found = describe(model, layout, length)
    lines = [f"billion operations of one layer, forward, on each of {found['ranks']} ranks in the mean;",
             f"as many rows as ranks, of {found['tokens']:,} tokens; back: backward's, of one forward's", "",
             f"  {'layer':<10}{'term':<17}{'the survey prints':<27}{'printed':>9}"
             + "".join(f"{way:>9}" for way in WAYS) + f"{'back':>8}"]
    for one in found["terms"]:
        counted = any(one["ours"].values())
        cells = "".join(f"{one['ours'][way] / 1e9:>9,.2f}" for way in WAYS) + (f"{one['backward']:>7g}x" if counted else "")
        lines.append(f"  {one['layer']:<10}{one['term']:<17}{one['printed']:<27}{one['figure'] / 1e9:>9,.2f}{cells}")
        lines += [f"  {'':<27}- {why}" for why in one["differs"]]
    return "\n".join(lines)
