"""Several engines find as much in their prefix caches as one."""

import pytest

from benchmarks.rollout_overhead import WORKLOADS
from benchmarks.rollout_routing import BLOCK, CachingServer, Workload, converse


@pytest.mark.parametrize("num_servers", [2, 4])
@pytest.mark.parametrize("workload", WORKLOADS)
async def test_the_hit_rate_is_that_of_one_engine(workload: str, num_servers: int) -> None:
    one = await converse(1, WORKLOADS[workload])
    several = await converse(num_servers, WORKLOADS[workload])
    assert several.cache_hit_rate >= 0.98 * one.cache_hit_rate
    requests = several.requests_per_server.values()
    assert several.num_moves == 0 and sum(requests) == one.requests_per_server[0]
    assert max(requests) <= 1.2 * min(requests)  # and none of them idles


async def test_conversations_that_move_lose_it() -> None:
    """The measure can fall: here every difference in load is an overload."""
    workload = Workload(num_prompts=64, n=1, num_turns=4)
    one = await converse(1, workload)
    moving = await converse(2, workload, sticky_imbalance=1.0)
    assert moving.num_moves > 0
    assert moving.cache_hit_rate < 0.98 * one.cache_hit_rate


async def test_what_a_caching_server_has() -> None:
    server, params = CachingServer(), {"max_tokens": 8}
    prompt = list(range(3 * BLOCK + 5))
    first = await server.generate(prompt, params, "a#0")
    assert first.num_cached_tokens == 0
    assert (await server.generate(prompt, params, "b#0")).num_cached_tokens == 3 * BLOCK
    assert (await server.generate(prompt[: 2 * BLOCK], params, "c#0")).num_cached_tokens == BLOCK
    assert (await server.generate([9, *prompt], params, "d#0")).num_cached_tokens == 0
