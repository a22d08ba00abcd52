"""An answer to chapter 8: the schedule 1F1B.

Judge it: python lessons/08_pipelines.py --mine docs/answers/08_one_f_one_b.py
"""
from refpar.parallel.schedule import Op


def one_f_one_b(s):
    """Rank r begins with p - r forwards; then a backward and, while there are any, a forward in turn."""
    rows = []
    for rank in range(s.p):
        ahead = min(s.p - rank, s.m)
        row = [Op("F", rank, micro) for micro in range(ahead)]
        for micro in range(s.m):
            row.append(Op("BW", rank, micro))
            if ahead + micro < s.m:
                row.append(Op("F", rank, ahead + micro))
        rows.append(row)
    return {"rows": rows}
