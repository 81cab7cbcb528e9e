"""The servers of train.py: one that samples from the policy, and one that knows the reward.

    python serve.py PORT sample|reward

They keep no state, so a restarted server gives the same answers.
"""

import itertools
import json
import math
import random
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def sample(logits: list[list[float]], seed: int, samples: int, length: int) -> list[list[int]]:
    """Return token sequences: each token depends on the one before it."""
    chance = random.Random(seed)
    weights = [[math.exp(value) for value in row] for row in logits]
    found = []
    for _ in range(samples):
        tokens = [0]
        while len(tokens) < length:
            tokens += chance.choices(range(len(logits)), weights[tokens[-1]])
        found.append(tokens)
    return found


def reward(sequences: list[list[int]], tokens: int) -> list[float]:
    """Return the share of tokens that count up from the one before."""
    return [
        sum(after == (before + 1) % tokens for before, after in itertools.pairwise(each))
        / (len(each) - 1)
        for each in sequences
    ]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer("ready")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(sample(**asked) if sys.argv[2] == "sample" else reward(**asked))

    def answer(self, found: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *_: object) -> None:
        """Log no request."""


if __name__ == "__main__":
    ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
