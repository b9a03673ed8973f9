"""Tenants that share a public system prompt and nothing else, with quotas, kept prefixes and bills.

Needs no torch: it is all the pool's. An engine passes the same keywords to `PagedKVCache.open`.
"""

from __future__ import annotations

import numpy as np

from pagedkv import BlockPool, Breakpoint, Usage

SYSTEM_TOKENS = 2_048
rng = np.random.default_rng(7)


def tokens(count: int) -> list[int]:
    """Make up some text."""
    return rng.integers(0, 50_000, count).tolist()


def serve(pool: BlockPool, prompt: list[int], tenant: str) -> Usage:
    """Serve a prompt of which the system prompt is public and kept for an hour, the rest the tenant's own."""
    with pool.open(
        prompt,
        cache_salt=tenant,
        salt_from=SYSTEM_TOKENS,  # the salt enters there: before it all tenants share, behind it nobody does
        breakpoints=[Breakpoint(SYSTEM_TOKENS, ttl_s=3_600), Breakpoint(len(prompt) - 64, ttl_s=300)],
    ) as seq:
        pool.commit(pool.reserve(seq, seq.num_uncached_tokens))
        return seq.usage


def main() -> None:
    """Serve two tenants in turn, and show who is charged for what."""
    pool = BlockPool(num_blocks=1_024)
    pool.set_quota("acme", 200)  # pages; over it acme's own oldest go, never those of others
    system = tokens(SYSTEM_TOKENS)
    history = {tenant: tokens(1_000) for tenant in ("acme", "globex")}

    bills = {tenant: Usage(0, 0, {}) for tenant in history}
    for _ in range(3):
        for tenant, own in history.items():
            own += tokens(200)  # the conversation goes on
            usage = serve(pool, system + own, tenant)
            bills[tenant] += usage
            how = f"{usage.cache_read:5,} read, {usage.cache_write:5,} written, {usage.input:2} computed"
            print(f"{tenant:6} {usage.num_tokens:5,} tokens: {how}")
    for tenant, bill in bills.items():
        # A read costs a tenth of an input token, a write a quarter more, or for an hour twice as much.
        full = bill.num_tokens * 3 / 1_000_000
        print(f"{tenant} pays ${bill.cost(3.0):.4f} at $3 a million, instead of ${full:.4f}")
        print(f"  as Anthropic reports it: {bill.anthropic()}")

    secret = system + history["acme"]
    found = pool.match(secret, cache_salt="globex", salt_from=SYSTEM_TOKENS).num_tokens
    print(f"globex asks for acme's prompt: {found:,} of {len(secret):,} tokens found, the public ones")
    for salt, held in pool.tenants().items():
        limit = "no quota" if held.quota is None else f"a quota of {held.quota}"
        print(f"{salt.decode():6} holds {held.num_blocks} pages, with {limit}")
    pool.check_integrity()


if __name__ == "__main__":
    main()
