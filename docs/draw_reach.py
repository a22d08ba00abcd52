"""Draw how far a gradient reaches, from backward passes that really run, as SVG on stdout.

One grid for each mixer, on two packed documents.  Row t: the gradient of token t's output alone.  Column s: how much of it arrives
at the input of token s; the darker, the more.  The residual stream is left out.
"""
import numpy as np

from refpar.config import Model
from refpar.nn.build import build
from refpar.nn.chain import start
from refpar.nn.gradient import zeros_like
from refpar.nn.init import initial
from refpar.oracle.packed import packed

DOCUMENTS, TOKENS, CELL, GAP = (5, 7), 12, 20, 40
SHADES = ("#ffffff", "#e4eef8", "#bcd7ee", "#82b3dc", "#3f7fbf")
LEVELS = (0.0, 0.003, 0.03, 0.3)            # of what arrives at the token itself
SIZES = dict(blocks=1, width=16, heads=4, kv_heads=2, head_width=4, ssm_heads=4, ssm_head_width=4, groups=2, state=4, chunk=4)
MIXERS = {"attention": Model(pattern=("attention",), **SIZES), "conv of 4 taps": Model(pattern=("mamba2",), cut=True, **SIZES),
          "conv and scan": Model(pattern=("mamba2",), **SIZES)}


def reach(model: Model) -> np.ndarray:
    """[t, s]: the length of the gradient that reaches the input of token s from the output of token t, through the branch."""
    batch, chain = packed(0, 1, TOKENS, 256, DOCUMENTS), build(model)
    params = initial(model, chain, 0, np.float64, rough=True)
    name, layer = chain.layers[1]
    slow = {"dt_bias": 0.0, "A_log": -1.5} if "mamba2" in model.pattern else {}     # half-lives of some tokens, to be seen
    w = params[name] | {which: np.full(model.ssm_heads, value) for which, value in slow.items()}
    before = start(chain, params, batch)[name]
    x = np.random.default_rng(0).standard_normal((1, TOKENS, model.width))
    _, after, saved = layer.forward(x, w, batch, before)
    found = np.empty((TOKENS, TOKENS))
    for t in range(TOKENS):
        dy = np.zeros_like(x)
        dy[0, t] = 1
        dx, _, _ = layer.backward(dy, zeros_like(after), saved, w, batch)
        found[t] = np.linalg.norm((dx - dy)[0], axis=1)
    return found


def grid(name: str, x: int, y: int) -> list[str]:
    """One mixer, with its title and its documents."""
    lines = [f'<text x="{x + TOKENS * CELL // 2}" y="{y - 12}" class="title">{name}</text>']
    for t, row in enumerate(reach(MIXERS[name])):
        lines.append(f'<text x="{x - 10}" y="{y + t * CELL + 14}">{t}</text>')
        lines.append(f'<text x="{x + t * CELL + 10}" y="{y + TOKENS * CELL + 14}">{t}</text>')
        for s, size in enumerate(row):
            shade = SHADES[sum(size > level * row[t] for level in LEVELS)]
            lines.append(f'<rect x="{x + s * CELL}" y="{y + t * CELL}" width="{CELL}" height="{CELL}" fill="{shade}"/>')
    cut, end = DOCUMENTS[0] * CELL, TOKENS * CELL
    return [*lines, f'<path d="M{x} {y + cut}h{end}M{x + cut} {y}v{end}"/>']


def picture() -> str:
    """The mixers side by side."""
    step = TOKENS * CELL + GAP
    width, height = len(MIXERS) * step + GAP, TOKENS * CELL + 2 * GAP
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
             "<style>rect{stroke:#999} text{fill:#222;font-size:10px;text-anchor:middle} .title{font-size:14px}",
             "path{stroke:#c33;stroke-width:2}</style>",
             f'<rect width="{width}" height="{height}" fill="#fff" style="stroke:none"/>']
    for number, name in enumerate(MIXERS):
        lines += grid(name, GAP + number * step, GAP)
    return "\n".join([*lines, "</svg>"])


if __name__ == "__main__":
    print(picture())
