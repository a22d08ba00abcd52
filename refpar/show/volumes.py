"""The survey's comparison in the terminal: what one layer sends as the sequence grows, Transformer against Mamba."""
from __future__ import annotations

from refpar.config import Model
from refpar.plan.survey import ROWS, Sizes

LENGTHS = (1024, 4096, 16_384, 65_536, 262_144)


def describe(transformer: Model, mamba: Model, ranks: int) -> dict:
    """Strategy -> numbers that each rank sends for one layer forward, for each length of a row."""
    rows = []
    for row in ROWS:
        model = transformer if row.kind == "attention" else mamba
        sent = [row.sent(Sizes.of(model, 1, length), ranks) / ranks for length in LENGTHS]
        rows.append({"table": row.table, "layer": row.kind, "strategy": row.strategy, "printed": row.printed, "ours": row.ours,
                     "sent": sent})
    return {"ranks": ranks, "lengths": list(LENGTHS), "rows": rows}


def draw(transformer: Model, mamba: Model, ranks: int) -> str:
    """The table."""
    told = describe(transformer, mamba, ranks)
    lines = [f"numbers that each of {ranks} ranks sends for one layer forward, a row of so many tokens", "",
             f"  {'layer':<10} {'strategy':<15} {'the survey prints':<24}{'sent':<32}" + "".join(f"{length:>12,}" for length in LENGTHS)]
    for row in told["rows"]:
        lines.append(f"  {row['layer']:<10} {row['strategy']:<15} {row['printed']:<24}{row['ours']:<32}"
                     + "".join(f"{size:>12,.0f}" for size in row["sent"]))
    return "\n".join([*lines, "",
                      "The survey's table 3 counts what is received too: twice what is sent.  Its table 8 gives orders; TPSP moves no",
                      "factor d_state.  Every formula is held against counted messages by a test.  What a state hands on does not grow."])
