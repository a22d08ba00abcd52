"""An answer to chapter 9: the schedule ZB-H1.

Judge it: python lessons/09_zero_bubble.py --mine docs/answers/09_zb_h1.py
"""
from refpar.parallel.schedule import Op


def zb_h1(s):
    """1F1B, whose W follow their B later by as many micro-batches as ranks stand before: so much bubble is to be filled at the end."""
    rows = []
    for rank in range(s.p):
        ahead = min(s.p - rank, s.m)
        row = [Op("F", rank, micro) for micro in range(ahead)]
        for micro in range(s.m):
            row.append(Op("B", rank, micro))
            if micro >= rank:
                row.append(Op("W", rank, micro - rank))
            if ahead + micro < s.m:
                row.append(Op("F", rank, ahead + micro))
        row += [Op("W", rank, micro) for micro in range(max(0, s.m - rank), s.m)]
        rows.append(row)
    return {"rows": rows}
