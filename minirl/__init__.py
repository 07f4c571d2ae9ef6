"""Reinforcement learning for language models that call tools: one machine, asyncio, no Ray."""

import os

__version__ = "0.1.0"

# For libgomp, which reads it when torch is imported. Its threads wait for one another by spinning,
# for so long that an update slows down tenfold where they have to share their cores; a thousand
# turns, and it keeps its speed (benchmarks/threads.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
